"""A small simulated run around the real buffer: random durations, rejections, losses and versions.

One slow source, a trainer that takes its time, workers that die: whatever the seed, what the buffer promises is
asserted after every event. Times are simulated, nothing sleeps.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

from knit.buffer.guards import holds
from knit.buffer.rules import Rules
from knit.buffer.streaming import StreamingBuffer
from knit.types import Chunk, Completion, GroupReport, State, Ticket, VersionRange
from tests.buffer.helpers import Clock, make_meta

WORKERS = ("w0", "w1")


@dataclass
class Troubles:
    """Probabilities, per group."""

    drop_group: float = 0.0
    drop_member: float = 0.0
    retry: float = 0.0
    lose_worker: float = 0.0
    lose_payload: float = 0.0


@dataclass
class SimulatedRun:
    rules: Rules
    seed: int
    speeds: dict[str, float]  # mean duration of a source, seconds
    troubles: Troubles = field(default_factory=Troubles)
    chunk_train_s: float = 1.0
    concurrency: int = 10**9  # groups per worker

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.clock = Clock()
        self.events: list[dict] = []
        self.buffer = StreamingBuffer(self.rules, self.events.append, self.clock, self.clock)
        self.in_flight: dict[int, tuple[Ticket, str]] = {}
        self.queue: list[tuple[float, int, str, int]] = []
        self.publishes: list[tuple[float, int]] = [(0.0, 0)]
        self.chunks: list[Chunk] = []
        self.sequence = 0
        self.trainer: Chunk | None = None
        self.begun = 0

    def push(self, delay_s: float, kind: str, what: int = 0) -> None:
        self.sequence += 1
        heapq.heappush(self.queue, (self.clock.now_s + delay_s, self.sequence, kind, what))

    def launch(self) -> None:
        for worker in WORKERS:
            busy = sum(w == worker for _, w in self.in_flight.values())
            for ticket in self.buffer.acquire(worker, self.concurrency - busy):
                self.in_flight[ticket.group_id] = (ticket, worker)
                self.push(self.speeds[ticket.source] * self.random.lognormvariate(0, 0.5), "group", ticket.group_id)

    def run(self, batches: int, max_events: int = 100_000) -> SimulatedRun:
        """``batches`` train batches; raises AssertionError on a deadlock or a broken promise."""
        self.begin()
        for _ in range(max_events):
            self.launch()
            self.train()
            if len(self.buffer.quota_records) == batches:
                return self
            assert self.queue, f"deadlock: {self.buffer.explain()}"
            self.clock.now_s, _, kind, what = heapq.heappop(self.queue)
            getattr(self, f"on_{kind}")(what)
            self.check()
        raise AssertionError(f"no end after {max_events} events: {self.buffer.explain()}")

    def begin(self) -> None:
        self.begun += 1
        self.buffer.begin_batch(self.begun)

    def train(self) -> None:
        buffer = self.buffer
        if self.trainer or buffer.batch is None or buffer.batch.complete:
            return
        chunk = buffer.admit()
        if chunk is None:
            if buffer.next_wake_s is not None:
                self.push(buffer.next_wake_s - self.clock.now_s, "wake")
            self.launch()
            return
        self.check_chunk(chunk)
        self.trainer = chunk
        self.chunks.append(chunk)
        buffer.training_started(chunk.step, chunk.mini_batch, chunk.chunk)
        self.push(self.chunk_train_s, "trained")

    def on_wake(self, _: int) -> None:
        pass

    def on_trained(self, _: int) -> None:
        chunk, self.trainer = self.trainer, None
        assert chunk is not None
        if chunk.last_of_mini_batch:
            self.buffer.trained(chunk.step, chunk.mini_batch)
        if chunk.last_of_batch:
            self.buffer.publish_started(self.buffer.version + 1)
            self.push(0.1, "published")

    def on_published(self, _: int) -> None:
        version = self.buffer.version + 1
        self.publishes.append((self.clock.now_s, version))
        self.buffer.published(version)
        self.begin()

    def on_group(self, group_id: int) -> None:
        if group_id not in self.in_flight:
            return  # its worker died
        ticket, worker = self.in_flight.pop(group_id)
        roll = self.random.random
        if roll() < self.troubles.lose_worker:
            self.in_flight = {g: (t, w) for g, (t, w) in self.in_flight.items() if w != worker}
            self.buffer.worker_lost(worker, "killed")
            return
        metas = [make_meta(ticket, m, self.sampled(ticket), float(roll() < 0.5)) for m in range(ticket.size)]
        done = [Completion(m.trajectory_id, self.clock.now_s, m.version_ranges) for m in metas if roll() < 0.7]
        bad = roll() < self.troubles.drop_group
        dropped = {m.trajectory_id: "filtered" for m in metas if bad or roll() < self.troubles.drop_member}
        accepted = tuple(m for m in metas if m.trajectory_id not in dropped)
        retry = not accepted and roll() < self.troubles.retry
        report = GroupReport(group_id, accepted, dropped, tuple(m.reward for m in metas), retry)
        self.buffer.report(worker, done, [report])
        if accepted and roll() < self.troubles.lose_payload:
            lost = accepted[0].trajectory_id
            live = self.buffer.ledger.live.get(lost)
            if live is not None and live.state is not State.ADMITTED:
                self.buffer.payload_lost([lost])

    def sampled(self, ticket: Ticket) -> tuple[VersionRange, ...]:
        """Ten tokens, one range for each weight version that was live between launch and now."""
        spans = [(max(at, ticket.launched_s), v) for at, v in self.publishes]
        spans = [(at, v) for k, (at, v) in enumerate(spans) if v >= ticket.version and at <= self.clock.now_s]
        return tuple(VersionRange(v, 10 * k, 10 * k + 10, at) for k, (at, v) in enumerate(spans))

    def check(self) -> None:
        buffer = self.buffer
        buffer.ledger.check()
        assert len(buffer.pool) == buffer.ledger.count(State.READY)
        assert sum(buffer.pool.counts.values()) == len(buffer.pool)
        for source in self.rules.sources:
            assert buffer.pool.by_source[source] == buffer.ledger.count(State.READY, source)
        if self.rules.policy.guarded and buffer.batch is not None:
            batch = buffer.batch
            for group, counts in zip(self.rules.groups, batch.admitted, strict=True):
                assert holds(group, counts, self.rules.size, batch.total), (batch.step, counts)

    def check_chunk(self, chunk: Chunk) -> None:
        assert len(chunk.trajectories) == self.rules.chunk_sizes[chunk.mini_batch][chunk.chunk]
        for meta in chunk.trajectories:
            stale = chunk.train_version - meta.oldest_version
            assert 0 <= stale <= self.rules.max_staleness
            assert all(r.version <= chunk.train_version for r in meta.version_ranges)
