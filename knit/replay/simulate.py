"""One replay: the real buffer between a simulated rollout side and a simulated trainer.

Every decision is the buffer's; the simulation only moves the clock. The trainer works as the driver's loop does:
it asks for the next chunk when it is free, trains it for a fixed time, and after the last one the weights are
published and the next train batch begins. Placement:

- disaggregated: generation goes on during training and pauses for a publish;
- colocated: the trainer starts when the rollout side has all the batch needs, and generation stands still until
  the publish.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import inf

from knit.buffer import staleness
from knit.buffer.journal import Sink
from knit.buffer.rules import Rules
from knit.buffer.streaming import StreamingBuffer
from knit.errors import RunError
from knit.replay.generation import Finished, Generation
from knit.replay.scenario import Scenario
from knit.replay.trace import Trace
from knit.types import Chunk, Completion, GroupReport, SegmentMeta, TrajectoryMeta, trajectory_id

WORKER = "replay"


@dataclass(slots=True)
class BatchRecord:
    """What happened to one train batch. Times are seconds from the start of the replay."""

    step: int
    begun_s: float
    complete_s: float | None = None  # the rollout side had all that the batch needs: the end of a rollout step
    admitted_s: list[float] = field(default_factory=list)  # of each mini-batch (its last chunk)
    mini_batches: list[Counter[str]] = field(default_factory=list)  # trajectories by source
    tokens: Counter[int] = field(default_factory=Counter)  # by staleness
    published_s: float = 0.0
    busy_slot_s: float = 0.0  # of the engines, from the start of the replay to the publish

    @property
    def by_source(self) -> Counter[str]:
        return sum(self.mini_batches, Counter[str]())


@dataclass(frozen=True, slots=True)
class Run:
    """A finished replay; ``counts`` are those of the buffer's ``finish``."""

    rules: Rules
    train_s: float
    engine_slots: int
    batches: tuple[BatchRecord, ...]
    counts: dict[str, object]
    launched: dict[str, int]  # trajectories by source


