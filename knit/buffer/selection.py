"""Which ready trajectories form the candidate. Deterministic: equal inputs give equal candidates.

The default takes the oldest launch first among what keeps every guard true, and looks for a feasible
candidate before giving up: with one quota group the greedy walk is complete (a trajectory either fills a
deficit, which costs no slack, or uses one unit of it, whatever the order); with several groups a second walk
prefers what uses the least slack. A walk that fails puts everything back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from heapq import heapify, heappop, heapreplace
from typing import Any

from knit.buffer.guards import Cell, Room
from knit.buffer.ready import Entry, Key, ReadyPool
from knit.types import TrajectoryMeta

Score = Callable[[Cell], Any]
"""Rank of a cell's next trajectory; must never fall while a candidate grows."""


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
    entries, refused = _walk(pool, room, size, _even_mix(pool, room, minima) if minima else pool.first)
    if entries is None and len(room.slack) > 1:
        room = make_room()
        entries, _ = _walk(pool, room, size, _least_slack(pool, room))
    return entries, refused


def _walk(pool: ReadyPool, room: Room, size: int, score: Score) -> tuple[list[Entry] | None, bool]:
    """Greedy merge over the cells: O(size · log cells) pops."""
    counts = pool.counts
    heads = [(score(cell), cell) for cell, count in counts.items() if count]
    heapify(heads)
    taken: list[Entry] = []
    refused = False
    while heads and len(taken) < size:
        rank, cell = heads[0]
        if not counts[cell]:
            heappop(heads)
        elif not room.allows(cell):
            heappop(heads)  # a cell that is refused once stays refused
            refused = True
        elif (now := score(cell)) != rank:
            heapreplace(heads, (now, cell))
        else:
            taken.append(pool.pop(cell))
            room.take(cell)
    if len(taken) < size:
        pool.put_back(taken)
        return None, refused
    return taken, refused


def _least_slack(pool: ReadyPool, room: Room) -> Score:
    return lambda cell: (room.cost(cell), pool.first(cell))


def _even_mix(pool: ReadyPool, room: Room, minima: Mapping[str, int]) -> Score:
    """Share of the source's minimum that is filled, in whole 1e-9: an order, so rounding cannot hurt."""

    def score(cell: Cell) -> tuple[int, Any]:
        minimum, need = minima.get(cell[0], 0), room.needs[0].get(cell[0], 0)
        filled = (minimum - need) * 10**9 // minimum if need else 10**9
        return filled, pool.first(cell)

    return score
