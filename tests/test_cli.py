import json
import subprocess
import sys
import time

import pytest
import yaml

import knit
from knit.cli import main
from knit.config.schema import KnitConf
from knit.errors import ConfigError, RunError
from knit.prepare import prepare

# Whatever imports these is too slow for a command that only checks its input.
HEAVY = ("torch", "transformers", "sglang", "megatron")


@pytest.fixture(autouse=True)
def _no_run_directories_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def errors_of(capsys, *argv):
    """Exit code and the marked lines on stderr; nothing else may be there."""
    code = main(argv)
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("knit: error: ") for line in lines)
    return code, [line.removeprefix("knit: error: ") for line in lines]


def test_help_is_quick_and_imports_nothing_heavy():
    code = (
        "import sys, knit.cli\ntry: knit.cli.main(['--help'])\nexcept SystemExit: pass\n"
        f"print([m for m in {(*HEAVY, 'ray', 'hydra', 'wandb')!r} if m in sys.modules])"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert time.monotonic() - started < 4  # 0.2 s on a machine of its own
    assert "train" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_cfg_prints_the_resolved_settings_wherever_the_option_stands(capsys):
    for argv in (["steps=3", "--cfg", "job", "seed=4"], ["--cfg=job", "steps=3", "seed=4"]):
        assert main(["train", "recipe=quickstart", *argv]) == 0
        settings = yaml.safe_load(capsys.readouterr().out)
        assert (settings["steps"], settings["seed"], settings["recipe_name"]) == (3, 4, "quickstart")


def test_wrong_arguments_are_one_line_and_exit_code_2(capsys):
    assert errors_of(capsys) == (2, ["the following arguments are required: COMMAND; see knit --help"])
    code, (line,) = errors_of(capsys, "trian")
    assert (code, line.startswith("argument COMMAND: invalid choice: 'trian'")) == (2, True)
    assert errors_of(capsys, "train", "--fast") == (2, ["unknown argument --fast; see knit --help"])
    code, (line,) = errors_of(capsys, "train", "recipe=quickstart", "--json", "/no/where/a.json")
    assert (code, line) == (2, "--json /no/where/a.json: there is no folder /no/where")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("batch.sise=64", "batch.sise is not a setting; did you mean batch.size?"),
        ("model.path=/no/where", "model.path=/no/where: there is no such folder"),
        ("sources.gcd.ratio=0.9", "the source ratios sum to 1.62, above 1: "),
        ("batch.mini_batches=5", "batch.size=256 is not divisible by batch.mini_batches=5"),
        ("rollout.workers=64", "the run wants 68 CPUs, the cluster has 12"),
        ("sources.gcd.reward=no.where:f", "sources.gcd.reward=no.where:f: there is no module no.where"),
        ("sources.gcd.path=no.jsonl", "sources.gcd.path=no.jsonl: there is no such file"),
    ],
)
def test_bad_input_is_one_readable_line_and_exit_code_2(capsys, tmp_path, override, says):
    code, lines = errors_of(capsys, "train", "recipe=quickstart", override)
    assert (code, len(lines)) == (2, 1)
    assert lines[0].startswith(says)
    assert not (tmp_path / "runs").exists()


def test_what_only_a_closer_look_shows_is_found_before_anything_starts(capsys, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "breaks.py").write_text("import torch_of_tomorrow\ndef f(sample): return 1.0\n")
    (tmp_path / "fine.py").write_text("print('noise')\ndef f(sample): return 1.0\n")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    source = "{{name: {0}, ratio: 0.2, reward: 'fine:f', path: {0}.jsonl}}"
    sources = ",".join([*map(source.format, ("empty", "bad")), "{name: c, reward: 'breaks:f', path: bad.jsonl}"])
    argv = ["train", "prepare=fine:f", "track.wandb=off", "admission.schedules={z: linear}", f"sources=[{sources}]"]
    code, lines = errors_of(capsys, *argv)
    assert code == 2
    reward, empty, bad, rules = lines
    assert reward.startswith("sources.c.reward=breaks:f: cannot import breaks (ModuleNotFoundError")
    assert empty == "sources.empty.path=empty.jsonl is empty; it needs at least one prompt"
    assert bad.startswith("sources.bad.path=bad.jsonl, line 2: malformed JSON")
    assert rules.startswith("admission.schedules names ['z']")


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """The driver is replaced by a function of the test's; everything before and after it is real."""
    (tmp_path / "prepares.py").write_text(
        "from knit.errors import ConfigError\n"
        "def model(conf):\n"
        "    print('made')\n"
        "    if conf.seed == 1: raise ConfigError('prepare_options.x is wrong')\n"
        "    if conf.seed == 2: raise RuntimeError('no luck')\n"
        "    open('model.safetensors', 'w'); open('config.json', 'w').write('{}'); open('tokenizer.json', 'w')\n"
        "    return {'model.path': '.'} if conf.seed != 3 else None\n"
        "def reward(sample): return 1.0\n"
    )
    (tmp_path / "data.jsonl").write_text('{"prompt": "a"}\n')
    monkeypatch.syspath_prepend(tmp_path)
    found = type(sys)("knit.driver")
    found.run = lambda conf, resolved, tracker: summary_of(conf)
    monkeypatch.setitem(sys.modules, "knit.driver", found)
    monkeypatch.setattr("knit.preflight.check", lambda conf: None)  # has a test above, and takes a process
    monkeypatch.setattr(knit, "driver", found, raising=False)
    return found


