"""Shares, schedules and further quota groups; bad input gives one readable line."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from knit.buffer.guards import Room, take
from knit.buffer.quotas import counts_from_shares, quota_group, source_of
from knit.buffer.ready import ReadyPool
from knit.buffer.rules import even_chunks, resolve_rules
from knit.buffer.schedules import parse_schedule
from knit.buffer.selection import oldest, select
from knit.errors import ConfigError
from knit.types import Ticket
from tests.buffer.helpers import make_conf, make_meta, ranges


def test_largest_remainder_gives_the_exact_total():
    assert counts_from_shares({"a": 0.24, "b": 0.24, "c": 0.24, "d": 0.24}, 100) == dict.fromkeys("abcd", 24)
    assert counts_from_shares({"a": 0.5, "b": 0.25, "c": 0.25}, 10) == {"a": 5, "b": 3, "c": 2}
    assert counts_from_shares({"a": Fraction(1, 3), "b": Fraction(2, 3)}, 10) == {"a": 3, "b": 7}
    assert counts_from_shares({"a": 3, "b": 0.5}, 10) == {"a": 3, "b": 5}


@given(st.lists(st.integers(0, 100), min_size=1, max_size=8), st.integers(1, 500))
def test_counts_never_exceed_the_batch_and_lie_within_one_of_their_share(parts, size):
    whole = max(1, sum(parts))
    shares = {str(k): Fraction(p, whole) for k, p in enumerate(parts)}
    counts = counts_from_shares(shares, size)
    assert sum(counts.values()) == (size if sum(parts) else 0)
    assert all(abs(counts[k] - share * size) < 1 for k, share in shares.items())


def test_ten_tenths_are_one_without_float_drift():
    assert sum(counts_from_shares({str(k): 0.1 for k in range(10)}, 1000).values()) == 1000


def test_chunks_are_as_even_as_possible_and_fill_each_mini_batch():
    assert even_chunks(20, 2, 3) == ((4, 3, 3), (4, 3, 3))


BAD = [
    ({"ratios": {"a": 0.7, "b": 0.4}}, r"source ratios sum to 17\.6 of a train batch of 16 .*a=0\.7, b=0\.4"),
    ({"ratios": {"a": -0.1}}, r"source ratio of 'a' is -0\.1: below 0"),
    ({"ratios": {}}, "at least one source"),
    ({"max_ahead": -1}, r"admission\.max_ahead=-1 is below 0"),
    ({"max_staleness": -1}, r"admission\.max_staleness=-1 is below 0: use 0 for on-policy"),
    ({"schedule": [0, 0.6, 0.5, 1]}, r"admission\.schedule=\[0, 0\.6, 0\.5, 1\] is not monotone"),
    ({"schedule": [0, 0.5, 0.5, 0.9]}, r"ends in 0\.9: the last value must be 1"),
    ({"schedule": [0, 1]}, r"has 2 values for batch\.mini_batches=4"),
    ({"schedule": [0, "x", 1, 1]}, "not a number"),
    ({"schedule": "cubic"}, r"admission\.schedule='cubic' is unknown: use linear"),
    ({"schedule": "power:x"}, r"write power:<p>"),
    ({"schedule": "power:-1"}, "not monotone"),
    ({"schedule": 3}, "neither a name nor a list"),
    ({"schedules": {"z": "linear"}}, r"names \['z'\], which is no predicate: use a, b, completion"),
    ({"policy": "best"}, r"admission\.policy='best' is unknown: use one of train_batch"),
    ({"selection": "newest"}, r"admission\.selection='newest' is unknown: use oldest"),
    ({"stale_action": "keep"}, "use drop or relaunch"),
    ({"completion_quota": 1.5}, "use 0 to 1"),
    ({"mini_batches": 3}, r"batch\.size=16 is not divisible by batch\.mini_batches=3"),
    ({"chunks_per_mini_batch": 5}, r"mini-batches of 4 trajectories: use 1 to 4"),
    ({"group_size": 0}, "below 1"),
    ({"max_ratios": {"a": 0.1}}, r"maximum of 'a' is 1 trajectories, below its minimum of 4"),
    ({"max_ratios": {"a": 0.3, "b": 0.4}}, "sum to 10, less than the train batch of 16"),
]


@pytest.mark.parametrize(("settings", "message"), BAD, ids=[str(s) for s, _ in BAD])
def test_bad_input_is_one_readable_line(settings, message):
    with pytest.raises(ConfigError, match=message) as error:
        resolve_rules(make_conf(**({"ratios": {"a": 0.25, "b": 0.25}} | settings)))
    assert "\n" not in str(error.value)
    assert error.value.exit_code == 2


def test_schedules_end_in_one_exactly():
    for spec in ("linear", "relaxed", "end", "power:0.3", "power:7"):
        values = parse_schedule(spec, 7)
        assert values[-1] == 1
        assert list(values) == sorted(values)


def domain(meta):
    return "hard" if meta.reward < 0.5 else "easy"


def pool_of(groups, items):
    pool = ReadyPool(groups, oldest)
    for k, (source, hard) in enumerate(items):
        ticket = Ticket(k, source, k, 1, 0, 1, 0, 0.0, 0.0)
        pool.add(make_meta(ticket, 0, ranges(0), reward=0.0 if hard else 1.0))
    return pool


def test_with_two_quota_groups_the_search_finds_the_candidate_that_the_oldest_first_walk_misses():
    """The oldest, (a, easy), uses up the slack of both groups; (a, hard) and (b, easy) only use one each."""
    groups = (
        quota_group("source", 4, {"a": 0, "b": 3}, by=source_of),
        quota_group("domain", 4, {"hard": 3}, by=domain, closed=False),
    )
    pool = pool_of(groups, [("a", False), ("a", True), ("b", False)])
    found, refused = select(pool, lambda: Room(groups, [{}, {}], 4, 0), 2)
    assert refused
    assert [e.meta.trajectory_id for e in found.entries] == ["1.0", "2.0"]
    assert len(pool) == 1
    found, _ = select(pool, lambda: Room(groups, [{"a": 1, "b": 1}, {"hard": 1, "easy": 1}], 4, 2), 1)
    assert found is None
    assert len(pool) == 1


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=20),
    st.integers(0, 4),
    st.integers(0, 4),
    st.integers(0, 6),
    st.integers(1, 8),
)
def test_no_candidate_of_two_groups_ever_breaks_a_guard(items, low_a, low_b, hard, size):
    groups = (
        quota_group("source", 12, {"a": low_a, "b": low_b, "c": 0}),
        quota_group("domain", 12, {"hard": hard}, by=domain, closed=False),
    )
    pool = pool_of(groups, items)
    found, _ = select(pool, lambda: Room(groups, [{}, {}], 12, 0), size)
    if found is not None:
        room = Room(groups, [{}, {}], 12, 0)
        assert all(take(room.rooms(e.cell)) for e in found.entries)
        assert len(found.entries) == size


@given(st.lists(st.sampled_from("abc"), max_size=20), st.integers(0, 4), st.integers(0, 8), st.integers(1, 8))
def test_with_one_group_a_feasible_candidate_is_found_whenever_there_is_one(items, low_a, low_b, size):
    groups = (quota_group("source", 12, {"a": low_a, "b": low_b, "c": 0}),)
    pool = pool_of(groups, [(s, False) for s in items])
    have = {s: items.count(s) for s in "abc"}
    feasible = any(
        max(0, low_a - a) + max(0, low_b - b) <= 12 - size
        for a in range(have["a"] + 1)
        for b in range(have["b"] + 1)
        if 0 <= size - a - b <= have["c"]
    )
    found, _ = select(pool, lambda: Room(groups, [{}], 12, 0), size)
    assert (found is not None) == feasible
