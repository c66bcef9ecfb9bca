"""What the buffer promises, over random quotas, schedules, speeds, rejections and failures."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from knit.buffer.policies import NAMES
from tests.buffer.helpers import make_rules
from tests.buffer.sim import SimulatedRun, Troubles

BOUNDS = st.integers(0, 3)
GUARDED = ("train_batch", "linear", "progressive", "balanced")


@st.composite
def schedules(draw, n):
    kind = draw(st.sampled_from(["linear", "relaxed", "end", "power", "list"]))
    if kind == "power":
        return f"power:{draw(st.sampled_from([0.5, 2, 3]))}"
    if kind == "list":
        values = sorted(draw(st.lists(st.integers(0, 20), min_size=n - 1, max_size=n - 1)))
        return [v / 20 for v in values] + [1]
    return kind


@st.composite
def runs(draw, policies=GUARDED, bounds=BOUNDS):
    names = [f"s{k}" for k in range(draw(st.integers(1, 4)))]
    parts = [draw(st.integers(0, 10)) for _ in names]
    scale = draw(st.sampled_from([1.0, 0.9, 0.5])) / max(1, sum(parts))
    n = draw(st.integers(1, 4))
    each = draw(st.integers(1, 12))
    maxima = {}
    if draw(st.booleans()) and len(names) > 1:
        maxima = {names[0]: min(1.0, parts[0] * scale + 0.2)}
    rules = make_rules(
        {name: int(part * scale * 1e6) / 1e6 for name, part in zip(names, parts, strict=True)},
        size=n * each,
        mini_batches=n,
        group_size=draw(st.integers(1, 4)),
        max_ratios=maxima,
        policy=draw(st.sampled_from(policies)),
        schedule=draw(schedules(n)),
        chunks_per_mini_batch=draw(st.integers(1, min(3, each))),
        max_staleness=draw(bounds),
        max_ahead=draw(st.sampled_from([None, 0.0, 0.3])),
        completion_quota=draw(st.sampled_from([0.0, 0.5, 1.0])),
        stale_action=draw(st.sampled_from(["drop", "relaunch"])),
        selection=draw(st.sampled_from(["oldest", "fifo", "longest"])),
        refill_budget=1e9,
        rollout={"max_prompt_failures": 1000},
    )
    rate = st.sampled_from([0.0, 0.2, 0.4])
    trouble = Troubles(draw(rate), draw(rate), draw(rate), draw(st.sampled_from([0.0, 0.05])), draw(rate))
    return SimulatedRun(
        rules,
        seed=draw(st.integers(0, 10**6)),
        speeds={name: draw(st.sampled_from([0.1, 1.0, 10.0, 60.0])) for name in names},
        troubles=trouble,
        chunk_train_s=draw(st.sampled_from([0.1, 1.0, 20.0])),
        concurrency=draw(st.sampled_from([2, 10**9])),
    )


PROFILE = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


@PROFILE
@given(runs())
def test_guarded_batches_are_always_filled_and_meet_their_quotas(run):
    run.run(batches=4)
    for record in run.buffer.quota_records:
        assert sum(s["admitted"] for s in record["sources"].values()) == run.rules.size
        for name, quota in run.rules.sources.items():
            assert quota.minimum <= record["sources"][name]["admitted"] <= quota.maximum


@settings(PROFILE, max_examples=25)
@given(runs(policies=("on_completion", "no_guards")))
def test_unguarded_batches_are_always_filled(run):
    run.run(batches=4)
    assert all(sum(s["admitted"] for s in r["sources"].values()) == run.rules.size for r in run.buffer.quota_records)


@settings(PROFILE, max_examples=25)
@given(runs(policies=NAMES))
def test_every_trajectory_ends_exactly_once_and_is_trained_at_most_once(run):
    run.run(batches=3)
    trained = Counter(t.trajectory_id for c in run.chunks if c.step <= 3 for t in c.trajectories)
    assert max(trained.values()) == 1
    counts = run.buffer.finish()
    ends = counts["trained"] + sum(counts["dropped"].values()) + sum(counts["lost"].values()) + counts["left_over"]
    assert counts["launched"] == ends
    assert not run.buffer.ledger.live
    assert not run.buffer.ledger.groups
    ended = [e["trajectory"] for e in run.events if e["event"] in ("drop", "lost")]
    assert len(ended) == len(set(ended))
    assert not set(ended) & set(trained)


@settings(PROFILE, max_examples=12)
@given(st.data())
def test_the_same_trace_gives_the_same_decisions(data):
    first = data.draw(runs(policies=NAMES))
    again = SimulatedRun(first.rules, first.seed, first.speeds, first.troubles, first.chunk_train_s, first.concurrency)
    assert first.run(batches=3).events == again.run(batches=3).events


@settings(PROFILE, max_examples=25)
@given(runs(bounds=st.just(0)))
def test_on_policy_means_that_what_is_trained_was_sampled_by_the_version_it_starts_from(run):
    """And that nothing is launched between the last admission of a batch and its publish."""
    run.run(batches=3)
    admitted = 0
    for event in run.events:
        if event["event"] == "publish":
            admitted = 0
        admitted += event["event"] == "admission"
        assert event["event"] != "launch" or admitted < run.rules.chunks
    for chunk in run.chunks:
        assert {r.version for t in chunk.trajectories for r in t.version_ranges} == {chunk.train_version}


@pytest.mark.parametrize("policy", GUARDED)
@pytest.mark.parametrize("bound", [0, 1, 3])
def test_a_slow_source_meets_its_quota_while_a_fast_one_floods_the_buffer(policy, bound):
    rules = make_rules(
        {"slow": 0.5, "fast": 0.3}, size=40, mini_batches=4, group_size=4, policy=policy, max_staleness=bound
    )
    run = SimulatedRun(rules, 1, {"slow": 300.0, "fast": 0.1}, chunk_train_s=1.0).run(batches=8)
    assert all(r["sources"]["slow"]["admitted"] >= 20 for r in run.buffer.quota_records)
