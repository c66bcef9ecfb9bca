"""One test per rule: a small valid configuration, one thing changed, the line that says so."""

import json
import math
from fractions import Fraction
from pathlib import Path

import pytest

from knit.config.resolved import exact, resolve
from knit.config.schema import KnitConf, QuotaConf, SourceConf
from knit.config.validate import FIT_RULES, check, problems
from knit.errors import ConfigError


def only_problem(conf: KnitConf) -> str:
    found = problems(conf, resolve(conf))
    assert len(found) == 1, found
    assert "\n" not in found[0]
    return found[0]


def test_a_valid_configuration_has_no_problems(conf):
    assert problems(conf, resolve(conf)) == []
    check(conf, resolve(conf))


def test_the_quickstart_is_valid(quickstart):
    assert problems(quickstart, resolve(quickstart)) == []


def test_all_problems_are_reported_together(conf):
    conf.batch.size, conf.model.path = 258, "/no/where"
    with pytest.raises(ConfigError) as error:
        check(conf, resolve(conf))
    assert len(str(error.value).splitlines()) == 3
    assert error.value.exit_code == 2


def test_unknown_choices_name_the_valid_ones(conf):
    conf.admission.policy = "eager"
    line = only_problem(conf)
    assert line.startswith("admission.policy=eager is not known; choose one of: train_batch, ")
    assert "progressive" in line


def test_numbers_out_of_range(conf):
    conf.batch.group_size = 0
    assert only_problem(conf) == "batch.group_size=0 must be at least 1"
    conf.batch.group_size, conf.admission.max_staleness = 8, -1
    assert only_problem(conf) == "admission.max_staleness=-1 must be at least 0"
    conf.admission.max_staleness, conf.optim.lr = 0, 0.0
    assert only_problem(conf) == "optim.lr=0.0 must be above 0"
    conf.optim.lr = math.nan
    assert only_problem(conf) == "optim.lr=nan must be above 0"
    conf.optim.lr, conf.admission.completion_quota = 1.0, 1.5
    assert only_problem(conf) == "admission.completion_quota=1.5 must be between 0 and 1"


def test_ratio_sum_above_one(conf):
    conf.sources[1].ratio = 0.51
    assert only_problem(conf) == (
        "the source ratios sum to 1.01, above 1: sources.a.ratio=0.5, sources.b.ratio=0.51; lower one by at least 0.01"
    )


def test_ratios_are_added_exactly(conf):
    reward = {"reward": "os.path:join", "prompt_source": "os.path:join"}
    conf.sources = [SourceConf(name=f"s{n}", ratio=0.1, **reward) for n in range(10)]
    assert problems(conf, resolve(conf)) == []
    assert exact(0.24) == Fraction(6, 25)


def test_ratios_out_of_range_or_too_small_for_one_trajectory(conf):
    conf.sources[1].ratio = -0.1
    assert only_problem(conf) == "sources.b.ratio=-0.1 must be between 0 and 1"
    conf.sources[1].ratio = 0.001
    assert only_problem(conf).startswith("sources.b.ratio=0.001 of batch.size=256 is less than one trajectory")
    conf.sources[1].ratio, conf.sources[1].max_ratio = 0.25, 0.2
    assert only_problem(conf) == "sources.b.max_ratio=0.2 must be between its ratio=0.25 and 1"


def test_batch_not_divisible_by_mini_batches(conf):
    conf.batch.size, conf.batch.mini_batches = 256, 3
    assert only_problem(conf) == (
        "batch.size=256 is not divisible by batch.mini_batches=3; use batch.size=255 or another number of mini-batches"
    )


def test_more_chunks_than_a_mini_batch_has_trajectories(conf):
    conf.batch.size, conf.admission.chunks_per_mini_batch = 16, 5
    line = only_problem(conf)
    assert "admission.chunks_per_mini_batch=5 exceeds the 4 trajectories" in line
    assert "batch.size=16, batch.mini_batches=4" in line
    assert line.endswith("use at most 4 chunks")


def test_batch_not_a_multiple_of_the_group(conf):
    conf.batch.group_size = 12
    assert only_problem(conf) == (
        "batch.size=256 is not a multiple of batch.group_size=12: prompts are launched in whole groups; "
        "use batch.size=252 or another group size"
    )


def test_min_group_size_above_the_group(conf):
    conf.rollout.min_group_size = 9
    assert only_problem(conf).startswith("rollout.min_group_size=9 is above batch.group_size=8")


@pytest.mark.parametrize("schedule", ["linear", "relaxed", "end", "power:2", "power:0.5", [0, 0, 0.5, 1], [1, 1, 1, 1]])
def test_known_schedules(conf, schedule):
    conf.admission.schedule = schedule
    assert problems(conf, resolve(conf)) == []


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        ("fast", "admission.schedule=fast is not known; choose linear, relaxed,"),
        ("power:0", "power:<p> with p above 0"),
        ([0, 1], "has 2 numbers; batch.mini_batches=4 needs 4"),
        ([0, 0.5, 0.4, 1], "must start at 0 or above, never fall, and end in 1"),
        ([0, 0.5, 0.6, 0.9], "end in 1"),
        ([-1, 0.5, 0.6, 1], "start at 0 or above"),
        ([0, "half", 0.6, 1], "must hold numbers only"),
    ],
)
def test_schedules_that_are_refused(conf, schedule, says):
    conf.admission.schedule = schedule
    assert says in only_problem(conf)


