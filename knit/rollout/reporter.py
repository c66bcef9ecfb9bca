"""Batches what a worker has to tell the buffer: one call per ``interval_s`` however many trajectories end."""

from __future__ import annotations

import asyncio
from typing import Protocol

from knit.types import Completion, GroupReport, Ticket

REPORT_INTERVAL_S = 0.03


class BufferPort(Protocol):
    """The buffer as a worker sees it."""

    async def acquire(self, worker: str, max_groups: int, wait_s: float) -> list[Ticket]: ...

    async def report(self, worker: str, completions: list[Completion], groups: list[GroupReport]) -> None: ...


class RayBuffer:
    """BufferPort over a Ray actor handle."""

    def __init__(self, handle: object) -> None:
        self._handle = handle

    async def acquire(self, worker: str, max_groups: int, wait_s: float) -> list[Ticket]:
        return list(await self._handle.acquire.remote(worker, max_groups, wait_s))  # type: ignore[attr-defined]

    async def report(self, worker: str, completions: list[Completion], groups: list[GroupReport]) -> None:
        await self._handle.report.remote(worker, completions, groups)  # type: ignore[attr-defined]


class Reporter:
    """A completion goes out no later than its group. An error of the buffer ends :meth:`run`."""

    def __init__(self, worker: str, buffer: BufferPort, interval_s: float = REPORT_INTERVAL_S) -> None:
        self.worker = worker
        self.buffer = buffer
        self.interval_s = interval_s
        self._completions: list[Completion] = []
        self._groups: list[GroupReport] = []
        self._pending = asyncio.Event()

    def completed(self, completion: Completion) -> None:
        self._completions.append(completion)
        self._pending.set()

    def judged(self, group: GroupReport) -> None:
        self._groups.append(group)
        self._pending.set()

    async def run(self) -> None:
        while True:
            await self._pending.wait()
            await asyncio.sleep(self.interval_s)
            await self.flush()

    async def flush(self) -> None:
        self._pending.clear()
        completions, self._completions = self._completions, []
        groups, self._groups = self._groups, []
        if completions or groups:
            await self.buffer.report(self.worker, completions, groups)
