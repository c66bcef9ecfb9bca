"""The process group that carries weights: rank 0 is the trainer, the engines' TP ranks follow.

The engines join through SGLang's ``init_custom_process_group``, so this side must arrange the same
stores: a ``TCPStore`` that the trainer hosts, inside a ``PrefixStore`` of the group's name. The trainer
needs no SGLang import for it.

A group is used until it breaks or the engine list changes; then a new one is formed under a name that was
never used before. Nothing here blocks past its deadline:

- The store's server is an object of its own. When one engine fails to join, closing the server ends the
  wait of all others, on both sides.
- gloo cannot abort a broadcast, and destroying its group meanwhile would stop every thread of this process
  (the destructor waits, and holds the interpreter). So a broken group is given up: the engines are asked to
  leave, which closes their connections, and a thread destroys this side once the broadcast has ended, at
  the latest by its own time-out. NCCL is aborted at once.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, _world

from knit.errors import PublishError
from knit.sync.engine_api import EngineCallError, EngineClient, failures, start_calls
from knit.types import EngineAddress

POLL_S = 0.02
LATE_S = 1.0  # an engine that meets a closed store would go on knocking for half an hour
CLOSE_S = 2.0


@dataclass(frozen=True, slots=True)
class RankLayout:
    """``offsets[i]`` is the rank of engine i's first TP rank; rank 0 is the trainer."""

    world_size: int
    offsets: tuple[int, ...]


def rank_layout(engines: Sequence[EngineAddress]) -> RankLayout:
    offsets, world_size = [], 1
    for engine in engines:
        offsets.append(world_size)
        world_size += engine.tp
    return RankLayout(world_size, tuple(offsets))


class GroupError(PublishError):
    """The group could not be formed; ``failed`` holds what the engines said, by name."""

    def __init__(self, message: str, failed: dict[str, EngineCallError]) -> None:
        super().__init__(message, failed)
        self.errors = failed

    def __str__(self) -> str:
        return str(self.args[0])


class WeightGroup:
    """One formed group. Make it with :meth:`form`, end it with :meth:`close`."""

    def __init__(self, name: str, clients: Sequence[EngineClient], server: TCPStore, group: Any) -> None:
        self.name = name
        self.engines = tuple(c.address for c in clients)
        self._clients = tuple(clients)
        self._server = server
        self._group = group
        self._work: Any = None

    @classmethod
    def form(
        cls, clients: Sequence[EngineClient], backend: str, host: str, timeout_s: float, pool: ThreadPoolExecutor
    ) -> WeightGroup:
        """Lets this process and all engines meet; ``host`` is this machine's address as the engines see it.

        Raises GroupError within ``timeout_s``, with the engines' own errors.
        """
        name = f"knit-{uuid.uuid4().hex[:12]}"
        layout = rank_layout([c.address for c in clients])
        limit = timedelta(seconds=timeout_s)
        server = TCPStore(host, 0, is_master=True, timeout=limit, wait_for_workers=False)
        offsets = {c.name: o for c, o in zip(clients, layout.offsets, strict=True)}
        master = (host, server.port)
        joins = start_calls(
            pool,
            clients,
            lambda c: c.join_group(name, master, offsets[c.name], layout.world_size, backend, timeout_s),
        )
        store = TCPStore(host, server.port, is_master=False, timeout=limit)
        own = pool.submit(_join, name, PrefixStore(name, store), layout.world_size, backend, limit)
        if _all_met([own, *joins.values()], timeout_s):
            return cls(name, clients, server, own.result())
        wait(joins.values(), timeout=LATE_S)
        del server  # ends every wait at the store, here and in the engines
        wait([own, *joins.values()], timeout=CLOSE_S)
        _destroy_when_done(own)
        done = {n: f for n, f in joins.items() if f.done()}
        failed = failures(done)
        silent = sorted(set(joins) - set(done))
        why = "; ".join(str(e) for e in failed.values()) or str(own.exception() if own.done() else "")
        tail = f"; no answer from {', '.join(silent)}" if silent else ""
        raise GroupError(f"the weight group of {len(clients)} engines could not be formed: {why}{tail}", failed)

    def broadcast(self, flat: Any, timeout_s: float) -> Any:
        """Starts the broadcast of ``flat`` from rank 0; returns torch's ``Work``."""
        self._work = self._group.broadcast(flat, 0, timedelta(seconds=timeout_s))
        return self._work

    def close(self, timeout_s: float, pool: ThreadPoolExecutor, skip: frozenset[str] = frozenset()) -> None:
        """Ends the group on both sides; engines in ``skip`` (gone or silent) are not asked.

        An engine that cannot leave is not an error: it has left already, or its next call will say more.
        Returns within ``timeout_s``, also when a broadcast is still pending.
        """
        leaving = start_calls(
            pool, [c for c in self._clients if c.name not in skip], lambda c: c.leave_group(self.name, timeout_s)
        )
        (group, work), (self._group, self._work) = (self._group, self._work), (None, None)
        _destroy(group, work)
        wait(leaving.values(), timeout=timeout_s)


def _join(name: str, store: PrefixStore, world_size: int, backend: str, limit: timedelta) -> Any:
    group, _ = _new_process_group_helper(world_size, 0, [], Backend(backend), store, group_name=name, timeout=limit)
    _world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group


def _all_met(calls: Sequence[Future[Any]], timeout_s: float) -> bool:
    """Whether all calls succeed; returns as soon as one fails or the time is up."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        done = [c for c in calls if c.done()]
        if any(c.exception() is not None for c in done):
            return False
        if len(done) == len(calls):
            return True
        wait([c for c in calls if not c.done()], timeout=POLL_S)
    return False


def _destroy_when_done(own: Future[Any]) -> None:
    own.add_done_callback(lambda f: None if f.exception() else _destroy(f.result(), None))


def _destroy(group: Any, work: Any) -> None:
    def run() -> None:
        group.abort()
        while work is not None and not work.is_completed():
            time.sleep(POLL_S)
        dist.destroy_process_group(group)

    threading.Thread(target=run, name="weight-group-end", daemon=True).start()
