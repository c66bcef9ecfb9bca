"""The buffer as a Ray actor: waits and wakes around :class:`knit.buffer.streaming.StreamingBuffer`.

One event loop, no threads: calls never overlap inside the buffer, and every call that changes it wakes all
waiters. Calls take batches.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from knit.buffer.rules import resolve_rules
from knit.buffer.streaming import StreamingBuffer
from knit.common.jsonl import JsonlWriter
from knit.common.procs import redirect_output
from knit.config.schema import KnitConf
from knit.errors import DeadlineError
from knit.types import Chunk, Completion, GroupReport, Ticket

TICK_S = 1.0  # deadlines of groups are looked at this often even if nothing happens


class BufferShell:
    """What the actor runs; usable without Ray."""

    def __init__(self, buffer: StreamingBuffer):
        self._buffer = buffer
        self._changed = asyncio.Event()

    async def acquire(self, worker: str, max_groups: int, wait_s: float) -> list[Ticket]:
        """Waits until slots are free; [] when none came free within ``wait_s`` or launching has stopped."""
        deadline_s = self._buffer.clock() + wait_s
        while self._buffer.launching:
            tickets = self._buffer.acquire(worker, max_groups)
            if tickets or not await self._change(deadline_s):
                return tickets
        return []

    async def next_chunk(self, timeout_s: float) -> Chunk:
        """Waits for the next admission. Raises DeadlineError that says what blocks, RunError if it never can be."""
        deadline_s = self._buffer.clock() + timeout_s
        while True:
            chunk = self._buffer.admit()
            if chunk is not None:
                self._wake()
                return chunk
            self._wake()  # a starving batch may launch now
            now_s = self._buffer.clock()
            if now_s >= deadline_s:
                raise DeadlineError(f"no admission within {timeout_s:g} s: {self._buffer.explain()}")
            wake_s = self._buffer.next_wake_s
            await self._change(min(deadline_s, now_s + TICK_S, deadline_s if wake_s is None else wake_s))

    async def report(self, worker: str, completions: list[Completion], groups: list[GroupReport]) -> None:
        self._buffer.report(worker, completions, groups)
        self._wake()

    async def worker_lost(self, worker: str, error: str) -> None:
        self._buffer.worker_lost(worker, error)
        self._wake()

    async def payload_lost(self, trajectory_ids: list[str]) -> None:
        self._buffer.payload_lost(trajectory_ids)
        self._wake()

    async def source_exhausted(self, source: str) -> None:
        self._buffer.source_exhausted(source)
        self._wake()

    async def begin_batch(self, step: int) -> None:
        self._buffer.begin_batch(step)
        self._wake()

    async def training_started(self, step: int, mini_batch: int, chunk: int) -> None:
        self._buffer.training_started(step, mini_batch, chunk)

    async def trained(self, step: int, mini_batch: int) -> None:
        self._buffer.trained(step, mini_batch)

    async def publish_started(self, version: int) -> None:
        self._buffer.publish_started(version)

    async def publish_failed(self, version: int) -> None:
        self._buffer.publish_failed(version)

    async def published(self, version: int) -> None:
        self._buffer.published(version)
        self._wake()

    async def stop_launching(self) -> None:
        self._buffer.stop_launching()
        self._wake()

    async def finish(self) -> dict[str, Any]:
        counts = self._buffer.finish()
        self._wake()
        return counts

    async def metrics(self) -> dict[str, float]:
        return self._buffer.metrics()

    async def counts(self) -> dict[str, Any]:
        return self._buffer.counts()

    async def quota_records(self) -> list[dict[str, Any]]:
        """Of every finished train batch: step and, per source, target and admitted."""
        return self._buffer.quota_records

    async def explain(self) -> str:
        return self._buffer.explain()

    async def drain_releasable(self) -> list[str]:
        return self._buffer.drain_releasable()

    async def state_dict(self) -> dict[str, Any]:
        return self._buffer.state_dict()

    async def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._buffer.load_state_dict(saved)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self, until_s: float) -> bool:
        """Waits for a change; False when ``until_s`` (the buffer's clock) passed without one."""
        try:
            await asyncio.wait_for(self._changed.wait(), max(0.0, until_s - self._buffer.clock()))
        except TimeoutError:
            return False
        return True


class BufferActor(BufferShell):
    """One per run, in the placement group ``rollout``; a plain class, made an actor by ``ray.remote``.

    Events go to ``events_path`` (JSON lines). ``max_concurrency`` must be above the number of waiting callers.
    """

    def __init__(self, log_path: str, conf: KnitConf, events_path: str | Path, version: int = 0):
        redirect_output(log_path)
        writer = JsonlWriter(events_path)
        super().__init__(StreamingBuffer(resolve_rules(conf), writer.write, version=version))
