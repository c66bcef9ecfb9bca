"""Agent loops: what happens between a prompt and a finished trajectory.

A loop is a class ``Loop(conf: RolloutConf)`` with ``async run(prompt, generate, env) -> Trajectory``. It may ask
``generate`` as often as it likes, put tool output between the turns, and return several segments when it
branches or compacts its context. Tokens go in and tokens come out: a loop extends a ``SegmentBuilder`` by
what was sampled and by what was observed, so what is trained is exactly what was sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from knit.config.schema import RolloutConf
from knit.errors import KnitError
from knit.rollout.client import Generation
from knit.types import Prompt, VersionRange

Array = np.ndarray[Any, Any]


class TrajectoryFailed(KnitError):
    """This trajectory cannot be used; the run goes on. ``reason`` is counted under ``drop/<reason>``.

    ``infrastructure`` says that the prompt is not to blame: it may be launched again.
    """

    def __init__(self, reason: str, message: str, infrastructure: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.infrastructure = infrastructure


class Generate(Protocol):
    async def __call__(self, input_ids: Sequence[int], max_tokens: int | None = None) -> Generation:
        """Samples a continuation with the run's temperature and stop tokens.

        At most ``max_tokens`` (default: ``rollout.max_response_tokens``), and no more than the context holds.
        Raises TrajectoryFailed("context_full") when there is no room for a single token.
        """
        ...


@dataclass(frozen=True, slots=True)
class Env:
    """What surrounds one trajectory. ``eos_ids`` end a response; ``context_length`` bounds a segment's tokens."""

    trajectory_id: str
    eos_ids: tuple[int, ...]
    context_length: int
    max_response_tokens: int
    deadline_s: float  # on the event loop's clock
    tokenizer: Any = None  # knit.rollout.tokenizer.Tokenizer
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Segment:
    """One contiguous sequence. The arrays have shape ``[len(tokens) - prompt_tokens]``: the response only."""

    tokens: tuple[int, ...]  # prompt + response
    prompt_tokens: int
    loss_mask: tuple[int, ...]  # 1 = sampled and trained
    logprobs: tuple[float, ...]  # 0 where not sampled
    versions: tuple[VersionRange, ...]  # of the sampled tokens; observed ones lie in no range

    @property
    def response(self) -> tuple[int, ...]:
        return self.tokens[self.prompt_tokens :]

    @property
    def trained_tokens(self) -> int:
        return sum(self.loss_mask)

    def fields(self) -> dict[str, Array]:
        """The unit's arrays, each of shape ``[prompt + response]``."""
        size, start = len(self.tokens), self.prompt_tokens
        logprobs, mask = np.zeros(size, np.float32), np.zeros(size, np.uint8)
        versions = np.full(size, -1, np.int32)
        logprobs[start:], mask[start:] = self.logprobs, self.loss_mask
        for r in self.versions:
            versions[start + r.start : start + r.end] = r.version
        return {
            "tokens": np.array(self.tokens, np.int32),
            "logprobs": logprobs,
            "loss_mask": mask,
            "versions": versions,
        }


@dataclass(frozen=True, slots=True)
class Trajectory:
    """``finished``: the policy ended it itself. ``truncated``: a limit cut it. ``response`` goes to the reward."""

    segments: tuple[Segment, ...]
    finished: bool
    truncated: bool
    retries: int = 0
    stats: dict[str, float] = field(default_factory=dict)

    @property
    def response(self) -> tuple[int, ...]:
        return self.segments[-1].response


class SegmentBuilder:
    """Grows one segment turn by turn; ``tokens`` is what the next ``generate`` gets."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.tokens: list[int] = list(prompt)
        self.prompt_tokens = len(self.tokens)
        self.retries = 0
        self._mask: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[VersionRange] = []

    def sampled(self, generation: Generation, train: bool = True) -> None:
        offset = len(self._mask)
        self.tokens += generation.tokens
        self._mask += [int(train)] * len(generation.tokens)
        self._logprobs += generation.logprobs
        self._versions += [replace(r, start=r.start + offset, end=r.end + offset) for r in generation.versions]
        self.retries += generation.retries

    def observed(self, ids: Sequence[int]) -> None:
        """Tool output and the like: in the context, out of the loss."""
        self.tokens += ids
        self._mask += [0] * len(ids)
        self._logprobs += [0.0] * len(ids)

    def build(self) -> Segment:
        return Segment(
            tuple(self.tokens), self.prompt_tokens, tuple(self._mask), tuple(self._logprobs), tuple(self._versions)
        )


class AgentLoop(Protocol):
    def __init__(self, conf: RolloutConf) -> None: ...

    async def run(self, prompt: Prompt, generate: Generate, env: Env) -> Trajectory: ...


class SingleTurn:
    """One prompt, one response."""

    def __init__(self, conf: RolloutConf) -> None:
        self.conf = conf

    async def run(self, prompt: Prompt, generate: Generate, env: Env) -> Trajectory:
        segment = SegmentBuilder(prompt.input_ids)
        generation = await generate(segment.tokens)
        segment.sampled(generation)
        finished = generation.finish_reason == "stop"
        return Trajectory((segment.build(),), finished=finished, truncated=not finished, retries=segment.retries)
