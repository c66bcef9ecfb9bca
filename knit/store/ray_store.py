"""The default backend: the Ray object store, with one actor that owns every payload.

A Ray object dies with the process that put it. So rollout workers hand their arrays to the
:class:`PayloadKeeper`, which puts and owns them: a rollout worker's death takes no finished trajectory
with it. Readers ask the keeper for references and map the arrays from plasma, zero-copy and read-only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray

from knit.common.procs import redirect_output
from knit.common.remote import call
from knit.errors import MissingUnitError, StoreFullError
from knit.store.table import UnitTable
from knit.store.unit import Fields, Read, Receipt, Unit, receipt, select, verify

BACKEND = "ray"


class PayloadKeeper:
    """Owns the payload objects of one node. Wrap it with ``ray.remote``."""

    def __init__(self, log_path: str, max_bytes: int) -> None:
        redirect_output(log_path)
        self._table: UnitTable[ray.ObjectRef[list[dict[str, Any]]]] = UnitTable(BACKEND, max_bytes)

    def put(self, receipts: list[Receipt], bulk: list[dict[str, Any]]) -> bool:
        """False when there is no room; the writer waits and asks again."""
        self._table.check_new(receipts)
        if not self._table.has_room(receipts):
            return False
        self._table.add(receipts, ray.put(bulk))
        return True

    def locate(self, keys: list[str]) -> list[tuple[ray.ObjectRef[list[dict[str, Any]]], int, Receipt]]:
        return [self._table.find(k) for k in keys]

    def release(self, keys: list[str]) -> None:
        self._table.release(keys)  # the last reference to a bulk goes with it, and Ray deletes the object

    def stored_bytes(self) -> int:
        return self._table.bytes

    def max_bytes(self) -> int:
        return self._table.max_bytes


class RayStore:
    """Picklable client of a keeper; see :class:`knit.store.base.UnitStore` for the guarantees."""

    def __init__(self, keeper: Any, timeout_s: float, sleep: Callable[[float], None] = time.sleep) -> None:
        self._keeper, self._timeout_s, self._sleep = keeper, timeout_s, sleep

    def write(self, units: Sequence[Unit]) -> list[Receipt]:
        receipts = [receipt(u) for u in units]
        bulk = [{n: np.ascontiguousarray(a) for n, a in u.fields.items()} for u in units]
        deadline = time.monotonic() + self._timeout_s
        pause_s = 0.05
        while not self._ask("put", receipts, bulk):
            if time.monotonic() > deadline:
                raise self._full(receipts)
            self._sleep(pause_s)
            pause_s = min(2 * pause_s, 1.0)
        return receipts

    def read(self, reads: Sequence[Read]) -> list[dict[str, np.ndarray[Any, Any]]]:
        where = self._ask("locate", [r.key for r in reads])
        refs = list(dict.fromkeys(ref for ref, _, _ in where))
        bulks = dict(zip(refs, self._fetch(refs, reads), strict=True))
        out = []
        for request, (ref, index, expected) in zip(reads, where, strict=True):
            fields: Fields = bulks[ref][index]
            verify(expected, fields, BACKEND)
            out.append(select(request.key, fields, request.fields))
        return out

    def release(self, keys: Sequence[str]) -> None:
        if keys:
            self._ask("release", list(keys))

    def stored_bytes(self) -> int:
        return int(self._ask("stored_bytes"))

    def _ask(self, method: str, *args: Any) -> Any:
        return call(getattr(self._keeper, method).remote(*args), self._timeout_s, f"the payload keeper's {method}")

    def _fetch(self, refs: list[Any], reads: Sequence[Read]) -> list[Any]:
        try:
            return list(ray.get(refs, timeout=self._timeout_s))
        except (ray.exceptions.ObjectLostError, ray.exceptions.GetTimeoutError) as error:
            names = ", ".join(r.key for r in reads[:5])
            raise MissingUnitError(f"units {names}… are lost from store {BACKEND}: {type(error).__name__}") from error

    def _full(self, receipts: list[Receipt]) -> StoreFullError:
        held, limit = self.stored_bytes(), int(self._ask("max_bytes"))
        need = sum(r.bytes for r in receipts)
        return StoreFullError(
            f"store {BACKEND} is full: {held:,} of {limit:,} bytes held, {need:,} more wanted, no room within "
            f"store.timeout_s={self._timeout_s:g}; raise store.max_gb or lower admission.max_staleness"
        )
