"""Which ready trajectories form the candidate. Deterministic: equal inputs give equal candidates.

The default takes the oldest launch first among what keeps every guard true, and looks for a feasible
candidate before giving up: with one quota group the greedy walk is complete (a trajectory either fills a
deficit, which costs no slack, or uses one unit of it, whatever the order); with several groups a second walk
prefers what uses the least slack. Nothing is taken out of the pool before a candidate is complete.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from heapq import heapify, heappop, heapreplace

from knit.buffer.guards import Cell, Room, Rooms, cost, take
from knit.buffer.ready import Entry, Key, ReadyPool
from knit.types import TrajectoryMeta

Score = Callable[[Cell, Rooms], int]
"""What ranks before the selection key; must never fall while a candidate grows."""


def oldest(meta: TrajectoryMeta, arrival: int) -> int:
    """Oldest launch first: group ids count launches."""
    return meta.group_id << 20 | meta.member


def fifo(meta: TrajectoryMeta, arrival: int) -> int:
    """First ready first."""
    return arrival


def longest(meta: TrajectoryMeta, arrival: int) -> int:
    """Most tokens first."""
    return -meta.tokens


KEYS: dict[str, Key] = {"oldest": oldest, "fifo": fifo, "longest": longest}


def select(
    pool: ReadyPool, make_room: Callable[[], Room], size: int, minima: Mapping[str, int] | None = None
) -> tuple[list[Entry] | None, bool]:
    """Take ``size`` entries that keep every guard true out of the pool; None (pool unchanged) if none are found.

    ``minima`` (of the source group) asks for an even mix: the source that has filled the least of its minimum
    goes first, what lies beyond the minima by age. The second value says whether a guard refused anything.
    """
    room = make_room()
    if room.at_most(pool.counts) < size:
        return None, True
    walk = _Walk(pool, room, size)
    done = walk.ranked(_even_mix(minima)) if minima else walk.merged()
    refused = walk.refused
    if not done and len(room.slack) > 1:
        walk = _Walk(pool, make_room(), size)
        done = walk.ranked(lambda cell, rooms: cost(rooms))
    if not done:
        return None, refused
    pool.take_first(Counter([entry.cell for entry in walk.taken]))
    return walk.taken, refused


class _Walk:
    """A greedy merge over the cells: O(size · log cells), each cell in its own order."""

    def __init__(self, pool: ReadyPool, room: Room, size: int):
        self.size = size
        self.taken: list[Entry] = []
        self.refused = False
        self._lanes = {cell: (room.rooms(cell), iter(entries)) for cell, entries in pool.cells.items() if entries}

    def merged(self) -> bool:
        """By selection key alone. True if the candidate is complete."""
        size, taken, lanes = self.size, self.taken, self._lanes
        heads = [next(entries) for _, entries in lanes.values()]
        heapify(heads)
        while heads and len(taken) < size:
            entry = heads[0]
            rooms, entries = lanes[entry.cell]
            if not take(rooms):
                heappop(heads)  # a cell that is refused once stays refused
                self.refused = True
                continue
            taken.append(entry)
            for following in entries:
                heapreplace(heads, following)
                break
            else:
                heappop(heads)
        return len(taken) == size

    def ranked(self, score: Score) -> bool:
        """By score, then by selection key. Scores that grew meanwhile are looked at again before they count."""
        heads: list[tuple[int, Entry]] = []
        for cell, (rooms, entries) in self._lanes.items():
            heads.append((score(cell, rooms), next(entries)))
        heapify(heads)
        while heads and len(self.taken) < self.size:
            rank, entry = heads[0]
            rooms, entries = self._lanes[entry.cell]
            now = score(entry.cell, rooms)
            if now != rank:
                heapreplace(heads, (now, entry))
            elif not take(rooms):
                heappop(heads)
                self.refused = True
            else:
                self.taken.append(entry)
                for following in entries:
                    heapreplace(heads, (score(entry.cell, rooms), following))
                    break
                else:
                    heappop(heads)
        return len(self.taken) == self.size


def _even_mix(minima: Mapping[str, int]) -> Score:
    """Share of the source's minimum that is filled, in whole 1e-9: an order, so rounding cannot hurt."""

    def score(cell: Cell, rooms: Rooms) -> int:
        need, minimum = rooms[0].need, minima.get(cell[0], 0)
        return (minimum - need) * 10**9 // minimum if need else 10**9

    return score
