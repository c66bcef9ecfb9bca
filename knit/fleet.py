"""The actors of a run as the driver sees them: engines that come back, rollout workers, training ranks.

``Failure`` is how the death of anything reaches the driver: whatever the driver waits for, it waits for
that *or* the first failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from knit.cluster import Member
from knit.config.schema import EngineConf, FaultConf
from knit.errors import DeadlineError, RunError
from knit.types import EngineAddress

T = TypeVar("T")


class Failure:
    """The first thing that went wrong in the background."""

    def __init__(self) -> None:
        self._error: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()

    def watch(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs ``work`` in the background; its error ends the run."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() and not self._error.done():
            self._error.set_exception(task.exception() or RunError("unknown"))

    async def guard(self, work: Awaitable[T]) -> T:
        """The result of ``work``, unless something in the background fails first."""
        task: asyncio.Future[Any] = asyncio.ensure_future(work)
        try:
            await asyncio.wait([task, self._error], return_when=asyncio.FIRST_COMPLETED)
            if self._error.done() and not (task.done() and not task.exception()):
                self._error.result()
            result: T = task.result()
            return result
        finally:
            task.cancel()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._error.done():
            self._error.exception()  # retrieved: no warning at exit


async def fan_out(members: Sequence[Member], method: str, *args: Any, timeout_s: float | None) -> list[Any]:
    """The same call on all members; the first error wins and the others' answers are not waited for."""
    calls = [asyncio.ensure_future(m.call(method, *args, timeout_s=timeout_s)) for m in members]
    try:
        return list(await asyncio.gather(*calls))
    finally:
        for call in calls:
            call.cancel()


class EngineFleet:
    """Rollout engines in and out of service.

    An engine is in service only while its process answers and serves the published weight version. One
    that dies leaves service at once, is started again from the published weights and comes back when its
    version matches; one that dies more than ``fault.max_engine_restarts`` times ends the run.

    ``published`` gives (folder, version) of the weights last published; ``announce`` tells the rollout
    workers who is in service. Publishing and coming back exclude each other through ``lock``.
    """

    def __init__(
        self,
        members: Sequence[Member],
        conf: EngineConf,
        fault: FaultConf,
        *,
        published: Callable[[], Awaitable[tuple[Path, int]]],
        load_from_disk: Callable[[EngineAddress, Path, int], Awaitable[None]],
        announce: Callable[[list[EngineAddress]], Awaitable[None]],
    ) -> None:
        self._members = {m.name: m for m in members}
        self._conf, self._fault = conf, fault
        self._published, self._load, self._announce = published, load_from_disk, announce
        self._serving: dict[str, EngineAddress] = {}
        self._suspects: set[str] = set()
        self._restarts = dict.fromkeys(self._members, 0)
        self._changed = asyncio.Event()
        self.lock = asyncio.Lock()

    @property
    def restarts(self) -> int:
        """Of all engines, since the start."""
        return sum(self._restarts.values())

    @property
    def in_service(self) -> list[EngineAddress]:
        return [self._serving[n] for n in sorted(self._serving)]

    async def start(self, model_path: Path, version: int) -> None:
        timeout_s = self._conf.start_timeout_s + 30
        calls = [m.call("start", str(model_path), version, timeout_s=timeout_s) for m in self._members.values()]
        for address in await asyncio.gather(*calls):
            self._serving[address.name] = address

    async def supervise(self) -> None:
        await asyncio.gather(*(self._supervise(m) for m in self._members.values()))

    def suspect(self, name: str) -> None:
        """The engine failed a publish: it is taken out and restarted, whatever its process says."""
        self._suspects.add(name)

    async def wait_in_service(self) -> list[EngineAddress]:
        """Engines in service; waits for the first one to come back when there is none."""
        deadline_s = self._conf.start_timeout_s * 2
        try:
            async with asyncio.timeout(deadline_s):
                while not self._serving or self._suspects:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise RunError(f"no rollout engine came back within {deadline_s:g} s") from None
        return self.in_service

    async def _supervise(self, member: Member) -> None:
        while True:
            await asyncio.sleep(self._fault.health_interval_s)
            if member.name in self._suspects or not await self._alive(member):
                await self._bring_back(member)

    async def _alive(self, member: Member) -> bool:
        """False when the server is gone, or silent three times over. Its actor's death ends the run."""
        for _ in range(3):
            try:
                return bool(await member.call("alive", timeout_s=self._fault.health_timeout_s))
            except DeadlineError:
                await asyncio.sleep(self._fault.health_interval_s)
        return False

    async def _bring_back(self, member: Member) -> None:
        self._serving.pop(member.name, None)
        await self._announce(self.in_service)
        self._restarts[member.name] += 1
        if self._restarts[member.name] > self._fault.max_engine_restarts:
            raise RunError(
                f"{member.name} died {self._restarts[member.name]} times, more often than "
                f"fault.max_engine_restarts={self._fault.max_engine_restarts}; see {member.log_path}"
            )
        async with self.lock:
            folder, version = await self._published()
        address: EngineAddress = await member.call(
            "restart", str(folder), version, timeout_s=self._conf.start_timeout_s + 30
        )
        async with self.lock:
            folder, current = await self._published()
            if current != version:
                await self._load(address, folder, current)
            self._serving[member.name] = address
            self._suspects.discard(member.name)
            await self._announce(self.in_service)
        self._changed.set()
