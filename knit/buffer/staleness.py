"""Staleness: v_train − v_gen of a token, where v_train is the published version its train batch started from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from operator import attrgetter

from knit.buffer.ready import Entry
from knit.errors import RunError
from knit.types import TrajectoryMeta


def check(entries: Sequence[Entry], train_version: int, bound: int) -> None:
    """Raise RunError if one is over-stale, or was sampled by a version that is not published yet."""
    newest = max(entries, key=attrgetter("newest_version"))
    oldest = min(entries, key=attrgetter("oldest_version"))
    if newest.newest_version > train_version:
        raise RunError(
            f"trajectory {newest.meta.trajectory_id} of {newest.meta.source!r} has tokens of weight version "
            f"{newest.newest_version}, but its train batch starts from version {train_version}: negative staleness; "
            "an engine is ahead of the buffer"
        )
    if train_version - oldest.oldest_version > bound:
        raise RunError(
            f"trajectory {oldest.meta.trajectory_id} of {oldest.meta.source!r} has staleness "
            f"{train_version - oldest.oldest_version}, above admission.max_staleness={bound}"
        )


def token_histogram(meta: TrajectoryMeta, train_version: int) -> Counter[int]:
    """Sampled tokens of a trajectory by their staleness."""
    histogram: Counter[int] = Counter()
    for r in meta.version_ranges:
        histogram[train_version - r.version] += r.tokens
    return histogram


def mean(histogram: Mapping[int, int]) -> float:
    total = sum(histogram.values())
    return sum(value * count for value, count in histogram.items()) / total if total else 0.0


def quantile(histogram: Mapping[int, int], q: float) -> float:
    """Smallest value that at least the share ``q`` of the tokens does not exceed; 0 if empty."""
    need, seen = q * sum(histogram.values()), 0
    for value in sorted(histogram):
        seen += histogram[value]
        if seen >= need:
            return float(value)
    return 0.0
