"""The streaming buffer: launches prompt groups, takes in what comes back, admits chunks to training.

Plain, synchronous, on an injected clock; the Ray actor around it (:mod:`knit.buffer.actor`) only waits and
wakes. One train batch:

    begin_batch → (admit → training_started → trained)… → publish_started → published

while workers ``acquire`` tickets and ``report`` trajectories all the time. Guarantees:

- every launched trajectory ends exactly once, and the counts add up at any time (``lifecycle``);
- a train batch has exactly N trajectories, each mini-batch N/n, and with a guarded policy every source
  quota is met (``guards``, ``batch``);
- no trajectory of a chunk is staler than the bound, none is younger than its train batch (``staleness``);
- nothing is launched without a slot, slots come free on publish, drop or loss (``pacing``);
- the same calls at the same times give the same decisions.

Wrong order of calls, reports about unknown trajectories and over-long waits raise RunError.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from knit.buffer import explain, staleness, state
from knit.buffer.batch import Block, TrainBatch
from knit.buffer.intake import Intake
from knit.buffer.journal import Journal, Sink
from knit.buffer.lifecycle import Ledger
from knit.buffer.meter import Meter
from knit.buffer.pacing import Pacing
from knit.buffer.policies import Pace
from knit.buffer.ready import Candidate, ReadyPool
from knit.buffer.rules import Rules
from knit.errors import RunError
from knit.types import Chunk, Completion, GroupReport, State, Ticket, TrajectoryMeta


class StreamingBuffer:
    """See the module. ``clock`` (seconds) drives deadlines and pacing, ``wall`` stamps events."""

    def __init__(
        self,
        rules: Rules,
        sink: Sink = lambda event: None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        version: int = 0,
    ):
        self.rules, self.clock = rules, clock
        self.journal = Journal(sink, wall)
        self.intake = Intake(rules, self.journal, version)
        self.pace = Pace(begin_s=clock())
        self.step = 0
        self.batch: TrainBatch | None = None
        self.blocked: Sequence[Block] = ()  # what kept the last admission back
        self.handed: dict[int, list[TrajectoryMeta]] = {}  # mini-batch -> admitted, not trained yet
        self.launching = True
        self.next_wake_s: float | None = None  # when an admission may become possible without a report
        self.quota_records: list[dict[str, Any]] = []  # of finished batches: step, source -> target, admitted
        self._last_metrics: dict[str, float] = {}

    @property
    def version(self) -> int:
        return self.intake.version

    @property
    def ledger(self) -> Ledger:
        return self.intake.ledger

    @property
    def pool(self) -> ReadyPool:
        return self.intake.pool

    @property
    def pacing(self) -> Pacing:
        return self.intake.pacing

    # -- launching

    def acquire(self, worker: str, max_groups: int) -> list[Ticket]:
        """Tickets for at most ``max_groups`` prompt groups, as slots are free; [] when none is or after a stop."""
        tickets: list[Ticket] = []
        if not self.launching:
            return tickets
        outstanding, rollout_step = self.outstanding(), self.step + (self.batch is None)
        while len(tickets) < max_groups:
            source = self.pacing.next_source(outstanding, ahead=self._ahead(outstanding))
            if source is None and self._starving():
                source = self.pacing.next_source(outstanding, starving=True)
            if source is None:
                break
            tickets.append(self.intake.launch(source, worker, rollout_step, self.clock()))
            outstanding[source] += self.rules.group_size
        return tickets

    def outstanding(self) -> dict[str, int]:
        """Per source, what holds slots: see :mod:`knit.buffer.pacing`."""
        usable = self.intake.oldest_usable
        held = self.batch.by_source if self.batch else Counter[str]()
        return {
            source: self.ledger.unfinished(source, usable) + self.pool.by_source[source] + held[source]
            for source in self.rules.sources
        }

    def _ahead(self, outstanding: Mapping[str, int]) -> bool:
        """Whether what is not admitted yet covers what training needs next, and ``max_ahead`` trajectories more."""
        if self.rules.max_ahead is None:
            return False
        admitted, needed = 0, self.rules.size
        if self.batch is not None:
            admitted = self.batch.total
            needed -= 0 if self.batch.complete else admitted
            if not self.batch.complete and self.batch.whole(self.pool):
                needed += self.rules.size  # rollout has done its part of this batch: on to the next one
        return sum(outstanding.values()) - admitted >= needed + self.rules.max_ahead

    def source_exhausted(self, source: str) -> None:
        """The source has no more prompts; what waits for its retry may still be launched."""
        if source not in self.rules.sources:
            raise RunError(f"source {source!r} is unknown; the run has {', '.join(self.rules.sources)}")
        self.pacing.exhausted.add(source)
        self.journal.write("source_exhausted", source=source, prompts=self.pacing.cursors[source])

    def stop_launching(self) -> None:
        self.launching = False

    def _starving(self) -> bool:
        """The batch waits, nothing that could help is in flight."""
        if self.batch is None or self.batch.complete or not self.blocked:
            return False
        return not any(self.ledger.unfinished(source, self.intake.oldest_usable) for source in self.rules.sources)

    # -- reports of the rollout workers

    def report(self, worker: str, completions: Sequence[Completion], groups: Sequence[GroupReport]) -> None:
        """Take in what ended; see :class:`Intake` for what raises."""
        for completion in completions:
            self.intake.completed(completion)
        for group in groups:
            self.intake.judged(group)
        self._note_whole()

    def worker_lost(self, worker: str, error: str) -> None:
        """Its unfinished trajectories end as lost; their prompts are launched again, or quarantined."""
        self.intake.worker_lost(worker, error)

    def payload_lost(self, trajectory_ids: Iterable[str]) -> None:
        """Payload is gone. Ready trajectories give their slot back; raises RunError if one is already admitted."""
        self.intake.payload_lost(trajectory_ids)

    # -- the train batch

    def begin_batch(self, step: int) -> None:
        """Start to admit train batch ``step`` from the published version; call it right after ``published``."""
        if self.batch is not None:
            raise RunError(f"train batch {step} begins, but train batch {self.batch.step} is not published yet")
        if step <= self.step:
            raise RunError(f"train batch {step} begins after train batch {self.step}: steps only grow")
        self.step = step
        self.intake.drop_stale()
        self.batch = TrainBatch(
            self.rules,
            step,
            self.version,
            self.clock(),
            start=dict(self.pool.by_source),
            earlier={s: (p.launched, p.sampled) for s, p in self.ledger.steps.items() if s < step},
        )
        self.journal.write("batch_start", step=step, version=self.version)
        self._note_whole()

    def admit(self) -> Chunk | None:
        """The next chunk of the batch, or None while something blocks (``explain`` says what).

        Raises RunError when the batch can no longer become feasible, the refill budget is used up, or a
        prompt group is past its deadline.
        """
        batch, now_s = self._admitting(), self.clock()
        self.next_wake_s = None
        self.pace.trainer_free(now_s)
        self._check_deadlines(now_s)
        blocks, candidate = batch.blocks(self.pool, self.ledger.steps), None
        if not blocks:
            self.next_wake_s = batch.hold_until(self.pool, self.pace, now_s)
            if self.next_wake_s is not None:
                blocks = [Block("mix", 0, f"even mix: waits up to {self.next_wake_s - now_s:.1f} s for slower sources")]
            else:
                candidate = batch.select(self.pool)
                blocks = [] if candidate else batch.guard_blocks(self.pool)
        self.blocked = blocks
        if candidate is None:
            self.intake.meter.waits.blocked(now_s, blocks)
            self._check_feasible()
            return None
        self.intake.meter.waits.admitted(now_s)
        return self._admit(batch, candidate, now_s)

    def training_started(self, step: int, mini_batch: int, chunk: int) -> None:
        self.journal.write("train_start", step=step, mini_batch=mini_batch, chunk=chunk)

    def trained(self, step: int, mini_batch: int) -> None:
        """The optimizer step of a mini-batch is done: its trajectories end, their payload may be deleted."""
        batch = self.batch
        if batch is None or batch.step != step or mini_batch != batch.trained_mini_batches:
            raise RunError(f"mini-batch {mini_batch} of train batch {step} was trained out of order")
        if batch.mini_batch <= mini_batch:
            raise RunError(f"mini-batch {mini_batch} of train batch {step} was trained before it was admitted")
        self.pace.trainer_free(self.clock())
        trajectories = self.handed.pop(mini_batch)
        for meta in trajectories:
            self.ledger.move(meta.trajectory_id, State.TRAINED)
        self.intake.meter.trained(trajectories, batch.train_version, mini_batch)
        self.intake.release(trajectories)
        batch.trained_mini_batches += 1
        self.journal.write("train_end", step=step, mini_batch=mini_batch)

    def publish_started(self, version: int) -> None:
        """Generation pauses: what is being sampled is paused."""
        self.journal.write("publish_start", version=version)
        self.intake.pause(State.RUNNING, State.PAUSED, "pause")

    def publish_failed(self, version: int) -> None:
        """The publish is given up or tried again; what was paused goes on, the version stays."""
        self.journal.write("publish_failed", version=version)
        self.intake.pause(State.PAUSED, State.RUNNING, "resume")

    def published(self, version: int) -> None:
        """Every engine serves ``version``: generation goes on, the batch's slots come free, metrics are closed.

        The current version again means that the batch was consumed without a publish (debug modes).
        """
        if version < self.version:
            raise RunError(f"weight version {version} was published after version {self.version}: versions only grow")
        batch = self.batch
        if batch is not None and batch.trained_mini_batches < self.rules.mini_batches:
            raise RunError(
                f"weight version {version} was published, but train batch {batch.step} has trained "
                f"{batch.trained_mini_batches} of {self.rules.mini_batches} mini-batches"
            )
        self.intake.version = version
        self.journal.write("publish", version=version)
        self.intake.pause(State.PAUSED, State.RUNNING, "resume")
        if batch is not None:
            self._close(batch)
        self.intake.drop_stale()

    def _admit(self, batch: TrainBatch, candidate: Candidate, now_s: float) -> Chunk:
        staleness.check(candidate.entries, batch.train_version, self.rules.max_staleness)
        trajectories = tuple([e.meta for e in candidate.entries])
        self.ledger.admit(trajectories)
        chunk = Chunk(
            step=batch.step,
            mini_batch=batch.mini_batch,
            chunk=batch.chunk,
            last_of_mini_batch=batch.last_of_mini_batch,
            last_of_batch=batch.last_of_batch,
            train_version=batch.train_version,
            admitted_s=now_s,
            trajectories=trajectories,
        )
        batch.admit(candidate)
        self.handed.setdefault(chunk.mini_batch, []).extend(trajectories)
        self.intake.dropped_since_admission.clear()
        self.pace.chunk_admitted(now_s)
        if chunk.last_of_batch:
            self.pace.final_admission(now_s)
        self.journal.admission(chunk)
        return chunk

    def _close(self, batch: TrainBatch) -> None:
        self._last_metrics = self.intake.meter.close(batch, self.pool, self.ledger)
        sources = {
            name: {"target": quota.minimum, "admitted": batch.by_source[name]}
            for name, quota in self.rules.sources.items()
        }
        self.quota_records.append({"step": batch.step, "sources": sources})
        self.intake.meter, self.batch, self.blocked = Meter(), None, ()
        self.ledger.forget_finished()

    def _admitting(self) -> TrainBatch:
        if self.batch is None or self.batch.complete:
            raise RunError("an admission was asked for, but no train batch is open: call begin_batch first")
        return self.batch

    def _note_whole(self) -> None:
        """Remember when the whole batch could first be admitted (the pace of ``balanced``)."""
        batch = self.batch
        if batch and self.pace.whole_s is None and not batch.complete and batch.whole(self.pool):
            self.pace.whole_s = self.clock()

    # -- what ends a run

    def _check_feasible(self) -> None:
        budget = self.rules.refill_budget * self.rules.size
        if sum(self.intake.dropped_since_admission.values()) > budget:
            raise RunError(explain.refill_budget(self))
        reason = explain.infeasible(self)
        if reason:
            raise RunError(reason)

    def _check_deadlines(self, now_s: float) -> None:
        """Deadlines rise in launch order, so that the first open group tells."""
        first = next(iter(self.ledger.open.values()), None)
        if first is not None and now_s > first.ticket.deadline_s:
            raise RunError(explain.overdue(self, now_s))

    # -- the end of the run

    def finish(self) -> dict[str, Any]:
        """Drop all that has not ended as ``left_over`` and return the counts: launched is the sum of the ends."""
        self.stop_launching()
        self.intake.release(meta for metas in self.handed.values() for meta in metas)
        self.intake.drop_all("left_over")
        self.batch, self.handed = None, {}
        self.ledger.check()
        return self.counts()

    def drain_releasable(self) -> list[str]:
        """Unit keys of trajectories that ended since the last call: their payload may be deleted."""
        return self.intake.drain_releasable()

    # -- questions

    def explain(self) -> str:
        """What the next admission waits for, in words and numbers."""
        return explain.waiting(self)

    def metrics(self) -> dict[str, float]:
        """Of the train batch that was published last; {} before the first."""
        return dict(self._last_metrics)

    def counts(self) -> dict[str, Any]:
        """Trajectories now, and since the run's start by how they ended (drops and losses by reason)."""
        ledger = self.ledger
        dropped: Counter[str] = Counter()
        for (reason, _), count in ledger.dropped.items():
            dropped[reason] += count
        lost: Counter[str] = Counter()
        for (reason, _), count in ledger.lost.items():
            lost[reason] += count
        left_over = dropped.pop("left_over", 0)
        now = (State.RUNNING, State.PAUSED, State.COMPLETED, State.READY, State.ADMITTED)
        return {
            "launched": ledger.launched.total(),
            "trained": ledger.trained.total(),
            "dropped": dict(dropped),
            "lost": dict(lost),
            "left_over": left_over,
            **{str(s): ledger.count(s) for s in now},
            "quarantined_prompts": self.pacing.quarantined.total(),
            "late_reports": self.intake.late_reports,
        }

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """JSON-able. Exact between ``published`` and ``begin_batch``: see :mod:`knit.buffer.state`."""
        return state.save(self)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Into a new buffer. Raises RunError if this one has launched anything."""
        state.load(self, saved)
