"""Feasibility guards (paper §5.1, equation 4), in exact integers.

For a group G of quotas with final minima τ_i and a batch of τ_0 trajectories, a candidate with cumulative
counts b_i (b_0 in all) may be admitted only if Σ_{i∈G} (τ_i − b_i)⁺ ≤ τ_0 − b_0. ``Room`` keeps both sides
while a candidate is put together, so that asking about one more trajectory costs O(groups).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from knit.buffer.quotas import QuotaGroup

Cell = tuple[str, ...]
"""A trajectory's class in every quota group, in the order of the groups; the first group is the source."""


def deficit(group: QuotaGroup, counts: Mapping[str, int]) -> int:
    """Σ (τ_i − b_i)⁺: the slots that the group's unmet minima still need."""
    return sum(max(0, quota.minimum - counts.get(name, 0)) for name, quota in group.quotas.items())


def holds(group: QuotaGroup, counts: Mapping[str, int], size: int, admitted: int) -> bool:
    """Equation (4) for one group, and no class above its maximum."""
    within = all(counts.get(name, 0) <= quota.maximum for name, quota in group.quotas.items())
    return within and deficit(group, counts) <= size - admitted


class Room:
    """What a growing candidate may still take. Taking never re-opens a cell that was refused."""

    def __init__(self, groups: Sequence[QuotaGroup], counts: Sequence[Mapping[str, int]], size: int, admitted: int):
        """``counts[k]`` is the admitted count per class of group k; ``admitted`` is b_0."""
        self.free = size - admitted
        self.needs = [
            {name: max(0, q.minimum - have.get(name, 0)) for name, q in group.quotas.items()}
            for group, have in zip(groups, counts, strict=True)
        ]
        self.headroom = [
            {name: q.maximum - have.get(name, 0) for name, q in group.quotas.items()}
            for group, have in zip(groups, counts, strict=True)
        ]
        self.slack = [self.free - sum(needs.values()) for needs in self.needs]

    def allows(self, cell: Cell) -> bool:
        """May one more trajectory of this cell be admitted without making any final quota unattainable?"""
        for k, name in enumerate(cell):
            if self.headroom[k].get(name, self.free) <= 0:
                return False
            if self.slack[k] <= 0 and not self.needs[k].get(name, 0):
                return False
        return True

    def cost(self, cell: Cell) -> int:
        """In how many groups the cell is surplus, that is, uses up slack. Never falls while taking."""
        return sum(not self.needs[k].get(name, 0) for k, name in enumerate(cell))

    def take(self, cell: Cell) -> None:
        for k, name in enumerate(cell):
            if self.needs[k].get(name, 0):
                self.needs[k][name] -= 1
            else:
                self.slack[k] -= 1
            if name in self.headroom[k]:
                self.headroom[k][name] -= 1
        self.free -= 1

    def at_most(self, available: Mapping[Cell, int]) -> int:
        """Upper bound of how many of the available can be taken at once; exact when there is one group."""
        bound = sum(available.values())
        for k in range(len(self.needs)):
            by_class: dict[str, int] = {}
            for cell, count in available.items():
                by_class[cell[k]] = by_class.get(cell[k], 0) + count
            needed = surplus = 0
            for name, count in by_class.items():
                count = min(count, max(0, self.headroom[k].get(name, count)))
                need = min(count, self.needs[k].get(name, 0))
                needed += need
                surplus += count - need
            bound = min(bound, needed + min(surplus, max(0, self.slack[k])))
        return bound


class NoRoomLimit(Room):
    """No guards: everything ready may be taken (the policies ``on_completion`` and ``no_guards``)."""

    def allows(self, cell: Cell) -> bool:
        return True

    def at_most(self, available: Mapping[Cell, int]) -> int:
        return sum(available.values())
