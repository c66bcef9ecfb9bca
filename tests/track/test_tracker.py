import io
import json
import os
import subprocess
import sys
import time

import pytest
from rich.console import Console as RichConsole

from knit.common.jsonl import read_jsonl
from knit.config.load import load
from knit.config.resolved import resolve
from knit.config.schema import KnitConf
from knit.errors import ConfigError
from knit.track import wandb_run
from knit.track.console import Console, Sample, shorten, step_line
from knit.track.memory import MemoryWatch
from knit.track.run_dir import create_run_dir
from knit.track.summary import Ends, RunRecord, build_summary
from knit.track.tracker import Tracker

METRICS = {
    "reward/gcd/mean": 0.4,
    "reward/spell/mean": 0.6,
    "sync/version": 3.0,
    "staleness/token/mean": 0.25,
    "perf/tokens_per_s": 512.0,
}
TIMES = {"time/step": 2.25, "time/wait_batch": 1.0, "time/wait_data": 0.0}
LINE = "step  3/60 · v3 · reward 0.50 (gcd 0.40, spell 0.60) · stale 0.25 · wait 1.0+0.0 s · 512 tok/s · 2.2 s"
SAMPLE = Sample("7.1", "gcd", "gcd 4\n6=", "[red]2", 1.0, (1, 2))


@pytest.fixture
def run(tmp_path):
    conf = KnitConf(steps=60)
    conf.track.wandb, conf.track.dir = "off", str(tmp_path / "run")
    resolved = resolve(conf)
    create_run_dir(conf, resolved)
    return conf, resolved


def test_metrics_samples_and_summary_are_files_for_programs(run, capsys):
    conf, resolved = run
    with Tracker(conf, resolved) as tracker:
        tracker.log(0, {"eval/heldout/avg_at_n": 0.5})
        tracker.step(3, METRICS, TIMES, [SAMPLE])
        tracker.summary(build_summary(RunRecord(), Ends(), wall_s=1.0))
    first, second = read_jsonl(resolved.run_dir / "metrics.jsonl")
    assert (first["step"], first["eval/heldout/avg_at_n"]) == (0, 0.5)
    assert METRICS.items() | TIMES.items() <= second.items()
    assert read_jsonl(resolved.run_dir / "samples.jsonl")[0]["response"] == "[red]2"
    assert json.loads((resolved.run_dir / "summary.json").read_text())["wall_s"] == 1.0
    shown = capsys.readouterr().out
    assert LINE in shown
    assert "gcd 7.1, weights 1→2, reward 1" in shown
    assert "response [red]2" in shown


def test_an_unknown_metric_is_refused_before_anything_is_written(run):
    conf, resolved = run
    with Tracker(conf, resolved) as tracker, pytest.raises(ValueError, match="'loss' is not a metric"):
        tracker.step(1, {"loss": 1.0}, {})
    assert read_jsonl(resolved.run_dir / "metrics.jsonl") == []


def test_the_run_directory_tells_how_the_run_was_made(run):
    _, resolved = run
    assert load([f"recipe={resolved.run_dir}/config.yaml", "recipe_name=custom"]) == load(
        ["steps=60", "track.wandb=off", f"track.dir={resolved.run_dir}"]
    )
    versions = json.loads((resolved.run_dir / "versions.json").read_text())
    assert {"python", "ray", "commit", "command"} <= set(versions)
    assert resolved.logs_dir.is_dir()


def test_a_run_with_metrics_is_not_overwritten(run):
    conf, resolved = run
    create_run_dir(conf, resolved)  # nothing was written yet
    (resolved.run_dir / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"track\.dir=.* holds the metrics of an earlier run"):
        create_run_dir(conf, resolved)


def test_a_folder_that_cannot_be_made_is_the_users_error(run, tmp_path):
    conf, _ = run
    (tmp_path / "file").write_text("")
    conf.track.dir = str(tmp_path / "file" / "run")
    with pytest.raises(ConfigError, match="cannot write there"):
        create_run_dir(conf, resolve(conf))


def test_what_is_unknown_shows_as_a_question_mark():
    assert step_line(1, 9, {}) == "step 1/9 · v? · stale ? · wait ?+? s · ? tok/s · ? s"


def test_the_bar_is_for_terminals_only():
    for terminal in (True, False):
        out = io.StringIO()
        console = Console(60, RichConsole(file=out, force_terminal=terminal, width=200, highlight=False))
        console.step(3, {**METRICS, **TIMES})
        console.close()
        console.close()
        assert LINE in out.getvalue()
        assert ("train batches" in out.getvalue()) == terminal


def test_long_text_loses_its_middle():
    assert shorten("a\nb\\") == "a\\nb\\\\"
    assert shorten("a" * 50 + "b" * 50, 20) == "a" * 10 + " … 80 characters … " + "b" * 10


def test_memory_of_children_is_counted():
    watch = MemoryWatch(interval_s=60)
    before = watch.sample()
    code = "x = bytearray(80_000_000); print('up', flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
    assert watch.sample() - before > 80_000_000
    child.communicate(b"\n")
    assert watch.close() - before > 80_000_000


def test_a_key_for_wandb_is_found_in_environment_and_netrc(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert not wandb_run.has_key()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    assert wandb_run.has_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.com")
    assert not wandb_run.has_key()
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    assert wandb_run.has_key()


def test_wandb_offline_is_silent_and_leaves_its_files(run):
    """In a process of its own: nothing but our lines on stdout and stderr."""
    _, resolved = run
    code = f"""
from knit.config.load import load
from knit.config.resolved import resolve
from knit.track.console import Sample
from knit.track.tracker import Tracker
conf = load(["track.wandb=online", "track.dir={resolved.run_dir}", "steps=2"])
with Tracker(conf, resolve(conf)) as tracker:
    tracker.step(1, {{"train/loss": 0.5}}, {{}}, [Sample("0.0", "gcd", "p", "r", 1.0, (0,))])
"""
    env = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")} | {"NETRC": "/dev/null"}
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - started < 40
    assert done.stderr == ""
    assert done.stdout.startswith("wandb: no API key, so this run is tracked offline")
    assert "step 1/2" in done.stdout
    assert len(done.stdout.splitlines()) == 5
    assert list((resolved.run_dir / "wandb").glob("offline-run-*/*.wandb"))


def test_a_wandb_that_hangs_cannot_keep_the_run_from_ending(monkeypatch, caplog):
    run = object.__new__(wandb_run.WandbRun)
    service = subprocess.Popen(["sleep", "60"])
    run.mode, run._service = "offline", {service.pid}
    run._run = type("Hanging", (), {"finish": lambda self, exit_code: time.sleep(60)})()
    monkeypatch.setitem(wandb_run.FINISH_TIMEOUT_S, "offline", 0.2)
    run.finish()
    assert service.wait(1) != 0
    assert "wandb did not finish in 0.2 s" in caplog.text
