"""The cost of admission at 100,000 ready trajectories; CPU time, so that a busy machine does not matter much."""

from __future__ import annotations

import json
import time

import pytest

from knit.buffer import bench
from knit.buffer.bench import bench_admission
from knit.cli import main


def test_the_benchmark_runs():
    cost = bench_admission(2_000, sources=4, size=256, batches=1)
    assert cost["decision_s"] > 0
    assert cost["completion_s"] > 0


def test_the_command_prints_both_costs_and_writes_them(monkeypatch, tmp_path, capsys):
    def quick(ready, policy):
        return bench_admission(ready // 100, sources=4, size=256, policy=policy, batches=1)

    monkeypatch.setattr(bench, "bench_admission", quick)
    assert main(["bench", "admission", "--json", str(tmp_path / "a.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert all("decision" in line and "completion" in line for line in lines)
    written = json.loads((tmp_path / "a.json").read_text())
    assert written["balanced"]["100000"]["decision_s"] > 0


@pytest.mark.slow
def test_a_decision_takes_5_ms_and_does_not_grow_with_what_is_ready():
    small, large = (bench_admission(ready, clock=time.thread_time) for ready in (10_000, 100_000))
    assert large["decision_s"] <= 0.005 * 2  # CI machines are slower than the 5 ms are meant for
    assert large["completion_s"] <= 50e-6
    assert large["decision_s"] <= 10 * small["decision_s"]
