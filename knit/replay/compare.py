"""Policies side by side on the same traces, with the same training time, against the colocated replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from knit.replay.measure import Measurement, Result, measure
from knit.replay.scenario import Scenario
from knit.replay.simulate import Simulation
from knit.replay.trace import Trace

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Question:
    """``rhos``: training time of a train batch as shares of the step time of the rollout side alone; ``train_s``, if
    it is known in seconds, replaces them."""

    scenario: Scenario
    traces: Sequence[Trace]
    policies: Sequence[str]
    rhos: Sequence[float] = (0.67, 0.95)
    train_s: float | None = None
    colocated: bool = False  # placement of the policies; the baseline of architectural staleness always is


@dataclass(frozen=True, slots=True)
class Share:
    """All policies at one training time."""

    rho: float
    train_s: float
    policies: dict[str, Result]


@dataclass(frozen=True, slots=True)
class Comparison:
    question: Question
    rollout_step_s: float  # of the rollout side alone
    colocated: Result
    shares: Sequence[Share]

    def to_json(self) -> dict[str, Any]:
        """``policies`` is at the first training share; ``by_rho`` has all of them."""
        first = self.shares[0]
        return {
            "settings": settings(self.question),
            "rho": first.rho,
            "train_s": first.train_s,
            "rollout_step_s": self.rollout_step_s,
            "policies": {name: result.to_json() for name, result in first.policies.items()},
            "colocated": self.colocated.to_json(),
            "by_rho": {
                f"{share.rho:g}": {
                    "train_s": share.train_s,
                    "policies": {name: result.to_json() for name, result in share.policies.items()},
                }
                for share in self.shares
            },
            "assumptions": list(self.question.scenario.assumptions),
        }


def compare(question: Question, progress: Progress = lambda text: None) -> Comparison:
    """Raises RunError if a replay stands still."""
    scenario, traces = question.scenario, question.traces

    def runs(policy: str, train_s: float, colocated: bool) -> list[Measurement]:
        progress(f"{policy}, {'colocated, ' if colocated else ''}training {train_s:.0f} s")
        return [
            measure(Simulation(scenario, policy, trace, train_s, colocated).run(scenario.batches), scenario.warm_up)
            for trace in traces
        ]

    rollout_step_s = fmean(run.step_s for run in runs("train_batch", 0.0, False))
    if question.train_s is None:
        times_s = [rho * rollout_step_s for rho in question.rhos]
    else:
        times_s = [question.train_s]
    colocated = runs("train_batch", times_s[0], True)
    shares = []
    for train_s in times_s:
        results = {name: Result(runs(name, train_s, question.colocated), colocated) for name in question.policies}
        shares.append(Share(train_s / rollout_step_s, train_s, results))
    return Comparison(question, rollout_step_s, Result(colocated, colocated), shares)


def settings(question: Question) -> dict[str, Any]:
    scenario = question.scenario
    batch, admission = scenario.conf.batch, scenario.conf.admission
    rules = scenario.rules("progressive")
    return {
        "scenario": scenario.name,
        "placement": "colocated" if question.colocated else "disaggregated",
        "launch": scenario.launch,
        "quotas": {name: quota.minimum for name, quota in rules.sources.items()},
        "size": batch.size,
        "mini_batches": batch.mini_batches,
        "chunks_per_mini_batch": admission.chunks_per_mini_batch,
        "group_size": batch.group_size,
        "schedule": admission.schedule,
        "selection": admission.selection,
        "max_staleness": admission.max_staleness,
        "max_outstanding": scenario.max_outstanding,
        "engine_slots": scenario.engine_slots,
        "slowdown": scenario.slowdown,
        "publish_s": scenario.publish_s,
        "batches": scenario.batches,
        "warm_up": scenario.warm_up,
        "seeds": len(question.traces),
    }
