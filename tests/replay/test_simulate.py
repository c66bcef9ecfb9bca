"""The simulation against cases worked by hand, and what must hold whatever is replayed."""

from dataclasses import replace

import pytest

from knit.buffer.guards import holds
from knit.replay.generation import Generation
from knit.replay.measure import measure
from knit.replay.scenario import PRESETS, Scenario, make_conf
from knit.replay.simulate import Simulation
from knit.replay.trace import RecordedTrace, Rollout
from knit.types import Ticket

TEN = RecordedTrace({"A": [Rollout(10.0, 10)]})  # every rollout: 10 s, a token per second


def tiny(**changes) -> Scenario:
    """Train batches of two, one trajectory per mini-batch, two engine slots."""
    settings = {
        "name": "tiny",
        "conf": make_conf({"A": 1.0}, 2, 2),
        "launch": "continuous",
        "engine_slots": 2,
        "slowdown": 0.0,
        "max_outstanding": 4,
        "batches": 4,
        "warm_up": 1,
        "seeds": 1,
    }
    return Scenario(**settings | changes)


def measured(scenario, policy, trace, train_s, colocated=False):
    return measure(Simulation(scenario, policy, trace, train_s, colocated).run(scenario.batches), scenario.warm_up)


@pytest.mark.parametrize("launch", ["continuous", "step"])
def test_training_as_long_as_generation_is_one_version_stale(launch):
    """Pairs run 0-10, 10-20, 20-30; the first trains 10-20: what is sampled 10-20 is trained after its publish."""
    found = measured(tiny(launch=launch), "progressive", TEN, train_s=10.0)
    assert found.token_staleness == 1
    assert found.step_s == pytest.approx(10)
    assert (found.idle_train, found.idle_rollout) == pytest.approx((0, 0))


def test_training_half_as_long_makes_half_of_the_tokens_stale():
    """The publish comes at 15: five tokens of a rollout from 10 to 20 are of the old version."""
    found = measured(tiny(), "progressive", TEN, train_s=5.0)
    assert found.token_staleness == 0.5
    assert found.step_s == pytest.approx(10)
    assert (found.idle_train, found.idle_rollout) == pytest.approx((0.5, 0))


def test_colocated_generation_stands_still_during_training():
    """Generation 0-10, training 10-15, generation 15-25: nothing is stale."""
    found = measured(tiny(), "train_batch", TEN, train_s=5.0, colocated=True)
    assert found.token_staleness == 0
    assert found.step_s == pytest.approx(15)
    assert (found.idle_train, found.idle_rollout) == pytest.approx((10 / 15, 5 / 15))


def test_a_publish_pauses_generation():
    """Training 10-15, publish 15-17: the rollouts that began at 10 end at 22."""
    found = measured(tiny(publish_s=2.0), "progressive", TEN, train_s=5.0)
    assert found.step_s == pytest.approx(12)
    assert found.token_staleness == 0.5
    assert found.idle_rollout == pytest.approx(2 / 12)


def test_token_times_say_which_version_sampled_a_token():
    late = RecordedTrace({"A": [Rollout(10.0, 3, token_times_s=(1.0, 9.0, 10.0))]})
    found = measured(tiny(), "progressive", late, train_s=5.0)
    assert found.token_staleness == pytest.approx(1 / 3)


def test_generation_is_faster_when_few_run():
    generation = Generation(slots=2, slowdown=1.0)
    ticket = Ticket(0, "A", 0, 1, 0, 1, 0, 0.0, 1e9)
    generation.submit(ticket, [Rollout(10.0, 10)])
    assert generation.next_finish_s() == pytest.approx(7.5)  # speed 2 / (1 + 1/2)
    generation.submit(ticket, [Rollout(10.0, 10), Rollout(4.0, 4)])  # the third waits for a slot
    assert (generation.speed, generation.free, generation.in_flight) == (1, 0, 3)
    generation.advance(10.0)
    assert generation.finish().rollout.tokens == 10
    generation.paused = True
    assert generation.next_finish_s() == float("inf")


def test_a_trajectory_trains_once_and_counts_add_up():
    for name in PRESETS:
        scenario = replace(PRESETS[name](), batches=3, warm_up=1)
        if name == "stress":
            scenario = scenario.with_settings({"size": 512}, {})
        admitted: list[str] = []
        events = Simulation(
            scenario,
            "progressive",
            scenario.synthetic(0),
            1000.0,
            sink=lambda e, admitted=admitted: admitted.extend(e["trajectories"]) if e["event"] == "admission" else None,
        )
        run = events.run(3)
        size = scenario.conf.batch.size
        assert run.counts["trained"] == 3 * size
        assert run.counts["launched"] == 3 * size + run.counts["left_over"] + sum(run.counts["dropped"].values())
        assert len(set(admitted)) == len(admitted)
        for batch in run.batches:
            assert sum(batch.tokens) >= 0
            assert [mix.total() for mix in batch.mini_batches] == [size // 4] * 4
            assert holds(run.rules.groups[0], batch.by_source, size, size)


def test_the_same_trace_gives_the_same_decisions():
    scenario = replace(PRESETS["continuous"](), batches=4, warm_up=1)
    first, second = (measured(scenario, "balanced", scenario.synthetic(3), 900.0) for _ in range(2))
    assert first == second
    assert first != measured(scenario, "balanced", scenario.synthetic(4), 900.0)


@pytest.mark.parametrize("launch", ["continuous", "step"])
@pytest.mark.parametrize("policy", ["train_batch", "progressive", "balanced"])
def test_rejected_rollouts_are_launched_again_until_the_quotas_are_met(launch, policy):
    rows = [Rollout(5.0 + k % 7, 10, accepted=k % 3 != 0) for k in range(50)]
    trace = RecordedTrace({"A": rows, "B": rows[::-1]})
    scenario = tiny(
        conf=make_conf({"A": 0.5, "B": 0.4}, 20, 4, group_size=2), launch=launch, engine_slots=24, max_outstanding=44
    )
    found = measured(scenario, policy, trace, 3.0)
    assert found.unmet_quotas == 0
    assert found.dropped["rejected"] > 0
