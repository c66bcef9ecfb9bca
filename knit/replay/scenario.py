"""Where a trace is replayed: batch and admission settings, engines, how launching works. The presets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from knit.buffer.rules import Rules, resolve_rules
from knit.config.schema import AdmissionConf, BatchConf, KnitConf, SourceConf
from knit.errors import ConfigError
from knit.replay.trace import Shape, SyntheticTrace

LAUNCHES = ("step", "continuous")


@dataclass(frozen=True, slots=True)
class Scenario:
    """``conf`` holds sources, batch and admission; the rest is the simulated cluster.

    ``launch``: ``step`` launches only when the rollout side has all that the current train batch needs, then up to
    ``max_outstanding``; ``continuous`` launches whenever an engine slot is free and the buffer grants a ticket.
    ``max_outstanding`` counts as the buffer does: in flight, ready, and admitted but not yet published.
    """

    name: str
    conf: KnitConf
    launch: str
    engine_slots: int
    slowdown: float  # see knit.replay.generation
    max_outstanding: int
    batches: int
    warm_up: int  # first batches that are left out of the means
    seeds: int
    publish_s: float = 0.0
    shapes: Mapping[str, Shape] | None = None
    assumptions: tuple[str, ...] = ()

    def rules(self, policy: str) -> Rules:
        """Of the real buffer. Raises ConfigError as ``knit train`` would."""
        conf = replace(self.conf, admission=replace(self.conf.admission, policy=policy))
        rules = resolve_rules(conf)
        return replace(rules, max_outstanding=self.max_outstanding, group_timeout_s=inf, refill_budget=inf)

    def synthetic(self, seed: int) -> SyntheticTrace:
        assert self.shapes is not None
        return SyntheticTrace(self.shapes, seed)

    def with_settings(self, batch: Mapping[str, Any], admission: Mapping[str, Any]) -> Scenario:
        """Some settings changed; the limit of what is outstanding follows the batch size."""
        conf = replace(
            self.conf, batch=replace(self.conf.batch, **batch), admission=replace(self.conf.admission, **admission)
        )
        scale = conf.batch.size / self.conf.batch.size
        slots, outstanding = round(self.engine_slots * scale), round(self.max_outstanding * scale)
        return replace(self, conf=conf, engine_slots=slots, max_outstanding=outstanding)

    def check(self) -> None:
        if self.max_outstanding < self.conf.batch.size:
            raise ConfigError(
                f"--max-outstanding {self.max_outstanding} is below the train batch of {self.conf.batch.size}: "
                "no batch could ever be filled"
            )
        if not 0 <= self.warm_up < self.batches:
            raise ConfigError(f"--batches {self.batches} leaves none after --warm-up {self.warm_up}: raise it")
        for name, value in (("--slots", self.engine_slots), ("--seeds", self.seeds)):
            if value < 1:
                raise ConfigError(f"{name} {value} is below 1")


def make_conf(
    ratios: Mapping[str, float], size: int, mini_batches: int = 4, group_size: int = 1, **admission: Any
) -> KnitConf:
    """Sources, batch and admission; the rest is not used by a replay."""
    sources = [SourceConf(name=name, ratio=ratio, reward="replay:recorded") for name, ratio in ratios.items()]
    return KnitConf(
        sources=sources,
        batch=BatchConf(size=size, mini_batches=mini_batches, group_size=group_size),
        admission=AdmissionConf(**admission),
    )


_ABCD = {"A": 1000.0, "B": 2000.0, "C": 3500.0, "D": 5000.0}  # mean seconds, after the paper's figure 3a
_COMMON = (
    "Durations of a source are lognormal and the k-th rollout of a source takes equally long under every policy; "
    "means 1000, 2000, 3500 and 5000 s are read off the paper's figure 3a.",
    "Prompt groups have one rollout each, all rollouts are accepted, tokens come evenly over a rollout.",
    "Training takes the same time for every mini-batch and under every policy: rho times the step time of the rollout "
    "side alone (train-batch admission, training in no time). A publish takes no time.",
)


def paper() -> Scenario:
    """Launching per rollout step, little carry-over, a late and bunched slow source: figures 3b and 10."""
    return Scenario(
        name="paper",
        conf=make_conf(dict.fromkeys(_ABCD, 0.24), 100, max_staleness=4),
        launch="step",
        engine_slots=140,
        slowdown=4.0,
        max_outstanding=240,
        batches=28,
        warm_up=8,
        seeds=2,
        shapes={name: Shape(mean_s, 0.3) for name, mean_s in _ABCD.items()},
        assumptions=(
            *_COMMON,
            "Rollout launches per step: when the rollout side has all that a train batch needs, prompts are launched "
            "until 1.4 train batches are in flight or ready for the next one.",
            "Standard deviation 30 % of the mean; 140 engine slots for batches of 100, so that all that is launched "
            "runs; the last rollouts of a step are generated up to 5 times as fast as at full load (g = 4). The "
            "deviation, g and the 1.4 were chosen so that the linear policy has the paper's first admission (near 80 % "
            "of a step) and its architectural staleness (0.47).",
        ),
    )


def continuous() -> Scenario:
    """Slots refill at once, much is carried over: how knit itself launches."""
    return Scenario(
        name="continuous",
        conf=make_conf(dict.fromkeys(_ABCD, 0.24), 100, max_staleness=16, selection="fifo"),
        launch="continuous",
        engine_slots=150,
        slowdown=0.0,
        max_outstanding=400,
        batches=40,
        warm_up=15,
        seeds=2,
        shapes={name: Shape(mean_s, 0.8) for name, mean_s in _ABCD.items()},
        assumptions=(
            *_COMMON,
            "A free engine slot is refilled at once while the buffer grants tickets, up to four train batches "
            "outstanding; the staleness bound of 16 never binds.",
            "Standard deviation 80 % of the mean; 150 engine slots for batches of 100; speed does not depend on load. "
            "Selection is by arrival (fifo), as in the first model of this regime.",
        ),
    )


def stress() -> Scenario:
    """64 sources, means from 200 to 6000 s, prompt groups of 8."""
    names = [f"s{k:02d}" for k in range(64)]
    return Scenario(
        name="stress",
        conf=make_conf(dict.fromkeys(names, 0.014), 1024, group_size=8, max_staleness=16),
        launch="continuous",
        engine_slots=1536,
        slowdown=0.0,
        max_outstanding=4096,
        batches=7,
        warm_up=3,
        seeds=1,
        shapes={name: Shape(200.0 * 30 ** (k / 63), 0.8) for k, name in enumerate(names)},
        assumptions=(
            "64 sources with 1.4 % each, lognormal durations with means from 200 to 6000 s and standard deviation 80 % "
            "of the mean; prompt groups of 8 that are ready when their last member is; 1536 engine slots, continuous "
            "launching, up to four train batches of 1024 outstanding.",
            _COMMON[2],
        ),
    )


PRESETS = {"paper": paper, "continuous": continuous, "stress": stress}
