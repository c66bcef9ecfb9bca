"""Starts the actors of a run in their placement groups, and ends all of them, whatever happened."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from knit.buffer.actor import BufferActor
from knit.cluster import Cluster, Member, MemberDiedError, Slot, spawn
from knit.config.resolved import Resolved
from knit.config.schema import KnitConf
from knit.fleet import EngineFleet, Failure, fan_out
from knit.rollout.engine import EngineActor
from knit.rollout.worker import RolloutWorker
from knit.store.ray_store import PayloadKeeper, RayStore
from knit.sync.engine_api import EngineClient
from knit.train.worker import TrainWorker
from knit.types import EngineAddress

STOP_S = 6.0
CONTROL_S = 60.0  # a control call moves metadata only
WATCH_S = 2.0


@dataclass(slots=True)
class Crew:
    """The actors of a run. A run that only trains has no engines and workers, one that only samples no trainers."""

    conf: KnitConf
    resolved: Resolved
    slots: dict[str, list[Slot]]
    keeper: Member
    buffer: Member
    store: RayStore
    trainers: list[Member]
    engine_members: list[Member]
    engines: EngineFleet = field(init=False)
    workers: dict[str, Member] = field(default_factory=dict)
    version: int = 0
    worker_restarts: int = 0

    def __post_init__(self) -> None:
        self.engines = EngineFleet(
            self.engine_members,
            self.conf.engine,
            self.conf.fault,
            published=self.published,
            load_from_disk=self._load_from_disk,
            announce=self._announce,
        )

    async def admit(self, method: str, *args: Any, timeout_s: float = CONTROL_S) -> Any:
        """A call to the buffer."""
        return await self.buffer.call(method, *args, timeout_s=timeout_s)

    async def train(self, method: str, *args: Any) -> list[Any]:
        """The same call on every training rank, in rank order. Its end is theirs: collectives have deadlines."""
        return await fan_out(self.trainers, method, *args, timeout_s=None)

    async def ask(self, name: str, method: str, *args: Any, timeout_s: float = CONTROL_S) -> Any:
        """A call to a rollout worker; if it dies meanwhile, its replacement is asked."""
        member = self.workers[name]
        try:
            return await member.call(method, *args, timeout_s=timeout_s)
        except MemberDiedError as error:
            return await (await self._replacement(member, error)).call(method, *args, timeout_s=timeout_s)

    async def sample(self, method: str, *args: Any, timeout_s: float = CONTROL_S) -> list[Any]:
        """The same call on every rollout worker."""
        return await self.sample_each(method, [args] * len(self.workers), timeout_s=timeout_s)

    async def sample_each(self, method: str, args: Sequence[tuple[Any, ...]], *, timeout_s: float) -> list[Any]:
        """A call to every rollout worker, each with its own arguments."""
        pairs = zip(self.workers, args, strict=True)
        return list(await asyncio.gather(*(self.ask(n, method, *a, timeout_s=timeout_s) for n, a in pairs)))

    async def published(self) -> tuple[Path, int]:
        """Folder and version of the weights last published; the initial ones are version 0."""
        if self.version == 0:
            return Path(str(self.conf.model.path)), 0
        folder = self.resolved.run_dir / "weights" / "published"
        return folder, int(await self.trainers[0].call("save_published", str(folder), timeout_s=None))

    async def start(self) -> None:
        """Engines and trainers side by side, then the rollout workers, which need engines to talk to."""
        await asyncio.gather(self._start_engines(), self._start_trainers(), self.admit("counts", timeout_s=120))
        for index in range(len(self.resolved.worker_bundles)):
            await self._start_worker(index)

    def supervise(self, failure: Failure) -> None:
        """From here on the death of an actor ends the run, unless it can be replaced."""
        for member in [self.buffer, self.keeper, *self.trainers]:
            failure.watch(member.watch(WATCH_S))
        failure.watch(self.engines.supervise())

    async def keep_sampling(self, index: int) -> None:
        """Lets a worker take tickets. When its process dies, what it had in flight is lost, and it is replaced."""
        name = f"worker{index}"
        while True:
            try:
                return await self.workers[name].call("run", timeout_s=None)
            except MemberDiedError as error:
                self.worker_restarts += 1
                if self.worker_restarts > self.conf.fault.max_worker_restarts:
                    raise
                await self.admit("worker_lost", name, str(error).splitlines()[0])
                await self._start_worker(index)

    async def stop(self) -> None:
        """Ends servers and actors within seconds. Their errors no longer matter: dead ones are ended already."""
        stops = [m.call("stop", timeout_s=STOP_S) for m in [*self.workers.values(), *self.engine_members]]
        await asyncio.gather(*stops, return_exceptions=True)
        if self.conf.cluster.address:  # a local Ray takes its actors with it
            for member in [self.buffer, self.keeper, *self.trainers, *self.engine_members, *self.workers.values()]:
                member.kill()

    # -- parts of the start

    async def _start_engines(self) -> None:
        if self.engine_members:
            await self.engines.start(Path(str(self.conf.model.path)), 0)

    async def _start_trainers(self) -> None:
        if self.trainers:
            address = await self.trainers[0].call("address", timeout_s=self.conf.cluster.start_timeout_s)
            await fan_out(self.trainers, "start", address, timeout_s=self.conf.cluster.start_timeout_s)

    async def _start_worker(self, index: int) -> None:
        name, slot = f"worker{index}", self.slots["rollout"][len(self.engine_members) + index]
        args = (name, self.conf, self.buffer.handle, self.store)
        member = spawn(RolloutWorker, slot, name, self.resolved.logs_dir, *args, max_concurrency=1000)
        await member.call("start", self.engines.in_service, timeout_s=self.conf.cluster.start_timeout_s)
        self.workers[name] = member

    async def _replacement(self, dead: Member, error: MemberDiedError) -> Member:
        """Waits for ``keep_sampling`` to replace a worker; raises ``error`` when it does not in time."""
        deadline = time.monotonic() + self.conf.cluster.start_timeout_s
        while self.workers[dead.name] is dead:
            if time.monotonic() > deadline:
                raise error
            await asyncio.sleep(0.2)
        return self.workers[dead.name]

    async def _announce(self, engines: list[EngineAddress]) -> None:
        await self.sample("set_engines", engines)

    async def _load_from_disk(self, address: EngineAddress, folder: Path, version: int) -> None:
        client = EngineClient(address)
        timeout_s = self.conf.sync.timeout_s
        await asyncio.to_thread(client.load_folder, str(folder), str(version), flush_cache=True, timeout_s=timeout_s)


@asynccontextmanager
async def launch(conf: KnitConf, resolved: Resolved, failure: Failure) -> AsyncIterator[Crew]:
    """A started and supervised crew. On the way out all its actors, its servers and a local Ray are ended."""
    cluster = Cluster(conf.cluster)
    try:
        crew = _spawn(conf, resolved, cluster)
        try:
            await failure.guard(crew.start())
            crew.supervise(failure)
            yield crew
        finally:
            await failure.close()
            await crew.stop()
    finally:
        cluster.close()


def _spawn(conf: KnitConf, resolved: Resolved, cluster: Cluster) -> Crew:
    """Creates all actors but the rollout workers. Nothing is waited for but room."""
    wanted = {"rollout": resolved.rollout_bundles, "train": resolved.train_bundles}
    slots = cluster.reserve({name: bundles for name, bundles in wanted.items() if bundles})
    logs, rollout = resolved.logs_dir, slots["rollout"]
    buffer_slot, keeper_slot = rollout[-2:]
    keeper = spawn(PayloadKeeper, keeper_slot, "keeper", logs, int(conf.store.max_gb * 2**30))
    buffer = spawn(
        BufferActor, buffer_slot, "buffer", logs, conf, str(resolved.run_dir / "events.jsonl"), max_concurrency=1000
    )
    store = RayStore(keeper.handle, conf.store.timeout_s)
    engines = []
    for i in range(len(resolved.engine_bundles)):
        args = (f"engine{i}", conf.engine, conf.model, resolved.device, conf.seed + 1000 * i)
        engines.append(spawn(EngineActor, rollout[i], f"engine{i}", logs, *args))
    trainers = [
        spawn(TrainWorker, slot, f"train{rank}", logs, rank, conf, resolved.run_dir / "weights", store)
        for rank, slot in enumerate(slots.get("train", []))
    ]
    return Crew(conf, resolved, slots, keeper, buffer, store, trainers, engines)
