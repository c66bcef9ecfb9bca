"""Other settings, end to end: each run is as short as it can be."""

import pytest

pytestmark = pytest.mark.e2e
QUICK = ("steps=2", "eval.before=false", "eval.after=false")


def finished(run):
    assert run.wait() == 0, run.text()[-3000:]
    assert run.processes() == []
    return run


@pytest.mark.parametrize(
    "overrides",
    [
        ("parallel.tp=2",),
        ("parallel.dp=2", "admission.chunks_per_mini_batch=2", "algorithm.loss_normaliser=token"),
        ("admission.policy=train_batch", "sync.transport=disk", "engine.pause_mode=abort"),
        ("admission.max_staleness=0", "engine.pause_mode=in_place"),
    ],
    ids=lambda o: "+".join(x.split("=", 1)[0].rsplit(".", 1)[-1] + x.split("=", 1)[1] for x in o),
)
def test_a_variant_ends_well_and_agrees_after_every_publish(start_run, overrides):
    run = finished(start_run(*QUICK, *overrides))
    assert run.summary()["weight_version"] == 2
    assert max(m["mismatch/probe"] for m in run.metrics() if "mismatch/probe" in m) <= 1e-4
    steps = [m for m in run.metrics() if "staleness/token/max" in m]
    bound = 0 if "admission.max_staleness=0" in overrides else 1
    assert max(m["staleness/trajectory/max"] for m in steps) <= bound


def test_trajectories_are_dumped_without_training_and_trained_without_sampling(start_run, tmp_path):
    sampled = finished(start_run("steps=2", "debug.mode=rollout_only", f"debug.dump={tmp_path}/dump"))
    assert sampled.summary()["weight_version"] == 0
    trained = finished(start_run("steps=2", "debug.mode=train_only", f"debug.dump={tmp_path}/dump"))
    assert trained.summary()["steps"] == 2
    losses = [m["train/loss"] for m in trained.metrics() if "train/loss" in m]
    assert len(losses) == 2
