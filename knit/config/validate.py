"""How the settings fit together and onto the machine; all of it is checked before Ray starts.

Every rule is a small function that yields one readable line per problem, each naming the settings, their
values and a fix. The rules import nothing of what they check: Python paths are looked up in source files.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from knit.common.pysource import missing_name
from knit.config.limits import AT_LEAST, CHOICES, POSITIVE, SHARES
from knit.config.resolved import Resolved, exact
from knit.config.schema import KnitConf, SourceConf
from knit.errors import ConfigError

Rule = Callable[[KnitConf, Resolved], Iterator[str]]


def check(conf: KnitConf, resolved: Resolved) -> None:
    """Raises :class:`ConfigError` with one line per problem."""
    found = problems(conf, resolved)
    if found:
        raise ConfigError("\n".join(found))


def problems(conf: KnitConf, resolved: Resolved) -> list[str]:
    """Of values first; how they fit together is looked at only when each alone makes sense."""
    alone = [line for rule in VALUE_RULES for line in rule(conf, resolved)]
    return alone or [line for rule in FIT_RULES for line in rule(conf, resolved)]


def value_of(conf: KnitConf, key: str) -> Any:
    found: Any = conf
    for part in key.split("."):
        found = getattr(found, part)
    return found


# --- each value alone


def known_choices(conf: KnitConf, resolved: Resolved) -> Iterator[str]:
    for key, choices in CHOICES.items():
        if value_of(conf, key) not in choices:
            yield f"{key}={value_of(conf, key)} is not known; choose one of: {', '.join(choices)}"


def numbers_in_range(conf: KnitConf, resolved: Resolved) -> Iterator[str]:
    for key, least in AT_LEAST.items():
        if value_of(conf, key) < least:
            yield f"{key}={value_of(conf, key)} must be at least {least}"
    for key in POSITIVE:
        if not value_of(conf, key) > 0:
            yield f"{key}={value_of(conf, key)} must be above 0"
    for key in SHARES:
        if not 0 <= value_of(conf, key) <= 1:
            yield f"{key}={value_of(conf, key)} must be between 0 and 1"


def schedule_is_known(conf: KnitConf, resolved: Resolved) -> Iterator[str]:
    schedule = conf.admission.schedule
    if isinstance(schedule, list):
        return
    if schedule in ("linear", "relaxed", "end"):
        return
    power = re.fullmatch(r"power:(\d+(?:\.\d+)?)", str(schedule))
    if power is None or float(power[1]) <= 0:
        yield (
            f"admission.schedule={schedule} is not known; choose linear, relaxed, end, power:<p> with p above 0, "
            f"or a list of {conf.batch.mini_batches} rising numbers that ends in 1"
        )


def source_names(conf: KnitConf, resolved: Resolved) -> Iterator[str]:
    for key, sources in (("sources", conf.sources), ("eval.sources", conf.eval.sources)):
        names = [s.name for s in sources]
        for name in sorted({n for n in names if names.count(n) > 1}):
            yield f"{key}: the name {name} is used {names.count(name)} times; give each source its own"
        for name in names:
            if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
                yield f"{key}: the name {name!r} must be of letters, digits, _ and - (it appears in metric names)"


# --- how they fit together


def sources_exist(conf: KnitConf, resolved: Resolved) -> Iterator[str]:
    if not conf.sources and conf.debug.mode != "train_only":
        yield "sources is empty; give at least one: sources=[{name: math, path: math.jsonl, reward: 'my.rewards:math'}]"


def ratios_sum_to_one_at_most(conf: KnitConf, resolved: Resolved) -> Iterator[str]:
    for s in conf.sources:
        if not 0 <= s.ratio <= 1:
            yield f"sources.{s.name}.ratio={s.ratio:g} must be between 0 and 1"
        elif not s.ratio <= s.max_ratio <= 1:
            yield f"sources.{s.name}.max_ratio={s.max_ratio:g} must be between its ratio={s.ratio:g} and 1"
        elif 0 < exact(s.ratio) * conf.batch.size < 1:
            yield (
                f"sources.{s.name}.ratio={s.ratio:g} of batch.size={conf.batch.size} is less than one trajectory; "
                f"raise one of them, or set the ratio to 0"
            )
    total = sum(exact(s.ratio) for s in conf.sources)
    if total > 1:
        parts = ", ".join(f"sources.{s.name}.ratio={s.ratio:g}" for s in conf.sources)
        yield f"the source ratios sum to {float(total):g}, above 1: {parts}; lower one by at least {float(total - 1):g}"


def batch_divides(conf: KnitConf, resolved: Resolved) -> Iterator[str]:
    size, parts = conf.batch.size, conf.batch.mini_batches
    if size % parts:
        yield (
            f"batch.size={size} is not divisible by batch.mini_batches={parts}; "
            f"use batch.size={_nearest_multiple(size, parts)} or another number of mini-batches"
        )
    elif conf.admission.chunks_per_mini_batch > resolved.mini_batch_size:
        yield (
            f"admission.chunks_per_mini_batch={conf.admission.chunks_per_mini_batch} exceeds the "
            f"{resolved.mini_batch_size} trajectories of a mini-batch (batch.size={size}, batch.mini_batches={parts}); "
            f"use at most {resolved.mini_batch_size} chunks"
        )


def groups_fill_the_batch(conf: KnitConf, resolved: Resolved) -> Iterator[str]:
    size, group = conf.batch.size, conf.batch.group_size
    if size % group:
        yield (
            f"batch.size={size} is not a multiple of batch.group_size={group}: prompts are launched in whole groups; "
            f"use batch.size={_nearest_multiple(size, group)} or another group size"
        )
    if conf.rollout.min_group_size > group:
        yield (
            f"rollout.min_group_size={conf.rollout.min_group_size} is above batch.group_size={group}: "
            f"no group could be accepted; use at most {group}"
        )


def schedule_fits(conf: KnitConf, resolved: Resolved) -> Iterator[str]:
    schedule, parts = conf.admission.schedule, conf.batch.mini_batches
    if not isinstance(schedule, list):
        return
    if len(schedule) != parts:
        yield f"admission.schedule={schedule} has {len(schedule)} numbers; batch.mini_batches={parts} needs {parts}"
        return
    if not all(isinstance(a, int | float) for a in schedule):
        yield f"admission.schedule={schedule} must hold numbers only"
        return
    rises = all(a <= b for a, b in itertools.pairwise(schedule))
    if not rises or schedule[0] < 0 or schedule[-1] != 1:
        yield f"admission.schedule={schedule} must start at 0 or above, never fall, and end in 1"


def response_fits_the_context(conf: KnitConf, resolved: Resolved) -> Iterator[str]:
    response, context = conf.rollout.max_response_tokens, conf.engine.context_length
    if response >= context:
        yield (
            f"rollout.max_response_tokens={response} leaves no room for a prompt in engine.context_length={context}; "
            f"lower the one or raise the other"
        )


def deadlines_nest(conf: KnitConf, resolved: Resolved) -> Iterator[str]:
    inner, outer = conf.rollout.trajectory_timeout_s, conf.rollout.group_timeout_s
    if inner > outer:
        yield (
            f"rollout.trajectory_timeout_s={inner:g} is above rollout.group_timeout_s={outer:g}: a slow trajectory "
            f"would pass for a stuck worker; raise the group's"
        )


def model_is_there(conf: KnitConf, resolved: Resolved) -> Iterator[str]:
    if conf.model.path is None:
        if conf.prepare is None:
            yield "model.path is not set; give the folder of a Hugging Face model, model.path=PATH"
        return
    folder = Path(conf.model.path)
    if not folder.is_dir():
        yield f"model.path={folder}: there is no such folder; give the folder of a Hugging Face model"
        return
    for pattern, what in (("config.json", "config.json"), ("*.safetensors", "weights (*.safetensors)")):
        if not any(folder.glob(pattern)):
            yield f"model.path={folder} has no {what}; give the folder of a Hugging Face model"
    if conf.debug.mode != "train_only" and not (folder / "tokenizer.json").is_file():
        yield f"model.path={folder} has no tokenizer.json; save the model's fast tokenizer there"


def model_splits(conf: KnitConf, resolved: Resolved) -> Iterator[str]:
    config = _model_config(conf)
    if config is None:
        return
    if not isinstance(config, dict):
        yield f"model.path={conf.model.path}: config.json is not valid JSON ({config})"
        return
    tp = conf.parallel.tp
    for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if isinstance(config.get(name), int) and config[name] % tp:
            yield f"parallel.tp={tp} does not divide {name}={config[name]} of model.path={conf.model.path}; lower it"
    heads = config.get("num_attention_heads")
    if isinstance(heads, int) and heads % conf.engine.tp:
        yield f"engine.tp={conf.engine.tp} does not divide num_attention_heads={heads} of model.path={conf.model.path}"
    longest = config.get("max_position_embeddings")
    if isinstance(longest, int) and conf.engine.context_length > longest:
        yield (
            f"engine.context_length={conf.engine.context_length} is above max_position_embeddings={longest} of "
            f"model.path={conf.model.path}; lower it"
        )


def files_are_there(conf: KnitConf, resolved: Resolved) -> Iterator[str]:
    for key, source in all_sources(conf):
        if source.path is not None and not Path(source.path).is_file():
            yield f"{key}.path={source.path}: there is no such file"


def evaluation_has_sources(conf: KnitConf, resolved: Resolved) -> Iterator[str]:
    wanted = [k for k in ("before", "after", "every") if getattr(conf.eval, k)]
    if wanted and not conf.eval.sources:
        yield f"eval.{wanted[0]}={value_of(conf, f'eval.{wanted[0]}')} but eval.sources is empty; give held-out sources"


def debug_has_its_dump(conf: KnitConf, resolved: Resolved) -> Iterator[str]:
    if conf.debug.mode == "train_only" and (conf.debug.dump is None or not Path(conf.debug.dump).is_dir()):
        yield (
            f"debug.mode=train_only needs debug.dump (now {conf.debug.dump or 'null'}): "
            f"the folder that a run with debug.mode=rollout_only wrote"
        )


def tracking_is_installed(conf: KnitConf, resolved: Resolved) -> Iterator[str]:
    if conf.track.wandb != "off" and importlib.util.find_spec("wandb") is None:
        yield f"track.wandb={conf.track.wandb}, but wandb is not installed; pip install wandb, or set track.wandb=off"


def python_paths_exist(conf: KnitConf, resolved: Resolved) -> Iterator[str]:
    """Form, file and name; whether a module *imports* is tried in a process of its own (:mod:`knit.preflight`)."""
    for key, path in python_paths(conf):
        problem = missing_name(path)
        if problem is not None:
            yield f"{key}={path}: {problem}"


def cluster_is_large_enough(conf: KnitConf, resolved: Resolved) -> Iterator[str]:
    """Of the local cluster; one that is joined is asked once it answers."""
    if conf.cluster.address is not None:
        return
    for resource, have, setting in (
        ("CPU", conf.cluster.num_cpus, "cluster.num_cpus"),
        ("GPU", resolved.local_gpus, "GPUs of this machine"),
    ):
        engines, workers, services, train = (
            sum(bundle.get(resource, 0) for bundle in bundles)
            for bundles in (
                resolved.engine_bundles,
                resolved.worker_bundles,
                resolved.service_bundles,
                resolved.train_bundles,
            )
        )
        wanted = engines + workers + services + train
        if wanted > have:
            fix = "raise cluster.num_cpus" if resource == "CPU" else "use cluster.device=cpu"
            yield (
                f"the run wants {wanted:g} {resource}s, the cluster has {have} ({setting}): {engines:g} for "
                f"engine.count={conf.engine.count}, {workers:g} for rollout.workers={conf.rollout.workers}, "
                f"{services:g} for buffer and payload, {train:g} for parallel.tp={conf.parallel.tp} x "
                f"parallel.dp={conf.parallel.dp}; lower one, or {fix}"
            )


VALUE_RULES: tuple[Rule, ...] = (known_choices, numbers_in_range, schedule_is_known, source_names)
FIT_RULES: tuple[Rule, ...] = (
    sources_exist,
    ratios_sum_to_one_at_most,
    batch_divides,
    groups_fill_the_batch,
    schedule_fits,
    response_fits_the_context,
    deadlines_nest,
    model_is_there,
    model_splits,
    files_are_there,
    evaluation_has_sources,
    debug_has_its_dump,
    tracking_is_installed,
    python_paths_exist,
    cluster_is_large_enough,
)


# --- what the configuration names


def all_sources(conf: KnitConf) -> list[tuple[str, SourceConf]]:
    """Training and evaluation sources by full key, ``sources.spell``."""
    train = [(f"sources.{s.name}", s) for s in conf.sources]
    return train + [(f"eval.sources.{s.name}", s) for s in conf.eval.sources]


def python_paths(conf: KnitConf, torch: bool = True) -> list[tuple[str, str]]:
    """Every (setting, Python path) in use; ``torch=False`` leaves out what may import torch."""
    found: list[tuple[str, str | None]] = [
        ("prepare", conf.prepare if torch else None),
        ("rollout.agent_loop", conf.rollout.agent_loop),
        ("rollout.group_filter", conf.rollout.group_filter),
        ("algorithm.advantage", conf.algorithm.advantage),
        ("algorithm.loss", conf.algorithm.loss if torch else None),
    ]
    found += [(f"admission.quotas.{quota.name}.by", quota.by) for quota in conf.admission.quotas]
    for key, source in all_sources(conf):
        found += [(f"{key}.reward", source.reward), (f"{key}.prompt_source", source.prompt_source)]
    return [(key, path) for key, path in found if path is not None]


def _model_config(conf: KnitConf) -> Any:
    """The parsed config.json, None without one, or the text of what is wrong with it."""
    path = Path(conf.model.path or "") / "config.json"
    if conf.model.path is None or not path.is_file():
        return None
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        return str(error)


def _nearest_multiple(size: int, part: int) -> int:
    return max(part, round(size / part) * part)
