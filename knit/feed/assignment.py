"""Which rank trains which trajectory in which micro-batch: one plan for all ranks, from metadata alone.

Guarantees, asserted by the tests:
- every segment of the chunk is in exactly one micro-batch of exactly one data-parallel rank;
- all ranks have the same number of micro-batches (some may be empty), so that collectives match;
- a micro-batch holds at most ``max_tokens_per_micro`` tokens, unless it is one longer segment alone;
- ranks are balanced by cost (longest processing time first: within 4/3 of the optimum);
- the same chunk gives the same plan.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from knit.types import Chunk


@dataclass(frozen=True, slots=True)
class SequenceRef:
    """One segment to train on. ``token_weight`` multiplies the loss of each of its trained tokens."""

    unit: str
    trajectory_id: str
    tokens: int
    trained_tokens: int
    advantage: float
    token_weight: float
    train_version: int


@dataclass(frozen=True, slots=True)
class MicroBatch:
    sequences: tuple[SequenceRef, ...]

    @property
    def tokens(self) -> int:
        return sum(s.tokens for s in self.sequences)


@dataclass(frozen=True, slots=True)
class Plan:
    """``ranks[r]`` are the micro-batches of data-parallel rank r, in the order in which it trains them."""

    step: int
    mini_batch: int
    chunk: int
    ranks: tuple[tuple[MicroBatch, ...], ...]
    trajectories: int
    trained_tokens: int

    @property
    def units(self) -> list[str]:
        return [s.unit for rank in self.ranks for micro in rank for s in micro.sequences]


def plan_chunk(chunk: Chunk, *, dp: int, max_tokens_per_micro: int, normaliser: str) -> Plan:
    """``normaliser``: ``trajectory`` (all trajectories weigh the same) or ``token`` (all tokens do)."""
    sequences = _sequences(chunk, normaliser)
    shares = _balance(sequences, dp)
    packed = [_first_fit(share, max_tokens_per_micro) for share in shares]
    count = max(len(bins) for bins in packed)
    ranks = tuple(
        tuple(MicroBatch(tuple(b)) for b in _spread(share, bins, count, max_tokens_per_micro))
        for share, bins in zip(shares, packed, strict=True)
    )
    return Plan(
        step=chunk.step,
        mini_batch=chunk.mini_batch,
        chunk=chunk.chunk,
        ranks=ranks,
        trajectories=len(chunk.trajectories),
        trained_tokens=sum(s.trained_tokens for s in sequences),
    )


def _sequences(chunk: Chunk, normaliser: str) -> list[SequenceRef]:
    out = []
    for trajectory in chunk.trajectories:
        for segment in trajectory.segments:
            per_token = segment.weight / max(segment.trained_tokens, 1) if normaliser == "trajectory" else 1.0
            out.append(
                SequenceRef(
                    unit=segment.unit,
                    trajectory_id=trajectory.trajectory_id,
                    tokens=segment.tokens,
                    trained_tokens=segment.trained_tokens,
                    advantage=trajectory.advantage,
                    token_weight=per_token,
                    train_version=chunk.train_version,
                )
            )
    return out


def _cost(tokens: int) -> float:
    """Forward-backward cost in units of one token's MLP: linear layers plus attention over the sequence.

    The quadratic term equals the linear one at about 24k tokens (6 hidden sizes of 4,096).
    """
    return tokens * (1.0 + tokens / 24_576)


def _balance(sequences: Sequence[SequenceRef], dp: int) -> list[list[SequenceRef]]:
    """Longest first to the rank with the least cost; each share keeps the admission order."""
    order = sorted(range(len(sequences)), key=lambda i: (-sequences[i].tokens, i))
    loads = [(0.0, rank) for rank in range(dp)]
    mine: list[list[int]] = [[] for _ in range(dp)]
    for i in order:
        load, rank = heapq.heappop(loads)
        mine[rank].append(i)
        heapq.heappush(loads, (load + _cost(sequences[i].tokens), rank))
    return [[sequences[i] for i in sorted(share)] for share in mine]


def _first_fit(share: Sequence[SequenceRef], budget: int) -> list[list[SequenceRef]]:
    """First-fit decreasing: at most 11/9 of the fewest bins, plus one."""
    bins: list[list[SequenceRef]] = []
    free: list[int] = []
    for sequence in sorted(share, key=lambda s: -s.tokens):
        slot = next((b for b, room in enumerate(free) if sequence.tokens <= room), None)
        if slot is None:
            bins.append([])
            free.append(budget)
            slot = len(bins) - 1
        bins[slot].append(sequence)
        free[slot] -= sequence.tokens
    return bins


def _spread(
    share: Sequence[SequenceRef], bins: list[list[SequenceRef]], count: int, budget: int
) -> list[list[SequenceRef]]:
    """Exactly ``count`` bins: evened out where that keeps the budget, else first fit plus empty ones."""
    even: list[list[SequenceRef]] = [[] for _ in range(count)]
    loads = [(0, b) for b in range(count)]
    for sequence in sorted(share, key=lambda s: -s.tokens):
        load, b = heapq.heappop(loads)
        even[b].append(sequence)
        heapq.heappush(loads, (load + sequence.tokens, b))
    if all(len(b) <= 1 or sum(s.tokens for s in b) <= budget for b in even):
        return even
    return bins + [[] for _ in range(count - len(bins))]
