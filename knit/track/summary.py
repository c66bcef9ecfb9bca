"""What a run leaves for programs: ``summary.json``, built from what was recorded at each step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from knit.errors import RunError
from knit.track.names import nest
from knit.track.scores import Scores, gain

Metrics = Mapping[str, float]


@dataclass(slots=True)
class Ends:
    """How the trajectories of a run ended. Every launched one is in exactly one of the rest."""

    launched: int = 0
    trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    """By reason, without those left over."""
    lost: dict[str, int] = field(default_factory=dict)
    """By reason."""
    left_over: int = 0
    """Unfinished or not admitted when the run ended."""

    @classmethod
    def of(cls, counts: Mapping[str, Any]) -> Ends:
        """From the buffer's counts, which hold more than these."""
        return cls(**{f.name: counts[f.name] for f in dataclasses.fields(cls)})

    def check(self) -> None:
        """Raises :class:`RunError` with the numbers when a trajectory ended twice or never."""
        dropped, lost = sum(self.dropped.values()), sum(self.lost.values())
        ended = self.trained + dropped + lost + self.left_over
        if ended != self.launched:
            raise RunError(
                f"trajectories do not add up: {self.launched} launched, but {ended} ended "
                f"({self.trained} trained, {dropped} dropped, {lost} lost, {self.left_over} left over)"
            )


@dataclass(slots=True)
class RunRecord:
    """Collects what the summary needs while the run goes on."""

    steps: int = 0
    weight_version: int = 0
    time_s: dict[str, float] = field(default_factory=dict)
    quota: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    evals: dict[str, Scores] = field(default_factory=dict)
    _sums: dict[str, list[float]] = field(default_factory=dict)  # name → [weighted sum, weight]

    def add_step(self, step: int, metrics: Metrics, times: Metrics) -> None:
        """``metrics`` and ``times`` as they are logged for the train batch ``step``."""
        self.steps = step
        self.weight_version = int(metrics.get("sync/version", self.weight_version))
        for name, seconds in times.items():
            part = name.removeprefix("time/")
            self.time_s[part] = self.time_s.get(part, 0.0) + seconds
        self._add_quotas(metrics)
        tokens = metrics.get("train/tokens", 1.0)
        for name in ("staleness/token/mean", "mismatch/logprob_abs_diff"):
            self._add_mean(name, metrics, tokens)
        for name in ("staleness/trajectory/mean", "partial/mixed_version_ratio"):
            self._add_mean(name, metrics, 1.0)

    def add_probe(self, metrics: Metrics) -> None:
        """Of one comparison of engine and trainer."""
        self._add_mean("mismatch/probe", metrics, 1.0)

    def add_eval(self, when: str, scores: Scores) -> None:
        """``when``: before, after, or step_<k>."""
        self.evals[when] = scores

    def means(self) -> dict[str, float]:
        return {name: total / weight for name, (total, weight) in self._sums.items() if weight}

    def _add_mean(self, name: str, metrics: Metrics, weight: float) -> None:
        value = metrics.get(name, math.nan)
        if math.isfinite(value):
            sums = self._sums.setdefault(name, [0.0, 0.0])
            sums[0] += value * weight
            sums[1] += weight

    def _add_quotas(self, metrics: Metrics) -> None:
        for name, value in metrics.items():
            group, _, rest = name.partition("/")
            source, _, kind = rest.rpartition("/")
            if group == "quota" and kind in ("target", "admitted"):
                series = self.quota.setdefault(source, {"target": [], "admitted": []})
                series[kind].append(int(value))


def build_summary(
    record: RunRecord, ends: Ends, wall_s: float, engine_restarts: int = 0, peak_memory_bytes: int = 0
) -> dict[str, Any]:
    """The content of ``summary.json``; raises :class:`RunError` when the trajectories do not add up.

    ``time`` sums the steps: ``step`` is the sum of its parts, start-up and the evaluations before and after
    are outside. ``quota`` has one number per train batch in each list.
    """
    ends.check()
    evals: dict[str, Any] = {when: scores.summary() for when, scores in record.evals.items()}
    if "before" in record.evals and "after" in record.evals:
        evals["gain"] = gain(record.evals["before"], record.evals["after"])
    return {
        "steps": record.steps,
        "weight_version": record.weight_version,
        "wall_s": wall_s,
        "eval": evals,
        **nest(record.means()),
        "time": dict(record.time_s),
        "quota": record.quota,
        "trajectories": {
            "launched": ends.launched,
            "trained": ends.trained,
            "dropped": dict(ends.dropped),
            "lost": dict(ends.lost),
            "left_over": ends.left_over,
        },
        "engine_restarts": engine_restarts,
        "peak_memory_bytes": peak_memory_bytes,
    }
