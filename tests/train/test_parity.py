"""One process, TP 2 and DP 2 train like a plain Hugging Face model, however the tokens are split."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from knit.common.net import free_port
from tests.train import cases

pytestmark = pytest.mark.megatron

LAYOUTS = ("one", "tp2", "dp2")
MODELS = tuple(cases.MODELS)
DEADLINE_S = 480


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs the world of tests/train/world.py once."""
    from tests.train import reference

    out = tmp_path_factory.mktemp("train")
    for name in MODELS:
        reference.make_folder(out, name)
    command = [sys.executable, "-W", "ignore", "-m", "tests.train.world"]
    ports = [str(free_port()) for _ in LAYOUTS]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    logs = [(out / f"rank{rank}.log").open("w+") for rank in (0, 1)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(out), *ports], env=env, stdout=log, stderr=subprocess.STDOUT)
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [rank.wait(DEADLINE_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for code, log in zip(codes, logs, strict=True):
        log.seek(0)
        assert code == 0, log.read()[-3000:]
    return out


@pytest.fixture(scope="session")
def expected(results: Path) -> dict[str, dict[str, Any]]:
    import torch

    from tests.train import reference

    torch.set_num_threads(1)
    out = {}
    for name in MODELS:
        model = reference.load(results, name)
        before = {n: p.detach().numpy().copy() for n, p in model.named_parameters()}
        with torch.no_grad():
            flat = [reference.logprobs(model, row)[0].numpy() for row in cases.sequences()]
        out[name] = {"before": before, "logprobs": flat, **reference.train(model, cases.conf(str(results / name)))}
    return out


def read(results: Path, name: str) -> dict[str, np.ndarray]:
    return dict(np.load(results / f"{name}.npz"))


def worst(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    assert a.keys() == b.keys()
    return max(float(np.abs(a[n] - b[n]).max()) for n in a)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_loaded_is_exported_bit_for_bit(results: Path, expected: Any, layout: str, model: str) -> None:
    assert worst(read(results, f"{layout}.{model}.loaded"), expected[model]["before"]) == 0.0


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logprobs_equal_hugging_face(results: Path, expected: Any, layout: str, model: str) -> None:
    ours = read(results, f"{layout}.{model}.logprobs")["logprobs"]
    ends = np.cumsum(cases.LENGTHS)
    assert (ours[ends - 1] == 0).all()
    theirs = np.concatenate(expected[model]["logprobs"])
    theirs[ends - 1] = 0
    assert np.abs(ours - theirs).max() < 1e-5


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradient_norm_equal_hugging_face(results: Path, expected: Any, layout: str, model: str) -> None:
    metrics = read(results, f"{layout}.{model}.metrics")
    assert abs(metrics["metric:train/loss"] - expected[model]["loss"]) < 1e-5
    assert abs(metrics["metric:train/grad_norm"] - expected[model]["norm"]) < 1e-5
    assert metrics["metric:train/lr"] == pytest.approx(0.5e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("split", ["whole", "many", "lopsided"])
def test_gradients_do_not_depend_on_the_split(results: Path, expected: Any, layout: str, split: str) -> None:
    base = read(results, "one.split.whole")
    ours = read(results, f"{layout}.split.{split}")
    assert worst(ours, base) < 1e-6
    gradients = {n: g for n, g in ours.items() if not n.startswith("metric:")}
    assert worst(gradients, expected["qwen3"]["gradients"]) < 1e-6
    assert max(np.abs(g).max() for g in gradients.values()) > 1e-3


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_optimizer_steps_equal_adamw(results: Path, expected: Any, layout: str, model: str) -> None:
    trained = read(results, f"{layout}.{model}.trained")
    assert worst(trained, expected[model]["trained"]) < 2e-5
    assert worst(trained, expected[model]["before"]) > 1e-3


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_saved_folder_holds_the_model(results: Path, layout: str, model: str) -> None:
    from safetensors.numpy import load_file

    folder = results / f"{layout}.{model}.saved"
    assert {p.name for p in folder.iterdir()} >= {"config.json", "tokenizer.json", "model.safetensors"}
    assert worst(load_file(folder / "model.safetensors"), read(results, f"{layout}.{model}.trained")) == 0.0
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    assert not list(results.glob(".*building*"))


@pytest.mark.parametrize("layout", ["tp2", "dp2"])
def test_random_weights_do_not_depend_on_the_layout(results: Path, layout: str) -> None:
    assert worst(read(results, f"{layout}.random"), read(results, "one.random")) == 0.0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bf16_learns_and_its_replicas_stay_equal(results: Path, layout: str) -> None:
    out = read(results, f"{layout}.bf16")
    first = read(results, "one.bf16")["losses"][0]
    assert out["losses"][-1] < out["losses"][0] - 0.1
    assert abs(out["losses"][0] - first) < 0.02
    assert out["replicas_differ_by"] == 0.0


def test_a_gradient_that_is_not_finite_names_the_step_and_changes_nothing(results: Path) -> None:
    out = read(results, "one.broken")
    assert "train batch 5" in str(out["message"])
    assert "nan" in str(out["message"]) or "inf" in str(out["message"])
    assert out["unchanged"]


def test_the_trainer_does_not_import_sglang(results: Path) -> None:
    assert not read(results, "one.host")["sglang_imported"]


def test_the_cpu_shim_changes_what_megatron_sees_and_nothing_else(results: Path) -> None:
    out = read(results, "one.host")
    assert out["torch_is_real"]
    assert out["same_tensor"]
    assert out["megatron_sees"] == "cpu"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("missing_tensor", r"llama: no tensor model.layers.0.self_attn.q_norm.weight"),
        ("spare_tensor", r"4 tensors are not part of the model, e.g. model.layers.0.self_attn.k_norm.weight"),
        ("shape", r"model.layers.0.self_attn.q_proj.weight has shape \[32, 32\]; config.json asks for \[64, 32\]"),
        ("unknown_field", r"parallel.megatron.recompute_granularty .* did you mean recompute_granularity\?"),
        ("indivisible", r"parallel.tp=3 does not divide the model's attention heads \(4\)"),
        ("no_weights", r"call load_hf or init_from_config first"),
    ],
)
def test_bad_input_is_refused_in_one_line(results: Path, case: str, message: str) -> None:
    found = str(read(results, "one.refusals")[case])
    assert re.search(message, found), found
    assert "\n" not in found
