"""Feasibility guards (paper §5.1, equation 4), in exact integers.

For a group G of quotas with final minima τ_i and a batch of τ_0 trajectories, a candidate with cumulative
counts b_i (b_0 in all) may be admitted only if Σ_{i∈G} (τ_i − b_i)⁺ ≤ τ_0 − b_0. ``Room`` keeps both sides
while a candidate is put together, so that one more trajectory costs O(groups).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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


@dataclass(slots=True)
class GroupRoom:
    """One side of equation (4) less the other: slots of the batch that are not reserved for unmet minima."""

    slack: int


@dataclass(slots=True)
class ClassRoom:
    """What one class may still take: ``need`` without using slack, ``headroom`` in all."""

    group: GroupRoom
    need: int
    headroom: int


Rooms = tuple[ClassRoom, ...]
"""Of one cell: its class in every group."""


class Room:
    """What a growing candidate may still take. A cell that was refused once stays refused."""

    def __init__(
        self,
        groups: Sequence[QuotaGroup],
        counts: Sequence[Mapping[str, int]],
        size: int,
        admitted: int,
        guarded: bool = True,
    ):
        """``counts[k]`` is the admitted count per class of group k, ``admitted`` is b_0. Unguarded: all is allowed."""
        self.free = size - admitted
        self.needs = [
            {name: max(0, quota.minimum - have.get(name, 0)) for name, quota in group.quotas.items()}
            for group, have in zip(groups, counts, strict=True)
        ]
        self.slack = [self.free - sum(needs.values()) if guarded else self.free for needs in self.needs]
        self._groups = [GroupRoom(slack) for slack in self.slack]
        self._classes: list[dict[str, ClassRoom]] = [{} for _ in groups]
        if guarded:
            for k, group in enumerate(groups):
                self._classes[k] = {
                    name: ClassRoom(self._groups[k], self.needs[k][name], quota.maximum - counts[k].get(name, 0))
                    for name, quota in group.quotas.items()
                }

    def rooms(self, cell: Cell) -> Rooms:
        """The live rooms of a cell; unlisted classes have no minimum and no maximum."""
        return tuple([self._class(k, name) for k, name in enumerate(cell)])

    def at_most(self, available: Mapping[Cell, int]) -> int:
        """Upper bound of how many of the available can be taken at once; exact when there is one group."""
        bound = sum(available.values())
        for k, group in enumerate(self._groups):
            by_class: dict[str, int] = {}
            for cell, count in available.items():
                by_class[cell[k]] = by_class.get(cell[k], 0) + count
            needed = surplus = 0
            for name, count in by_class.items():
                room = self._class(k, name)
                count = min(count, max(0, room.headroom))
                need = min(count, room.need)
                needed += need
                surplus += count - need
            bound = min(bound, needed + min(surplus, max(0, group.slack)))
        return bound

    def _class(self, k: int, name: str) -> ClassRoom:
        room = self._classes[k].get(name)
        if room is None:
            room = self._classes[k][name] = ClassRoom(self._groups[k], 0, self.free)
        return room


def take(rooms: Rooms, wanted: int = 1) -> int:
    """Take up to ``wanted`` trajectories of one cell; the count that leaves every final quota attainable."""
    for room in rooms:
        wanted = min(wanted, room.headroom, room.need + max(0, room.group.slack))
    if wanted <= 0:
        return 0
    for room in rooms:
        room.headroom -= wanted
        surplus = max(0, wanted - room.need)
        room.need -= wanted - surplus
        room.group.slack -= surplus
    return wanted


def cost(rooms: Rooms) -> int:
    """In how many groups the cell is surplus, that is, uses up slack. Never falls while a candidate grows."""
    return sum(not room.need for room in rooms)
