"""What may be launched next: launching is part of admission.

Slots: ``used = Σ_j max(outstanding_j, τ_j)`` of ``(η+1)·N``, where outstanding_j counts what may still be
trained: running, paused, completed and ready trajectories of source j, and those admitted or trained but not
yet published. τ_j, the source's own quota, is always reserved: a surplus of one source never blocks another. A
prompt group of source i is launched iff

    outstanding_i < τ_i          (its own reservation), or
    used < (η+1)·N               (a slot is free; the last group may stick out by less than one group).

``max_outstanding`` lowers the number of slots below (η+1)·N; the reservations stay. ``max_ahead`` bounds what is not
admitted yet to what training needs next plus that many: what is sampled earlier than it is needed only grows stale.
What it needs is the rest of the open batch and, once that is ready, the next batch.

Slots come free on publish, drop or loss. With η = 0 it follows that after the final admission of a batch
nothing is launched before the publish: each source holds its τ_i, and all hold N. No deadlock: when nothing is
in flight and no launch is allowed, each source has τ_i and all together N ready or admitted, which is what
a guarded batch needs. (Maxima and further quota groups can need more: see ``starving``.)
Unfinished trajectories launched more than η versions ago do not count: they cannot be trained any more.

Order: the source with the largest unfilled reservation first; then the lowest outstanding per weight. Prompts
that came to nothing are launched again before new ones.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from knit.buffer.quotas import Quota, Share, exact


@dataclass(frozen=True, slots=True)
class PromptVisit:
    """One visit of a prompt: ``attempt`` counts its earlier tickets, ``failures`` those of infrastructure."""

    index: int
    attempt: int = 0
    failures: int = 0


def launch_weights(ratios: Mapping[str, Share]) -> dict[str, float]:
    """Shares of the free slots: by ratio; sources without a ratio share equally what the ratios leave."""
    shares = {name: exact(ratio) for name, ratio in ratios.items()}
    free = 1 - sum(shares.values())
    without = [name for name, share in shares.items() if not share]
    if without:
        return {name: float(share or free / len(without)) for name, share in shares.items()}
    return {name: float(share) for name, share in shares.items()}


@dataclass(slots=True)
class Pacing:
    """Cursors, retries and the choice of the next source. Knows nothing of trajectories, only counts."""

    quotas: Mapping[str, Quota]  # of the source group, every source listed
    weights: Mapping[str, float]
    size: int  # N
    max_staleness: int  # η
    max_failures: int
    max_outstanding: int | None = None  # slots, where fewer than (η+1)·N
    cursors: dict[str, int] = field(default_factory=dict)
    retries: dict[str, deque[PromptVisit]] = field(default_factory=dict)
    exhausted: set[str] = field(default_factory=set)
    quarantined: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.cursors = dict.fromkeys(self.quotas, 0) | self.cursors
        self.retries = {name: deque(self.retries.get(name, ())) for name in self.quotas}

    @property
    def slots(self) -> int:
        slots = (self.max_staleness + 1) * self.size
        return slots if self.max_outstanding is None else min(slots, self.max_outstanding)

    def used(self, outstanding: Mapping[str, int]) -> int:
        return sum(max(outstanding[name], quota.minimum) for name, quota in self.quotas.items())

    def next_source(self, outstanding: Mapping[str, int], starving: bool = False, ahead: bool = False) -> str | None:
        """The source whose prompt is launched next, or None if no slot is free. O(sources).

        ``ahead``: rollout is as far ahead of training as it may be; only unfilled reservations are launched.

        ``starving``: the batch lacks trajectories, nothing is in flight and no slot is free, because what is
        ready is of the wrong class. Then one group is launched beyond the slots.
        """
        used, worst, least = 0, 0, float("inf")
        behind: str | None = None  # with the largest unfilled reservation
        lightest: str | None = None  # with the least outstanding per weight
        for name, quota in self.quotas.items():
            out, low = outstanding[name], quota.minimum
            used += max(out, low)
            if name in self.exhausted and not self.can_launch(name):
                continue
            if out - low < worst:
                worst, behind = out - low, name
            weight = self.weights[name]
            if weight > 0 and out < (self.max_staleness + 1) * quota.maximum and out / weight < least:
                least, lightest = out / weight, name
        if behind is not None:
            return behind
        return lightest if starving or (used < self.slots and not ahead) else None

    def can_launch(self, source: str) -> bool:
        return source not in self.exhausted or bool(self.retries[source])

    def next_prompt(self, source: str) -> PromptVisit:
        """The next visit of a source that ``can_launch``; moves its cursor unless a prompt waits for its retry."""
        if self.retries[source]:
            return self.retries[source].popleft()
        visit = PromptVisit(self.cursors[source])
        self.cursors[source] += 1
        return visit

    def again(self, source: str, visit: PromptVisit, failed: bool) -> bool:
        """Queue the prompt of a visit that came to nothing. False: it failed too often and is quarantined."""
        failures = visit.failures + failed
        if failed and failures >= self.max_failures:
            self.quarantined[source] += 1
            return False
        self.retries[source].append(PromptVisit(visit.index, visit.attempt + 1, failures))
        return True

    def state_dict(self) -> dict[str, Any]:
        return {
            "cursors": dict(self.cursors),
            "retries": {s: [[v.index, v.attempt, v.failures] for v in q] for s, q in self.retries.items()},
            "exhausted": sorted(self.exhausted),
            "quarantined": dict(self.quarantined),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sources that the state does not know start at their first prompt; those unknown here are ignored."""
        self.cursors |= {s: n for s, n in state["cursors"].items() if s in self.quotas}
        for source, visits in state["retries"].items():
            if source in self.quotas:
                self.retries[source] = deque(PromptVisit(*v) for v in visits)
        self.exhausted = {s for s in state["exhausted"] if s in self.quotas}
        self.quarantined = Counter(state["quarantined"])
