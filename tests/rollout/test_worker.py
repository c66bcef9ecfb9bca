from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from knit.config.schema import KnitConf
from knit.errors import RunError, StoreError
from knit.recipes.quickstart.tokenizer import EOS_ID
from knit.rollout.agent import Env, Generate, SegmentBuilder, Trajectory
from knit.rollout.worker import RolloutLoop
from knit.types import EngineAddress, Prompt
from tests.rollout.fakes import FakeBuffer, FakeEngine, FakeStore, conf_in, engines, reply, right_away, ticket


class Counting:
    """An engine whose n-th answer begins with token n, so that rewards differ."""

    def __init__(self) -> None:
        self.calls = 0

    async def __call__(self, body: dict[str, Any]) -> dict[str, Any]:
        self.calls += 1
        return reply([self.calls, EOS_ID], version=3)


@asynccontextmanager
async def running(loop: RolloutLoop, addresses: list[EngineAddress]) -> AsyncIterator[asyncio.Task[None]]:
    loop.set_engines(addresses)
    task = asyncio.create_task(loop.run())
    try:
        yield task
    finally:
        await loop.stop()
        await asyncio.gather(task, return_exceptions=True)


def make(conf: KnitConf, tickets: list[Any]) -> tuple[RolloutLoop, FakeBuffer, FakeStore]:
    log: list[str] = []
    buffer, store = FakeBuffer(tickets, log), FakeStore(log)
    return RolloutLoop("worker0", conf, buffer, store), buffer, store


async def test_payload_is_stored_before_its_group_is_reported(tmp_path: Path) -> None:
    loop, buffer, store = make(conf_in(tmp_path), [ticket(1), ticket(2, source="b")])
    async with engines(FakeEngine("e0", Counting())) as addresses, running(loop, addresses):
        groups = await buffer.wait_for_groups(2)
    for group in groups:
        before = buffer.log[: buffer.log.index(f"report {group.group_id}")]
        assert {f"write {group.group_id}.{m}/s0" for m in range(4)} <= set(before)
    assert len(store.units) == 8


async def test_units_and_metadata_tell_the_same_story(tmp_path: Path) -> None:
    loop, buffer, store = make(conf_in(tmp_path), [ticket(1)])
    async with engines(FakeEngine("e0", Counting())) as addresses, running(loop, addresses):
        (group,) = await buffer.wait_for_groups(1)
    prompt = loop.tokenizer.encode("one")
    for t in group.accepted:
        (segment,) = t.segments
        fields = store.units[segment.unit].fields
        assert [str(fields[k].dtype) for k in ("tokens", "logprobs", "loss_mask", "versions")] == [
            "int32",
            "float32",
            "uint8",
            "int32",
        ]
        assert fields["tokens"].tolist() == [*prompt, int(t.reward), EOS_ID]
        assert fields["loss_mask"].tolist() == [0, 0, 0, 1, 1]
        assert fields["versions"].tolist() == [-1, -1, -1, 3, 3]
        assert fields["logprobs"][:3].tolist() == [0, 0, 0]
        assert (segment.tokens, segment.prompt_tokens, segment.trained_tokens, segment.weight) == (5, 3, 2, 1.0)
        assert not t.truncated
    assert {c.trajectory_id for c in buffer.completions} == {t.trajectory_id for t in group.accepted}
    rewards = np.array([t.reward for t in group.accepted])
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    assert [t.advantage for t in group.accepted] == pytest.approx(expected)


async def test_no_more_trajectories_are_in_flight_than_allowed(tmp_path: Path) -> None:
    open_now = most = 0

    async def slow(body: dict[str, Any]) -> dict[str, Any]:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        await asyncio.sleep(0.02)
        open_now -= 1
        return reply([open_now + 1, EOS_ID])

    conf = conf_in(tmp_path, concurrency=10, drop_zero_std=False)
    loop, buffer, _ = make(conf, [ticket(i) for i in range(12)])
    async with engines(FakeEngine("e0", slow)) as addresses, running(loop, addresses):
        await buffer.wait_for_groups(12)
    assert most == 8
    assert buffer.most_asked == 2


async def test_a_failing_member_is_dropped_and_the_others_are_used(tmp_path: Path) -> None:
    counting = Counting()

    async def handler(body: dict[str, Any]) -> Any:
        answer = await counting(body)
        return web.json_response({"error": "bad"}, status=400) if counting.calls == 2 else answer

    loop, buffer, _ = make(conf_in(tmp_path), [ticket(1)])
    async with engines(FakeEngine("e0", handler)) as addresses, running(loop, addresses):
        (group,) = await buffer.wait_for_groups(1)
    assert len(group.accepted) == 3
    assert list(group.dropped.values()) == ["failed"]
    assert not group.retry
    assert "bad" in (group.error or "")


async def test_a_group_lost_to_infrastructure_is_to_be_retried(tmp_path: Path) -> None:
    async def handler(body: dict[str, Any]) -> Any:
        return web.json_response({"error": "down"}, status=503)

    loop, buffer, store = make(conf_in(tmp_path, max_retries=0), [ticket(1)])
    async with engines(FakeEngine("e0", handler)) as addresses, running(loop, addresses):
        (group,) = await buffer.wait_for_groups(1)
    assert group.retry
    assert set(group.dropped.values()) == {"failed"}
    assert not store.units


