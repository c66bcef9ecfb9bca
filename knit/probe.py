"""Do engine and trainer agree? A fixed set of sequences, scored by both at exactly the published weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from knit.launch import Crew
from knit.meter import Metrics


@dataclass(frozen=True, slots=True)
class Probe:
    """Sequences sampled once from the initial weights, prompts included."""

    sequences: list[list[int]]

    @classmethod
    async def make(cls, crew: Crew, count: int) -> Probe:
        worker = next(iter(crew.workers.values()))
        timeout_s = crew.conf.rollout.trajectory_timeout_s
        return cls(await worker.call("make_probe", count, timeout_s=timeout_s))

    async def compare(self, crew: Crew) -> Metrics:
        """Mean and largest absolute difference of per-token log-probs, over all tokens but the first of each."""
        worker = next(iter(crew.workers.values()))
        timeout_s = crew.conf.sync.timeout_s
        engine = await worker.call("probe", self.sequences, timeout_s=timeout_s)
        trainer = (await crew.train("logprobs", self.sequences))[0]
        differences = np.concatenate([np.abs(np.subtract(e[1:], t[1:])) for e, t in zip(engine, trainer, strict=True)])
        return {"mismatch/probe": float(differences.mean()), "mismatch/probe_max": float(differences.max())}
