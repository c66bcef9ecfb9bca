"""One train batch while it is admitted: readiness, guards, and what blocks.

Mini-batch t is admitted in chunks. Guards hold at every chunk; the readiness targets of mini-batch t hold at its
last chunk (with a policy for whole batches: at every chunk). s_i = admitted in this batch + ready. The batch
is admissible when every predicate P_i,t and every guard Q_k holds (paper equation 5).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import ceil

from knit.buffer.guards import Room
from knit.buffer.lifecycle import StepProgress
from knit.buffer.policies import Pace
from knit.buffer.quotas import exact
from knit.buffer.ready import Candidate, ReadyPool
from knit.buffer.rules import COMPLETION, Rules
from knit.buffer.schedules import target, targets
from knit.buffer.selection import select


@dataclass(frozen=True, slots=True)
class Block:
    """A predicate or guard that is not true yet. ``name`` is its metric name, ``missing`` in trajectories."""

    name: str
    missing: int
    text: str


@dataclass(slots=True)
class TrainBatch:
    """Progress of one train batch of ``rules.size`` trajectories, from ``begin_batch`` to publish."""

    rules: Rules
    step: int
    train_version: int
    began_s: float
    start: dict[str, int]  # s_i(0): ready at the start, by source
    earlier: dict[int, tuple[int, int]]  # rollout step -> (launched, sampled at the start)
    mini_batch: int = 0
    chunk: int = 0
    total: int = 0  # b_0
    admitted: tuple[Counter[str], ...] = ()  # per quota group: class -> b_i
    trained_mini_batches: int = 0
    targets: dict[str, tuple[int, ...]] = field(default_factory=dict)
    guard_blocked: bool = False
    guard_rejections: int = 0

    def __post_init__(self) -> None:
        self.admitted = tuple(Counter() for _ in self.rules.groups)
        for name, quota in self.rules.sources.items():
            schedule = self.rules.policy.schedule(name)
            if schedule is not None:
                self.targets[name] = targets(self.start.get(name, 0), quota.minimum, schedule)

    @property
    def by_source(self) -> Counter[str]:
        return self.admitted[0]

    @property
    def complete(self) -> bool:
        return self.total == self.rules.size

    @property
    def chunk_size(self) -> int:
        return self.rules.chunk_sizes[self.mini_batch][self.chunk]

    @property
    def last_of_mini_batch(self) -> bool:
        return self.chunk == len(self.rules.chunk_sizes[self.mini_batch]) - 1

    @property
    def last_of_batch(self) -> bool:
        return self.last_of_mini_batch and self.mini_batch == self.rules.mini_batches - 1

    def blocks(self, pool: ReadyPool, steps: dict[int, StepProgress]) -> list[Block]:
        """The readiness predicates that are not true. O(sources)."""
        if len(pool) < self.chunk_size or (self.rules.policy.whole_batch and self.total + len(pool) < self.rules.size):
            return [self._size_block(pool), *self._target_blocks(pool, steps)]
        return self._target_blocks(pool, steps)

    def select(self, pool: ReadyPool) -> Candidate | None:
        """Take the next chunk's trajectories out of the pool; None if the guards allow no candidate."""
        policy = self.rules.policy
        minima = {n: q.minimum for n, q in self.rules.sources.items()} if policy.even_mix else None
        candidate, refused = select(pool, self.room, self.chunk_size, minima)
        if refused and not self.guard_blocked:
            self.guard_rejections += 1
        self.guard_blocked = candidate is None
        return candidate

    def room(self) -> Room:
        return Room(self.rules.groups, self.admitted, self.rules.size, self.total, self.rules.policy.guarded)

    def guard_blocks(self, pool: ReadyPool) -> list[Block]:
        """Why the guards allow no candidate although enough is ready, per quota group."""
        room, blocks = self.room(), []
        for k, group in enumerate(self.rules.groups):
            lacking = {name: need for name, need in room.needs[k].items() if need}
            listed = ", ".join(f"{need} {name!r}" for name, need in lacking.items()) or "nothing (a maximum is reached)"
            text = f"guard {group.name!r}: {room.free} slots left in the batch, reserved for {listed}"
            blocks.append(Block(f"guard.{group.name}", sum(lacking.values()), text))
        return blocks

    def hold_until(self, pool: ReadyPool, pace: Pace, now_s: float) -> float | None:
        """For an even mix: until when this chunk waits although it could be admitted; None: no longer."""
        if not self.rules.policy.even_mix or self.last_of_batch or self.whole(pool):
            return None
        after = self.total + self.chunk_size
        wanted = {n: q.minimum * after // self.rules.size for n, q in self.rules.sources.items()}
        if all(self.by_source[n] + pool.by_source[n] >= count for n, count in wanted.items()):
            return None  # proportional already
        deadline_s = pace.deadline_s(self.rules.chunks - self.chunks_admitted - 1)
        return deadline_s if now_s < deadline_s else None

    def whole(self, pool: ReadyPool) -> bool:
        """Could the rest of the batch, all source quotas included, be admitted now?"""
        if self.total + len(pool) < self.rules.size:
            return False
        return all(self.by_source[n] + pool.by_source[n] >= q.minimum for n, q in self.rules.sources.items())

    @property
    def chunks_admitted(self) -> int:
        return sum(len(sizes) for sizes in self.rules.chunk_sizes[: self.mini_batch]) + self.chunk

    def admit(self, candidate: Candidate) -> None:
        """Count the chunk and move on to the next one."""
        for cell, count in candidate.cells.items():
            for counts, name in zip(self.admitted, cell, strict=True):
                counts[name] += count
        self.total += len(candidate.entries)
        last = self.last_of_mini_batch
        self.chunk = 0 if last else self.chunk + 1
        self.mini_batch += last

    def _size_block(self, pool: ReadyPool) -> Block:
        need = self.rules.size - self.total if self.rules.policy.whole_batch else self.chunk_size
        return Block("size", need - len(pool), f"size: {len(pool)} of {need} trajectories ready")

    def _target_blocks(self, pool: ReadyPool, steps: dict[int, StepProgress]) -> list[Block]:
        if not (self.last_of_mini_batch or self.rules.policy.whole_batch):
            return []
        blocks = []
        for name, by_mini_batch in self.targets.items():
            have, need = self.by_source[name] + pool.by_source[name], by_mini_batch[self.mini_batch]
            if have < need:
                text = f"source {name!r}: {have} of {need} trajectories ready or admitted"
                blocks.append(Block(f"source.{name}", need - have, text))
        return blocks + self._completion_blocks(steps)

    def _completion_blocks(self, steps: dict[int, StepProgress]) -> list[Block]:
        schedule = self.rules.policy.schedule(COMPLETION)
        if schedule is None or not self.rules.completion_quota:
            return []
        missing, worst = 0, ""
        for step, (launched, sampled_at_start) in self.earlier.items():
            final = ceil(exact(self.rules.completion_quota) * launched)
            need = target(sampled_at_start, final, schedule[self.mini_batch])
            have = steps[step].sampled if step in steps else launched
            if have < need:
                missing += need - have
                worst = worst or f"completion of rollout step {step}: {have} of {need} (launched {launched})"
        return [Block(COMPLETION, missing, worst)] if missing else []
