"""Which unit lies in which bulk value, and how many bytes are held: bookkeeping without any I/O.

The units of one write travel as one bulk value, because many small objects cost more than their bytes
(paper section 7.2 on Miles). A bulk is dropped when its last unit has been released.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from knit.errors import DuplicateKeyError, MissingUnitError
from knit.store.unit import Receipt

Bulk = TypeVar("Bulk")


@dataclass(slots=True)
class _Held(Generic[Bulk]):
    bulk: Bulk
    live: int


class UnitTable(Generic[Bulk]):
    """Keys of live units. A released key is forgotten: group ids never repeat, so no key comes back."""

    def __init__(self, backend: str, max_bytes: int) -> None:
        self.backend, self.max_bytes, self.bytes = backend, max_bytes, 0
        self._where: dict[str, tuple[_Held[Bulk], int, Receipt]] = {}

    def __len__(self) -> int:
        return len(self._where)

    def has_room(self, receipts: Sequence[Receipt]) -> bool:
        return self.bytes + sum(r.bytes for r in receipts) <= self.max_bytes

    def check_new(self, receipts: Sequence[Receipt]) -> None:
        keys = [r.key for r in receipts]
        used = next((k for k in keys if k in self._where), None)
        if used is not None or len(set(keys)) < len(keys):
            raise DuplicateKeyError(f"unit {used or keys} was written to store {self.backend} before")

    def add(self, receipts: Sequence[Receipt], bulk: Bulk) -> None:
        self.check_new(receipts)
        held = _Held(bulk, len(receipts))
        for index, r in enumerate(receipts):
            self._where[r.key] = (held, index, r)
            self.bytes += r.bytes

    def find(self, key: str) -> tuple[Bulk, int, Receipt]:
        if key not in self._where:
            raise MissingUnitError(f"unit {key} is not in store {self.backend}: never written, or released")
        held, index, r = self._where[key]
        return held.bulk, index, r

    def release(self, keys: Sequence[str]) -> list[Bulk]:
        """Forgets the units; returns the bulks that no live unit needs any more."""
        for key in keys:
            self.find(key)
        empty = []
        for key in keys:
            held, _, r = self._where.pop(key)
            self.bytes -= r.bytes
            held.live -= 1
            if held.live == 0:
                empty.append(held.bulk)
        return empty