class Simulation:
    """Drives one StreamingBuffer. ``train_s``: training time of a whole train batch; ``sink`` gets its events."""

    def __init__(
        self,
        scenario: Scenario,
        policy: str,
        trace: Trace,
        train_s: float,
        colocated: bool = False,
        sink: Sink = lambda event: None,
    ):
        self.scenario, self.trace, self.train_s, self.colocated = scenario, trace, train_s, colocated
        self.rules = scenario.rules(policy)
        self.now_s = 0.0
        self.buffer = StreamingBuffer(self.rules, sink, clock=self._clock, wall=self._clock)
        self.generation = Generation(scenario.engine_slots, scenario.slowdown)
        self.done: list[BatchRecord] = []
        self.record = BatchRecord(1, 0.0)
        self._judging: dict[int, list[Finished]] = {}  # group -> members that ended
        self._training: Chunk | None = None
        self._trained_s = self._published_s = self._wake_s = inf
        self._refused = False  # by the buffer, and no slot has come free since

    def _clock(self) -> float:
        return self.now_s

    def run(self, batches: int) -> Run:
        """Raises RunError, with the buffer's explanation, if the replay cannot go on."""
        self._begin(1)
        if self.scenario.launch == "step":  # the first one, too, has some for the next batch
            self._acquire((self.scenario.max_outstanding - 2 * self.rules.size) // self.rules.group_size)
        while len(self.done) < batches:
            self._note_complete()
            if self.scenario.launch == "continuous":
                self._acquire(self.generation.free // self.rules.group_size)
            self._train()
            self._next_event()
        launched = dict(self.buffer.ledger.launched)
        return Run(self.rules, self.train_s, self.generation.slots, tuple(self.done), self.buffer.finish(), launched)

    # -- launching

    def _acquire(self, groups: int) -> None:
        if groups < 1 or self._refused:
            return
        tickets = self.buffer.acquire(WORKER, groups)
        # With max_ahead an admission may let it grant again, too.
        self._refused = len(tickets) < groups and self.rules.max_ahead is None
        for ticket in tickets:
            self.generation.submit(ticket, self.trace.group(ticket.source, ticket.prompt_index, ticket.size))

    def _note_complete(self) -> None:
        """Has the rollout side all that the batch needs? Then the next rollout step is launched."""
        batch = self.buffer.batch
        if batch is None or self.record.complete_s is not None:
            return
        if self.rules.policy.schedules is None:
            complete = batch.total + len(self.buffer.pool) >= self.rules.size
        else:
            complete = batch.whole(self.buffer.pool)
        if complete:
            self.record.complete_s = self.now_s
            if self.scenario.launch == "step":
                self._slots_freed()
                self._acquire(self.scenario.max_outstanding)

    def _slots_freed(self) -> None:
        self._refused = False

    def _top_up(self) -> None:
        """What a rollout step lost by rejected or stale trajectories is launched again."""
        self._slots_freed()
        if self.scenario.launch == "continuous" or self.buffer.batch is None or self.record.complete_s is not None:
            return
        outstanding = self.buffer.outstanding()
        short = sum(max(0, quota.minimum - outstanding[name]) for name, quota in self.rules.sources.items())
        short = max(short, self.rules.size - sum(outstanding.values()))
        self._acquire(-(-short // self.rules.group_size))

    # -- training

    def _begin(self, step: int) -> None:
        self.buffer.begin_batch(step)
        self.record = BatchRecord(step, self.now_s)
        self._top_up()

    def _train(self) -> None:
        """The trainer, if it is free, asks for the next chunk."""
        batch = self.buffer.batch
        if self._training is not None or batch is None or batch.complete:
            return
        if self.colocated and self.record.complete_s is None:
            return
        chunk = self.buffer.admit()
        self._wake_s = self.buffer.next_wake_s if self.buffer.next_wake_s is not None else inf
        if chunk is not None:
            self._start_training(chunk)
        elif not self.generation.in_flight:
            self._slots_freed()
            self._acquire(1)  # the buffer grants beyond its slots when nothing that is ready can help

    def _start_training(self, chunk: Chunk) -> None:
        self._training = chunk
        self.generation.paused = self.colocated
        self._trained_s = self.now_s + self.train_s * len(chunk.trajectories) / self.rules.size
        self.buffer.training_started(chunk.step, chunk.mini_batch, chunk.chunk)
        if chunk.chunk == 0:
            self.record.mini_batches.append(Counter())
        self.record.mini_batches[-1].update(meta.source for meta in chunk.trajectories)
        for meta in chunk.trajectories:
            self.record.tokens.update(staleness.token_histogram(meta, chunk.train_version))
        if chunk.last_of_mini_batch:
            self.record.admitted_s.append(self.now_s)

    # -- events

    def _next_event(self) -> None:
        finish_s = self.generation.next_finish_s()
        self.now_s = min(finish_s, self._trained_s, self._published_s, self._wake_s)
        if self.now_s == inf:
            raise RunError(f"the replay stands still after {len(self.done)} train batches: {self.buffer.explain()}")
        self.generation.advance(self.now_s)
        if self._published_s <= self.now_s:
            self._on_published()
        elif self._trained_s <= self.now_s:
            self._on_trained()
        elif finish_s <= self.now_s:
            self._on_finished(self.generation.finish())
        else:
            self._wake_s = inf

    def _on_trained(self) -> None:
        chunk, self._training, self._trained_s = self._training, None, inf
        assert chunk is not None
        if chunk.last_of_mini_batch:
            self.buffer.trained(chunk.step, chunk.mini_batch)
        if chunk.last_of_batch:
            self.buffer.publish_started(self.buffer.version + 1)
            self.generation.paused = True
            self._published_s = self.now_s + self.scenario.publish_s

    def _on_published(self) -> None:
        self._published_s = inf
        self.generation.published()
        self.generation.paused = False
        self.buffer.published(self.buffer.version + 1)
        self.buffer.drain_releasable()
        self.record.published_s, self.record.busy_slot_s = self.now_s, self.generation.busy_slot_s
        self.done.append(self.record)
        self._begin(self.record.step + 1)

    def _on_finished(self, finished: Finished) -> None:
        ticket = finished.ticket
        members = self._judging.setdefault(ticket.group_id, [])
        members.append(finished)
        name = trajectory_id(ticket.group_id, finished.member)
        completion = Completion(name, self.now_s, finished.versions)
        if len(members) < ticket.size:
            self.buffer.report(WORKER, [completion], [])
            return
        report = self._judge(self._judging.pop(ticket.group_id))
        dropped = self.buffer.ledger.dropped.total()
        self.buffer.report(WORKER, [completion], [report])
        if self.buffer.ledger.dropped.total() > dropped:
            self._top_up()

    def _judge(self, members: list[Finished]) -> GroupReport:
        """The verdicts are those of the trace."""
        dropped = {
            trajectory_id(f.ticket.group_id, f.member): f.rollout.reason for f in members if not f.rollout.accepted
        }
        accepted = tuple(self._meta(f) for f in members if f.rollout.accepted)
        return GroupReport(members[0].ticket.group_id, accepted, dropped)

    def _meta(self, finished: Finished) -> TrajectoryMeta:
        ticket = finished.ticket
        name = trajectory_id(ticket.group_id, finished.member)
        tokens = sum(span.tokens for span in finished.versions)
        return TrajectoryMeta(
            trajectory_id=name,
            group_id=ticket.group_id,
            member=finished.member,
            source=ticket.source,
            rollout_step=ticket.rollout_step,
            attempt=ticket.attempt,
            segments=(SegmentMeta(f"{name}/s0", tokens, 0, tokens, finished.versions),),
            reward=0.0,
            advantage=0.0,
            launched_s=ticket.launched_s,
            completed_s=self.now_s,
        )
