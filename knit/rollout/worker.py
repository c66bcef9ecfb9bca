"""The rollout worker: turns tickets of the buffer into trajectories in the store.

``RolloutLoop`` is the plain class, ``RolloutWorker`` its Ray shell. Guarantees:

- Every member of every ticket it took is reported exactly once, in the report of its group, unless the
  worker is stopped first (the buffer then counts it as left over).
- The payload of a group is durable in the store before the group is reported.
- A failure stays with its trajectory. The root cause is logged once and travels in the report. When nothing
  usable came out of a group for reasons of infrastructure, it is reported with ``retry``.
- At most ``rollout.concurrency`` trajectories are in flight (one group, when a group is larger than that).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from knit.common.paths import load_path
from knit.common.procs import redirect_output
from knit.config.schema import KnitConf
from knit.errors import RunError
from knit.rollout.agent import Trajectory, TrajectoryFailed
from knit.rollout.client import EngineClient
from knit.rollout.evaluate import EvalScores, Evaluator
from knit.rollout.groups import Failed, GroupRules
from knit.rollout.payload import meta_of, readable, units_of
from knit.rollout.prompts import PromptSource, make_source
from knit.rollout.reporter import BufferPort, RayBuffer, Reporter
from knit.rollout.rewards import Reward, Rewarder
from knit.rollout.tokenizer import Tokenizer
from knit.rollout.trajectory import TrajectoryRunner, root_cause
from knit.store.base import UnitStore
from knit.store.unit import Unit
from knit.track.console import Sample
from knit.types import (
    Completion,
    EngineAddress,
    GroupReport,
    Prompt,
    Ticket,
    TrajectoryMeta,
    trajectory_id,
)

ACQUIRE_WAIT_S = 2.0
EMPTY_PAUSE_S = 0.1  # a closed buffer answers at once; do not ask in a tight loop


class RolloutLoop:
    """Belongs to one event loop. ``run`` returns after ``stop`` and raises when the buffer is lost."""

    def __init__(
        self,
        name: str,
        conf: KnitConf,
        buffer: BufferPort,
        store: UnitStore,
        clock: Callable[[], float] = time.time,
    ) -> None:
        rollout = conf.rollout
        self.name, self.conf, self.clock = name, conf, clock
        self.buffer, self.store = buffer, store
        self.tokenizer = Tokenizer(str(conf.model.path))
        self.client = EngineClient(
            max_retries=rollout.max_retries,
            engine_wait_s=conf.engine.start_timeout_s,
            request_timeout_s=2 * rollout.trajectory_timeout_s,  # a slow trajectory is no broken engine
        )
        self.sources: dict[str, PromptSource] = {
            s.name: make_source(s, self.tokenizer, conf.seed) for s in conf.sources
        }
        self.rules = GroupRules(
            min_size=rollout.min_group_size,
            drop_zero_std=rollout.drop_zero_std,
            group_filter=load_path(rollout.group_filter) if rollout.group_filter else None,
            advantage=load_path(conf.algorithm.advantage),
        )
        self.runner = self._runner({s.name: load_path(s.reward) for s in conf.sources})
        self.reporter = Reporter(name, buffer)
        self._evaluator: Evaluator | None = None
        self._groups: set[asyncio.Task[None]] = set()
        self._in_flight = 0
        self._room = asyncio.Event()
        self._stopping = asyncio.Event()
        self._logged: set[str] = set()
        self._samples: dict[str, Sample] = {}
        self._idle_since: float | None = time.monotonic()
        self._idle_s = 0.0

    def set_engines(self, engines: Sequence[EngineAddress]) -> None:
        self.client.set_engines(engines)

    async def run(self) -> None:
        """Works until ``stop``; raises the first error that is not a trajectory's own."""
        tasks = [asyncio.create_task(self._acquire_loop()), asyncio.create_task(self.reporter.run())]
        stopped = asyncio.create_task(self._stopping.wait())
        try:
            done, _ = await asyncio.wait([*tasks, stopped], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopped}:
                task.result()
        finally:
            for task in [*tasks, stopped, *self._groups]:
                task.cancel()
            await asyncio.gather(*tasks, stopped, *self._groups, return_exceptions=True)

    async def stop_sampling(self, timeout_s: float = 3.0) -> None:
        """Gives up what is in flight and reports what had ended; evaluation goes on. ``run`` returns."""
        self._stopping.set()
        for task in list(self._groups):
            task.cancel()
        await asyncio.gather(*self._groups, return_exceptions=True)
        try:
            await asyncio.wait_for(self.reporter.flush(), timeout_s)
        except Exception as error:  # the buffer may be gone already; nothing depends on this report any more
            print(f"{self.name}: last report not delivered: {root_cause(error)}", flush=True)

    async def stop(self) -> None:
        """Ends sampling and closes the connections."""
        await self.stop_sampling()
        await self.client.close()

    async def evaluate(self, samples: int, temperature: float, shard: tuple[int, int] = (0, 1)) -> list[EvalScores]:
        """Scores of this worker's share of the held-out problems (``index % shard[1] == shard[0]``)."""
        if self._evaluator is None:
            self._evaluator = await asyncio.to_thread(Evaluator, self.conf, self.tokenizer, self._runner)
        return await self._evaluator.run(samples, temperature, shard)

    async def make_probe(self, count: int) -> list[list[int]]:
        """``count`` sequences, prompt and sampled response, taken from the sources in turn."""
        sources = list(self.sources.values())
        prompts = [sources[k % len(sources)].prompt(k // len(sources)) for k in range(count)]
        trajectories = await asyncio.gather(
            *[self.runner.sample(f"probe/{k}", p, self.conf.rollout.temperature) for k, p in enumerate(prompts)]
        )
        return [list(t.segments[0].tokens) for t in trajectories]

    async def probe(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """The engines' log-probs of given token sequences, position by position (0 at position 0)."""
        return list(await asyncio.gather(*[self.client.score(s) for s in sequences]))

    def samples(self) -> list[Sample]:
        """A readable recent trajectory per source."""
        return list(self._samples.values())

    def metrics(self) -> dict[str, float]:
        """Running totals of this worker."""
        idle = self._idle_s + (time.monotonic() - self._idle_since if self._idle_since is not None else 0.0)
        return {
            "sampled_tokens": self.client.sampled_tokens,
            "engine_retries": self.client.retries,
            "in_flight": self._in_flight,
            "idle_s": idle,
        }

    # -- taking tickets

    async def _acquire_loop(self) -> None:
        while True:
            free = self._free_groups()
            if free == 0:
                self._room.clear()
                await self._room.wait()
                continue
            tickets = await self.buffer.acquire(self.name, free, ACQUIRE_WAIT_S)
            for ticket in tickets:
                self._start(ticket)
            if not tickets:
                await asyncio.sleep(EMPTY_PAUSE_S)

    def _free_groups(self) -> int:
        free = (self.conf.rollout.concurrency - self._in_flight) // self.conf.batch.group_size
        return max(free, 0) if self._in_flight else max(free, 1)

    def _start(self, ticket: Ticket) -> None:
        if self._in_flight == 0 and self._idle_since is not None:
            self._idle_s += time.monotonic() - self._idle_since
            self._idle_since = None
        self._in_flight += ticket.size
        task = asyncio.create_task(self._group(ticket))
        self._groups.add(task)
        task.add_done_callback(self._groups.discard)

    def _member_ended(self) -> None:
        self._in_flight -= 1
        if self._in_flight == 0:
            self._idle_since = time.monotonic()
        self._room.set()

    # -- one group

    async def _group(self, ticket: Ticket) -> None:
        """Whatever happens, the group is reported."""
        try:
            report = await self._outcome(ticket)
        except TrajectoryFailed as error:
            report = self._all_failed(ticket, error)
        except Exception as error:  # a mistake of ours or of user code; it must not leave the buffer waiting
            report = self._all_failed(ticket, TrajectoryFailed("failed", root_cause(error)))
        self.reporter.judged(report)

    async def _outcome(self, ticket: Ticket) -> GroupReport:
        prompt = self._prompt(ticket)
        members = await asyncio.gather(*[self._member(ticket, m, prompt) for m in range(ticket.size)])
        failed = [m for m in members if isinstance(m, Failed)]
        done = {m[0].trajectory_id: m for m in members if not isinstance(m, Failed)}
        try:
            report = self.rules.judge(ticket, prompt, [meta for meta, _ in done.values()], failed)
        except Exception as error:  # group filter and advantage are user code
            raise TrajectoryFailed("judge_failed", root_cause(error)) from error
        units = [u for t in report.accepted for u in units_of(t.trajectory_id, done[t.trajectory_id][1])]
        if units:
            await self._store(units)
        return report

    def _prompt(self, ticket: Ticket) -> Prompt:
        try:
            return self.sources[ticket.source].prompt(ticket.prompt_index)
        except Exception as error:  # a prompt source is user code
            for _ in range(ticket.size):
                self._member_ended()
            raise TrajectoryFailed("prompt_failed", root_cause(error)) from error

    async def _store(self, units: list[Unit]) -> None:
        try:
            await asyncio.to_thread(self.store.write, units)
        except Exception as error:  # each backend has its own; the run's supervision decides whether it is over
            raise TrajectoryFailed("store_failed", root_cause(error), infrastructure=True) from error

    async def _member(self, ticket: Ticket, member: int, prompt: Prompt) -> tuple[TrajectoryMeta, Trajectory] | Failed:
        name = trajectory_id(ticket.group_id, member)
        try:
            trajectory = await self._sample(name, prompt)
            versions = tuple(r for s in trajectory.segments for r in s.versions)
            self.reporter.completed(Completion(name, self.clock(), versions, trajectory.retries))
            scored = await self.runner.score(prompt, trajectory)
        except TrajectoryFailed as error:
            self._log_once(f"{error.reason}: {root_cause(error)}", key=f"{error.reason}/{type(error.__cause__)}")
            return Failed(name, error.reason, root_cause(error), error.infrastructure)
        except Exception as error:  # a failure stays with its trajectory, whatever it is
            self._log_once(f"failed: {root_cause(error)}", key=f"failed/{type(error)}")
            return Failed(name, "failed", root_cause(error))
        self._samples[ticket.source] = readable(name, prompt, scored)
        return meta_of(ticket, member, scored), trajectory

    async def _sample(self, name: str, prompt: Prompt) -> Trajectory:
        try:
            return await self.runner.sample(name, prompt, self.conf.rollout.temperature)
        finally:
            self._member_ended()  # its reward does not hold a slot

    def _all_failed(self, ticket: Ticket, error: TrajectoryFailed) -> GroupReport:
        self._log_once(f"{error.reason}: {error}", key=error.reason)
        dropped = dict.fromkeys(ticket.trajectory_ids(), error.reason)
        return GroupReport(ticket.group_id, (), dropped, retry=error.infrastructure, error=str(error))

    def _runner(self, rewards: dict[str, Reward]) -> TrajectoryRunner:
        rollout = self.conf.rollout
        return TrajectoryRunner(
            rollout,
            self.conf.engine.context_length,
            self.client,
            self.tokenizer,
            load_path(rollout.agent_loop)(rollout),
            Rewarder(rewards, rollout.reward_timeout_s, rollout.reward_concurrency),
            self.clock,
        )

    def _log_once(self, message: str, key: str | None = None) -> None:
        if (key or message) not in self._logged:
            self._logged.add(key or message)
            print(f"{self.name}: {message} (logged once)", flush=True)


class RolloutWorker:
    """Ray shell of one loop; an async actor. The driver keeps the reference of ``run`` and watches it."""

    def __init__(self, log_path: str, name: str, conf: KnitConf, buffer: object, store: UnitStore) -> None:
        redirect_output(log_path)
        self._args = (name, conf, RayBuffer(buffer), store)
        self._loop: RolloutLoop | None = None

    async def start(self, engines: list[EngineAddress]) -> None:
        """Reads sources, tokenizer and rewards; raises ConfigError where they are wrong."""
        self._loop = await asyncio.to_thread(RolloutLoop, *self._args)
        self._loop.set_engines(engines)

    async def run(self) -> None:
        """Takes tickets until ``stop``; raises when the buffer is lost."""
        await self._ready().run()

    async def set_engines(self, engines: list[EngineAddress]) -> None:
        self._ready().set_engines(engines)

    async def evaluate(self, samples: int, temperature: float, shard: tuple[int, int] = (0, 1)) -> list[EvalScores]:
        return await self._ready().evaluate(samples, temperature, shard)

    async def make_probe(self, count: int) -> list[list[int]]:
        return await self._ready().make_probe(count)

    async def probe(self, sequences: list[list[int]]) -> list[list[float]]:
        return await self._ready().probe(sequences)

    async def samples(self) -> list[Sample]:
        return self._ready().samples()

    async def metrics(self) -> dict[str, float]:
        return self._ready().metrics()

    async def stop_sampling(self) -> None:
        await self._ready().stop_sampling()

    async def stop(self) -> None:
        if self._loop is not None:
            await self._loop.stop()

    def _ready(self) -> RolloutLoop:
        if self._loop is None:
            raise RunError(f"{self._args[0]} was asked before start()")
        return self._loop
