"""The ready pool: one heap per cell, so that no decision ever looks at all ready trajectories."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush
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


class ReadyPool:
    """Ready trajectories by cell. ``counts`` (per cell) and ``by_source`` are always exact."""

    def __init__(self, groups: Sequence[QuotaGroup], key: Key):
        self._groups, self._key = groups, key
        self._heaps: dict[Cell, list[Entry]] = {}
        self._gone: set[str] = set()
        self._arrivals = 0
        self._by_version: Counter[int] = Counter()
        self.counts: dict[Cell, int] = {}
        self.by_source: Counter[str] = Counter()

    def __len__(self) -> int:
        return self.by_source.total()

    def __iter__(self) -> Iterator[TrajectoryMeta]:
        """All ready trajectories in order of arrival: O(ready), for state and the end of a run."""
        entries = [e for heap in self._heaps.values() for e in heap if e.meta.trajectory_id not in self._gone]
        return iter([e.meta for e in sorted(entries, key=lambda e: e.arrival)])

    def add(self, meta: TrajectoryMeta) -> None:
        """O(log ready)."""
        cell = tuple([group.by(meta) for group in self._groups])
        versions = [r.version for s in meta.segments for r in s.versions]
        key, oldest = self._key(meta, self._arrivals), min(versions)
        heap = self._heaps.setdefault(cell, [])
        heappush(heap, Entry(key, self._arrivals, oldest, max(versions), cell, meta))
        self._arrivals += 1
        self._account(cell, meta.source, oldest, 1)

    def first(self, cell: Cell) -> Any:
        """Selection key of the cell's next trajectory. The cell must not be empty."""
        return self._top(cell).key

    def pop(self, cell: Cell) -> Entry:
        entry = self._top(cell)
        heappop(self._heaps[cell])
        self._account(cell, entry.meta.source, entry.oldest_version, -1)
        return entry

    def put_back(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            heappush(self._heaps[entry.cell], entry)
            self._account(entry.cell, entry.meta.source, entry.oldest_version, 1)

    def discard(self, trajectory_id: str) -> None:
        """Take one trajectory out of turn: O(ready) to find it; it stays in its heap until it comes up."""
        for heap in self._heaps.values():
            for e in heap:
                if e.meta.trajectory_id == trajectory_id and trajectory_id not in self._gone:
                    self._gone.add(trajectory_id)
                    self._account(e.cell, e.meta.source, e.oldest_version, -1)
                    return
        raise KeyError(trajectory_id)

    def pop_older_than(self, version: int) -> list[TrajectoryMeta]:
        """Remove all whose oldest token was sampled before ``version``, by arrival. O(ready), if there are any."""
        if not any(v < version and count for v, count in self._by_version.items()):
            return []
        stale: list[Entry] = []
        for cell, heap in self._heaps.items():
            live = [e for e in heap if e.meta.trajectory_id not in self._gone]
            stale += [e for e in live if e.oldest_version < version]
            self._heaps[cell] = [e for e in live if e.oldest_version >= version]
            heapify(self._heaps[cell])
        self._gone.clear()
        for e in stale:
            self._account(e.cell, e.meta.source, e.oldest_version, -1)
        self._by_version = +self._by_version
        return [e.meta for e in sorted(stale, key=lambda e: e.arrival)]

    def _top(self, cell: Cell) -> Entry:
        heap = self._heaps[cell]
        while self._gone and heap[0].meta.trajectory_id in self._gone:
            self._gone.discard(heappop(heap).meta.trajectory_id)
        return heap[0]

    def _account(self, cell: Cell, source: str, version: int, change: int) -> None:
        self.counts[cell] = self.counts.get(cell, 0) + change
        self.by_source[source] += change
        self._by_version[version] += change
