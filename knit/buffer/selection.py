"""Which ready trajectories form the candidate. Deterministic: equal inputs give equal candidates.

The default takes the oldest launch first among what keeps every guard true, and looks for a feasible
candidate before giving up: with one quota group the greedy walk is complete (a trajectory either fills a
deficit, which costs no slack, or uses one unit of it, whatever the order); with several groups a second walk
prefers what uses the least slack. Nothing is taken out of the pool before a candidate is complete.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import Any

from knit.buffer.guards import Cell, Room, Rooms, cost, take
from knit.buffer.ready import Candidate, Entry, Key, ReadyPool
from knit.types import TrajectoryMeta

RUN = 32  # longest run that is looked for at once

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
) -> tuple[Candidate | None, bool]:
    """Take a candidate of ``size`` that keeps every guard true out of the pool; None (pool unchanged) if none is found.

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
    candidate = Candidate(walk.taken, Counter([entry.cell for entry in walk.taken]))
    pool.remove(candidate)
    return candidate, refused


@dataclass(slots=True)
class _Lane:
    """A cell's ready trajectories in selection order, of which ``place`` are taken."""

    cell: Cell
    rooms: Rooms
    entries: list[Entry]
    place: int = 0


class _Walk:
    """A greedy merge over the cells: O(size · log cells), each cell in its own order."""

    def __init__(self, pool: ReadyPool, room: Room, size: int):
        self.size = size
        self.taken: list[Entry] = []
        self.refused = False
        self._lanes = {cell: _Lane(cell, room.rooms(cell), entries) for cell, entries in pool.cells.items() if entries}

    def merged(self) -> bool:
        """By selection key alone, in runs (a prompt group's members mostly follow each other). True: complete."""
        taken, lanes = self.taken, self._lanes
        heads = [lane.entries[0] for lane in lanes.values()]
        heapify(heads)
        while heads and len(taken) < self.size:
            lane = lanes[heads[0].cell]
            place, entries = lane.place, lane.entries
            end = min(len(entries), place + RUN, place + self.size - len(taken))
            if len(heads) > 1:
                end = bisect_left(entries, min(heads[1:3]), place + 1, end)
            lane.place += take(lane.rooms, end - place)
            taken += entries[place : lane.place]
            if lane.place < end:
                heappop(heads)  # a cell that is refused once stays refused
                self.refused = True
            else:
                _follow(heads, lane.place < len(entries) and entries[lane.place])
        return len(taken) == self.size

    def ranked(self, score: Score) -> bool:
        """By score, then by selection key. Scores that grew meanwhile are looked at again before they count."""
        heads = [(score(lane.cell, lane.rooms), lane.entries[0]) for lane in self._lanes.values()]
        heapify(heads)
        while heads and len(self.taken) < self.size:
            rank, entry = heads[0]
            lane = self._lanes[entry.cell]
            now = score(lane.cell, lane.rooms)
            if now != rank:
                heapreplace(heads, (now, entry))
            elif not take(lane.rooms):
                heappop(heads)
                self.refused = True
            else:
                self.taken.append(entry)
                lane.place += 1
                more = lane.place < len(lane.entries)
                _follow(heads, more and (score(lane.cell, lane.rooms), lane.entries[lane.place]))
        return len(self.taken) == self.size


def _follow(heads: list[Any], head: Any) -> None:
    """The lane at the top goes on with its next head, or (False) has no more."""
    if head is False:
        heappop(heads)
    else:
        heapreplace(heads, head)


def _even_mix(minima: Mapping[str, int]) -> Score:
    """Share of the source's minimum that is filled, in whole 1e-9: an order, so rounding cannot hurt."""

    def score(cell: Cell, rooms: Rooms) -> int:
        need, minimum = rooms[0].need, minima.get(cell[0], 0)
        return (minimum - need) * 10**9 // minimum if need else 10**9

    return score
