"""How the bytes of a publish reach the engines: a broadcast (gloo, NCCL) or a folder on a shared disk.

A transport moves buckets and reports, per engine, what became of them. It knows nothing of versions kept,
pausing or repair: that is the publisher's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

from knit.sync.buckets import Bucket
from knit.sync.engine_api import EngineCallError, EngineClient, Fault, failures, start_calls
from knit.sync.folder import FolderWriter
from knit.sync.group import WeightGroup

POLL_S = 0.001
CLOSE_TIMEOUT_S = 5.0
LATE_S = 0.5  # how long a broadcast may take to end after the first error


@dataclass(frozen=True, slots=True)
class Order:
    """What stays the same for all buckets of one publish. ``deadline`` is on ``time.monotonic``."""

    version: int
    clients: tuple[EngineClient, ...]
    flush_cache: bool
    deadline: float
    grace_s: float  # how much longer than the deadline an engine may take to notice that it is over

    def left_s(self) -> float:
        return self.deadline - time.monotonic()


@dataclass(frozen=True, slots=True)
class Sent:
    """What became of one bucket, by engine name. Engines in neither field have loaded it.

    ``failed`` engines are at fault; ``interrupted`` ones are fine but did not get the bucket because
    another failed. ``error`` is the transport's own failure when no engine is to blame.
    """

    failed: dict[str, EngineCallError] = field(default_factory=dict)
    interrupted: frozenset[str] = frozenset()
    error: str | None = None

    @property
    def ok(self) -> bool:
        return not (self.failed or self.interrupted or self.error)


class Transport(Protocol):
    needs_session: bool
    """Whether engines must be put between begin and end of a weight update."""

    def prepare(self, order: Order) -> None:
        """Gets ready before anything is paused. Raises PublishError."""

    def send(self, order: Order, bucket: Bucket, last: bool) -> Sent:
        """Moves one bucket; with the last one the engines take on ``order.version``."""

    def reset(self, skip: frozenset[str], timeout_s: float) -> None:
        """After a failure: forget what is half done. Does not ask the engines in ``skip`` for anything."""

    def close(self) -> None:
        """Ends the transport cleanly."""


class DistributedTransport:
    """Broadcast from rank 0 over a process group with all engines.

    Both sides are watched: an engine that answers with an error, or dies, ends the broadcast at once; one
    that stays silent ends it at the deadline. ``host`` is the trainer's address as the engines see it.
    """

    needs_session = True

    def __init__(self, backend: str, host: str, pool: ThreadPoolExecutor) -> None:
        self._backend = backend
        self._host = host
        self._pool = pool
        self._group: WeightGroup | None = None

    def prepare(self, order: Order) -> None:
        if self._group and self._group.engines != tuple(c.address for c in order.clients):
            self.reset(frozenset(), order.grace_s)
        if self._group is None:
            self._group = WeightGroup.form(order.clients, self._backend, self._host, order.left_s(), self._pool)

    def send(self, order: Order, bucket: Bucket, last: bool) -> Sent:
        group = self._group
        assert group is not None, "prepare() forms the group"
        description = bucket.description()
        version = str(order.version) if last else None
        patience_s = order.left_s() + order.grace_s
        calls = start_calls(
            self._pool,
            order.clients,
            lambda c: c.receive_bucket(description, group.name, version, order.flush_cache and last, patience_s),
        )
        work = group.broadcast(bucket.flat, max(order.left_s(), 0.001))
        early = _watch(calls, work, order.deadline)
        if early is None:
            return Sent()
        return self._explain(order, calls, work, early)

    def _explain(
        self, order: Order, calls: Mapping[str, Future[None]], work: Any, early: dict[str, EngineCallError]
    ) -> Sent:
        """Ends the broken broadcast and tells those at fault from those it only interrupted.

        Whoever is gone or silent is at fault. An engine that answers with an error is so if it had the data,
        or if its answer came before we broke the broadcast off.
        """
        delivered = _delivered(work, min(LATE_S, order.left_s()))
        self.reset(frozenset(n for n, e in early.items() if e.fault is not Fault.REFUSED), order.grace_s)
        wait(calls.values(), timeout=order.grace_s)
        failed = failures({n: c for n, c in calls.items() if c.done()})
        limit = f"did not answer /update_weights_from_distributed within {order.grace_s:g} s after the broadcast ended"
        for client in order.clients:
            if not calls[client.name].done():
                text = f"engine {client.name} ({client.address.url}) {limit}"
                failed[client.name] = EngineCallError(text, client.name, Fault.SILENT)
        culprits = {n: e for n, e in failed.items() if e.fault is not Fault.REFUSED}
        culprits = culprits or {n: e for n, e in failed.items() if delivered or n in early}
        broken = work.exception() if work.is_completed() else None
        error = None if culprits else f"the broadcast {f'failed: {broken}' if broken else 'was not over in time'}"
        return Sent(culprits, frozenset(failed) - frozenset(culprits), error)

    def reset(self, skip: frozenset[str], timeout_s: float) -> None:
        if self._group is not None:
            group, self._group = self._group, None
            group.close(timeout_s=timeout_s, pool=self._pool, skip=skip)

    def close(self) -> None:
        self.reset(frozenset(), CLOSE_TIMEOUT_S)


class DiskTransport:
    """A folder that trainer and engines both see; the engines load it when it is complete.

    ``new_writer(version)`` says where. An engine could be started from the folder. The folder of the
    version before is removed once every engine has loaded the new one. SGLang does not survive a folder
    it cannot load (its roll-back loads the same folder again): such an engine is gone.
    """

    needs_session = False

    def __init__(self, new_writer: Callable[[int], FolderWriter], pool: ThreadPoolExecutor) -> None:
        self._new_writer = new_writer
        self._pool = pool
        self._writer: FolderWriter | None = None
        self._previous: FolderWriter | None = None

    def prepare(self, order: Order) -> None:
        self._writer = self._new_writer(order.version)

    def send(self, order: Order, bucket: Bucket, last: bool) -> Sent:
        writer = self._writer
        assert writer is not None, "prepare() opens the folder"
        writer.add(bucket.on_host())
        if not last:
            return Sent()
        path = str(writer.finish())
        calls = start_calls(
            self._pool,
            order.clients,
            lambda c: c.load_folder(path, str(order.version), order.flush_cache, order.left_s()),
        )
        failed = failures(calls)
        if not failed:
            self._keep_only(writer)
        return Sent(failed)

    def _keep_only(self, writer: FolderWriter) -> None:
        if self._previous is not None:
            self._previous.discard()
        self._previous, self._writer = writer, None

    def reset(self, skip: frozenset[str], timeout_s: float) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.discard()

    def close(self) -> None:
        self.reset(frozenset(), CLOSE_TIMEOUT_S)


def _watch(calls: Mapping[str, Future[None]], work: Any, deadline: float) -> dict[str, EngineCallError] | None:
    """None when broadcast and all calls succeeded; else the errors known at the first sign of trouble."""
    while time.monotonic() < deadline:
        done = {n: c for n, c in calls.items() if c.done()}
        failed = failures(done)
        if failed:
            return failed
        if work.is_completed():
            if work.exception() is not None:
                return {}
            if len(done) == len(calls):
                return None
        wait([c for c in calls.values() if not c.done()] or [next(iter(calls.values()))], timeout=POLL_S)
        if len(done) == len(calls):
            time.sleep(POLL_S)
    return {}


def _delivered(work: Any, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not work.is_completed() and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return bool(work.is_completed() and work.exception() is None)
