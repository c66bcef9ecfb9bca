"""What travels between the rooms of knit: plain frozen data carriers, numpy-free, picklable.

Words follow the architecture page: a *trajectory* is one rollout of a prompt, a *group* the n
trajectories of one prompt, a *train batch* ends in a publish, a *mini-batch* in an optimizer step, a
*chunk* is what one admission hands to training. Payload (token arrays) never travels in these types: a
trajectory's metadata names the atomic units that hold it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class State(StrEnum):
    """Where a trajectory is. The last three are ends: each trajectory reaches exactly one of them."""

    RUNNING = "running"
    PAUSED = "paused"
    COMPLETED = "completed"  # sampled to its end; waits for its siblings or its reward
    READY = "ready"
    ADMITTED = "admitted"
    TRAINED = "trained"
    DROPPED = "dropped"
    LOST = "lost"


ENDS = frozenset({State.TRAINED, State.DROPPED, State.LOST})


@dataclass(frozen=True, slots=True)
class VersionRange:
    """Sampled tokens ``[start, end)`` of a segment's response, all drawn from one weight version.

    ``start``/``end`` count response tokens from 0; ``end_time_s`` is the wall clock (``time.time()``)
    at which the last of them was known to exist.
    """

    version: int
    start: int
    end: int
    end_time_s: float

    @property
    def tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class SegmentMeta:
    """One contiguous token sequence of a trajectory. An agent that branches or compacts yields several.

    ``weight`` is this segment's share of the trajectory's loss weight; the shares of a trajectory sum
    to 1. ``unit`` is the key of the atomic unit with the per-token fields.
    """

    unit: str
    tokens: int  # prompt + response
    prompt_tokens: int
    trained_tokens: int  # tokens whose loss mask is 1
    versions: tuple[VersionRange, ...]
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Ticket:
    """Permission to roll out one group: ``size`` trajectories of prompt ``prompt_index`` of ``source``.

    ``group_id`` is never used twice. ``attempt`` counts earlier tickets of the same prompt visit that
    came to nothing (a worker died, every member failed). ``deadline_s`` is on the buffer's clock.
    """

    group_id: int
    source: str
    prompt_index: int  # position in the source's endless prompt stream
    rollout_step: int  # the train batch whose slots launched it
    attempt: int
    size: int
    version: int  # weight version current at launch
    launched_s: float
    deadline_s: float

    def trajectory_ids(self) -> tuple[str, ...]:
        return tuple(trajectory_id(self.group_id, m) for m in range(self.size))


def trajectory_id(group_id: int, member: int) -> str:
    return f"{group_id}.{member}"


@dataclass(frozen=True, slots=True)
class Completion:
    """A trajectory was sampled to its end (its reward may still be outstanding)."""

    trajectory_id: str
    completed_s: float
    versions: tuple[VersionRange, ...]  # of all segments, in order
    retries: int = 0  # engine failures survived on the way


@dataclass(frozen=True, slots=True)
class TrajectoryMeta:
    """All that admission, planning and metrics need to know of an accepted trajectory."""

    trajectory_id: str
    group_id: int
    member: int
    source: str
    rollout_step: int
    attempt: int
    segments: tuple[SegmentMeta, ...]
    reward: float
    advantage: float
    launched_s: float
    completed_s: float
    truncated: bool = False
    media: tuple[str, ...] = ()  # content hashes of shared media units
    stats: dict[str, float] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return sum(s.tokens for s in self.segments)

    @property
    def trained_tokens(self) -> int:
        return sum(s.trained_tokens for s in self.segments)

    @property
    def oldest_version(self) -> int:
        return min(r.version for s in self.segments for r in s.versions)

    @property
    def version_ranges(self) -> tuple[VersionRange, ...]:
        return tuple(r for s in self.segments for r in s.versions)


@dataclass(frozen=True, slots=True)
class GroupReport:
    """The verdict on one group. Every member of the ticket is in exactly one of the two."""

    group_id: int
    accepted: tuple[TrajectoryMeta, ...]
    dropped: dict[str, str]  # trajectory id -> reason (zero_std, filtered, timeout, failed, ...)
    rewards: tuple[float, ...] = ()  # of every member that has one, dropped ones included
    retry: bool = False  # nothing usable came out for a reason of infrastructure: launch the prompt again
    error: str | None = None  # root cause of failures, one line


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one admission hands to training, in the order it was selected.

    ``train_version`` is the published version from which the train batch started: a token's staleness
    is ``train_version`` minus the version that sampled it.
    """

    step: int  # train batch, from 1
    mini_batch: int  # from 0
    chunk: int  # from 0, inside its mini-batch
    last_of_mini_batch: bool
    last_of_batch: bool
    train_version: int
    admitted_s: float
    trajectories: tuple[TrajectoryMeta, ...]


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """A rollout engine that may be asked for tokens: ``url`` without trailing slash."""

    name: str
    url: str
    tp: int = 1


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a source. ``input_ids`` is what the engine sees; the rest is for rewards."""

    source: str
    index: int
    input_ids: tuple[int, ...]
    text: str
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
