"""Ray and the two placement groups of a run, each with a deadline and numbers in its errors."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from knit.common.net import free_port
from knit.common.procs import tail, terminate_tree
from knit.common.remote import ActorLostError, acall
from knit.config.schema import ClusterConf
from knit.errors import ConfigError, RunError

Bundle = dict[str, float]

CLOSE_S = 6.0

# Two real cores may carry a dozen processes: one thread each, and no CUDA probing where there is none.
ACTOR_ENV = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True, slots=True)
class Slot:
    """One bundle of a placement group: where an actor is put."""

    group: PlacementGroup
    index: int
    resources: Bundle

    def options(self, **extra: Any) -> dict[str, Any]:
        """Arguments for ``Actor.options``: the bundle's whole share, never restarted behind our back."""
        return {
            "num_cpus": self.resources.get("CPU", 0),
            "num_gpus": self.resources.get("GPU", 0),
            "max_restarts": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=self.index
            ),
            **extra,
        }


class Cluster:
    """A Ray cluster that was started for this run, or joined. ``close`` ends only what was started."""

    def __init__(self, conf: ClusterConf) -> None:
        self._conf = conf
        self._groups: list[PlacementGroup] = []
        self._before = set(psutil.Process().children())
        with _signal_handlers_kept():
            self._connect()
        self._started = set(psutil.Process().children()) - self._before

    def _connect(self) -> None:
        common: dict[str, Any] = {
            "log_to_driver": False,
            "logging_level": logging.ERROR,
            "runtime_env": {"env_vars": ACTOR_ENV},
        }
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # the servers inherit it; at 15 they starve beside anything
        if self._conf.address:
            try:
                ray.init(address=self._conf.address, **common)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise RunError(f"cluster.address={self._conf.address}: cannot join ({error})") from error
            return
        local = {
            "address": "local",
            "num_cpus": self._conf.num_cpus,
            "object_store_memory": int(self._conf.object_store_gb * 2**30),
            "include_dashboard": False,
        }
        deadline = time.monotonic() + self._conf.start_timeout_s
        while True:
            try:
                ray.init(**local, _metrics_export_port=free_port(), **common)
                return
            except Exception as error:  # Ray raises bare ones: a port taken meanwhile, 30 s over on a busy machine
                ray.shutdown()
                for process in set(psutil.Process().children()) - self._before:
                    terminate_tree(process.pid, grace_s=0.5)
                if time.monotonic() > deadline:
                    raise RunError(
                        f"no local Ray within cluster.start_timeout_s={self._conf.start_timeout_s:g}: {error}"
                    ) from error

    def reserve(self, wanted: Mapping[str, Sequence[Bundle]]) -> dict[str, list[Slot]]:
        """One placement group per entry, all of them ready. Raises ConfigError when they can never fit."""
        self._check_fits(wanted)
        groups = {
            name: placement_group(list(bundles), strategy="PACK", name=f"knit-{name}-{os.getpid()}")
            for name, bundles in wanted.items()
        }
        self._groups += groups.values()
        deadline = time.monotonic() + self._conf.start_timeout_s
        for name, group in groups.items():
            if not group.wait(max(deadline - time.monotonic(), 0.1)):
                raise RunError(
                    f"placement group {name} got no resources within cluster.start_timeout_s="
                    f"{self._conf.start_timeout_s:g}: wants {_total(wanted[name])}, "
                    f"free are {_rounded(ray.available_resources())}"
                )
        return {n: [Slot(g, i, dict(b)) for i, b in enumerate(wanted[n])] for n, g in groups.items()}

    def _check_fits(self, wanted: Mapping[str, Sequence[Bundle]]) -> None:
        have = ray.cluster_resources()
        for resource, amount in _total([b for bundles in wanted.values() for b in bundles]).items():
            if amount > have.get(resource, 0):
                parts = ", ".join(f"{n} {_total(b).get(resource, 0):g}" for n, b in wanted.items())
                raise ConfigError(
                    f"the placement groups want {amount:g} {resource} ({parts}), the cluster has "
                    f"{have.get(resource, 0):g}; lower engine.count, rollout.workers or parallel sizes, or add nodes "
                    f"(cluster.num_cpus for a local Ray)"
                )

    def close(self) -> None:
        """Leaves a joined cluster as it was found; ends a local one, within ``CLOSE_S``, also when it is half dead.

        A signal to the whole process group reaches Ray's own processes too, and calls to a control store
        that is gone block for a minute: a local Ray is therefore not asked to tidy up, but ended.
        """
        if not ray.is_initialized():
            return
        if self._conf.address:
            for group in self._groups:
                remove_placement_group(group)
            ray.shutdown()
            return
        tree = [q for p in self._started if p.is_running() for q in (p, *p.children(recursive=True))]
        shutdown = threading.Thread(target=ray.shutdown, daemon=True)
        shutdown.start()
        shutdown.join(CLOSE_S)
        for process in tree:
            terminate_tree(process.pid, grace_s=0.5)


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """``ray.init`` takes over SIGTERM, at the level of C; how a run ends is ours to decide."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(n) for n in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


class MemberDiedError(RunError):
    """The process of an actor is gone; the message has its name and the end of its log."""


def spawn(cls: type, slot: Slot, name: str, logs: Path, *args: Any, **options: Any) -> Member:
    """Creates the actor ``cls(log_path, *args)`` in ``slot``; it is being started when this returns."""
    log_path = logs / f"{name}.log"
    handle = ray.remote(cls).options(**slot.options(**options)).remote(str(log_path), *args)
    return Member(name, handle, log_path)


@dataclass(frozen=True, slots=True)
class Member:
    """An actor of this run, with the name and the log that its errors show."""

    name: str
    handle: Any
    log_path: Path

    async def call(self, method: str, *args: Any, timeout_s: float | None) -> Any:
        """Calls the actor; its death raises MemberDiedError with its name and the end of its log."""
        try:
            return await acall(getattr(self.handle, method).remote(*args), timeout_s, f"{self.name}.{method}")
        except ActorLostError:
            raise self.obituary(f"during {method}") from None

    async def watch(self, interval_s: float) -> None:
        """Returns never; raises as soon as the actor's process is seen dead, however idle the run is."""
        while True:
            try:
                await acall(self.handle.__ray_ready__.remote(), None, self.name)
            except ActorLostError:
                raise self.obituary("while it was being watched") from None
            await asyncio.sleep(interval_s)

    def obituary(self, when: str) -> MemberDiedError:
        end = textwrap.indent(tail(self.log_path, 20) or "(its log is empty)", "    ")
        return MemberDiedError(f"{self.name} died {when}; end of {self.log_path}:\n{end}")

    def kill(self) -> None:
        ray.kill(self.handle)


def _total(bundles: Sequence[Bundle]) -> Bundle:
    total: Bundle = {}
    for bundle in bundles:
        for resource, amount in bundle.items():
            total[resource] = total.get(resource, 0) + amount
    return total


def _rounded(resources: dict[str, float]) -> Bundle:
    return {k: round(v, 1) for k, v in resources.items() if k in ("CPU", "GPU")}
