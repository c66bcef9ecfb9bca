"""Makes the quickstart's model: a tiny Qwen3, warmed up by supervised training on demonstrations of the tasks.

``prepare(conf)`` is the recipe's ``prepare``: it runs in a process of its own and returns the settings it decides
(``model.path``). The model is cached under ``${XDG_CACHE_HOME:-~/.cache}/knit/quickstart-<hash of its settings>``
and is either whole or not there. ``prepare_options`` may hold ``warmup``:

- ``careless`` (default): in the last 40 of 240 steps half of the demonstrations end wrongly. The policy learns
  the skills, and then to be unsure of them, which leaves a reinforcement learner something to sharpen.
- ``clean``: all demonstrations are right, in 120 steps (240 of them leave less than half to be learned).

Other fields of :class:`Settings` may be given there too.
"""

from __future__ import annotations

import hashlib
import os
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from knit.config.schema import KnitConf, ModelConf, OptimConf, ParallelConf
from knit.errors import ConfigError
from knit.recipes.quickstart.tasks import Item, items, sample_items
from knit.recipes.quickstart.tokenizer import EOS_ID, PAD_ID, VOCAB_SIZE, encode, save_tokenizer

ARCHITECTURE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
    "bos_token_id": None,
    "torch_dtype": "float32",
}


STEPS = {"careless": 240, "clean": 120}


@dataclass(frozen=True)
class Settings:
    """Everything that the warmed-up weights depend on; their hash names the cache folder."""

    warmup: str = "careless"
    seed: int = 0
    steps: int = 240
    batch: int = 64
    lr: float = 3e-3
    lr_warmup_steps: int = 20
    init_std: float = 0.05
    careless_steps: int = 40
    """The last steps, in which ``wrong_share`` of the demonstrations end wrongly."""
    wrong_share: float = 0.5
    recipe_version: int = 1
    """Raised when tasks, notation or architecture change."""

    @property
    def folder(self) -> Path:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        text = orjson.dumps([asdict(self), ARCHITECTURE], option=orjson.OPT_SORT_KEYS)
        return cache / "knit" / f"quickstart-{hashlib.sha256(text).hexdigest()[:12]}"


def prepare(conf: KnitConf) -> dict[str, Any]:
    """The settings that the recipe leaves open: the path of the warmed-up model, made if it is not cached."""
    settings = settings_of(conf)
    folder = settings.folder
    if (folder / "model.safetensors").is_file():
        print(f"warm-up: cached in {folder}", flush=True)
    else:
        warm_up(settings, folder, conf.cluster.device)
    return {"model.path": str(folder)}


def settings_of(conf: KnitConf) -> Settings:
    options = dict(conf.prepare_options)
    known = Settings.__dataclass_fields__
    for key in options:
        if key not in known:
            raise ConfigError(f"prepare_options.{key} is not known; choose from {', '.join(known)}")
    warmup = options.get("warmup", Settings.warmup)
    if warmup not in STEPS:
        raise ConfigError(f"prepare_options.warmup={warmup} is not known; choose {' or '.join(STEPS)}")
    return Settings(**{"steps": STEPS[warmup]} | options)


def warm_up(settings: Settings, folder: Path, device: str) -> None:
    """Trains the model and writes it to ``folder``, in one move at the end."""
    from knit.common.net import free_port
    from knit.train import parallel

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".warmup-") as blank:
        write_blank(Path(blank), settings)
        conf = training_conf(settings, blank, device)
        ranks = parallel.Ranks()
        parallel.start(ranks, f"127.0.0.1:{free_port()}", conf)
        try:
            _train(settings, conf, ranks, folder)
        finally:
            parallel.stop()


def write_blank(folder: Path, settings: Settings) -> None:
    """Config, tokenizer and the settings, without weights."""
    pretty = orjson.OPT_INDENT_2
    (folder / "config.json").write_bytes(orjson.dumps(ARCHITECTURE, option=pretty))
    (folder / "warmup.json").write_bytes(orjson.dumps(asdict(settings), option=pretty))
    save_tokenizer(folder)


def training_conf(settings: Settings, model_path: str, device: str) -> KnitConf:
    conf = KnitConf(
        seed=settings.seed,
        steps=settings.steps,
        model=ModelConf(path=model_path, dtype="float32", init_std=settings.init_std),
        optim=OptimConf(
            lr=settings.lr, min_lr=settings.lr / 10, warmup_steps=settings.lr_warmup_steps, schedule="cosine"
        ),
        parallel=ParallelConf(threads=1),
    )
    conf.cluster.device = device
    return conf


def _train(settings: Settings, conf: KnitConf, ranks: Any, folder: Path) -> None:
    from knit.train.sft import warm_up as supervise
    from knit.train.trainer import Trainer

    trainer = Trainer(conf, ranks)
    trainer.init_from_config(str(conf.model.path), settings.seed)
    started, losses = time.monotonic(), []

    def show(step: int, loss: float) -> None:
        losses.append(loss)
        if step % 10 == 0 or step == settings.steps:
            mean, taken_s = sum(losses[-10:]) / len(losses[-10:]), time.monotonic() - started
            print(f"warm-up: step {step}/{settings.steps}, loss {mean:.3f}, {taken_s:.0f} s", flush=True)

    supervise(trainer, demonstrations(settings), on_step=show)
    trainer.save_hf(str(folder))


def demonstrations(settings: Settings) -> Iterator[list[tuple[list[int], list[int]]]]:
    """Per step ``batch`` pairs (prompt ids, response ids), the tasks in turn."""
    rng = random.Random(settings.seed)
    for step in range(settings.steps):
        late = step >= settings.steps - settings.careless_steps
        careless = settings.warmup == "careless" and late
        pairs = []
        for item in sample_items(rng, settings.batch):
            wrong = careless and rng.random() < settings.wrong_share
            demo = wrong_demo(item, rng) if wrong else item.demo
            pairs.append((encode(item.text), [*encode(demo), EOS_ID]))
        yield pairs


def wrong_demo(item: Item, rng: random.Random) -> str:
    """A demonstration whose end is wrong, most of the time: another item's, or another count."""
    if item.task == "count":
        return item.demo[:-1] + str(rng.randint(0, 3))
    return rng.choice(items(item.task, "train")).demo
