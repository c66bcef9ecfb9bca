import datetime
from pathlib import Path

from knit.config.resolved import default_run_dir, resolve

NOW = datetime.datetime(2030, 1, 2, 3, 4, 5)


def test_sizes_and_bundles_of_a_cpu_run(conf):
    conf.cluster.device, conf.engine.count, conf.rollout.workers, conf.parallel.dp = "cpu", 2, 3, 2
    resolved = resolve(conf)
    assert resolved.mini_batch_size == 64
    assert resolved.rollout_bundles == ({"CPU": 1.0},) * (2 + 3 + 2)
    assert resolved.train_bundles == ({"CPU": 1.0},) * 2


def test_bundles_ask_for_gpus_where_there_are_any(conf, monkeypatch):
    monkeypatch.setattr("knit.config.resolved.local_gpus", lambda: 8)
    conf.engine.tp, conf.parallel.tp = 4, 2
    resolved = resolve(conf)
    assert resolved.device == "cuda"
    assert resolved.engine_bundles == ({"CPU": 1.0, "GPU": 4.0},)
    assert resolved.train_bundles == ({"CPU": 1.0, "GPU": 1.0},) * 2
    assert all("GPU" not in b for b in resolved.worker_bundles + resolved.service_bundles)


def test_debug_modes_start_only_what_they_need(conf):
    conf.debug.mode = "train_only"
    assert resolve(conf).engine_bundles == resolve(conf).worker_bundles == ()
    conf.debug.mode = "rollout_only"
    assert resolve(conf).train_bundles == ()
    assert resolve(conf).dump_dir == resolve(conf).run_dir / "dump"


def test_the_run_directory_is_absolute_and_new(conf, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = tmp_path / "runs" / "custom-20300102-030405"
    assert resolve(conf, NOW).run_dir == first
    first.mkdir(parents=True)
    assert default_run_dir("custom", NOW) == Path("runs/custom-20300102-030405-2")
    conf.track.dir = "here"
    assert resolve(conf).run_dir == tmp_path / "here"
