"""``knit replay`` from the command line: results, and wrong input as one line with exit code 2."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from knit.cli import main
from knit.replay.read import read_recording
from knit.replay.scenario import PRESETS
from knit.replay.simulate import Simulation


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def replay(*argv, capsys=None):
    code = main(["replay", "--json", "r.json", *argv])
    assert code == 0, capsys and capsys.readouterr().err
    with open("r.json") as file:
        return json.load(file)


SHORT = ("--batches", "14", "--seeds", "1", "--rho", "0.67")


def refused(capsys, *argv):
    assert main(["replay", *argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("knit: error: ")


def test_help_needs_only_the_light_packages():
    code = (
        "import sys, knit.cli\ntry: knit.cli.main(['replay', '--help'])\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'ray', 'sglang', 'numpy', 'hydra', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--policy" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_paper_preset_orders_the_policies_as_the_paper_does(capsys):
    found = replay("--preset", "paper", *SHORT)["policies"]
    architectural = {name: policy["staleness"]["architectural"] for name, policy in found.items()}
    assert architectural["progressive"] < architectural["linear"] < architectural["train_batch"]
    assert architectural["balanced"] < architectural["linear"]
    for name, policy in found.items():
        met = policy["unmet_quotas"] == 0
        assert met == (name not in ("on_completion", "no_guards")), name
        assert policy["train_batches"] == 14
    assert "progressive" in capsys.readouterr().out


@pytest.mark.parametrize("preset", ["paper", "continuous"])
def test_chunks_halve_the_architectural_staleness_and_cost_no_time(preset):
    whole, chunked = (
        replay("--preset", preset, "--policy", "progressive", "--schedule", "0,0,.5,1", *SHORT, *more)["policies"][
            "progressive"
        ]
        for more in ((), ("--chunks", "5"))
    )
    assert chunked["staleness"]["architectural"] <= whole["staleness"]["architectural"] / 2
    assert chunked["train_batches_per_hour"] >= 0.99 * whole["train_batches_per_hour"]


def test_figures_are_drawn_for_few_sources_and_for_many(capsys):
    short = ("--batches", "3", "--seeds", "1", "--rho", "0.67", "--policy", "progressive,linear")
    many = tuple(word for k in range(9) for word in ("--ratio", f"s{k}=0.1"))
    rows = [{"source": f"s{k % 9}", "duration": 5.0 + k % 4} for k in range(90)]
    for name, more in (("few", ()), ("many", ("--trace", write("m.jsonl", *rows), *many))):
        assert main(["replay", *short, *more, "--figures", name]) == 0, capsys.readouterr().err
        assert len(list(Path(name).glob("*.png"))) == 4


def test_the_json_has_the_documented_keys():
    found = replay("--preset", "paper", "--policy", "linear", "--batches", "4", "--seeds", "2")
    assert set(found["by_rho"]) == {"0.67", "0.95"}
    assert found["settings"]["quotas"] == {"A": 24, "B": 24, "C": 24, "D": 24}
    policy = found["policies"]["linear"]
    assert {"mean"} <= set(policy["staleness"]["token"])
    assert set(policy["idle"]) == {"train", "rollout"}
    assert sum(policy["composition"][source][0] for source in "ABCD") == pytest.approx(1)
    assert policy["train_batches_per_hour"] > 0
    assert 0 <= policy["mix_skew"] <= 1


def test_colocated_policies_have_no_architectural_staleness():
    found = replay("--preset", "continuous", "--policy", "train_batch", "--placement", "colocated", "--batches", "8")
    assert found["policies"]["train_batch"]["staleness"]["architectural"] == 0


def write(name, *rows):
    with open(name, "w") as file:
        file.writelines((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    return name


ROWS = [{"source": "math", "duration": 10.0 + k % 5, "tokens": 50} for k in range(30)]
ROWS += [{"source": "code", "token_times": [4.0, 9.0, 20.0 + k % 7], "accepted": k % 4 > 0} for k in range(30)]


def test_a_simple_trace_is_replayed_with_equal_quotas():
    found = replay("--trace", write("t.jsonl", *ROWS), "--policy", "progressive,linear", "--batches", "6")
    assert found["settings"]["quotas"] == {"math": 48, "code": 48}
    assert found["policies"]["progressive"]["unmet_quotas"] == 0
    assert found["policies"]["progressive"]["dropped"]["rejected"] > 0


def test_quotas_can_be_given_to_a_trace():
    more = ("--ratio", "math=0.5", "--ratio", "code=0.25", "--size", "40", "--max-outstanding", "100")
    found = replay("--trace", write("t.jsonl", *ROWS), "--policy", "progressive", "--batches", "4", *more)
    assert found["settings"]["quotas"] == {"math": 20, "code": 10}


def test_the_events_of_a_run_give_back_its_rollouts():
    """Durations as they were, whatever the run did with them; pauses for publishes are left out."""
    scenario = PRESETS["continuous"]()
    scenario = scenario.with_settings({"group_size": 2}, {})
    events: list[dict] = []
    trace = scenario.synthetic(1)
    Simulation(scenario, "progressive", trace, 800.0, sink=events.append).run(4)
    write("events.jsonl", *events)
    recording = read_recording(Path("events.jsonl"))
    assert recording.group_size == 2
    assert recording.concurrency == 150
    assert recording.train_s == pytest.approx(800.0)
    assert "prompt groups are left out" in recording.notes[0]
    longest = {s: max(r.duration_s for r in rows) for s, rows in recording.trace.rollouts.items()}
    for source, rows in recording.trace.rollouts.items():
        drawn = [r for k in range(400) for r in trace.group(source, k, 2)]
        durations = sorted(r.duration_s for r in drawn)
        assert longest[source] <= durations[-1] + 1e-6
        for rollout in rows[:20]:
            assert min(abs(rollout.duration_s - d) for d in durations) < 1e-6
    found = replay("--trace", "events.jsonl", "--policy", "progressive", "--batches", "4")
    assert found["train_s"] == pytest.approx(800.0)
    assert found["settings"]["group_size"] == 2


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([*ROWS[:2], '{"source": "math", "dur'], "t.jsonl:3: the line is not JSON"),
        ([ROWS[0], {"source": "math"}], "t.jsonl:2: give either duration or token_times"),
        ([ROWS[0], {"source": "math", "duration": -1}], "t.jsonl:2: duration is -1; give seconds above 0"),
        ([ROWS[0], {"source": "math", "seconds": 1}], "t.jsonl:2: unknown key 'seconds'; a rollout has source, "),
        ([ROWS[0], [1]], "t.jsonl:2: the line is no JSON object"),
        ([{"source": "math", "token_times": [2, 1]}], "t.jsonl:1: token_times go back in time"),
        ([{"source": "math", "duration": 1, "accepted": False}], "t.jsonl: no rollout of source 'math' is accepted"),
        ([{"event": "launch", "t": 0}], "t.jsonl:1: launch event without 'source'"),
        ([], "--trace t.jsonl: the file is empty"),
    ],
)
def test_a_bad_trace_is_refused_with_its_line(capsys, rows, says):
    assert refused(capsys, "--trace", write("t.jsonl", *rows)).startswith(says)


def test_a_truncated_last_line_is_named(capsys):
    write("t.jsonl", *ROWS[:4])
    with open("t.jsonl", "a") as file:
        file.write('{"source": "math", "duration"')
    assert refused(capsys, "--trace", "t.jsonl").startswith("t.jsonl:5: the line is cut off")


def test_an_unknown_source_in_a_trace_is_named_with_its_line(capsys):
    line = refused(capsys, "--trace", write("t.jsonl", *ROWS), "--ratio", "math=0.5")
    assert line == "t.jsonl:31: source 'code' is unknown; known are math"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--ratio", "A=0.7", "--ratio", "B=0.6"], "source ratios sum to 130 of a train batch of 100 trajectories"),
        (["--schedule", "0,.5,.3,1"], "admission.schedule=[0.0, 0.5, 0.3, 1.0] is not monotone"),
        (["--schedule", "0,x"], "--schedule 0,x: give linear"),
        (["--max-staleness", "-1"], "admission.max_staleness=-1 is below 0"),
        (["--policy", "greedy"], "--policy greedy: there is no such policy; use all, train_batch"),
        (["--ratio", "E=0.1"], "--ratio E: the preset has the sources A, B, C, D"),
        (["--ratio", "A"], "--ratio A: write SOURCE=SHARE"),
        (["--mini-batches", "8"], "batch.size=100 is not divisible by batch.mini_batches=8"),
        (["--chunks", "0"], "admission.chunks_per_mini_batch=0"),
        (["--max-outstanding", "20"], "--max-outstanding 20 is below the train batch of 100"),
        (["--batches", "3", "--warm-up", "3"], "--batches 3 leaves none after --warm-up 3"),
        (["--rho", "0"], "--rho and --train-s must be above 0"),
        (["--json", "/no/where/r.json"], "--json /no/where/r.json: there is no folder"),
        (["--trace", "no.jsonl"], "--trace no.jsonl: No such file"),
        (["now"], "unknown argument now"),
    ],
)
def test_wrong_settings_are_one_line(capsys, argv, says):
    assert refused(capsys, *argv).startswith(says)
