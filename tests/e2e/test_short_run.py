from collections import Counter

import pytest

pytestmark = pytest.mark.e2e


def test_the_summary_has_what_it_promises(short_run):
    summary = short_run.summary()
    assert summary["steps"] == summary["weight_version"] == 3
    for when in ("before", "after"):
        scores = summary["eval"][when]
        assert set(scores["sources"]) == {"spell", "sort", "gcd", "count"}
        assert 0 <= scores["avg_at_n"] <= 1
        assert scores["problems"] == 40
    assert 0 <= summary["staleness"]["token"]["mean"] <= 1
    assert summary["wall_s"] > summary["time"]["step"]


def test_every_trajectory_ends_exactly_once(short_run):
    t = short_run.summary()["trajectories"]
    assert t["launched"] == t["trained"] + sum(t["dropped"].values()) + sum(t["lost"].values()) + t["left_over"]
    assert t["trained"] == 3 * 256
    ends = Counter()
    launched = set()
    for event in short_run.events():
        if event["event"] == "launch":
            launched |= set(event["trajectories"])
        elif event["event"] in ("drop", "lost"):
            ends[event["trajectory"]] += 1
        elif event["event"] == "admission":
            ends.update(event["trajectories"])
    assert set(ends) == launched
    assert set(ends.values()) == {1}


def test_every_train_batch_meets_the_quota_of_every_source(short_run):
    for series in short_run.summary()["quota"].values():
        assert set(series["target"]) <= {61, 62}  # 24 % of 256, in whole trajectories
        assert len(series["target"]) == len(series["admitted"]) == 3
        assert all(a >= t for a, t in zip(series["admitted"], series["target"], strict=True))
    admissions = [e for e in short_run.events() if e["event"] == "admission"]
    assert len(admissions) == 3 * 4
    assert all(len(e["trajectories"]) == 64 for e in admissions)


def test_the_parts_of_the_time_add_up_to_the_steps(short_run):
    time = short_run.summary()["time"]
    parts = ("wait_batch", "wait_data", "train", "sync", "eval", "unaccounted")
    assert sum(time[p] for p in parts) == pytest.approx(time["step"])
    assert time["unaccounted"] < 0.1 * time["step"]


def test_engine_and_trainer_agree_after_every_publish(short_run):
    probes = [m["mismatch/probe"] for m in short_run.metrics() if "mismatch/probe" in m]
    assert len(probes) == 4
    assert max(probes) <= 1e-4


def test_staleness_is_never_negative_nor_beyond_the_bound(short_run):
    steps = [m for m in short_run.metrics() if "staleness/token/mean" in m]
    assert len(steps) == 3
    assert all(0 <= m["staleness/token/mean"] <= m["staleness/token/max"] <= 1 for m in steps)


def test_the_payload_of_ended_trajectories_is_deleted(short_run):
    assert [m for m in short_run.metrics() if "buffer/bytes" in m][-1]["buffer/bytes"] < 1e6


def test_events_and_logs_are_there_and_nothing_is_left_running(short_run):
    kinds = {e["event"] for e in short_run.events()}
    assert {"launch", "completion", "accept", "drop", "admission", "train_start", "train_end", "pause"} <= kinds
    logs = {p.name for p in (short_run.folder / "logs").iterdir()}
    assert {"engine0.log", "worker0.log", "train0.log", "buffer.log", "keeper.log", "driver.log"} <= logs
    assert (short_run.folder / "config.yaml").is_file()
    assert short_run.processes() == []