def summary_of(conf):
    from knit.track.summary import Ends, RunRecord, build_summary

    return build_summary(RunRecord(), Ends(), wall_s=1.0) | {"model": conf.model.path}


ARGV = [
    "train",
    "prepare=prepares:model",
    "track.wandb=off",
    "track.dir=run",
    "sources=[{name: a, reward: 'prepares:reward', path: data.jsonl}]",
]


@pytest.fixture
def model(tmp_path):
    """Settings of a run with nothing to prepare."""
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    return ["prepare=null", "model.path=."]


def test_a_run_prepares_drives_and_writes_its_summary(driver, tmp_path, capsys):
    assert main([*ARGV, "--json", "result.json"]) == 0
    summary = json.loads((tmp_path / "result.json").read_text())
    assert summary["model"] == "."
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    assert "path: ." in (tmp_path / "run" / "config.yaml").read_text()
    assert (tmp_path / "run" / "logs" / "prepare.log").read_text() == "made\n"
    out = capsys.readouterr().out
    assert "preparing: prepares:model" in out
    assert f"everything is in {tmp_path}/run" in out


@pytest.mark.parametrize(
    ("seed", "error", "first", "last"),
    [
        (1, ConfigError, "prepare_options.x is wrong", "prepare_options.x is wrong"),
        (2, RunError, "prepare=prepares:model failed with exit code 1; end of ", "RuntimeError: no luck"),
        (3, RunError, "prepare=prepares:model ended well but ", "set no model.path, and the configuration has none"),
    ],
)
def test_a_prepare_that_fails_says_why(driver, tmp_path, seed, error, first, last):
    with pytest.raises(error) as raised:
        prepare(KnitConf(prepare="prepares:model", seed=seed), tmp_path, lambda text: None)
    assert str(raised.value).startswith(first)
    assert str(raised.value).endswith(last)


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (
            RunError("engine0 died; end of its log:\n    gone"),
            1,
            "knit: error: engine0 died; end of its log:\n    gone\n",
        ),
        (KeyboardInterrupt(), 130, "knit: error: interrupted\n"),
    ],
)
def test_how_a_run_ends_is_its_exit_code(driver, model, capsys, error, code, says):
    def run(conf, resolved, tracker):
        raise error

    driver.run = run
    assert main([*ARGV, *model]) == code
    assert capsys.readouterr().err == says


def test_a_bug_is_one_line_with_the_traceback_in_the_log(driver, model, capsys, tmp_path):
    def run(conf, resolved, tracker):
        raise ZeroDivisionError("oh")

    driver.run = run
    assert main([*ARGV, *model]) == 1
    log = tmp_path / "run" / "logs" / "driver.log"
    assert capsys.readouterr().err == f"knit: error: unexpected ZeroDivisionError: oh (traceback: {log})\n"
    assert "Traceback" in log.read_text()


def test_checking_the_input_imports_nothing_heavy():
    code = (
        "import sys\nfrom knit.config.load import load\nfrom knit.config.resolved import resolve\n"
        "from knit.config.validate import problems\nimport knit.preflight, knit.prepare, knit.track.tracker\n"
        "conf = load(['recipe=quickstart'])\nprint(problems(conf, resolve(conf)))\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n[]\n"