async def test_a_slow_trajectory_ends_by_its_time_out_and_frees_its_slot(tmp_path: Path) -> None:
    async def handler(body: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(5)
        return reply([1])

    loop, buffer, _ = make(conf_in(tmp_path, trajectory_timeout_s=0.2), [ticket(1)])
    async with engines(FakeEngine("e0", handler)) as addresses, running(loop, addresses):
        (group,) = await buffer.wait_for_groups(1)
        assert loop.metrics()["in_flight"] == 0
    assert set(group.dropped.values()) == {"timeout"}
    assert not group.retry


async def test_a_store_that_fails_costs_the_group_not_the_run(tmp_path: Path) -> None:
    loop, buffer, store = make(conf_in(tmp_path), [ticket(1), ticket(2)])
    store.error = StoreError("full")
    async with engines(FakeEngine("e0", Counting())) as addresses, running(loop, addresses):
        groups = await buffer.wait_for_groups(2)
    assert all(g.retry and set(g.dropped.values()) == {"store_failed"} for g in groups)


class Broken:
    """A loop that returns what no loop may return."""

    def __init__(self, conf: Any) -> None: ...

    async def run(self, prompt: Prompt, generate: Generate, env: Env) -> None:
        await generate(prompt.input_ids)


async def test_every_group_is_reported_whatever_user_code_does(tmp_path: Path) -> None:
    conf = conf_in(tmp_path, agent_loop="tests.rollout.test_worker:Broken")
    loop, buffer, _ = make(conf, [ticket(1), ticket(2, source="missing")])
    async with engines(FakeEngine("e0", Counting())) as addresses, running(loop, addresses):
        first, second = sorted(await buffer.wait_for_groups(2), key=lambda g: g.group_id)
        assert loop.metrics()["in_flight"] == 0
    assert set(first.dropped.values()) == {"failed"}
    assert set(second.dropped.values()) == {"prompt_failed"}
    assert "missing" in (second.error or "")


async def test_the_loss_of_the_buffer_ends_the_worker_with_its_error(tmp_path: Path) -> None:
    loop, buffer, _ = make(conf_in(tmp_path), [ticket(1)])
    buffer.error = RunError("buffer is gone")
    async with engines(FakeEngine("e0", Counting())) as addresses:
        loop.set_engines(addresses)
        with pytest.raises(RunError, match="buffer is gone"):
            await asyncio.wait_for(loop.run(), 5)
        await loop.stop()


async def test_stop_gives_up_what_is_in_flight_within_seconds(tmp_path: Path) -> None:
    async def never(body: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(3600)
        return {}

    loop, buffer, _ = make(conf_in(tmp_path), [ticket(1), ticket(2)])
    engine = FakeEngine("e0", never)
    await engine.server.start_server()
    loop.set_engines([engine.address])
    task = asyncio.create_task(loop.run())
    await asyncio.sleep(0.3)
    assert loop.metrics()["in_flight"] == 8
    started = time.monotonic()
    await loop.stop()
    await asyncio.wait_for(task, 2)
    assert time.monotonic() - started < 2
    assert not buffer.groups
    await engine.server.close()


async def test_reports_are_batched(tmp_path: Path) -> None:
    loop, buffer, _ = make(conf_in(tmp_path), [ticket(i) for i in range(16)])
    async with engines(FakeEngine("e0", Counting())) as addresses, running(loop, addresses):
        await buffer.wait_for_groups(16)
    assert len(buffer.completions) == 64
    assert buffer.reports < 16


async def test_evaluation_covers_every_problem_once_over_all_shards(tmp_path: Path) -> None:
    conf = conf_in(tmp_path)
    conf.eval.sources = conf.sources
    loop, _, _ = make(conf, [])
    engine = FakeEngine("e0", right_away)
    async with engines(engine) as addresses:
        loop.set_engines(addresses)
        shards = [await loop.evaluate(3, 0.0, (i, 2)) for i in range(2)]
        await loop.stop()
    for k, name in enumerate("ab"):
        parts = [shard[k] for shard in shards]
        assert [p.source for p in parts] == [name, name]
        assert [s for p in parts for s in p.scores] == [(1.0,) * 3] * 2
        assert [p.failed for p in parts] == [0, 0]
    assert {r["sampling_params"]["temperature"] for r in engine.requests} == {0.0}


class TwoTurns:
    """Asks twice, with an observation in between, and hands back a second segment."""

    def __init__(self, conf: Any) -> None: ...

    async def run(self, prompt: Prompt, generate: Generate, env: Env) -> Trajectory:
        first, second = SegmentBuilder(prompt.input_ids), SegmentBuilder(prompt.input_ids)
        first.sampled(await generate(first.tokens))
        first.observed([40, 41, 42])
        first.sampled(await generate(first.tokens))
        second.sampled(await generate(second.tokens))
        return Trajectory((first.build(), second.build()), finished=True, truncated=False)


async def test_a_loop_with_turns_and_branches_trains_exactly_what_was_sampled(tmp_path: Path) -> None:
    conf = conf_in(tmp_path, agent_loop="tests.rollout.test_worker:TwoTurns", drop_zero_std=False)
    loop, buffer, store = make(conf, [ticket(1, size=1)])
    engine = FakeEngine("e0", Counting())
    async with engines(engine) as addresses, running(loop, addresses):
        (group,) = await buffer.wait_for_groups(1)
    (t,) = group.accepted
    first, second = (store.units[s.unit].fields for s in t.segments)
    prompt = loop.tokenizer.encode("one")
    assert first["tokens"].tolist() == [*prompt, 1, EOS_ID, 40, 41, 42, 2, EOS_ID]
    assert first["loss_mask"].tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 1, 1]
    assert first["versions"].tolist() == [-1, -1, -1, 3, 3, -1, -1, -1, 3, 3]
    assert second["tokens"].tolist() == [*prompt, 3, EOS_ID]
    assert [s.weight for s in t.segments] == pytest.approx([4 / 6, 2 / 6])
    assert [(r.start, r.end) for r in t.segments[0].versions] == [(0, 2), (5, 7)]
    assert engine.requests[1]["input_ids"] == [*prompt, 1, EOS_ID, 40, 41, 42]
