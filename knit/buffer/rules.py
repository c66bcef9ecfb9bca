"""The admission rules of a run, resolved once from the configuration; every cross-check raises ConfigError."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from knit.buffer.pacing import launch_weights
from knit.buffer.policies import Policy, make_policy
from knit.buffer.quotas import Quota, QuotaGroup, quota_group
from knit.buffer.ready import Key
from knit.buffer.schedules import parse_schedule
from knit.buffer.selection import KEYS
from knit.common.paths import load_path
from knit.config.schema import KnitConf
from knit.errors import ConfigError

COMPLETION = "completion"


@dataclass(frozen=True, slots=True)
class Rules:
    """What the buffer decides by. Counts are trajectories, times seconds."""

    size: int  # N, per train batch
    chunk_sizes: tuple[tuple[int, ...], ...]  # [mini_batch][chunk]
    group_size: int
    groups: tuple[QuotaGroup, ...]  # the first is the source group and lists every source
    weights: Mapping[str, float]  # shares of free slots
    policy: Policy
    key: Key
    completion_quota: float = 0.0
    max_staleness: int = 1
    relaunch_stale: bool = False
    refill_budget: float = 8.0
    group_timeout_s: float = 1800.0
    max_prompt_failures: int = 3
    max_ahead: int | None = None  # trajectories sampled beyond what training needs next; None: as slots allow
    max_outstanding: int | None = None  # fewer slots than (max_staleness + 1) · size; None: as many

    @property
    def sources(self) -> Mapping[str, Quota]:
        return self.groups[0].quotas

    @property
    def mini_batches(self) -> int:
        return len(self.chunk_sizes)

    @property
    def chunks(self) -> int:
        """Per train batch."""
        return sum(len(sizes) for sizes in self.chunk_sizes)


def even_chunks(size: int, mini_batches: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """Chunk sizes as even as possible, the larger ones first; every mini-batch has size/mini_batches."""
    if mini_batches < 1 or size < 1 or size % mini_batches:
        raise ConfigError(
            f"batch.size={size} is not divisible by batch.mini_batches={mini_batches}: change one of them"
        )
    each = size // mini_batches
    if not 1 <= chunks <= each:
        raise ConfigError(
            f"admission.chunks_per_mini_batch={chunks} for mini-batches of {each} trajectories: use 1 to {each}"
        )
    return (tuple(each // chunks + (k < each % chunks) for k in range(chunks)),) * mini_batches


def resolve_rules(conf: KnitConf) -> Rules:
    """Rules of a configuration. Raises ConfigError naming setting, value and fix."""
    batch, admission, rollout = conf.batch, conf.admission, conf.rollout
    names = [s.name for s in conf.sources]
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"sources={names}: give at least one source, each with a name of its own")
    if admission.max_staleness < 0:
        raise ConfigError(f"admission.max_staleness={admission.max_staleness} is below 0: use 0 for on-policy")
    if not 0 <= admission.completion_quota <= 1:
        raise ConfigError(f"admission.completion_quota={admission.completion_quota} is a share: use 0 to 1")
    if admission.max_ahead is not None and admission.max_ahead < 0:
        raise ConfigError(f"admission.max_ahead={admission.max_ahead:g} is below 0: use 0 or more train batches")
    if admission.stale_action not in ("drop", "relaunch"):
        raise ConfigError(f"admission.stale_action={admission.stale_action!r} is unknown: use drop or relaunch")
    if batch.group_size < 1:
        raise ConfigError(f"batch.group_size={batch.group_size} is below 1")
    ratios = {s.name: float(s.ratio) for s in conf.sources}
    source_group = quota_group(
        "source", batch.size, ratios, {s.name: s.max_ratio for s in conf.sources}, setting="source ratio"
    )
    return Rules(
        size=batch.size,
        chunk_sizes=even_chunks(batch.size, batch.mini_batches, admission.chunks_per_mini_batch),
        group_size=batch.group_size,
        groups=(source_group, *_further_groups(conf)),
        weights=launch_weights(ratios),
        policy=_policy(conf, names),
        key=_selection_key(admission.selection),
        completion_quota=admission.completion_quota,
        max_staleness=admission.max_staleness,
        relaunch_stale=admission.stale_action == "relaunch",
        refill_budget=admission.refill_budget,
        group_timeout_s=rollout.group_timeout_s,
        max_prompt_failures=rollout.max_prompt_failures,
        max_ahead=None if admission.max_ahead is None else round(admission.max_ahead * batch.size),
    )


def _policy(conf: KnitConf, names: Sequence[str]) -> Policy:
    admission, n = conf.admission, conf.batch.mini_batches
    unknown = set(admission.schedules) - {*names, COMPLETION}
    if unknown:
        known = ", ".join([*names, COMPLETION])
        raise ConfigError(f"admission.schedules names {sorted(unknown)}, which is no predicate: use {known}")
    default = parse_schedule(admission.schedule, n)
    own = {name: parse_schedule(spec, n) for name, spec in admission.schedules.items()}
    return make_policy(admission.policy, n, dict.fromkeys([*names, COMPLETION], default) | own)


def _further_groups(conf: KnitConf) -> list[QuotaGroup]:
    return [
        quota_group(
            g.name, conf.batch.size, g.minima, g.maxima, by=load_path(g.by), closed=False, setting=f"{g.name} minimum"
        )
        for g in conf.admission.quotas
    ]


def _selection_key(name: str) -> Key:
    if name not in KEYS:
        raise ConfigError(f"admission.selection={name!r} is unknown: use {', '.join(KEYS)}")
    return KEYS[name]
