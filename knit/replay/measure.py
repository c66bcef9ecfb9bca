"""From finished replays to numbers: one :class:`Measurement` per run, means over seeds as plain JSON values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from statistics import fmean, stdev
from typing import Any

from knit.buffer import staleness
from knit.buffer.quotas import Quota
from knit.replay.simulate import BatchRecord, Run


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run. Quotas and composition are of all its train batches, everything else of those after the warm-up."""

    train_batches: int
    unmet_quotas: int  # train batches in which a quota was missed
    token_staleness: float  # mean over tokens
    step_s: float  # between publishes
    idle_train: float  # share of the time in which the trainer does nothing
    idle_rollout: float  # share of the engine slots that stand empty, over the time
    composition: Mapping[str, Sequence[float]]  # source -> its share of each train batch
    mix_skew: float  # mean distance of a mini-batch's mix from the target mix: 0 equal, 1 disjoint
    admissions: tuple[float, ...]  # of each mini-batch, in steps from one complete rollout step to the next
    dropped: Mapping[str, int]  # trajectories of the whole run by reason
    launched: Mapping[str, int]  # by source


def measure(run: Run, warm_up: int) -> Measurement:
    """``warm_up`` batches are left out. O(batches · sources)."""
    quotas, size = run.rules.sources, run.rules.size
    kept = run.batches[warm_up:]
    before = run.batches[warm_up - 1] if warm_up else BatchRecord(0, 0.0, 0.0)
    lasted_s = kept[-1].published_s - before.published_s
    busy_slot_s = kept[-1].busy_slot_s - before.busy_slot_s
    tokens = sum((batch.tokens for batch in kept), Counter[int]())
    dropped = run.counts["dropped"]
    assert isinstance(dropped, dict)
    return Measurement(
        train_batches=len(run.batches),
        unmet_quotas=sum(_unmet(batch, quotas) for batch in run.batches),
        token_staleness=staleness.mean(tokens),
        step_s=lasted_s / len(kept),
        idle_train=max(0.0, 1 - run.train_s * len(kept) / lasted_s) if lasted_s else 0.0,
        idle_rollout=max(0.0, 1 - busy_slot_s / (run.engine_slots * lasted_s)) if lasted_s else 0.0,
        composition={name: [batch.by_source[name] / size for batch in run.batches] for name in quotas},
        mix_skew=fmean(_skew(mix, quotas) for batch in kept for mix in batch.mini_batches),
        admissions=_admissions([before, *kept]),
        dropped=dropped,
        launched=run.launched,
    )


def _unmet(batch: BatchRecord, quotas: Mapping[str, Quota]) -> bool:
    return any(batch.by_source[name] < quota.minimum for name, quota in quotas.items())


def _skew(mix: Counter[str], quotas: Mapping[str, Quota]) -> float:
    """Total variation distance from the mix that the quotas ask for (an even one, if they ask for nothing)."""
    wanted = sum(quota.minimum for quota in quotas.values())
    size = mix.total()
    targets = {n: quota.minimum / wanted if wanted else 1 / len(quotas) for n, quota in quotas.items()}
    return sum(abs(mix[name] / size - target) for name, target in targets.items()) / 2


def _admissions(batches: Sequence[BatchRecord]) -> tuple[float, ...]:
    shares = []
    for before, batch in pairwise(batches):
        begin_s, end_s = before.complete_s or 0.0, batch.complete_s or 0.0
        if end_s > begin_s:
            shares.append([(at - begin_s) / (end_s - begin_s) for at in batch.admitted_s])
    return tuple(fmean(column) for column in zip(*shares, strict=True))


@dataclass(frozen=True, slots=True)
class Result:
    """One policy over several seeds, beside the colocated replays of the same traces (same order)."""

    runs: Sequence[Measurement]
    colocated: Sequence[Measurement]

    def mean(self, name: str) -> float:
        return fmean(getattr(run, name) for run in self.runs)

    @property
    def architectural(self) -> list[float]:
        """Architectural staleness of each seed."""
        return [run.token_staleness - base.token_staleness for run, base in zip(self.runs, self.colocated, strict=True)]

    @property
    def batches_per_hour(self) -> float:
        return 3600 / self.mean("step_s")

    @property
    def unmet_quotas(self) -> int:
        return sum(run.unmet_quotas for run in self.runs)

    @property
    def train_batches(self) -> int:
        return sum(run.train_batches for run in self.runs)

    @property
    def admissions(self) -> list[float]:
        return [fmean(column) for column in zip(*(run.admissions for run in self.runs), strict=True)]

    def to_json(self) -> dict[str, Any]:
        dropped: Counter[str] = Counter()
        for run in self.runs:
            dropped.update(run.dropped)
        return {
            "train_batches": self.train_batches,
            "unmet_quotas": self.unmet_quotas,
            "staleness": {
                "token": {"mean": self.mean("token_staleness")},
                "architectural": fmean(self.architectural),
                "architectural_se": standard_error(self.architectural),
            },
            "train_batches_per_hour": self.batches_per_hour,
            "idle": {"train": self.mean("idle_train"), "rollout": self.mean("idle_rollout")},
            "composition": {
                name: [share for run in self.runs for share in run.composition[name]]
                for name in self.runs[0].composition
            },
            "mix_skew": self.mean("mix_skew"),
            "admissions": self.admissions,
            "dropped": dict(dropped),
        }


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean; None for a single value."""
    return stdev(values) / sqrt(len(values)) if len(values) > 1 else None
