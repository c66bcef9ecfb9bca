import pytest

from knit.errors import RunError
from knit.track.console import result_lines
from knit.track.scores import Scores
from knit.track.summary import Ends, RunRecord, build_summary

TIMES = {"time/step": 2.0, "time/train": 1.5, "time/unaccounted": 0.5}


def record_of_two_steps():
    record = RunRecord()
    record.add_eval("before", Scores({"a": [[0.0, 0.5]]}, {"a": [0.0]}))
    for step, tokens, stale in ((1, 100.0, 0.0), (2, 300.0, 1.0)):
        metrics = {
            "train/tokens": tokens,
            "staleness/token/mean": stale,
            "sync/version": float(step),
            "quota/a/target": 31.0,
            "quota/a/admitted": 30.0 + step,
            "quota/a/ready": 5.0,
        }
        record.add_step(step, metrics, TIMES)
    record.add_eval("after", Scores({"a": [[1.0, 0.5]]}, {"a": [1.0]}))
    return record


ENDS = Ends(launched=10, trained=5, dropped={"zero_std": 2, "timeout": 1}, lost={"worker": 1}, left_over=1)


def test_the_summary_has_what_programs_read():
    summary = build_summary(record_of_two_steps(), ENDS, wall_s=9.0, engine_restarts=1, peak_memory_bytes=7)
    assert summary["eval"]["before"]["avg_at_n"] == 0.25
    assert summary["eval"]["after"]["avg_at_n"] == 0.75
    assert summary["eval"]["after"]["sources"]["a"]["greedy"] == 1.0
    assert summary["eval"]["gain"]["avg_at_n"] == 0.5
    assert summary["staleness"]["token"]["mean"] == 0.75  # weighted by tokens
    assert (summary["steps"], summary["weight_version"], summary["wall_s"]) == (2, 2, 9.0)
    assert summary["time"] == {"step": 4.0, "train": 3.0, "unaccounted": 1.0}
    assert summary["quota"] == {"a": {"target": [31, 31], "admitted": [31, 32]}}
    assert summary["trajectories"]["dropped"] == {"zero_std": 2, "timeout": 1}
    assert (summary["engine_restarts"], summary["peak_memory_bytes"]) == (1, 7)
    assert any("10 launched, 5 trained, 3 dropped" in line for line in result_lines(summary))


def test_trajectories_that_do_not_add_up_are_an_error_with_numbers():
    ENDS.check()
    for ends in (Ends(launched=3, trained=2), Ends(launched=3, trained=2, left_over=2)):
        with pytest.raises(RunError, match=r"do not add up: 3 launched, but \d ended \(2 trained, 0 dropped"):
            build_summary(RunRecord(), ends, wall_s=1.0)


def test_ends_are_read_from_the_buffers_counts():
    counts = {"launched": 1, "trained": 1, "dropped": {}, "lost": {}, "left_over": 0, "running": 0}
    assert Ends.of(counts) == Ends(launched=1, trained=1)


def test_a_run_without_evaluation_has_a_summary_too():
    summary = build_summary(RunRecord(), Ends(), wall_s=1.0)
    assert summary["eval"] == {}
    assert result_lines(summary)
