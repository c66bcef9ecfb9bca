"""The life of every trajectory: each one that is launched ends exactly once, and the counts always add up.

    running ⇄ paused → completed → ready → admitted → trained
       └─────────┴─────────┴─────────┴────────┴─────▶ dropped(reason) | lost(reason)

launched = running + paused + completed + ready + admitted + trained + dropped + lost, at any time.
``Ledger.move`` enforces the arrows; an illegal one raises RunError.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from knit.errors import RunError
from knit.types import ENDS, State, Ticket, TrajectoryMeta

_GONE = {State.DROPPED, State.LOST}
ARROWS: dict[State, set[State]] = {
    State.RUNNING: {State.PAUSED, State.COMPLETED} | _GONE,
    State.PAUSED: {State.RUNNING, State.COMPLETED} | _GONE,
    State.COMPLETED: {State.READY} | _GONE,
    State.READY: {State.ADMITTED} | _GONE,
    State.ADMITTED: {State.TRAINED} | _GONE,
    State.TRAINED: set(),
    State.DROPPED: set(),
    State.LOST: set(),
}
SAMPLING = frozenset({State.RUNNING, State.PAUSED})
UNFINISHED = SAMPLING | {State.COMPLETED}


@dataclass(slots=True)
class Group:
    """The trajectories of one ticket. ``open`` until its verdict is known or its worker is lost."""

    ticket: Ticket
    worker: str
    failures: int  # earlier tickets of this prompt that failed for reasons of infrastructure
    open: bool = True
    alive: int = 0  # members that have not ended


@dataclass(slots=True)
class Live:
    """A trajectory that has not ended."""

    group: Group
    state: State = State.RUNNING

    @property
    def source(self) -> str:
        return self.group.ticket.source


@dataclass(slots=True)
class StepProgress:
    """Of one rollout step: how many were launched, and how many were sampled to their end (or ended)."""

    launched: int = 0
    sampled: int = 0


@dataclass(slots=True)
class Ledger:
    """Single owner of the states. All counts are kept incrementally: every operation is O(1) per trajectory."""

    sources: tuple[str, ...]
    launched: Counter[str] = field(default_factory=Counter)  # by source
    trained: Counter[str] = field(default_factory=Counter)
    dropped: Counter[tuple[str, str]] = field(default_factory=Counter)  # by (reason, source)
    lost: Counter[tuple[str, str]] = field(default_factory=Counter)
    groups: dict[int, Group] = field(default_factory=dict)  # those with live members
    open: dict[int, Group] = field(default_factory=dict)  # in launch order
    steps: dict[int, StepProgress] = field(default_factory=dict)  # rollout steps with trajectories being sampled
    live: dict[str, Live] = field(default_factory=dict)
    _states: dict[str, dict[State, int]] = field(default_factory=dict)
    _unfinished: dict[str, Counter[int]] = field(default_factory=dict)  # by launch version

    def __post_init__(self) -> None:
        self._states = {source: dict.fromkeys(State, 0) for source in self.sources}
        self._unfinished = {source: Counter() for source in self.sources}

    def launch(self, ticket: Ticket, worker: str, failures: int) -> Group:
        group = Group(ticket, worker, failures, alive=ticket.size)
        self.groups[ticket.group_id] = self.open[ticket.group_id] = group
        for trajectory_id in ticket.trajectory_ids():
            self.live[trajectory_id] = Live(group)
        self.launched[ticket.source] += ticket.size
        self._states[ticket.source][State.RUNNING] += ticket.size
        self._unfinished[ticket.source][ticket.version] += ticket.size
        self.steps.setdefault(ticket.rollout_step, StepProgress()).launched += ticket.size
        return group

    def move(self, trajectory_id: str, state: State, reason: str = "") -> Live:
        """Follow one arrow. Raises RunError for a trajectory that is unknown or has ended, or an illegal arrow."""
        live = self.live.get(trajectory_id)
        if live is None:
            raise RunError(f"trajectory {trajectory_id} cannot become {state}: it is unknown or has already ended")
        before, ticket = live.state, live.group.ticket
        if state not in ARROWS[before]:
            raise RunError(f"trajectory {trajectory_id} cannot go from {before} to {state}")
        counts = self._states[ticket.source]
        counts[before] -= 1
        counts[state] += 1
        live.state = state
        if before in SAMPLING and state not in SAMPLING:
            self.steps[ticket.rollout_step].sampled += 1
        if before in UNFINISHED and state not in UNFINISHED:
            self._unfinished[ticket.source][ticket.version] -= 1
        if state in ENDS:
            self._end(trajectory_id, live, reason)
        return live

    def admit(self, trajectories: Sequence[TrajectoryMeta]) -> None:
        """``move`` of many ready trajectories to admitted, in one pass."""
        moved: Counter[str] = Counter([meta.source for meta in trajectories])
        for meta in trajectories:
            live = self.live.get(meta.trajectory_id)
            if live is None or live.state is not State.READY:
                raise RunError(f"trajectory {meta.trajectory_id} is admitted, but it is not ready")
            live.state = State.ADMITTED
        for source, count in moved.items():
            self._states[source][State.READY] -= count
            self._states[source][State.ADMITTED] += count

    def close(self, group_id: int) -> None:
        """The group's verdict is complete."""
        group = self.open.pop(group_id)
        group.open = False
        if not group.alive:
            del self.groups[group_id]

    def members(self, group: Group, states: Iterable[State]) -> list[str]:
        """Live members of a group that are in one of the states, by member number."""
        ids = group.ticket.trajectory_ids()
        return [t for t in ids if (live := self.live.get(t)) is not None and live.state in states]

    def in_state(self, state: State) -> list[str]:
        """O(live)."""
        return [t for t, live in self.live.items() if live.state is state]

    def count(self, state: State, source: str | None = None) -> int:
        if source is not None:
            return self._states[source][state]
        return sum(counts[state] for counts in self._states.values())

    def unfinished(self, source: str, since_version: int = 0) -> int:
        """Running, paused or completed ones of a source that were launched at ``since_version`` or later."""
        counts = self._states[source]
        total = counts[State.RUNNING] + counts[State.PAUSED] + counts[State.COMPLETED]
        if since_version <= 0 or not total:
            return total
        return total - sum(n for version, n in self._unfinished[source].items() if version < since_version)

    def forget_finished(self) -> None:
        """Let go of rollout steps and launch versions of which nothing is being sampled any more."""
        self.steps = {step: p for step, p in self.steps.items() if p.sampled < p.launched}
        self._unfinished = {source: +counts for source, counts in self._unfinished.items()}

    def restore(
        self,
        launched: Counter[str],
        trained: Counter[str],
        dropped: Counter[tuple[str, str]],
        lost: Counter[tuple[str, str]],
        ready: dict[str, Live],
    ) -> None:
        """Fill an empty ledger with the counts of an earlier run and its ready trajectories."""
        self.launched, self.trained, self.dropped, self.lost = launched, trained, dropped, lost
        self.live = dict(ready)
        for live in ready.values():
            live.group.alive += 1
            self.groups[live.group.ticket.group_id] = live.group
            self._states[live.source][State.READY] += 1
        for source, count in trained.items():
            self._states[source][State.TRAINED] += count
        for counts, state in ((dropped, State.DROPPED), (lost, State.LOST)):
            for (_, source), count in counts.items():
                self._states[source][state] += count

    def check(self) -> None:
        """Raise RunError unless every trajectory is in exactly one state."""
        states = {state: self.count(state) for state in State}
        total = sum(self.launched.values())
        if total != sum(states.values()) or min(states.values()) < 0:
            raise RunError(f"trajectory counts do not add up: launched {total}, states {states}")
        by_kind = {
            State.TRAINED: sum(self.trained.values()),
            State.DROPPED: sum(self.dropped.values()),
            State.LOST: sum(self.lost.values()),
        }
        for state, count in by_kind.items():
            if states[state] != count:
                raise RunError(f"{states[state]} {state} trajectories, but {count} by kind")
        if len(self.live) != total - sum(states[state] for state in ENDS):
            raise RunError(f"{len(self.live)} live trajectories, states {states}")

    def _end(self, trajectory_id: str, live: Live, reason: str) -> None:
        source = live.source
        if live.state is State.TRAINED:
            self.trained[source] += 1
        elif live.state is State.DROPPED:
            self.dropped[reason, source] += 1
        else:
            self.lost[reason, source] += 1
        del self.live[trajectory_id]
        live.group.alive -= 1
        if not live.group.alive and not live.group.open:
            del self.groups[live.group.ticket.group_id]
