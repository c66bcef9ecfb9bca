"""What comes back from rollout: every report moves trajectories to the ready pool or to their end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from knit.buffer.explain import shorten
from knit.buffer.journal import Journal
from knit.buffer.lifecycle import SAMPLING, UNFINISHED, Group, Ledger
from knit.buffer.meter import Meter
from knit.buffer.pacing import Pacing, PromptVisit
from knit.buffer.ready import ReadyPool
from knit.buffer.rules import Rules
from knit.errors import RunError
from knit.types import Completion, GroupReport, State, Ticket, TrajectoryMeta


class Intake:
    """Owns the trajectories from launch to their end: states, the ready pool, retries, payload to be deleted.

    Reports of groups that were given up meanwhile (a lost worker, the end of the run) are counted and ignored,
    their payload is released. Other reports about unknown or ended trajectories raise RunError.
    """

    def __init__(self, rules: Rules, journal: Journal, version: int):
        self.rules = rules
        self.version = version  # published
        self.journal = journal
        self.ledger = Ledger(tuple(rules.sources))
        self.pool = ReadyPool(rules.groups, rules.key)
        self.pacing = Pacing(
            rules.sources,
            rules.weights,
            rules.size,
            rules.max_staleness,
            rules.max_prompt_failures,
            rules.max_outstanding,
        )
        self.meter = Meter()
        self.next_group = 0
        self.late_reports = 0
        self.dropped_since_admission: Counter[tuple[str, str]] = Counter()  # by (reason, source)
        self._payload_lost: set[str] = set()  # unfinished trajectories whose payload is already gone
        self._releasable: list[str] = []

    @property
    def oldest_usable(self) -> int:
        """The oldest version whose tokens may still be trained."""
        return self.version - self.rules.max_staleness

    def launch(self, source: str, worker: str, rollout_step: int, now_s: float) -> Ticket:
        visit = self.pacing.next_prompt(source)
        ticket = Ticket(
            group_id=self.next_group,
            source=source,
            prompt_index=visit.index,
            rollout_step=rollout_step,
            attempt=visit.attempt,
            size=self.rules.group_size,
            version=self.version,
            launched_s=now_s,
            deadline_s=now_s + self.rules.group_timeout_s,
        )
        self.next_group += 1
        self.ledger.launch(ticket, worker, visit.failures)
        self.journal.launch(ticket, worker)
        return ticket

    def completed(self, completion: Completion) -> None:
        live = self.ledger.live.get(completion.trajectory_id)
        if live is None:
            self._late(int(completion.trajectory_id.split(".")[0]), f"trajectory {completion.trajectory_id}")
            return
        self.ledger.move(completion.trajectory_id, State.COMPLETED)
        self.meter.completed(completion)
        self.journal.completion(live.group.ticket, completion.trajectory_id, completion.versions, completion.retries)

    def judged(self, report: GroupReport) -> None:
        """The verdict on a group: its members become ready, or end."""
        group = self.ledger.open.get(report.group_id)
        if group is None:
            self._late(report.group_id, f"group {report.group_id}")
            self.release(report.accepted)
            return
        _check_report(group, report)
        self.meter.judged(group.ticket.source, report)
        stale = [self._accept(group, meta) for meta in report.accepted]
        for trajectory_id, reason in report.dropped.items():
            self.drop(group, trajectory_id, reason, report.error)
        self.ledger.close(report.group_id)
        if report.retry:
            self._launch_again(group, failed=True)
        elif any(stale) and self.rules.relaunch_stale:
            self._launch_again(group, failed=False)

    def worker_lost(self, worker: str, error: str) -> None:
        for group in [g for g in self.ledger.open.values() if g.worker == worker]:
            for trajectory_id in self.ledger.members(group, UNFINISHED):
                self._lose(group, trajectory_id, "worker", error)
            self.ledger.close(group.ticket.group_id)
            self._launch_again(group, failed=True)

    def payload_lost(self, trajectory_ids: Iterable[str]) -> None:
        admitted = []
        for trajectory_id in trajectory_ids:
            live = self.ledger.live.get(trajectory_id)
            if live is None:
                continue
            if live.state is State.ADMITTED:
                admitted.append(trajectory_id)
            elif live.state is State.READY:
                self.pool.discard(trajectory_id)
                self._lose(live.group, trajectory_id, "payload")
            else:
                self._payload_lost.add(trajectory_id)
        if admitted:
            raise RunError(
                f"the payload of admitted trajectories is lost: {shorten(admitted)}; their train batch cannot go on"
            )

    def drop_stale(self) -> None:
        """Ready trajectories beyond the bound end as ``stale``; by option their prompts are launched again."""
        stale = self.pool.pop_older_than(self.oldest_usable)
        groups: dict[int, Group] = {}
        for meta in stale:
            group = groups[meta.group_id] = self.ledger.live[meta.trajectory_id].group
            self.drop(group, meta.trajectory_id, "stale")
        self.release(stale)
        if self.rules.relaunch_stale:
            for group in groups.values():
                self._launch_again(group, failed=False)

    def drop_all(self, reason: str) -> None:
        """The end of the run: whatever has not ended is dropped."""
        self.release(self.pool)
        for trajectory_id, live in list(self.ledger.live.items()):
            self.drop(live.group, trajectory_id, reason)
        for group_id in list(self.ledger.open):
            self.ledger.close(group_id)
        self.pool = ReadyPool(self.rules.groups, self.rules.key)

    def drop(self, group: Group, trajectory_id: str, reason: str, error: str | None = None) -> None:
        self.ledger.move(trajectory_id, State.DROPPED, reason)
        self.dropped_since_admission[reason, group.ticket.source] += 1
        self._payload_lost.discard(trajectory_id)
        self.journal.drop(group.ticket, trajectory_id, reason, error)

    def pause(self, before: State, after: State, event: str) -> None:
        moved = self.ledger.in_state(before)
        for trajectory_id in moved:
            self.ledger.move(trajectory_id, after)
        self.journal.write(event, trajectories=moved)

    def release(self, trajectories: Iterable[TrajectoryMeta]) -> None:
        self._releasable += [s.unit for meta in trajectories for s in meta.segments]

    def drain_releasable(self) -> list[str]:
        units, self._releasable = self._releasable, []
        return units

    def _accept(self, group: Group, meta: TrajectoryMeta) -> bool:
        """Into the pool. True: it was over-stale already and is dropped."""
        trajectory_id = meta.trajectory_id
        if self.ledger.live[trajectory_id].state in SAMPLING:
            self.completed(Completion(trajectory_id, meta.completed_s, meta.version_ranges))
        if trajectory_id in self._payload_lost:
            self._lose(group, trajectory_id, "payload")
            return False
        if meta.oldest_version < self.oldest_usable:
            self.drop(group, trajectory_id, "stale")
            self.release([meta])
            return True
        self.ledger.move(trajectory_id, State.READY)
        self.pool.add(meta)
        self.journal.accept(group.ticket, meta)
        return False

    def _lose(self, group: Group, trajectory_id: str, reason: str, error: str | None = None) -> None:
        self.ledger.move(trajectory_id, State.LOST, reason)
        self._payload_lost.discard(trajectory_id)
        self.journal.lost(group.ticket, trajectory_id, reason, error)

    def _launch_again(self, group: Group, failed: bool) -> None:
        ticket = group.ticket
        visit = PromptVisit(ticket.prompt_index, ticket.attempt, group.failures)
        if not self.pacing.again(ticket.source, visit, failed):
            attempts = ticket.attempt + 1
            self.journal.write("quarantine", source=ticket.source, prompt_index=ticket.prompt_index, attempts=attempts)

    def _late(self, group_id: int, what: str) -> None:
        if group_id >= self.next_group:
            raise RunError(f"{what} was reported, but it was never launched")
        self.late_reports += 1
        self.journal.write("late_report", what=what)


def _check_report(group: Group, report: GroupReport) -> None:
    ids: Sequence[str] = [*(t.trajectory_id for t in report.accepted), *report.dropped]
    if sorted(ids) != sorted(group.ticket.trajectory_ids()):
        raise RunError(
            f"the report of group {report.group_id} ({group.worker}) names {shorten(ids)}, its ticket "
            f"{shorten(group.ticket.trajectory_ids())}: each member must be in it once"
        )
    for meta in report.accepted:
        if meta.source != group.ticket.source or not meta.version_ranges:
            raise RunError(
                f"trajectory {meta.trajectory_id} was accepted for source {meta.source!r} with "
                f"{len(meta.version_ranges)} version ranges; its ticket is of {group.ticket.source!r}"
            )
