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
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from knit.buffer import explain, staleness, state
from knit.buffer.batch import Block, TrainBatch
from knit.buffer.journal import Journal, Sink
from knit.buffer.lifecycle import SAMPLING, UNFINISHED, Group, Ledger
from knit.buffer.meter import Meter
from knit.buffer.pacing import Pacing, PromptVisit
from knit.buffer.policies import Pace
from knit.buffer.ready import Entry, ReadyPool
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
        self.rules, self.version, self.step = rules, version, 0
        self.clock = clock
        self.ledger = Ledger(tuple(rules.sources))
        self.pool = ReadyPool(rules.groups, rules.key)
        self.pacing = Pacing(rules.sources, rules.weights, rules.size, rules.max_staleness, rules.max_prompt_failures)
        self.pace = Pace(begin_s=clock())
        self.meter = Meter()
        self.batch: TrainBatch | None = None
        self.blocked: Sequence[Block] = ()  # what kept the last admission back
        self.dropped_since_admission: Counter[tuple[str, str]] = Counter()
        self.launching = True
        self.next_wake_s: float | None = None  # when an admission may become possible without a report
        self.quota_records: list[dict[str, Any]] = []  # of finished batches: step, source -> target, admitted
        self.late_reports = 0
        self.next_group = 0
        self.handed: dict[int, list[TrajectoryMeta]] = {}  # mini-batch -> admitted, not trained yet
        self._journal = Journal(sink, wall)
        self._payload_lost: set[str] = set()  # unfinished trajectories whose payload is already gone
        self._releasable: list[str] = []
        self._last_metrics: dict[str, float] = {}

    # -- launching

    def acquire(self, worker: str, max_groups: int) -> list[Ticket]:
        """Tickets for at most ``max_groups`` prompt groups, as slots are free; [] when none is or after a stop."""
        tickets: list[Ticket] = []
        if not self.launching:
            return tickets
        outstanding = self.outstanding()
        while len(tickets) < max_groups:
            source = self.pacing.next_source(outstanding, self._starving())
            if source is None:
                break
            tickets.append(self._launch(source, worker))
            outstanding[source] += self.rules.group_size
        return tickets

    def outstanding(self) -> dict[str, int]:
        """Per source, what holds slots: see :mod:`knit.buffer.pacing`."""
        usable = self.version - self.rules.max_staleness
        held = self.batch.by_source if self.batch else Counter[str]()
        return {
            source: self.ledger.unfinished(source, usable) + self.pool.by_source[source] + held[source]
            for source in self.rules.sources
        }

    def source_exhausted(self, source: str) -> None:
        """The source has no more prompts; what waits for its retry may still be launched."""
        self._known(source)
        self.pacing.exhausted.add(source)
        self._journal.write("source_exhausted", source=source, prompts=self.pacing.cursors[source])

    def stop_launching(self) -> None:
        self.launching = False

    def _launch(self, source: str, worker: str) -> Ticket:
        visit, now_s = self.pacing.next_prompt(source), self.clock()
        ticket = Ticket(
            group_id=self.next_group,
            source=source,
            prompt_index=visit.index,
            rollout_step=self.step + (self.batch is None),
            attempt=visit.attempt,
            size=self.rules.group_size,
            version=self.version,
            launched_s=now_s,
            deadline_s=now_s + self.rules.group_timeout_s,
        )
        self.next_group += 1
        self.ledger.launch(ticket, worker, visit.failures)
        self._journal.launch(ticket, worker)
        return ticket

    def _starving(self) -> bool:
        """The batch waits, nothing that could help is in flight."""
        if self.batch is None or self.batch.complete or not self.blocked:
            return False
        usable = self.version - self.rules.max_staleness
        return not any(self.ledger.unfinished(source, usable) for source in self.rules.sources)

    # -- reports of the rollout workers

    def report(self, worker: str, completions: Sequence[Completion], groups: Sequence[GroupReport]) -> None:
        """Take in what ended. Reports of groups that were given up meanwhile are ignored, their payload released."""
        for completion in completions:
            self._completed(completion)
        for group in groups:
            self._judged(group)
        self._note_whole()

    def worker_lost(self, worker: str, error: str) -> None:
        """Its unfinished trajectories end as lost; their prompts are launched again, or quarantined."""
        for group in [g for g in self.ledger.open.values() if g.worker == worker]:
            for trajectory_id in self.ledger.members(group, UNFINISHED):
                self._lose(group, trajectory_id, "worker", error)
            self.ledger.close(group.ticket.group_id)
            self._launch_again(group, failed=True)

    def payload_lost(self, trajectory_ids: Iterable[str]) -> None:
        """Payload is gone. Ready trajectories give their slot back; raises RunError if one is already admitted."""
        admitted = []
        for trajectory_id in trajectory_ids:
            live = self.ledger.live.get(trajectory_id)
            if live is None:
                continue
            if live.state is State.ADMITTED:
                admitted.append(trajectory_id)
            elif live.state is State.READY:
                self._take_ready(trajectory_id)
                self._lose(live.group, trajectory_id, "payload")
            else:
                self._payload_lost.add(trajectory_id)
        if admitted:
            raise RunError(
                f"the payload of admitted trajectories is lost: {explain.shorten(admitted)}; "
                "their train batch cannot go on"
            )

    def _completed(self, completion: Completion) -> None:
        live = self.ledger.live.get(completion.trajectory_id)
        if live is None:
            self._late(int(completion.trajectory_id.split(".")[0]), completion.trajectory_id)
            return
        self.ledger.move(completion.trajectory_id, State.COMPLETED)
        self.meter.completed(completion)
        self._journal.completion(live.group.ticket, completion.trajectory_id, completion.versions, completion.retries)

    def _judged(self, report: GroupReport) -> None:
        group = self.ledger.open.get(report.group_id)
        if group is None:
            self._late(report.group_id, f"group {report.group_id}")
            self._release(report.accepted)
            return
        self._check_report(group, report)
        self.meter.judged(group.ticket.source, report)
        stale = False
        for meta in report.accepted:
            stale |= self._accept(group, meta)
        for trajectory_id, reason in report.dropped.items():
            self._drop(group, trajectory_id, reason, report.error)
        self.ledger.close(report.group_id)
        if report.retry:
            self._launch_again(group, failed=True)
        elif stale and self.rules.relaunch_stale:
            self._launch_again(group, failed=False)

    def _accept(self, group: Group, meta: TrajectoryMeta) -> bool:
        """Into the pool. True: it was over-stale already and is dropped."""
        trajectory_id = meta.trajectory_id
        if self.ledger.live[trajectory_id].state in SAMPLING:
            self._completed(Completion(trajectory_id, meta.completed_s, meta.version_ranges))
        if trajectory_id in self._payload_lost:
            self._payload_lost.discard(trajectory_id)
            self._lose(group, trajectory_id, "payload")
        elif meta.oldest_version < self.version - self.rules.max_staleness:
            self._drop(group, trajectory_id, "stale")
            self._release([meta])
            return True
        else:
            self.ledger.move(trajectory_id, State.READY)
            self.pool.add(meta)
            self._journal.accept(group.ticket, meta)
        return False

    def _check_report(self, group: Group, report: GroupReport) -> None:
        ids = [t.trajectory_id for t in report.accepted] + list(report.dropped)
        if sorted(ids) != sorted(group.ticket.trajectory_ids()):
            raise RunError(
                f"the report of group {report.group_id} ({group.worker}) names {explain.shorten(ids)}, its ticket "
                f"{explain.shorten(group.ticket.trajectory_ids())}: each member must be in it once"
            )
        for meta in report.accepted:
            if meta.source != group.ticket.source or not meta.version_ranges:
                raise RunError(
                    f"trajectory {meta.trajectory_id} was accepted for source {meta.source!r} with "
                    f"{len(meta.version_ranges)} version ranges; its ticket is of {group.ticket.source!r}"
                )

    def _late(self, group_id: int, what: str) -> None:
        if group_id >= self.next_group:
            raise RunError(f"{what} was reported, but no such group was launched")
        self.late_reports += 1
        self._journal.write("late_report", what=what)

    # -- the train batch

    def begin_batch(self, step: int) -> None:
        """Start to admit train batch ``step`` from the published version; call it right after ``published``."""
        if self.batch is not None:
            raise RunError(f"train batch {step} begins, but train batch {self.batch.step} is not published yet")
        if step <= self.step:
            raise RunError(f"train batch {step} begins after train batch {self.step}: steps only grow")
        self.step = step
        self._drop_stale()
        self.batch = TrainBatch(
            self.rules,
            step,
            self.version,
            self.clock(),
            start=dict(self.pool.by_source),
            earlier={s: (p.launched, p.sampled) for s, p in self.ledger.steps.items() if s < step},
        )
        self._journal.write("batch_start", step=step, version=self.version)
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
        blocks, entries = batch.blocks(self.pool, self.ledger.steps), None
        if not blocks:
            self.next_wake_s = batch.hold_until(self.pool, self.pace, now_s)
            if self.next_wake_s is not None:
                blocks = [Block("mix", 0, f"even mix: waits up to {self.next_wake_s - now_s:.1f} s for slower sources")]
            else:
                entries = batch.select(self.pool)
                blocks = [] if entries else batch.guard_blocks(self.pool)
        self.blocked = blocks
        if entries is None:
            self.meter.waits.blocked(now_s, blocks)
            self._check_feasible()
            return None
        self.meter.waits.admitted(now_s)
        return self._admit(batch, entries, now_s)

    def training_started(self, step: int, mini_batch: int, chunk: int) -> None:
        self._journal.write("train_start", step=step, mini_batch=mini_batch, chunk=chunk)

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
        self.meter.trained(trajectories, batch.train_version, mini_batch)
        self._release(trajectories)
        batch.trained_mini_batches += 1
        self._journal.write("train_end", step=step, mini_batch=mini_batch)

    def publish_started(self, version: int) -> None:
        """Generation pauses: what is being sampled is paused."""
        self._journal.write("publish_start", version=version)
        self._pause(State.RUNNING, State.PAUSED, "pause")

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
        self.version = version
        self._journal.write("publish", version=version)
        self._pause(State.PAUSED, State.RUNNING, "resume")
        if batch is not None:
            self._close(batch)
        self._drop_stale()

    def _admit(self, batch: TrainBatch, entries: Sequence[Entry], now_s: float) -> Chunk:
        for e in entries:
            staleness.check(e.meta, e.oldest_version, e.newest_version, batch.train_version, self.rules.max_staleness)
            self.ledger.move(e.meta.trajectory_id, State.ADMITTED)
        trajectories = tuple([e.meta for e in entries])
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
        batch.admit(entries)
        self.handed.setdefault(chunk.mini_batch, []).extend(trajectories)
        self.dropped_since_admission.clear()
        self.pace.chunk_admitted(now_s)
        if chunk.last_of_batch:
            self.pace.final_admission(now_s)
        self._journal.admission(chunk)
        return chunk

    def _close(self, batch: TrainBatch) -> None:
        self._last_metrics = self.meter.close(batch, self.pool, self.ledger)
        sources = {
            name: {"target": quota.minimum, "admitted": batch.by_source[name]}
            for name, quota in self.rules.sources.items()
        }
        self.quota_records.append({"step": batch.step, "sources": sources})
        self.meter, self.batch, self.blocked = Meter(), None, ()
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
        if sum(self.dropped_since_admission.values()) > budget:
            raise RunError(explain.refill_budget(self))
        reason = explain.infeasible(self)
        if reason:
            raise RunError(reason)

    def _check_deadlines(self, now_s: float) -> None:
        """Deadlines rise in launch order, so that the first open group tells."""
        first = next(iter(self.ledger.open.values()), None)
        if first is not None and now_s > first.ticket.deadline_s:
            raise RunError(explain.overdue(self, now_s))

    # -- ends

    def finish(self) -> dict[str, Any]:
        """Drop all that has not ended as ``left_over`` and return the counts: launched is the sum of the ends."""
        self.stop_launching()
        self._release(self.pool)
        for trajectory_id, live in list(self.ledger.live.items()):
            self._drop(live.group, trajectory_id, "left_over")
        for group_id in list(self.ledger.open):
            self.ledger.close(group_id)
        self.pool = ReadyPool(self.rules.groups, self.rules.key)
        self.batch, self.handed = None, {}
        self.ledger.check()
        return self.counts()

    def drain_releasable(self) -> list[str]:
        """Unit keys of trajectories that ended since the last call: their payload may be deleted."""
        units, self._releasable = self._releasable, []
        return units

    def _drop(self, group: Group, trajectory_id: str, reason: str, error: str | None = None) -> None:
        self.ledger.move(trajectory_id, State.DROPPED, reason)
        self.dropped_since_admission[reason, group.ticket.source] += 1
        self._payload_lost.discard(trajectory_id)
        self._journal.drop(group.ticket, trajectory_id, reason, error)

    def _lose(self, group: Group, trajectory_id: str, reason: str, error: str | None = None) -> None:
        self.ledger.move(trajectory_id, State.LOST, reason)
        self._payload_lost.discard(trajectory_id)
        self._journal.lost(group.ticket, trajectory_id, reason, error)

    def _drop_stale(self) -> None:
        again: dict[int, Group] = {}
        stale = self.pool.pop_older_than(self.version - self.rules.max_staleness)
        for meta in stale:
            group = again[meta.group_id] = self.ledger.live[meta.trajectory_id].group
            self._drop(group, meta.trajectory_id, "stale")
        self._release(stale)
        if self.rules.relaunch_stale:
            for group in again.values():
                self._launch_again(group, failed=False)

    def _launch_again(self, group: Group, failed: bool) -> None:
        ticket = group.ticket
        visit = PromptVisit(ticket.prompt_index, ticket.attempt, group.failures)
        if not self.pacing.again(ticket.source, visit, failed):
            self._journal.write(
                "quarantine", source=ticket.source, prompt_index=ticket.prompt_index, attempts=ticket.attempt + 1
            )

    def _take_ready(self, trajectory_id: str) -> None:
        self.pool.discard(next(m for m in self.pool if m.trajectory_id == trajectory_id))

    def _release(self, trajectories: Iterable[TrajectoryMeta]) -> None:
        self._releasable += [s.unit for meta in trajectories for s in meta.segments]

    def _pause(self, before: State, after: State, event: str) -> None:
        moved = list(self.ledger.in_state(before))
        for trajectory_id in moved:
            self.ledger.move(trajectory_id, after)
        self._journal.write(event, trajectories=moved)

    def _known(self, source: str) -> None:
        if source not in self.rules.sources:
            raise RunError(f"source {source!r} is unknown; the run has {', '.join(self.rules.sources)}")

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
            "late_reports": self.late_reports,
        }

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """JSON-able. Exact between ``published`` and ``begin_batch``: see :mod:`knit.buffer.state`."""
        return state.save(self)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Into a new buffer. Raises RunError if this one has launched anything."""
        state.load(self, saved)
