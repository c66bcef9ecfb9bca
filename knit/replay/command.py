"""``knit replay``: arguments → question → comparison → table, JSON, figures."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from knit.buffer.policies import NAMES
from knit.errors import ConfigError
from knit.replay.compare import Question, compare
from knit.replay.read import read_recording
from knit.replay.scenario import PRESETS, Scenario, make_conf
from knit.replay.table import show
from knit.replay.trace import Recording, Trace

RHOS = (0.67, 0.95)
FREE_SHARE = 0.04  # of a batch, that the quotas leave when a trace comes without any


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Returns what ``--json`` writes. Whatever can be wrong with the input is checked before the first replay."""
    if args.figures is not None:
        from knit.replay import figures

        figures.check(args.figures)
    question = make_question(args)
    comparison = compare(question, _progress)
    show(comparison)
    if args.figures is not None:
        for path in figures.draw(comparison, args.figures, _progress):
            print(path)
    return {"preset": args.preset, "trace": args.trace and str(args.trace), **comparison.to_json()}


def make_question(args: argparse.Namespace) -> Question:
    """Raises ConfigError for any wrong argument, trace or setting."""
    policies = NAMES if args.policy == "all" else tuple(args.policy.split(","))
    unknown = [name for name in policies if name not in NAMES]
    if unknown:
        raise ConfigError(f"--policy {unknown[0]}: there is no such policy; use all, {', '.join(NAMES)}")
    ratios = _ratios(args.ratio)
    if args.trace is None:
        scenario, traces, recorded_s = _synthetic(args, ratios)
    else:
        scenario, traces, recorded_s = _recorded(args, ratios)
    train_s = args.train_s if args.train_s is not None or args.rho else recorded_s
    rhos = tuple(args.rho or RHOS)
    if min(rhos) <= 0 or (train_s is not None and train_s <= 0):
        raise ConfigError("--rho and --train-s must be above 0, e.g. --rho 0.67")
    scenario.check()
    for policy in (*policies, "train_batch"):
        scenario.rules(policy)
    return Question(scenario, traces, policies, rhos, train_s, args.placement == "colocated")


Parts = tuple[Scenario, Sequence[Trace], float | None]  # the last: recorded training time of a train batch


def _synthetic(args: argparse.Namespace, ratios: Mapping[str, float] | None) -> Parts:
    scenario = PRESETS[args.preset or "paper"]()
    if ratios is not None:
        assert scenario.shapes is not None
        unknown = [name for name in ratios if name not in scenario.shapes]
        if unknown:
            raise ConfigError(f"--ratio {unknown[0]}: the preset has the sources {', '.join(scenario.shapes)}")
        scenario = _with_ratios(scenario, dict.fromkeys(scenario.shapes, 0.0) | dict(ratios))
    scenario = _with_options(args, scenario)
    return scenario, [scenario.synthetic(args.seed + k) for k in range(scenario.seeds)], None


def _recorded(args: argparse.Namespace, ratios: Mapping[str, float] | None) -> Parts:
    scenario = PRESETS[args.preset or "continuous"]()
    conf_file = args.trace.parent / "config.yaml"
    recording = read_recording(args.trace, list(ratios) if ratios else None)
    if recording.group_size is not None and conf_file.is_file() and ratios is None:
        scenario = _of_run(scenario, recording, conf_file, args.trace)
    else:
        names = recording.trace.sources
        share = round((1 - FREE_SHARE) / len(names), 6)
        scenario = _with_ratios(scenario, ratios or dict.fromkeys(names, share))
        scenario = scenario.with_settings({"group_size": recording.group_size or 1}, {})
    notes = (
        f"Rollouts are those of {args.trace}, per source in their order, again from the first after the last one; "
        "their durations are taken as they would be at constant speed.",
        *recording.notes,
    )
    scenario = replace(scenario, shapes=None, seeds=1, slowdown=0.0, assumptions=notes)
    if recording.publish_s is not None:
        scenario = replace(scenario, publish_s=recording.publish_s)
    return _with_options(args, scenario), [recording.trace], recording.train_s


def _of_run(scenario: Scenario, recording: Recording, conf_file: Path, trace: Path) -> Scenario:
    """Batch, quotas and bounds of the run, its concurrency as engine slots."""
    from knit.config.load import load

    conf = load([f"recipe={conf_file}"])
    known = [source.name for source in conf.sources]
    for source, line in recording.lines.items():
        if source not in known:
            raise ConfigError(f"{trace}:{line}: source {source!r} is unknown; {conf_file} has {', '.join(known)}")
    for name in known:
        if name not in recording.trace.rollouts:
            raise ConfigError(f"--trace {trace} has no finished rollout of source {name!r}: give quotas by --ratio")
    slots = conf.rollout.workers * conf.rollout.concurrency
    outstanding = (conf.admission.max_staleness + 1) * conf.batch.size
    return replace(
        scenario,
        name=conf_file.parent.name,
        conf=conf,
        engine_slots=slots,
        max_outstanding=outstanding,
        launch="continuous",
    )


def _with_ratios(scenario: Scenario, ratios: Mapping[str, float]) -> Scenario:
    batch, admission = scenario.conf.batch, scenario.conf.admission
    return replace(scenario, conf=replace(make_conf(ratios, batch.size), batch=batch, admission=admission))


def _with_options(args: argparse.Namespace, scenario: Scenario) -> Scenario:
    batch = _given(size=args.size, mini_batches=args.mini_batches, group_size=args.group_size)
    admission = _given(
        chunks_per_mini_batch=args.chunks,
        schedule=_schedule(args.schedule),
        selection=args.selection,
        max_staleness=args.max_staleness,
        max_ahead=args.max_ahead,
    )
    if args.size is not None and args.size < 1:
        raise ConfigError(f"--size {args.size} is below 1")
    scenario = scenario.with_settings(batch, admission)
    if args.batches is not None:
        share = scenario.warm_up / scenario.batches
        scenario = replace(scenario, batches=args.batches, warm_up=int(share * args.batches))
    own = _given(
        warm_up=args.warm_up,
        seeds=args.seeds,
        launch=args.launch,
        engine_slots=args.slots,
        max_outstanding=args.max_outstanding,
        slowdown=args.slowdown,
        publish_s=args.publish_s,
    )
    for name in ("slowdown", "publish_s"):
        if own.get(name, 0) < 0:
            raise ConfigError(f"--{name.replace('_', '-')} {own[name]:g} is below 0")
    return replace(scenario, **own)


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _schedule(text: str | None) -> str | list[float] | None:
    """``0,0,.5,1`` as a list; names as they are."""
    if text is None or text[:1].isalpha():
        return text
    try:
        return [float(part) for part in text.strip("[]").split(",")]
    except ValueError as error:
        raise ConfigError(f"--schedule {text}: give linear, relaxed, end, power:P or numbers like 0,0,.5,1") from error


def _ratios(given: Sequence[str] | None) -> dict[str, float] | None:
    if given is None:
        return None
    ratios = {}
    for item in given:
        name, _, share = item.partition("=")
        try:
            ratios[name] = float(share)
        except ValueError as error:
            raise ConfigError(f"--ratio {item}: write SOURCE=SHARE, e.g. math=0.24") from error
    return ratios


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
