"""Processes are killed in the middle of real runs."""

import os
import signal
import time

import pytest

pytestmark = pytest.mark.e2e


def test_a_killed_server_comes_back_with_the_published_weights_and_the_run_ends_well(start_run):
    run = start_run("steps=5")
    run.wait_for(r"step +2/5")
    run.process_of("knit.rollout.server_main").kill()
    assert run.wait() == 0, run.text()[-3000:]
    summary = run.summary()
    assert summary["steps"] == 5
    assert summary["engine_restarts"] == 1
    trajectories = summary["trajectories"]
    ended = sum(trajectories["dropped"].values()) + sum(trajectories["lost"].values()) + trajectories["left_over"]
    assert trajectories["launched"] == trajectories["trained"] + ended
    assert max(m["mismatch/probe"] for m in run.metrics() if "mismatch/probe" in m) <= 1e-4
    assert run.processes() == []


def test_a_killed_training_worker_ends_the_run_with_its_name_and_log(start_run):
    run = start_run("steps=50", "eval.before=false")
    run.wait_for(r"step +2/50")
    run.process_of("ray::TrainWorker").kill()
    started = time.monotonic()
    assert run.wait(60) == 1
    assert time.monotonic() - started < 60
    assert "train0 died" in run.text()
    assert "train0.log" in run.text()
    assert run.processes() == []


def test_a_killed_rollout_worker_is_replaced_and_its_trajectories_are_counted_as_lost(start_run):
    run = start_run("steps=5", "eval.before=false")
    run.wait_for(r"step +2/5")
    run.process_of("ray::RolloutWorker").kill()
    assert run.wait() == 0, run.text()[-3000:]
    assert run.summary()["trajectories"]["lost"]["worker"] > 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing_behind(start_run, number):
    run = start_run("steps=50", "eval.before=false")
    run.wait_for(r"step +1/50")
    started = time.monotonic()
    os.killpg(run.process.pid, number)  # as a terminal and a job manager do: Ray's own processes get it too
    assert run.wait(30) in (130, 128 + number)
    assert time.monotonic() - started < 20
    assert run.processes() == []
