"""Scores of a held-out evaluation: averages, standard errors, and what is left of a difference after noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Scores:
    """Rewards of one evaluation. Every problem of every source is there, in the same order each time."""

    samples: Mapping[str, Sequence[Sequence[float]]]
    """Source → problem → rewards of its n samples."""
    greedy: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Source → problem → reward at temperature 0; empty when greedy decoding was not asked for."""

    @property
    def problems(self) -> int:
        return sum(len(p) for p in self.samples.values())

    def means(self) -> dict[str, list[float]]:
        """Source → problem → mean over its samples."""
        return {source: [math.fsum(r) / len(r) for r in problems] for source, problems in self.samples.items()}

    def metrics(self, set_name: str) -> dict[str, float]:
        """Named ``eval/<set>/…``."""
        means, prefix = self.means(), f"eval/{set_name}"
        named = {f"{prefix}/avg_at_n": pooled_mean(means), f"{prefix}/standard_error": standard_error(means)}
        named |= {f"{prefix}/{source}/avg_at_n": mean(values) for source, values in means.items()}
        if self.greedy:
            named[f"{prefix}/greedy"] = pooled_mean(self.greedy)
            named |= {f"{prefix}/{source}/greedy": mean(values) for source, values in self.greedy.items()}
        return named

    def summary(self) -> dict[str, Any]:
        means = self.means()
        sources: dict[str, dict[str, float]] = {
            source: {"avg_at_n": mean(values), "standard_error": standard_error({source: values})}
            for source, values in means.items()
        }
        for source, values in self.greedy.items():
            sources[source]["greedy"] = mean(values)
        return {
            "avg_at_n": pooled_mean(means),
            "standard_error": standard_error(means),
            "greedy": pooled_mean(self.greedy) if self.greedy else None,
            "greedy_standard_error": standard_error(self.greedy) if self.greedy else None,
            "problems": self.problems,
            "samples_per_problem": max((len(r) for p in self.samples.values() for r in p), default=0),
            "sources": sources,
        }


def gain(before: Scores, after: Scores) -> dict[str, float | None]:
    """``after`` minus ``before``, with the standard errors of the paired differences over problems."""
    sampled = _differences(before.means(), after.means())
    greedy = _differences(before.greedy, after.greedy)
    return {
        "avg_at_n": pooled_mean(sampled),
        "paired_standard_error": standard_error(sampled),
        "greedy": pooled_mean(greedy) if greedy else None,
        "greedy_paired_standard_error": standard_error(greedy) if greedy else None,
    }


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def pooled_mean(by_source: Mapping[str, Sequence[float]]) -> float:
    """Every problem counts the same."""
    return mean([v for values in by_source.values() for v in values])


def standard_error(by_source: Mapping[str, Sequence[float]]) -> float:
    """Of the pooled mean, over problems. Sources are strata: what lies between them is no noise."""
    total = sum(len(values) for values in by_source.values())
    if total == 0:
        return math.nan
    return math.sqrt(math.fsum(len(v) * _variance(v) for v in by_source.values())) / total


def _variance(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    center = mean(values)
    return math.fsum((v - center) ** 2 for v in values) / (len(values) - 1)


def _differences(before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    return {s: [b - a for a, b in zip(before[s], after[s], strict=True)] for s in before if s in after}
