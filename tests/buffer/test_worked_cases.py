"""The paper's worked cases (§5.1, figure 1), and what each policy makes of them."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest

from knit.buffer.guards import deficit, holds
from knit.buffer.quotas import quota_group
from knit.buffer.schedules import linear, parse_schedule, relaxed, targets
from tests.buffer.helpers import Clock, accept, launch, make_buffer, train_and_publish

HALVES = quota_group("source", 100, {"A": 0.5, "B": 0.5})


def test_relaxed_targets_are_0_0_2_4_where_linear_ones_are_1_2_3_4():
    assert targets(0, 4, relaxed(4)) == (0, 0, 2, 4)
    assert targets(0, 4, linear(4)) == (1, 2, 3, 4)
    assert relaxed(4) == (0, 0, Fraction(1, 2), 1)
    assert [len(relaxed(n)) for n in (1, 2, 3, 8)] == [1, 2, 3, 8]


def test_targets_start_from_what_is_ready_and_never_pass_the_quota():
    assert targets(2, 4, relaxed(4)) == (2, 2, 3, 4)
    assert targets(9, 4, linear(4)) == (4, 4, 4, 4)
    assert targets(0, 24, parse_schedule("power:2", 4)) == (2, 6, 14, 24)
    assert targets(0, 24, parse_schedule([0.1, 0.3, 0.6, 1], 4)) == (3, 8, 15, 24)


def test_65_a_and_10_b_after_three_of_four_mini_batches_are_refused():
    """25 slots are left for the 40 that B still needs."""
    counts = {"A": 65, "B": 10}
    assert deficit(HALVES, counts) == 40
    assert not holds(HALVES, counts, size=100, admitted=75)
    assert holds(HALVES, {"A": 50, "B": 25}, size=100, admitted=75)


def batch_with_ready(policy, ready, schedule, **settings):
    """A buffer of 100 slots, half A and half B, with ``ready`` counts added before each admission."""
    buffer = make_buffer(
        {"A": 0.5, "B": 0.5}, size=100, mini_batches=4, policy=policy, schedule=schedule, max_staleness=9, **settings
    )
    buffer.begin_batch(1)
    tickets = launch(buffer)
    chunks = []
    for counts in ready:
        for source, count in counts.items():
            for ticket in [tickets[source].pop(0) for _ in range(count)]:
                accept(buffer, ticket)
        chunks.append(buffer.admit())
    return buffer, chunks


TO_65_10 = ({"A": 25, "B": 0}, {"A": 25, "B": 0}, {"A": 15, "B": 10})
LATE = [0, 0, 0.2, 1]  # 10 at the third admission


def test_without_guards_the_65_to_10_composition_is_admitted_and_a_quota_goes_unmet():
    buffer, chunks = batch_with_ready("no_guards", TO_65_10, LATE)
    assert [len(c.trajectories) for c in chunks] == [25, 25, 25]
    assert buffer.batch.by_source == {"A": 65, "B": 10}


@pytest.mark.parametrize("policy", ["progressive", "balanced"])
def test_with_guards_the_same_completions_are_refused_until_b_can_still_be_met(policy):
    buffer, chunks = batch_with_ready(policy, TO_65_10, LATE)
    assert [c is not None for c in chunks] == [True, True, False]
    assert buffer.batch.by_source["A"] == 50
    assert "guard 'source': 50 slots left in the batch, reserved for 50 'B'" in buffer.explain()
    assert buffer.batch.guard_rejections == 1


def test_the_selection_searches_for_a_feasible_candidate_before_it_gives_up():
    """The first 25 ready are all A and would break the guard; B's came later, but there are enough of them."""
    buffer, chunks = batch_with_ready("progressive", (*TO_65_10[:2], {"A": 25, "B": 25}), LATE, selection="fifo")
    assert Counter(t.source for t in chunks[2].trajectories) == {"B": 25}
    assert buffer.batch.guard_rejections == 1


