"""Do engine and trainer agree? A fixed set of sequences, scored by both at exactly the published weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np

from knit.launch import Crew
from knit.meter import Metrics

Logprobs = list[list[float]]
WORKER = "worker0"


class Probe:
    """Sequences sampled once from the initial weights, prompts included.

    After a publish the trainer scores at once, before its next optimizer step changes its weights. The
    engines score beside the next train batch; ``settle`` must be awaited before the next publish changes theirs.
    """

    def __init__(self, crew: Crew, sequences: list[list[int]], report: Callable[[int, Metrics], None]) -> None:
        self._crew, self._sequences, self._report = crew, sequences, report
        self._pending: tuple[int, Logprobs, asyncio.Task[Logprobs]] | None = None

    @classmethod
    async def make(cls, crew: Crew, count: int, report: Callable[[int, Metrics], None]) -> Probe:
        """``report(step, metrics)`` is called once per comparison, by ``settle``."""
        timeout_s = crew.conf.rollout.trajectory_timeout_s
        return cls(crew, await crew.ask(WORKER, "make_probe", count, timeout_s=timeout_s), report)

    async def start(self, step: int) -> None:
        trainer = (await self._crew.train("logprobs", self._sequences))[0]
        timeout_s = self._crew.conf.engine.start_timeout_s * 2  # an engine may have to come back first
        engine = asyncio.ensure_future(self._crew.ask(WORKER, "probe", self._sequences, timeout_s=timeout_s))
        engine.add_done_callback(lambda task: task.cancelled() or task.exception())  # a run that fails never settles
        self._pending = (step, trainer, engine)

    async def settle(self) -> None:
        """Reports the mean and largest absolute difference over all tokens but the first of each sequence."""
        if self._pending is None:
            return
        (step, trainer, engine), self._pending = self._pending, None
        pairs = zip(await engine, trainer, strict=True)
        differences = np.concatenate([np.abs(np.subtract(e[1:], t[1:])) for e, t in pairs])
        mean, largest = float(differences.mean()), float(differences.max())
        self._report(step, {"mismatch/probe": mean, "mismatch/probe_max": largest})