def test_response_longer_than_the_context(conf):
    conf.rollout.max_response_tokens = 4096
    assert only_problem(conf) == (
        "rollout.max_response_tokens=4096 leaves no room for a prompt in engine.context_length=4096; "
        "lower the one or raise the other"
    )


def test_a_trajectory_may_not_outlast_its_group(conf):
    conf.rollout.trajectory_timeout_s = 2000
    line = only_problem(conf)
    assert line.startswith("rollout.trajectory_timeout_s=2000 is above rollout.group_timeout_s=1800")


def test_model_path_missing(conf):
    conf.model.path = None
    assert only_problem(conf).startswith("model.path is not set; give the folder")
    conf.prepare = "os.path:join"
    assert problems(conf, resolve(conf)) == []
    conf.model.path = "/no/where"
    assert only_problem(conf).startswith("model.path=/no/where: there is no such folder")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_model_folder_lacks_a_file(conf, name):
    (Path(conf.model.path) / name).unlink()
    line = only_problem(conf)
    assert f"model.path={conf.model.path} has no " in line
    assert name.removeprefix("model") in line


def test_parallel_sizes_divide_the_model(conf):
    conf.parallel.tp, conf.cluster.device = 4, "cpu"
    assert only_problem(conf).startswith("parallel.tp=4 does not divide num_key_value_heads=2 of model.path=")
    conf.parallel.tp, conf.engine.tp = 1, 3
    assert only_problem(conf).startswith("engine.tp=3 does not divide num_attention_heads=4")


def test_the_context_fits_the_model(conf):
    (Path(conf.model.path) / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    assert only_problem(conf).startswith("engine.context_length=4096 is above max_position_embeddings=64")
    (Path(conf.model.path) / "config.json").write_text("{")
    assert "config.json is not valid JSON" in only_problem(conf)


def test_source_file_missing(conf):
    conf.sources[0].path = "/no/data.jsonl"
    assert only_problem(conf) == "sources.a.path=/no/data.jsonl: there is no such file"


def test_no_sources_and_names_used_twice(conf):
    conf.sources = []
    assert only_problem(conf).startswith("sources is empty; give at least one")
    conf.sources = [SourceConf(name="a", reward="x:y"), SourceConf(name="a", reward="x:y")]
    assert only_problem(conf) == "sources: the name a is used 2 times; give each source its own"
    conf.sources = [SourceConf(name="a/b", reward="x:y")]
    assert only_problem(conf).startswith("sources: the name 'a/b' must be of letters, digits")


def test_evaluation_without_sources(conf):
    conf.eval.before = True
    assert only_problem(conf) == "eval.before=True but eval.sources is empty; give held-out sources"


def test_training_from_a_dump_needs_one(conf, tmp_path):
    conf.debug.mode = "train_only"
    assert only_problem(conf).startswith("debug.mode=train_only needs debug.dump (now null)")
    conf.debug.dump = str(tmp_path)
    assert problems(conf, resolve(conf)) == []


def test_wandb_wanted_but_not_installed(conf, monkeypatch):
    conf.track.wandb = "offline"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert only_problem(conf).startswith("track.wandb=offline, but wandb is not installed")


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda c, p: setattr(c.sources[0], "reward", p), "sources.a.reward"),
        (lambda c, p: setattr(c.sources[0], "prompt_source", p), "sources.a.prompt_source"),
        (lambda c, p: setattr(c.rollout, "agent_loop", p), "rollout.agent_loop"),
        (lambda c, p: setattr(c.rollout, "group_filter", p), "rollout.group_filter"),
        (lambda c, p: setattr(c.algorithm, "advantage", p), "algorithm.advantage"),
        (lambda c, p: setattr(c.algorithm, "loss", p), "algorithm.loss"),
        (lambda c, p: setattr(c, "prepare", p), "prepare"),
        (lambda c, p: c.admission.quotas.append(QuotaConf(name="q", by=p)), "admission.quotas.q.by"),
    ],
)
def test_python_paths_that_lead_nowhere(conf, change, key):
    change(conf, "no.where:f")
    assert only_problem(conf).startswith(f"{key}=no.where:f: there is no module no.where")


def test_the_loss_is_looked_up_without_importing_torch(conf):
    conf.algorithm.loss = "knit.train.losses:no_such_loss"
    assert only_problem(conf).endswith("losses.py has no no_such_loss")


def test_more_workers_than_the_cluster_has(conf):
    conf.rollout.workers, conf.engine.count, conf.parallel.dp = 9, 2, 3
    conf.cluster.device = "cpu"
    assert only_problem(conf) == (
        "the run wants 16 CPUs, the cluster has 12 (cluster.num_cpus): 2 for engine.count=2, 9 for rollout.workers=9, "
        "2 for buffer and payload, 3 for parallel.tp=1 x parallel.dp=3; lower one, or raise cluster.num_cpus"
    )
    conf.cluster.address = "ray://elsewhere"  # asked once it is joined
    assert problems(conf, resolve(conf)) == []


def test_more_gpus_than_the_machine_has(conf, monkeypatch):
    monkeypatch.setattr("knit.config.resolved.local_gpus", lambda: 1)
    line = only_problem(conf)
    assert line.startswith("the run wants 2 GPUs, the cluster has 1 (GPUs of this machine): 1 for engine.count=1")
    assert line.endswith("or use cluster.device=cpu")


def test_every_rule_is_tested_here():
    tested = Path(__file__).read_text()
    assert len(FIT_RULES) <= tested.count("\ndef test_")
