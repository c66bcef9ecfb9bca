"""Gives one training rank its packed micro-batches, in order, and counts what it waited for."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from knit.feed.assignment import MicroBatch
from knit.feed.packing import FIELDS, PackedMicro, pack
from knit.store.base import UnitStore
from knit.store.unit import Read


@dataclass(slots=True)
class FeedStats:
    """``exposed_s``: time the training loop waited for data."""

    exposed_s: float = 0.0
    bytes_read: int = 0


class FeedReader:
    def __init__(self, store: UnitStore) -> None:
        self._store = store
        self.stats = FeedStats()

    def micro_batches(self, micros: Sequence[MicroBatch]) -> Iterator[PackedMicro]:
        """Reads of all micro-batches go out together; packing happens as training asks for each."""
        started = time.perf_counter()
        units = self._store.read([Read(s.unit, FIELDS) for m in micros for s in m.sequences])
        self.stats.bytes_read += sum(a.nbytes for fields in units for a in fields.values())
        self.stats.exposed_s += time.perf_counter() - started
        at = 0
        for micro in micros:
            started = time.perf_counter()
            packed = pack(micro, units[at : at + len(micro.sequences)])
            at += len(micro.sequences)
            self.stats.exposed_s += time.perf_counter() - started
            yield packed

    def take_stats(self) -> FeedStats:
        """What was counted since the last call."""
        stats, self.stats = self.stats, FeedStats()
        return stats
