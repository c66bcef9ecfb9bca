"""The simulated rollout side: engine slots, and a generation clock that slows down under load and can be paused.

All running trajectories advance by the generation clock, at ``(1 + g) / (1 + g·running/slots)`` of the wall clock:
g = 0 is a constant speed, g > 0 lets the last ones of a rollout step run faster, as decoding does in small batches.
A token carries the weight version that was published last when it was generated.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from knit.replay.trace import Rollout
from knit.types import Ticket, VersionRange


@dataclass(frozen=True, slots=True)
class Finished:
    ticket: Ticket
    member: int
    rollout: Rollout
    versions: tuple[VersionRange, ...]


@dataclass(frozen=True, slots=True)
class _Flight:
    ticket: Ticket
    member: int
    rollout: Rollout
    start: float  # on the generation clock


class Generation:
    """``now_s`` is the wall clock; at most ``slots`` trajectories run, the others wait in launch order."""

    def __init__(self, slots: int, slowdown: float):
        self.slots, self.slowdown = slots, slowdown
        self.now_s = 0.0
        self.paused = False
        self.busy_slot_s = 0.0  # integral of running trajectories over the wall clock, pauses left out
        self._clock = 0.0
        self._published_at: list[float] = []  # generation clock at the publish of version k + 1
        self._waiting: deque[tuple[Ticket, int, Rollout]] = deque()
        self._running: list[tuple[float, int, _Flight]] = []  # heap by end on the generation clock
        self._started = 0

    @property
    def in_flight(self) -> int:
        return len(self._running) + len(self._waiting)

    @property
    def free(self) -> int:
        return max(0, self.slots - self.in_flight)

    @property
    def speed(self) -> float:
        if self.paused:
            return 0.0
        return (1 + self.slowdown) / (1 + self.slowdown * len(self._running) / self.slots)

    def submit(self, ticket: Ticket, rollouts: Sequence[Rollout]) -> None:
        self._waiting.extend((ticket, member, rollout) for member, rollout in enumerate(rollouts))
        self._fill()

    def next_finish_s(self) -> float:
        """When the next trajectory ends, if nothing changes before; infinite if none can."""
        if self.paused or not self._running:
            return inf
        return self.now_s + max(0.0, self._running[0][0] - self._clock) / self.speed

    def advance(self, now_s: float) -> None:
        passed_s = now_s - self.now_s
        if not self.paused:
            self._clock += passed_s * self.speed
            self.busy_slot_s += passed_s * len(self._running)
        self.now_s = now_s

    def finish(self) -> Finished:
        """The trajectory that ends now."""
        end, _, flight = heapq.heappop(self._running)
        self._clock = max(self._clock, end)
        self._fill()
        return Finished(flight.ticket, flight.member, flight.rollout, self._versions(flight))

    def published(self) -> None:
        """From now on tokens carry the next version."""
        self._published_at.append(self._clock)

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self.slots:
            flight = _Flight(*self._waiting.popleft(), self._clock)
            self._started += 1
            heapq.heappush(self._running, (self._clock + flight.rollout.duration_s, self._started, flight))

    def _versions(self, flight: _Flight) -> tuple[VersionRange, ...]:
        ranges, done, rollout = [], 0, flight.rollout
        version = bisect_right(self._published_at, flight.start)
        for at in self._published_at[version:]:
            by_then = rollout.tokens_by(at - flight.start)
            if by_then > done:
                ranges.append(VersionRange(version, done, by_then, self.now_s))
                done = by_then
            version += 1
        if done < rollout.tokens:
            ranges.append(VersionRange(version, done, rollout.tokens, self.now_s))
        return tuple(ranges)
