"""One try to bring a set of engines to a new version, and what follows when it fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum

from knit.errors import PublishError
from knit.sync.buckets import Bucket
from knit.sync.engine_api import EngineCallError, EngineClient, Fault, failures, start_calls
from knit.sync.group import GroupError
from knit.sync.transports import Order, Transport


class Weights(StrEnum):
    """Which weights an engine holds, as far as the trainer knows."""

    OLD = "old"
    MIXED = "mixed"  # a part of the new ones, or nobody knows
    NEW = "new"


class _Failed(Exception):
    """A step did not succeed on every engine."""

    def __init__(self, errors: dict[str, EngineCallError], error: str | None = None) -> None:
        super().__init__(error)
        self.errors = errors
        self.error = error


class Attempt:
    """``run`` once. ``restore(client)`` puts the old weights back into an engine."""

    def __init__(
        self,
        order: Order,
        transport: Transport,
        pause_mode: str,
        pool: ThreadPoolExecutor,
        restore: Callable[[EngineClient], None],
    ) -> None:
        self._order = order
        self._transport = transport
        self._pause_mode = pause_mode
        self._pool = pool
        self._restore = restore
        self._weights = {c.name: Weights.OLD for c in order.clients}
        self._in_session: set[str] = set()

    def run(self, buckets: Iterator[tuple[Bucket, bool]]) -> tuple[tuple[Bucket, ...], float]:
        """Returns the buckets, in host memory, and the seconds for which generation was paused."""
        try:
            return self._run(buckets)
        except _Failed as failure:
            raise self._settle(failure.errors, failure.error) from next(iter(failure.errors.values()), None)
        except GroupError as e:
            raise self._settle(e.errors, None if e.errors else str(e)) from e
        except BaseException as e:  # the export failed, or we are told to stop
            self._settle({}, repr(e))
            raise

    def _run(self, buckets: Iterator[tuple[Bucket, bool]]) -> tuple[tuple[Bucket, ...], float]:
        order = self._order
        self._everywhere(lambda c: c.version(order.left_s()))
        self._transport.prepare(order)
        item = next(buckets, None)  # exported before the pause
        if item is None:
            raise _Failed({}, "there are no tensors to publish")
        paused = time.monotonic()
        self._everywhere(lambda c: c.pause(self._pause_mode, order.left_s()))
        if self._transport.needs_session:
            self._everywhere(self._begin)
        sent: list[Bucket] = []
        while item is not None:
            self._send(*item)
            sent.append(item[0].on_host())
            item = next(buckets, None)
        if self._transport.needs_session:
            self._everywhere(self._end)
        self._everywhere(self._verify)
        self._everywhere(lambda c: c.resume(order.left_s()))
        return tuple(sent), time.monotonic() - paused

    def _everywhere(self, call: Callable[[EngineClient], object]) -> None:
        errors = failures(start_calls(self._pool, self._order.clients, call))
        if errors:
            raise _Failed(errors)

    def _begin(self, client: EngineClient) -> None:
        _begin_anyhow(client, self._order.left_s())
        self._in_session.add(client.name)

    def _end(self, client: EngineClient) -> None:
        client.end_update(self._order.left_s())
        self._in_session.discard(client.name)

    def _send(self, bucket: Bucket, last: bool) -> None:
        sent = self._transport.send(self._order, bucket, last)
        for name in self._weights:
            loaded = name not in sent.failed and name not in sent.interrupted
            if not loaded or not last:
                self._weights[name] = Weights.MIXED
            else:
                self._weights[name] = Weights.NEW
        if not sent.ok:
            raise _Failed(sent.failed, sent.error)

    def _verify(self, client: EngineClient) -> None:
        wanted, found = str(self._order.version), client.version(self._order.left_s())
        if found != wanted:
            text = f"engine {client.name} ({client.address.url}) reports weight version {found!r} instead of {wanted}"
            raise EngineCallError(text, client.name, Fault.REFUSED)

    # -- after a failure
    def _settle(self, errors: dict[str, EngineCallError], error: str | None) -> PublishError:
        """Continues every engine whose weights are known and returns the error that tells the tale."""
        unreachable = frozenset(n for n, e in errors.items() if e.fault is not Fault.REFUSED)
        self._transport.reset(unreachable, self._order.grace_s)
        alive = [c for c in self._order.clients if c.name not in unreachable]
        calls = start_calls(self._pool, alive, self._continue)
        unsettled = failures(calls)
        versions = {n: c.result() for n, c in calls.items() if n not in unsettled}
        return self._report(errors, error, unsettled, versions)

    def _continue(self, client: EngineClient) -> str:
        """Brings one engine back to work on whole weights, new or old. Returns its version."""
        limit_s = self._order.grace_s
        if client.name in self._in_session:
            _end_anyhow(client, limit_s)
        if self._weights[client.name] is Weights.MIXED:
            self._restore(client)
        client.resume(limit_s)
        return client.version(limit_s)

    def _report(
        self,
        errors: dict[str, EngineCallError],
        error: str | None,
        unsettled: dict[str, EngineCallError],
        versions: dict[str, str],
    ) -> PublishError:
        confirmed = tuple(sorted(n for n, v in versions.items() if v == str(self._order.version)))
        parts = [str(e) for e in errors.values()] + ([error] if error else [])
        parts += [f"{n} kept version {versions[n]}" for n in errors if n in versions and n not in confirmed]
        parts += [f"{n} could not be continued and needs a restart: {e}" for n, e in unsettled.items()]
        others = sorted(n for n in versions if n not in errors and n not in confirmed)
        if others:
            parts.append(", ".join(f"{n} goes on with version {versions[n]}" for n in others))
        parts.append(f"confirmed by {', '.join(confirmed) or 'no engine'}")
        report = PublishError(f"version {self._order.version} was not published: " + "; ".join(parts))
        report.failed = tuple(sorted({*errors, *unsettled}))
        report.confirmed = tuple(n for n in confirmed if n not in report.failed)
        return report


def _begin_anyhow(client: EngineClient, timeout_s: float) -> None:
    """Opens a session; one that a publish left open when it lost sight of this engine is ended first."""
    try:
        client.begin_update(timeout_s)
    except EngineCallError as e:
        if e.fault is not Fault.REFUSED:
            raise
        client.end_update(timeout_s)
        client.begin_update(timeout_s)


def _end_anyhow(client: EngineClient, timeout_s: float) -> None:
    """Ends the session; if the engine has none open, proves by a new one that it can."""
    try:
        client.end_update(timeout_s)
    except EngineCallError as e:
        if e.fault is not Fault.REFUSED:
            raise
        client.begin_update(timeout_s)
        client.end_update(timeout_s)
