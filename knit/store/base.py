"""The contract of every storage backend.

- A write is durable when it returns: the receipts prove it. Metadata is published only afterwards.
- Writing a key twice raises DuplicateKeyError; the first value stays.
- A read of a missing, short or corrupt unit raises MissingUnitError or CorruptUnitError with key and backend.
- A full store makes writers wait, up to ``timeout_s``, and then raises StoreFullError. It never evicts.
- A unit is deleted by ``release``, which the consumer's acknowledgement triggers, and by nothing else.

Handles are picklable and may be used from any process and thread of the cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from knit.store.unit import Read, Receipt, Unit


class UnitStore(Protocol):
    def write(self, units: Sequence[Unit]) -> list[Receipt]:
        """Stores all units or none; one receipt per unit, in order."""
        ...

    def read(self, reads: Sequence[Read]) -> list[dict[str, np.ndarray[Any, Any]]]:
        """Arrays in the order of ``reads``; read-only where the backend shares memory."""
        ...

    def release(self, keys: Sequence[str]) -> None:
        """Deletes units. A key that was never written or is already gone raises MissingUnitError."""
        ...

    def stored_bytes(self) -> int:
        """Payload bytes now held."""
        ...
