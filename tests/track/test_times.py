import pytest
from hypothesis import given
from hypothesis import strategies as st

from knit.track.times import PARTS, StepTimes


class Clock:
    def __init__(self):
        self.ns = 10**18  # so large that sums of floats would lose nanoseconds

    def __call__(self):
        return self.ns


DURATIONS = st.integers(min_value=0, max_value=10**12)
ACTIONS = st.one_of(
    st.tuples(st.just("run"), DURATIONS),
    st.tuples(st.just("enter"), st.sampled_from(PARTS)),
    st.tuples(st.just("exit"), st.none()),
    st.tuples(st.just("move"), st.tuples(st.sampled_from(PARTS), st.sampled_from(PARTS), st.floats(-1, 10**4))),
)


@given(st.lists(ACTIONS, max_size=40))
def test_the_parts_add_up_to_the_step_and_none_is_negative(actions):
    clock = Clock()
    times, opened = StepTimes(clock), []
    for action, value in actions:
        if action == "run":
            clock.ns += value
        elif action == "enter":
            opened.append(times(value))
            opened[-1].__enter__()
        elif action == "exit" and opened:
            opened.pop().__exit__(None, None, None)
        elif action == "move":
            times.move(*value)
    metrics = times.close()
    step = metrics.pop("time/step")
    assert set(metrics) == {f"time/{p}" for p in (*PARTS, "unaccounted")}
    assert all(v >= 0 for v in metrics.values())
    assert sum(round(v * 1e9) for v in metrics.values()) == round(step * 1e9) == clock.ns - 10**18


def test_an_inner_part_stops_the_outers_clock():
    clock = Clock()
    times = StepTimes(clock)
    with times("train"):
        clock.ns += 3_000_000_000
        with times("wait_data"):
            clock.ns += 1_000_000_000
        clock.ns += 1_000_000_000
    clock.ns += 500_000_000
    metrics = times.close()
    assert (metrics["time/train"], metrics["time/wait_data"], metrics["time/unaccounted"]) == (4.0, 1.0, 0.5)
    assert metrics["time/step"] == 5.5


def test_time_is_counted_when_the_part_raises():
    clock = Clock()
    times = StepTimes(clock)

    def fail():
        with times("sync"):
            clock.ns += 10**9
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert times.close()["time/sync"] == 1.0


def test_more_than_there_is_cannot_be_moved():
    clock = Clock()
    times = StepTimes(clock)
    with times("train"):
        clock.ns += 10**9
    times.move("train", "wait_data", 5.0)
    metrics = times.close()
    assert (metrics["time/train"], metrics["time/wait_data"]) == (0.0, 1.0)


def test_an_unknown_part_is_refused():
    with pytest.raises(ValueError, match="'rollout' is not a part of a step"), StepTimes()("rollout"):
        pass
