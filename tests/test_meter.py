import pytest

from knit.meter import RateMeter, TrainMeter

TIMES = {"time/step": 10.0, "time/wait_batch": 4.0, "time/wait_data": 1.0, "time/train": 2.0}


def worker(tokens, idle_s):
    return {"sampled_tokens": tokens, "idle_s": idle_s, "engine_retries": 0}


def test_mini_batches_count_the_same_and_the_slowest_rank_sets_the_exposed_time():
    meter = TrainMeter()
    assert meter.chunk(10, [{"exposed_s": 0.1, "bytes_read": 5}, {"exposed_s": 0.3, "bytes_read": 7}]) == 0.3
    meter.mini_batch({"train/loss": 1.0, "train/lr": 1e-4})
    meter.mini_batch({"train/loss": 3.0, "train/lr": 2e-4})
    metrics = meter.metrics()
    assert metrics["train/loss"] == 2.0
    assert metrics["train/lr"] == 2e-4
    assert metrics["train/tokens"] == 10
    assert metrics["transfer/bytes_read"] == 12


def test_nothing_trained_gives_no_metrics():
    assert TrainMeter().metrics() == {}


def test_rates_are_of_this_step_alone():
    rates = RateMeter()
    rates.metrics([worker(100, 1.0)], TIMES, 50, 0.5)
    metrics = rates.metrics([worker(400, 3.0)], TIMES, 50, 0.5)
    assert metrics["perf/tokens_per_s"] == 30
    assert metrics["perf/train_tokens_per_s"] == 25
    assert metrics["idle/train"] == 0.5
    assert metrics["idle/rollout"] == pytest.approx(0.25)


def test_a_replaced_worker_that_counts_anew_gives_no_negative_rate():
    rates = RateMeter()
    rates.metrics([worker(400, 5.0)], TIMES, 50, 0.0)
    metrics = rates.metrics([worker(10, 0.0)], TIMES, 50, 0.0)
    assert metrics["perf/tokens_per_s"] == 0
    assert metrics["idle/rollout"] == 0
