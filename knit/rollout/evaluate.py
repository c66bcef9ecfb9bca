"""Evaluation: held-out problems, several samples each, scored by the rewards of the evaluation sources."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from knit.common.paths import load_path
from knit.config.schema import KnitConf
from knit.errors import RunError
from knit.rollout.agent import TrajectoryFailed
from knit.rollout.prompts import PromptSource, make_source
from knit.rollout.rewards import Reward
from knit.rollout.tokenizer import Tokenizer
from knit.rollout.trajectory import TrajectoryRunner, root_cause
from knit.types import Prompt


@dataclass(frozen=True, slots=True)
class EvalScores:
    """``scores[p]`` are the rewards of problem p's samples; ``failed`` counts samples that gave none."""

    source: str
    scores: tuple[tuple[float, ...], ...]
    failed: int
    truncated: int
    error: str | None = None  # root cause of the first failure


class Evaluator:
    """Problems are the first ``eval.limit`` prompts of each source; their order does not depend on the worker."""

    def __init__(
        self, conf: KnitConf, tokenizer: Tokenizer, make_runner: Callable[[dict[str, Reward]], TrajectoryRunner]
    ) -> None:
        self.conf = conf
        self.sources: dict[str, PromptSource] = {
            s.name: make_source(s, tokenizer, conf.seed) for s in conf.eval.sources
        }
        self.runner = make_runner({s.name: load_path(s.reward) for s in conf.eval.sources})
        self._slots = asyncio.Semaphore(conf.rollout.concurrency)

    async def run(self, samples: int, temperature: float, shard: tuple[int, int]) -> list[EvalScores]:
        """Raises RunError when not a single sample of a source could be scored."""
        jobs = [self._source(name, samples, temperature, shard) for name in self.sources]
        return list(await asyncio.gather(*jobs))

    async def _source(self, name: str, samples: int, temperature: float, shard: tuple[int, int]) -> EvalScores:
        source = self.sources[name]
        limit = self.conf.eval.limit
        size = len(source) if limit is None else min(limit, len(source))
        prompts = [source.prompt(i) for i in range(shard[0], size, shard[1])]
        outcomes = await asyncio.gather(
            *[self._sample(f"eval/{name}/{p.index}.{k}", p, temperature) for p in prompts for k in range(samples)]
        )
        groups = [outcomes[i : i + samples] for i in range(0, len(outcomes), samples)]
        scores = tuple(tuple(o[0] for o in g if not isinstance(o, TrajectoryFailed)) for g in groups)
        failures = [o for o in outcomes if isinstance(o, TrajectoryFailed)]
        error = root_cause(failures[0]) if failures else None
        if outcomes and len(failures) == len(outcomes):
            raise RunError(f"evaluation of {name}: all {len(outcomes)} samples failed; {error}")
        truncated = sum(o[1] for o in outcomes if not isinstance(o, TrajectoryFailed))
        return EvalScores(name, scores, len(failures), truncated, error)

    async def _sample(self, name: str, prompt: Prompt, temperature: float) -> tuple[float, bool] | TrajectoryFailed:
        try:
            async with self._slots:
                trajectory = await self.runner.sample(name, prompt, temperature)
            scored = await self.runner.score(prompt, trajectory)
        except TrajectoryFailed as error:
            return error
        return scored.reward, trajectory.truncated
