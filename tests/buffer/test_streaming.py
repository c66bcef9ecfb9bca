"""Launching, staleness, failures, metrics and state, by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from knit.buffer.streaming import StreamingBuffer
from knit.errors import RunError
from knit.track.names import refuse_unknown
from knit.types import Completion, GroupReport, State
from tests.buffer.helpers import (
    Clock,
    accept,
    drop,
    launch,
    make_buffer,
    make_meta,
    make_rules,
    ranges,
    train_and_publish,
)


def admit_all(buffer):
    chunks = []
    while not buffer.batch.complete:
        chunk = buffer.admit()
        assert chunk is not None, buffer.explain()
        chunks.append(chunk)
    return chunks


def fill(buffer):
    while tickets := launch(buffer):
        for ticket in [t for ts in tickets.values() for t in ts]:
            accept(buffer, ticket)


def run_batch(buffer, step, version):
    buffer.begin_batch(step)
    fill(buffer)
    chunks = admit_all(buffer)
    train_and_publish(buffer, version)
    return chunks


def test_a_train_batch_has_exactly_its_mini_batches_and_chunks():
    buffer = make_buffer({"a": 0.5, "b": 0.5}, size=20, mini_batches=2, chunks_per_mini_batch=3, group_size=4)
    chunks = run_batch(buffer, 1, 1)
    assert [len(c.trajectories) for c in chunks] == [4, 3, 3, 4, 3, 3]
    last = chunks[-1]
    assert (last.mini_batch, last.chunk, last.last_of_mini_batch, last.last_of_batch) == (1, 2, True, True)
    assert {c.train_version for c in run_batch(buffer, 2, 2)} == {1}
    counts = buffer.finish()
    assert counts["trained"] == 40
    assert counts["launched"] == 40 + counts["left_over"]


# -- launching


def test_launches_fill_the_slots_by_ratio_and_no_more():
    buffer = make_buffer({"a": 0.5, "b": 0.25}, size=16, max_staleness=1)
    assert {s: len(t) for s, t in launch(buffer).items()} == {"a": 21, "b": 11}
    assert launch(buffer) == {}


def test_fewer_slots_than_the_staleness_bound_gives_keep_the_reservations():
    rules = replace(make_rules({"a": 0.5, "b": 0.25}, size=16, max_staleness=3), max_outstanding=20)
    buffer = StreamingBuffer(rules)
    tickets = launch(buffer)
    assert {s: len(t) for s, t in tickets.items()} == {"a": 13, "b": 7}
    buffer.begin_batch(1)
    for ticket in tickets["a"]:
        accept(buffer, ticket)
    for ticket in tickets["b"]:
        drop(buffer, ticket)
    assert len(launch(buffer)["b"]) == 7


def test_rollout_is_no_further_ahead_than_training_needs_next():
    buffer = make_buffer({"a": 0.5, "b": 0.5}, size=16, mini_batches=2, max_staleness=1, max_ahead=0.25)
    tickets = [t for of_source in launch(buffer).values() for t in of_source]
    assert len(tickets) == 16 + 4
    buffer.begin_batch(1)
    for ticket in tickets:
        accept(buffer, ticket)
        if ticket is tickets[-6]:
            assert launch(buffer) == {}  # 15 of 16 are ready, and all that may be ahead is in flight
    assert sum(len(t) for t in launch(buffer).values()) == 12  # the next batch, though training has not begun


def test_sources_without_a_ratio_share_what_the_ratios_leave():
    buffer = make_buffer({"a": 0.5, "b": 0, "c": 0}, size=16, max_staleness=1)
    assert {s: len(t) for s, t in launch(buffer).items()} == {"a": 16, "b": 8, "c": 8}


def test_a_surplus_of_one_source_cannot_take_the_reservation_of_another():
    buffer = make_buffer({"slow": 0.5, "fast": 0.25}, size=16, max_staleness=1)
    buffer.begin_batch(1)
    tickets = launch(buffer)
    for ticket in tickets["slow"]:
        drop(buffer, ticket)
    assert len(launch(buffer)["slow"]) == len(tickets["slow"])


def test_slots_come_free_on_publish_not_on_training():
    buffer = make_buffer({"a": 1.0}, size=8, mini_batches=2, max_staleness=0)
    buffer.begin_batch(1)
    fill(buffer)
    admit_all(buffer)
    assert launch(buffer) == {}
    buffer.trained(1, 0)
    buffer.trained(1, 1)
    assert launch(buffer) == {}
    buffer.publish_started(1)
    buffer.published(1)
    assert len(launch(buffer)["a"]) == 8


def test_groups_that_do_not_divide_the_quotas_still_fill_an_on_policy_batch():
    buffer = make_buffer({"a": 0.24, "b": 0.24, "c": 0.24, "d": 0.24}, size=100, group_size=8, max_staleness=0)
    for step in (1, 2, 3):
        assert len(run_batch(buffer, step, step)) == 4


def test_a_prompt_that_came_to_nothing_is_launched_again_first_and_quarantined_in_the_end():
    buffer = make_buffer({"a": 1.0}, size=8, rollout={"max_prompt_failures": 3})
    first = launch(buffer, 1)["a"][0]
    drop(buffer, first, "failed", retry=True)
    again = launch(buffer, 1)["a"][0]
    assert (again.prompt_index, again.attempt, again.group_id) == (first.prompt_index, 1, 1)
    buffer.worker_lost("w", "killed")
    third = launch(buffer, 1)["a"][0]
    assert (third.prompt_index, third.attempt) == (first.prompt_index, 2)
    drop(buffer, third, "failed", retry=True)
    assert launch(buffer, 1)["a"][0].prompt_index == 1
    counts = buffer.counts()
    assert (counts["quarantined_prompts"], counts["lost"], counts["dropped"]) == (1, {"worker": 1}, {"failed": 2})


def test_a_source_with_a_maximum_neither_floods_the_buffer_nor_the_batch():
    buffer = make_buffer({"a": 0.25, "b": 0.25}, size=16, max_ratios={"a": 0.5}, max_staleness=1)
    chunks = run_batch(buffer, 1, 1)
    assert sum(t.source == "a" for c in chunks for t in c.trajectories) <= 8


# -- staleness


def test_over_stale_ready_trajectories_are_dropped_and_their_slots_and_payload_given_back():
    buffer = make_buffer({"a": 1.0}, size=4, mini_batches=1, max_staleness=0, group_size=3)
    buffer.begin_batch(1)
    fill(buffer)
    admit_all(buffer)
    assert len(buffer.pool) == 2
    train_and_publish(buffer, 1)
    assert buffer.counts()["dropped"] == {"stale": 2}
    assert len(buffer.drain_releasable()) == 6
    assert len(launch(buffer)["a"]) == 2


def test_over_stale_prompts_are_launched_again_by_option():
    buffer = make_buffer({"a": 1.0}, size=4, mini_batches=1, max_staleness=0, group_size=3, stale_action="relaunch")
    buffer.begin_batch(1)
    fill(buffer)
    admit_all(buffer)
    train_and_publish(buffer, 1)
    ticket = launch(buffer, 1)["a"][0]
    assert (ticket.prompt_index, ticket.attempt) == (1, 1)


def test_what_is_over_stale_when_it_is_reported_is_never_ready_and_holds_no_slot_before():
    buffer = make_buffer({"a": 1.0}, size=4, mini_batches=1, max_staleness=1)
    ticket = launch(buffer, 1)["a"][0]
    run_batch(buffer, 1, 1)
    assert buffer.outstanding()["a"] == 4
    run_batch(buffer, 2, 2)
    assert buffer.outstanding()["a"] == 3
    accept(buffer, ticket, 0, 1)
    assert buffer.counts()["dropped"] == {"stale": 1}
    assert buffer.counts()["ready"] == 3


def test_negative_staleness_is_an_error():
    buffer = make_buffer({"a": 1.0}, size=4, mini_batches=4)
    buffer.begin_batch(1)
    accept(buffer, launch(buffer, 1)["a"][0], 7)
    with pytest.raises(RunError, match=r"tokens of weight version 7.*starts from version 0: negative staleness"):
        buffer.admit()


def test_versions_and_steps_only_grow_and_calls_come_in_order():
    buffer = make_buffer({"a": 1.0}, size=4, mini_batches=2)
    with pytest.raises(RunError, match="call begin_batch first"):
        buffer.admit()
    buffer.begin_batch(1)
    with pytest.raises(RunError, match="train batch 1 is not published yet"):
        buffer.begin_batch(2)
    with pytest.raises(RunError, match="has trained 0 of 2 mini-batches"):
        buffer.published(1)
    with pytest.raises(RunError, match="before it was admitted"):
        buffer.trained(1, 0)
    with pytest.raises(RunError, match="out of order"):
        buffer.trained(1, 1)
    fill(buffer)
    admit_all(buffer)
    train_and_publish(buffer, 1)
    with pytest.raises(RunError, match="steps only grow"):
        buffer.begin_batch(1)
    with pytest.raises(RunError, match="versions only grow"):
        buffer.published(0)


# -- reports and failures


def test_a_report_must_name_each_member_once_and_only_launched_groups():
    buffer = make_buffer({"a": 1.0}, size=4, group_size=2)
    ticket = launch(buffer, 1)["a"][0]
    with pytest.raises(RunError, match=r"report of group 0 \(w\) names 0\.0, its ticket 0\.0, 0\.1"):
        buffer.report("w", [], [GroupReport(0, (), {"0.0": "failed"})])
    with pytest.raises(RunError, match="never launched"):
        buffer.report("w", [], [GroupReport(99, (), {})])
    accept(buffer, ticket)
    with pytest.raises(RunError, match=r"0\.0 cannot go from ready to completed"):
        buffer.report("w", [Completion("0.0", 0.0, ())], [])


def test_late_reports_of_a_lost_worker_are_ignored_and_their_payload_released():
    buffer = make_buffer({"a": 1.0}, size=4, group_size=2)
    ticket = launch(buffer, 1)["a"][0]
    buffer.worker_lost("w", "killed")
    assert buffer.counts()["lost"] == {"worker": 2}
    accept(buffer, ticket)
    assert buffer.drain_releasable() == ["0.0/s0", "0.1/s0"]
    assert buffer.counts()["ready"] == 0
    buffer.ledger.check()


def test_lost_payload_gives_a_ready_slot_back_and_fails_aloud_once_admitted():
    buffer = make_buffer({"a": 1.0}, size=4, mini_batches=2, max_staleness=0)
    buffer.begin_batch(1)
    tickets = launch(buffer)["a"]
    buffer.payload_lost(["0.0", "unknown"])
    for ticket in tickets:
        accept(buffer, ticket)
    buffer.payload_lost(["3.0"])
    assert buffer.counts()["lost"] == {"payload": 2}
    chunk = buffer.admit()
    assert [t.trajectory_id for t in chunk.trajectories] == ["1.0", "2.0"]
    with pytest.raises(RunError, match=r"payload of admitted trajectories is lost: 1\.0;"):
        buffer.payload_lost(["1.0"])
    assert len(launch(buffer)["a"]) == 2


def test_a_group_past_its_deadline_ends_the_run_with_the_names():
    clock = Clock()
    buffer = make_buffer({"a": 1.0}, clock, size=4, group_size=2, rollout={"group_timeout_s": 60.0})
    buffer.begin_batch(1)
    launch(buffer, 1)
    clock.now_s = 61.0
    with pytest.raises(RunError, match=r"trajectories 0\.0, 0\.1 of w are past rollout\.group_timeout_s=60"):
        buffer.admit()


def test_the_refill_budget_ends_a_run_that_only_drops():
    buffer = make_buffer({"a": 0.5, "b": 0.5}, size=4, refill_budget=2.0)
    buffer.begin_batch(1)
    for _ in range(9):
        tickets = launch(buffer, 1)
        assert buffer.admit() is None
        for ticket in [t for ts in tickets.values() for t in ts]:
            drop(buffer, ticket)
    with pytest.raises(RunError, match=r"9 trajectories were dropped.*refill_budget=2 .*: a zero_std 9|b zero_std"):
        buffer.admit()


def test_an_exhausted_source_ends_the_run_with_an_explanation_once_its_quota_is_out_of_reach():
    buffer = make_buffer({"a": 0.5, "b": 0.5}, size=8, mini_batches=2, max_staleness=0)
    buffer.begin_batch(1)
    tickets = launch(buffer)
    for ticket in tickets["a"][:3]:
        accept(buffer, ticket)
    buffer.source_exhausted("a")
    assert buffer.admit() is None
    drop(buffer, tickets["a"][3], "exhausted")
    with pytest.raises(RunError, match=r"source 'a' is exhausted after 4 prompts.*at most 3 of the 4"):
        buffer.admit()
    with pytest.raises(RunError, match="source 'z' is unknown"):
        buffer.source_exhausted("z")


def test_the_buffer_says_what_blocks_and_for_how_long():
    clock = Clock()
    buffer = make_buffer({"a": 0.5, "b": 0.5}, clock, size=8, mini_batches=2, policy="linear")
    buffer.begin_batch(1)
    tickets = launch(buffer)
    assert buffer.admit() is None
    for ticket in tickets["a"][:4]:
        accept(buffer, ticket)
    clock.now_s = 5.0
    assert buffer.admit() is None
    text = buffer.explain()
    assert "train batch 1, mini-batch 1 of 2, chunk 1 (4 trajectories): source 'b': 0 of 2" in text
    assert "b: 8 running" in text
    clock.now_s = 12.0
    for ticket in tickets["a"][4:] + tickets["b"]:
        accept(buffer, ticket)
    admit_all(buffer)
    train_and_publish(buffer, 1)
    metrics = buffer.metrics()
    assert metrics["admission/wait_s"] == 12.0
    assert metrics["admission/blocked_by/size"] == 5.0
    assert metrics["quota/b/starved_s"] == 12.0
    assert metrics["quota/a/starved_s"] == 5.0


def test_a_completion_quota_keeps_the_batch_open_for_earlier_rollout_steps():
    buffer = make_buffer({"a": 1.0}, size=4, mini_batches=2, completion_quota=0.75, max_staleness=2)
    buffer.begin_batch(1)
    early = launch(buffer)["a"]
    for ticket in early[:4]:
        accept(buffer, ticket)
    admit_all(buffer)
    train_and_publish(buffer, 1)
    buffer.begin_batch(2)
    for ticket in launch(buffer)["a"]:
        accept(buffer, ticket)
    assert buffer.admit() is not None
    assert buffer.admit() is None
    assert "completion of rollout step 1: 4 of 9 (launched 12)" in buffer.explain()
    for ticket in early[4:9]:
        accept(buffer, ticket)
    assert buffer.admit().last_of_batch


# -- metrics, events, state


def test_metrics_have_known_names_and_count_versions_by_token():
    buffer = make_buffer({"a": 0.5, "b": 0.5}, size=4, mini_batches=2, group_size=2, max_staleness=1)
    buffer.begin_batch(1)
    tickets = launch(buffer)
    drop(buffer, tickets["a"].pop())
    for ticket in tickets["a"][:1] + tickets["b"][:1]:
        accept(buffer, ticket)
    admit_all(buffer)
    train_and_publish(buffer, 1)
    buffer.begin_batch(2)
    accept(buffer, tickets["b"][1], 0, 1)
    accept(buffer, launch(buffer, 1)["a"][0], reward=0.0)
    admit_all(buffer)
    train_and_publish(buffer, 2)
    metrics = buffer.metrics()
    refuse_unknown(metrics)
    assert metrics["staleness/token/mean"] == pytest.approx(8 / 24)
    assert metrics["staleness/token/p95"] == metrics["staleness/token/max"] == 1
    assert metrics["staleness/trajectory/mean"] == 0.5
    assert metrics["staleness/update_lag"] == pytest.approx(8 / 24)
    assert metrics["partial/mixed_version_ratio"] == 0.5
    assert metrics["partial/spans"] == 1.5
    assert metrics["drop/zero_std/a"] == 2
    assert metrics["quota/a/admitted"] == metrics["quota/b/target"] == 2
    assert metrics["reward/a/mean"] == 0.0
    assert buffer.quota_records[1]["sources"]["a"] == {"target": 2, "admitted": 2}


def test_events_tell_the_life_of_a_trajectory():
    events = []
    buffer = make_buffer({"a": 1.0}, sink=events.append, size=2, mini_batches=1, max_staleness=0)
    buffer.begin_batch(1)
    tickets = launch(buffer)["a"]
    buffer.publish_started(1)
    assert buffer.counts()["paused"] == 2
    buffer.publish_failed(1)
    assert buffer.counts()["running"] == 2
    for ticket in tickets:
        accept(buffer, ticket)
    buffer.admit()
    buffer.training_started(1, 0, 0)
    train_and_publish(buffer, 1)
    names = [e["event"] for e in events if "0.0" in (e.get("trajectory"), *e.get("trajectories", ()))]
    assert names == ["launch", "pause", "resume", "completion", "accept", "admission"]
    completion = next(e for e in events if e["event"] == "completion")
    assert completion["versions"] == [[0, 4, 0.0]]
    assert {e["event"] for e in events} >= {"batch_start", "train_start", "train_end", "publish_start", "publish"}
    json.dumps(events)


def test_the_state_can_be_written_out_and_read_back():
    settings = {"size": 4, "mini_batches": 2, "group_size": 2, "max_staleness": 2}
    buffer = make_buffer({"a": 0.5, "b": 0.5}, **settings)
    buffer.begin_batch(1)
    tickets = launch(buffer)
    for ticket in tickets["a"][:2] + tickets["b"][:2]:
        accept(buffer, ticket)
    drop(buffer, tickets["a"][2], "failed", retry=True)
    admit_all(buffer)
    train_and_publish(buffer, 1)
    saved = json.loads(json.dumps(buffer.state_dict()))

    again = StreamingBuffer(make_rules({"a": 0.5, "b": 0.5}, **settings), clock=Clock())
    again.load_state_dict(saved)
    assert (again.version, again.step) == (1, 1)
    assert [m.trajectory_id for m in again.pool] == [m.trajectory_id for m in buffer.pool]
    counts = again.counts()
    assert counts["launched"] == counts["trained"] + 2 + counts["lost"]["restart"] + counts["ready"]
    relaunched = launch(again, 2)
    first = {s: (t[0].prompt_index, t[0].attempt, t[0].group_id) for s, t in relaunched.items()}
    assert all(group_id >= saved["next_group"] for _, _, group_id in first.values())
    assert {i for s in relaunched for i in [t.prompt_index for t in relaunched[s]]} <= {2}
    again.begin_batch(2)
    fill(again)
    assert admit_all(again)[0].train_version == 1
    again.finish()
    with pytest.raises(RunError, match="load it into a new one"):
        again.load_state_dict(saved)


def test_illegal_moves_of_a_trajectory_are_refused():
    buffer = make_buffer({"a": 1.0}, size=4)
    launch(buffer, 1)
    with pytest.raises(RunError, match=r"0\.0 cannot go from running to admitted"):
        buffer.ledger.move("0.0", State.ADMITTED)
    with pytest.raises(RunError, match="unknown or has already ended"):
        buffer.ledger.move("9.9", State.LOST)


def test_an_accepted_trajectory_needs_its_source_and_sampled_tokens():
    buffer = make_buffer({"a": 1.0}, size=4)
    ticket = launch(buffer, 1)["a"][0]
    with pytest.raises(RunError, match="0 version ranges"):
        buffer.report("w", [], [GroupReport(0, (make_meta(ticket, 0, ranges()[:0]),), {})])
