"""What is replayed: for every source an endless sequence of rollouts, the same whatever the policy does.

The k-th prompt of a source always gets the same rollouts, so that policies differ by their decisions alone.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import log, sqrt
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Rollout:
    """One trajectory as it was, or might be: ``duration_s`` at unit speed of generation.

    ``token_times_s`` are seconds from the start at which each token existed; None: tokens come evenly.
    """

    duration_s: float
    tokens: int
    accepted: bool = True
    reason: str = "rejected"  # if it is not
    token_times_s: tuple[float, ...] | None = None

    def tokens_by(self, age_s: float) -> int:
        """Tokens that exist after ``age_s`` of generation."""
        if self.token_times_s is not None:
            return bisect_right(self.token_times_s, age_s)
        return min(self.tokens, int(self.tokens * age_s / self.duration_s))


class Trace(Protocol):
    @property
    def sources(self) -> Sequence[str]: ...

    def group(self, source: str, index: int, size: int) -> Sequence[Rollout]:
        """The ``size`` rollouts of prompt ``index`` of a source."""
        ...


@dataclass(frozen=True, slots=True)
class Shape:
    """Lognormal durations of a source; ``cv`` is standard deviation / mean. One token per second."""

    mean_s: float
    cv: float

    def draw(self, rng: random.Random) -> Rollout:
        variance = log(1 + self.cv * self.cv)
        duration_s = max(1.0, rng.lognormvariate(log(self.mean_s) - variance / 2, sqrt(variance)))
        return Rollout(duration_s, max(1, round(duration_s)))


class SyntheticTrace:
    """Rollouts drawn from one shape per source; equal seeds give equal traces."""

    def __init__(self, shapes: Mapping[str, Shape], seed: int):
        self._shapes = dict(shapes)
        self._drawn: dict[str, list[Rollout]] = {name: [] for name in shapes}
        self._random = {name: random.Random(f"{seed}/{name}") for name in shapes}

    @property
    def sources(self) -> Sequence[str]:
        return list(self._shapes)

    def group(self, source: str, index: int, size: int) -> Sequence[Rollout]:
        drawn = self._drawn[source]
        while len(drawn) < (index + 1) * size:
            drawn.append(self._shapes[source].draw(self._random[source]))
        return drawn[index * size : (index + 1) * size]


@dataclass(frozen=True, slots=True)
class RecordedTrace:
    """Rollouts of a file, per source in their order; after the last one it starts again with the first."""

    rollouts: Mapping[str, Sequence[Rollout]]

    @property
    def sources(self) -> Sequence[str]:
        return list(self.rollouts)

    def group(self, source: str, index: int, size: int) -> Sequence[Rollout]:
        rows = self.rollouts[source]
        return [rows[k % len(rows)] for k in range(index * size, (index + 1) * size)]

    def rounds(self, used: Mapping[str, int]) -> dict[str, float]:
        """How often each source's rollouts were gone through when ``used`` of them were launched."""
        return {source: used.get(source, 0) / len(rows) for source, rows in self.rollouts.items()}


@dataclass(frozen=True, slots=True)
class Recording:
    """A trace from a file and what the file tells about the run that it comes from."""

    trace: RecordedTrace
    lines: Mapping[str, int]  # source -> line where it appears first
    group_size: int | None = None
    concurrency: int | None = None  # most rollouts in flight at once
    train_s: float | None = None  # training time of one train batch
    publish_s: float | None = None
    notes: tuple[str, ...] = field(default=())