def first_admissions(policy, schedule="relaxed"):
    """How many trajectories must be ready before mini-batch t is admitted; A completes, then B."""
    buffer = make_buffer({"A": 0.5, "B": 0.5}, size=8, mini_batches=4, policy=policy, schedule=schedule)
    buffer.begin_batch(1)
    tickets = launch(buffer)
    order = [("A", 4), ("B", 4)]
    at, done = [], 0
    for source, count in order:
        for ticket in tickets[source][:count]:
            accept(buffer, ticket)
            done += 1
            while not buffer.batch.complete and buffer.admit() is not None:
                at.append(done)
    return at


def test_figure_1_relaxed_targets_admit_early_and_linear_ones_wait_for_the_slow_source():
    assert first_admissions("progressive") == [2, 4, 6, 8]
    assert first_admissions("linear") == [5, 6, 7, 8]
    assert first_admissions("train_batch") == [8, 8, 8, 8]
    assert first_admissions("on_completion") == [2, 4, 6, 8]


def test_targets_bind_at_the_last_chunk_of_a_mini_batch_and_guards_at_every_chunk():
    buffer = make_buffer(
        {"A": 0.5, "B": 0.5}, size=16, mini_batches=2, policy="linear", chunks_per_mini_batch=4, max_staleness=3
    )
    buffer.begin_batch(1)
    tickets = launch(buffer)
    for ticket in tickets["A"][:16]:
        accept(buffer, ticket)
    assert [buffer.admit() is not None for _ in range(4)] == [True, True, True, False]
    assert "source 'B': 0 of 4" in buffer.explain()
    for ticket in tickets["B"][:4]:
        accept(buffer, ticket)
    assert buffer.admit().last_of_mini_batch


def test_the_oldest_launch_goes_first():
    buffer = make_buffer({"A": 1.0}, size=8, mini_batches=4, policy="progressive")
    buffer.begin_batch(1)
    tickets = launch(buffer)["A"]
    for ticket in reversed(tickets[:6]):
        accept(buffer, ticket)
    assert [t.trajectory_id for t in buffer.admit().trajectories] == ["0.0", "1.0"]


def test_balanced_evens_the_mix_out_where_progressive_takes_the_oldest():
    def mix(policy):
        buffer = make_buffer({"A": 0.5, "B": 0.5}, size=16, mini_batches=2, policy=policy, max_staleness=3)
        buffer.begin_batch(1)
        tickets = launch(buffer)
        for ticket in tickets["A"][:12] + tickets["B"][:6]:
            accept(buffer, ticket)
        return Counter(t.source for t in buffer.admit().trajectories)

    assert mix("balanced") == {"A": 4, "B": 4}
    buffer_order = mix("progressive")
    assert buffer_order["A"] + buffer_order["B"] == 8


def test_balanced_waits_for_an_even_mix_only_as_long_as_the_batch_is_not_delayed():
    clock = Clock()
    buffer = make_buffer({"A": 0.5, "B": 0.5}, clock, size=8, mini_batches=2, policy="balanced", max_staleness=3)
    buffer.begin_batch(1)
    tickets = launch(buffer)
    clock.now_s = 10.0
    for source in ("A", "B"):
        for ticket in tickets[source][:4]:
            accept(buffer, ticket)
    buffer.admit()
    clock.now_s = 12.0  # a mini-batch trains for 2 s
    buffer.admit()
    train_and_publish(buffer, 1)
    buffer.begin_batch(2)  # the whole batch took 10 s to be ready: so it will again, at 12 + 10
    for ticket in tickets["A"][4:8]:
        accept(buffer, ticket)
    clock.now_s = 13.0
    assert buffer.admit() is None
    assert buffer.next_wake_s == pytest.approx(12 + 10 - 2 - buffer.pace.margin_s, abs=0.5)
    assert "even mix" in buffer.explain()
    clock.now_s = buffer.next_wake_s
    assert Counter(t.source for t in buffer.admit().trajectories) == {"A": 4}
