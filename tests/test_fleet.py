"""Supervision, with members that are plain objects: no Ray, no engines."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from knit.config.schema import EngineConf, FaultConf
from knit.errors import RunError
from knit.fleet import EngineFleet, Failure, fan_out
from knit.types import EngineAddress


@dataclass
class FakeEngine:
    name: str
    log_path: Path = Path("engine.log")
    up: bool = True
    starts: list = field(default_factory=list)

    async def call(self, method, *args, timeout_s):
        if method == "alive":
            return self.up
        self.up = True
        self.starts.append((method, *args))
        return EngineAddress(self.name, f"http://host:{len(self.starts)}")


class World:
    """What a fleet asks of the driver: which version is published, and who hears of changes."""

    def __init__(self, *engines, max_restarts=2):
        self.version, self.announced, self.loaded, self.wait_restart = 0, [], [], None
        fault = FaultConf(max_engine_restarts=max_restarts, health_interval_s=0.001)
        self.fleet = EngineFleet(
            engines,
            EngineConf(start_timeout_s=2),
            fault,
            published=self.published,
            load_from_disk=self.load,
            announce=self.announce,
        )

    async def published(self):
        return Path(f"v{self.version}"), self.version

    async def announce(self, engines):
        self.announced.append([e.url for e in engines])

    async def load(self, address, folder, version):
        self.loaded.append((address.name, folder.name, version))


async def run_for_a_moment(world, until):
    failure = Failure()
    failure.watch(world.fleet.supervise())

    async def wait():
        async with asyncio.timeout(2):
            while not until():  # noqa: ASYNC110 - the fleet has no event for it
                await asyncio.sleep(0.001)

    try:
        await failure.guard(wait())
    finally:
        await failure.close()


async def test_a_dead_engine_leaves_service_and_returns_with_the_published_weights():
    a, b = FakeEngine("a"), FakeEngine("b")
    world = World(a, b)
    await world.fleet.start(Path("model"), 0)
    world.version, a.up = 3, False
    await run_for_a_moment(world, lambda: len(world.fleet.in_service) == 2 and len(a.starts) == 2)
    assert world.announced[0] == ["http://host:1"]  # b alone, before anything else
    assert a.starts[1] == ("restart", "v3", 3)
    assert world.announced[-1] == ["http://host:2", "http://host:1"]
    assert b.starts == [("start", "model", 0)]
    assert world.fleet.restarts == 1


async def test_an_engine_that_comes_back_behind_the_published_version_is_brought_up_to_it_first():
    class Slow(FakeEngine):
        async def call(self, method, *args, timeout_s):
            if method == "restart":
                world.version = 5  # a publish to the others, meanwhile
            return await super().call(method, *args, timeout_s=timeout_s)

    a = Slow("a")
    world = World(a)
    await world.fleet.start(Path("model"), 0)
    world.version, a.up = 4, False
    await run_for_a_moment(world, lambda: world.loaded)
    assert a.starts[1] == ("restart", "v4", 4)
    assert world.loaded == [("a", "v5", 5)]


async def test_an_engine_that_dies_too_often_ends_the_run_with_its_name():
    a = FakeEngine("a")
    world = World(a, max_restarts=0)
    await world.fleet.start(Path("model"), 0)
    a.up = False
    with pytest.raises(RunError, match=r"a died 1 times.*max_engine_restarts=0"):
        await run_for_a_moment(world, lambda: False)


async def test_a_suspect_is_restarted_though_its_process_answers():
    a = FakeEngine("a")
    world = World(a)
    await world.fleet.start(Path("model"), 0)
    world.fleet.suspect("a")
    assert world.fleet.in_service  # it is the supervisor that takes it out
    await run_for_a_moment(world, lambda: len(a.starts) == 2)


async def test_the_first_background_failure_ends_whatever_is_waited_for():
    failure = Failure()

    async def fail():
        raise RunError("train0 died")

    failure.watch(fail())
    with pytest.raises(RunError, match="train0 died"):
        await failure.guard(asyncio.sleep(60))
    await failure.close()


async def test_a_result_that_is_there_is_given_back():
    failure = Failure()
    assert await failure.guard(asyncio.sleep(0, "done")) == "done"
    await failure.close()


async def test_fan_out_raises_the_first_error_and_waits_for_nobody_else():
    class Hangs(FakeEngine):
        async def call(self, method, *args, timeout_s):
            await asyncio.sleep(60)

    class Fails(FakeEngine):
        async def call(self, method, *args, timeout_s):
            raise RunError("train1 died")

    async with asyncio.timeout(1):
        with pytest.raises(RunError, match="train1"):
            await fan_out([Hangs("train0"), Fails("train1")], "finish", timeout_s=None)
