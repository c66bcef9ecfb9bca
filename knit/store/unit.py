"""Atomic units: the smallest pieces of trajectory data that are stored and read alone.

A unit has a key that is never reused and named numpy fields. Fields along the sequence have the unit's
declared length as their first dimension; the others (an image, a scalar) are read whole. One segment of a
trajectory is one unit (paper section 5.2, "Atomic Units").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from knit.errors import CorruptUnitError

Fields = Mapping[str, np.ndarray[Any, Any]]


@dataclass(frozen=True, slots=True)
class Unit:
    """``fields[name]`` for the names in ``sequence_fields`` has shape ``[length, ...]``."""

    key: str
    fields: Fields
    length: int
    sequence_fields: frozenset[str] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        for name in self.sequence_fields:
            shape = self.fields[name].shape
            if not shape or shape[0] != self.length:
                raise ValueError(f"unit {self.key}: field {name} has shape {shape}, declared length {self.length}")


@dataclass(frozen=True, slots=True)
class Receipt:
    """Proof that a unit is stored: its payload bytes and the xxh3 checksum of all its fields."""

    key: str
    bytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Read:
    """A request for one unit; ``fields=None`` reads all of them."""

    key: str
    fields: tuple[str, ...] | None = None


def checksum(fields: Fields) -> int:
    """xxh3-64 over names, dtypes, shapes and bytes, independent of the order of the fields."""
    digest = xxhash.xxh3_64()
    for name in sorted(fields):
        array = np.ascontiguousarray(fields[name])
        digest.update(f"{name}:{array.dtype.str}:{array.shape}".encode())
        digest.update(array.view(np.uint8).data if array.size else b"")
    return digest.intdigest()


def receipt(unit: Unit) -> Receipt:
    return Receipt(unit.key, sum(a.nbytes for a in unit.fields.values()), checksum(unit.fields))


def verify(expected: Receipt, fields: Fields, backend: str) -> None:
    """Raises CorruptUnitError unless ``fields`` are exactly what was stored under the receipt."""
    size = sum(a.nbytes for a in fields.values())
    if size != expected.bytes:
        raise CorruptUnitError(f"unit {expected.key} in store {backend}: read {size} bytes of {expected.bytes}")
    if checksum(fields) != expected.checksum:
        raise CorruptUnitError(f"unit {expected.key} in store {backend}: checksum differs from its receipt")


def select(key: str, fields: Fields, names: Iterable[str] | None) -> dict[str, np.ndarray[Any, Any]]:
    """The named fields of one unit; an unknown name raises CorruptUnitError."""
    if names is None:
        return dict(fields)
    missing = [n for n in names if n not in fields]
    if missing:
        raise CorruptUnitError(f"unit {key} has no field {missing[0]!r}; it has {sorted(fields)}")
    return {n: fields[n] for n in names}
