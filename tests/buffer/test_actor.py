"""The actor's waits: they end on a change, on a deadline with an explanation, and over Ray."""

from __future__ import annotations

import asyncio
import time

import pytest

from knit.buffer.actor import BufferShell
from knit.buffer.streaming import StreamingBuffer
from knit.common.jsonl import read_jsonl
from knit.errors import DeadlineError, RunError
from knit.types import Completion, GroupReport
from tests.buffer.helpers import make_conf, make_meta, make_rules, ranges


def shell(**settings):
    return BufferShell(StreamingBuffer(make_rules({"a": 1.0}, size=4, mini_batches=2, **settings)))


def report_of(ticket):
    metas = tuple(make_meta(ticket, m, ranges(ticket.version)) for m in range(ticket.size))
    done = [Completion(m.trajectory_id, 0.0, m.version_ranges) for m in metas]
    return done, [GroupReport(ticket.group_id, metas, {}, (1.0,) * len(metas))]


async def test_a_waiting_trainer_wakes_on_a_report():
    buffer = shell()
    await buffer.begin_batch(1)
    tickets = await buffer.acquire("w", 100, 1.0)
    waiter = asyncio.create_task(buffer.next_chunk(5.0))
    await asyncio.sleep(0.02)
    assert not waiter.done()
    for ticket in tickets[:2]:
        await buffer.report("w", *report_of(ticket))
    assert len((await waiter).trajectories) == 2


async def test_a_waiting_worker_wakes_when_slots_come_free_and_on_stop():
    buffer = shell(max_staleness=0)
    await buffer.begin_batch(1)
    tickets = await buffer.acquire("w", 100, 1.0)
    waiter = asyncio.create_task(buffer.acquire("w", 1, 5.0))
    await asyncio.sleep(0.02)
    dropped = GroupReport(tickets[0].group_id, (), {tickets[0].trajectory_ids()[0]: "zero_std"})
    await buffer.report("w", [], [dropped])
    assert len(await waiter) == 1
    waiter = asyncio.create_task(buffer.acquire("w", 1, 60.0))
    await asyncio.sleep(0.02)
    await buffer.stop_launching()
    assert await asyncio.wait_for(waiter, 1.0) == []


async def test_a_wait_without_an_admission_ends_with_what_blocks():
    buffer = shell()
    await buffer.begin_batch(1)
    await buffer.acquire("w", 1, 1.0)
    with pytest.raises(DeadlineError, match=r"no admission within 0\.05 s.*size: 0 of 2 trajectories ready.*1 running"):
        await buffer.next_chunk(0.05)
    assert await buffer.acquire("w", 0, 0.01) == []


@pytest.mark.ray
def test_the_buffer_works_as_a_ray_actor(tmp_path, request):
    ray = pytest.importorskip("ray")
    from knit.buffer.actor import BufferActor
    from knit.common.remote import call

    started = not ray.is_initialized()
    if started:
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        conf = make_conf({"a": 1.0}, size=4, mini_batches=2, group_size=2)
        actor = ray.remote(num_cpus=0)(BufferActor).remote(
            str(tmp_path / "buffer.log"), conf, str(tmp_path / "events.jsonl")
        )
        call(actor.begin_batch.remote(1), 60.0, "begin_batch")
        tickets = call(actor.acquire.remote("w", 2, 1.0), 10.0, "acquire")
        chunk = actor.next_chunk.remote(30.0)
        call(actor.report.remote("w", *report_of(tickets[0])), 10.0, "report")
        assert len(call(chunk, 10.0, "chunk").trajectories) == 2
        with pytest.raises(RunError, match="unknown"):
            call(actor.source_exhausted.remote("nope"), 10.0, "exhausted")
        with pytest.raises(DeadlineError, match="no admission within"):
            call(actor.next_chunk.remote(0.1), 10.0, "chunk")
        begin_s = time.monotonic()
        calls = [actor.counts.remote() for _ in range(100)]
        ray.get(calls)
        assert time.monotonic() - begin_s < 10
        events = [e["event"] for e in read_jsonl(tmp_path / "events.jsonl")]
        assert events.count("launch") == 2
        assert events.count("admission") == 1
    finally:
        if started:
            ray.shutdown()
