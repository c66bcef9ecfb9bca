"""The ready pool: one sorted list per cell, so that no decision ever looks at all ready trajectories."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from knit.buffer.guards import Cell
from knit.buffer.quotas import QuotaGroup
from knit.types import TrajectoryMeta

Key = Callable[[TrajectoryMeta, int], Any]
"""Selection order: the smaller key goes first. The second argument counts arrivals in the pool."""


class Entry(NamedTuple):
    """Ordered by ``key``, then arrival: comparisons never reach the metadata."""

    key: Any
    arrival: int
    oldest_version: int
    newest_version: int
    cell: Cell
    meta: TrajectoryMeta


class Candidate(NamedTuple):
    """What a selection proposes: entries in the order of selection, and how many of each cell."""

    entries: list[Entry]
    cells: Counter[Cell]


class ReadyPool:
    """Ready trajectories by cell, each list in selection order. ``by_source`` and ``counts`` are exact."""

    def __init__(self, groups: Sequence[QuotaGroup], key: Key):
        self._groups, self._key = groups, key
        self._arrivals = 0
        self.cells: dict[Cell, list[Entry]] = {}
        self.by_source: Counter[str] = Counter()
        self._by_version: Counter[int] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self.cells.values()))

    def __iter__(self) -> Iterator[TrajectoryMeta]:
        """All ready trajectories in order of arrival: O(ready), for state and the end of a run."""
        entries = [e for cell in self.cells.values() for e in cell]
        return iter([e.meta for e in sorted(entries, key=lambda e: e.arrival)])

    @property
    def counts(self) -> dict[Cell, int]:
        return {cell: len(entries) for cell, entries in self.cells.items()}

    def add(self, meta: TrajectoryMeta) -> None:
        """A binary search and a move of what comes after it: short, as the latest mostly goes last."""
        cell = tuple([group.by(meta) for group in self._groups])
        versions = [r.version for s in meta.segments for r in s.versions]
        oldest = min(versions)
        entry = Entry(self._key(meta, self._arrivals), self._arrivals, oldest, max(versions), cell, meta)
        insort(self.cells.setdefault(cell, []), entry)
        self._arrivals += 1
        self.by_source[meta.source] += 1
        self._by_version[oldest] += 1

    def remove(self, candidate: Candidate) -> None:
        """Its entries are the first of their cells."""
        for cell, count in candidate.cells.items():
            del self.cells[cell][:count]
            self.by_source[cell[0]] -= count
        for version, count in Counter([e.oldest_version for e in candidate.entries]).items():
            self._by_version[version] -= count

    def discard(self, trajectory_id: str) -> None:
        """Take one trajectory out of turn: O(ready). Raises KeyError if it is not here."""
        for entries in self.cells.values():
            for place, e in enumerate(entries):
                if e.meta.trajectory_id == trajectory_id:
                    self._forget(e)
                    del entries[place]
                    return
        raise KeyError(trajectory_id)

    def pop_older_than(self, version: int) -> list[TrajectoryMeta]:
        """Remove all whose oldest token was sampled before ``version``, by arrival. O(ready), if there are any."""
        if not any(v < version and count for v, count in self._by_version.items()):
            return []
        stale: list[Entry] = []
        for cell, entries in self.cells.items():
            stale += [e for e in entries if e.oldest_version < version]
            self.cells[cell] = [e for e in entries if e.oldest_version >= version]
        for e in stale:
            self._forget(e)
        self._by_version = +self._by_version
        return [e.meta for e in sorted(stale, key=lambda e: e.arrival)]

    def _forget(self, entry: Entry) -> None:
        self.by_source[entry.meta.source] -= 1
        self._by_version[entry.oldest_version] -= 1
