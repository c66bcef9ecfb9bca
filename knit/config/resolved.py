"""What follows from the configuration and this machine: computed once, before anything starts, then read-only."""

from __future__ import annotations

import datetime
import os
import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from knit.config.schema import KnitConf

Bundle = dict[str, float]

SERVICES = 2  # the buffer and the keeper of payload, one CPU slot each


@dataclass(frozen=True, slots=True)
class Resolved:
    """Derived values of one run. Sizes are in trajectories; a bundle is the share of one Ray actor."""

    run_dir: Path
    """Absolute; not created yet."""
    device: str
    """cpu | cuda"""
    local_gpus: int
    mini_batch_size: int
    dump_dir: Path
    """Where the debug modes write or read trajectories."""
    engine_bundles: tuple[Bundle, ...]
    worker_bundles: tuple[Bundle, ...]
    service_bundles: tuple[Bundle, ...]
    train_bundles: tuple[Bundle, ...]

    @property
    def rollout_bundles(self) -> tuple[Bundle, ...]:
        """Of the placement group ``rollout``: engines, then workers, then services."""
        return self.engine_bundles + self.worker_bundles + self.service_bundles

    @property
    def logs_dir(self) -> Path:
        return self.run_dir / "logs"


def resolve(conf: KnitConf, now: datetime.datetime | None = None) -> Resolved:
    """Never raises for settings that are wrong: :mod:`knit.config.validate` names those."""
    gpus = local_gpus()
    device = conf.cluster.device
    if device == "auto":
        device = "cuda" if gpus else "cpu"
    run_dir = Path(conf.track.dir) if conf.track.dir else default_run_dir(conf.recipe_name, now)
    run_dir = Path(os.path.abspath(run_dir.expanduser()))
    engine = _bundle(conf.engine.threads, conf.engine.tp, device)
    trainer = _bundle(conf.parallel.threads, 1, device)
    samples, trains = conf.debug.mode != "train_only", conf.debug.mode != "rollout_only"
    return Resolved(
        run_dir=run_dir,
        device=device,
        local_gpus=gpus,
        mini_batch_size=conf.batch.size // max(conf.batch.mini_batches, 1),
        dump_dir=Path(os.path.abspath(conf.debug.dump)) if conf.debug.dump else run_dir / "dump",
        engine_bundles=(engine,) * conf.engine.count if samples else (),
        worker_bundles=({"CPU": 1.0},) * conf.rollout.workers if samples else (),
        service_bundles=({"CPU": 1.0},) * SERVICES,
        train_bundles=(trainer,) * (conf.parallel.tp * conf.parallel.dp) if trains else (),
    )


def exact(ratio: float) -> Fraction:
    """The decimal that the user wrote: 0.1 is one tenth, so that ten of them are 1."""
    return Fraction(repr(float(ratio)))


def default_run_dir(recipe: str, now: datetime.datetime | None = None) -> Path:
    """``runs/<recipe>-<time>``, with a number behind it when two runs start in the same second."""
    stamp = (now or datetime.datetime.now()).strftime("%Y%m%d-%H%M%S")
    first = Path("runs") / f"{recipe}-{stamp}"
    candidate, number = first, 2
    while candidate.exists():
        candidate, number = first.with_name(f"{first.name}-{number}"), number + 1
    return candidate


def local_gpus() -> int:
    """GPUs that this machine offers to the run, found without loading CUDA."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = [p for p in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", p.name)]
    if chosen is None or not present:
        return len(present)
    return len([c for c in chosen.split(",") if c.strip() and c.strip() != "-1"])


def _bundle(cpus: int, gpus: int, device: str) -> Bundle:
    return {"CPU": float(cpus), "GPU": float(gpus)} if device == "cuda" else {"CPU": float(cpus)}
