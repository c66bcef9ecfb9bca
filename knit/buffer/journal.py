"""The run's events, one dict each: enough to replay the run (``knit replay``). ``t`` is the wall clock in seconds.

Launches are one event per prompt group, pauses and resumes one per publish, admissions one per chunk; each of
them lists trajectory ids. Everything else is one event per trajectory. ``versions`` is a list of
``[version, tokens, end_time_s]``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from knit.types import Chunk, Ticket, TrajectoryMeta, VersionRange

Sink = Callable[[dict[str, Any]], None]


class Journal:
    """Writes events to a sink."""

    def __init__(self, sink: Sink, wall: Callable[[], float]):
        self._sink, self._wall = sink, wall

    def write(self, event: str, **fields: Any) -> None:
        self._sink({"event": event, "t": self._wall(), **fields})

    def launch(self, ticket: Ticket, worker: str) -> None:
        self.write(
            "launch",
            group_id=ticket.group_id,
            source=ticket.source,
            prompt_index=ticket.prompt_index,
            rollout_step=ticket.rollout_step,
            attempt=ticket.attempt,
            version=ticket.version,
            worker=worker,
            trajectories=ticket.trajectory_ids(),
        )

    def completion(self, ticket: Ticket, trajectory_id: str, versions: Sequence[VersionRange], retries: int) -> None:
        spans = [[r.version, r.tokens, r.end_time_s] for r in versions]
        self._one("completion", ticket, trajectory_id, versions=spans, retries=retries)

    def accept(self, ticket: Ticket, meta: TrajectoryMeta) -> None:
        self._one("accept", ticket, meta.trajectory_id, verdict="accepted", reward=meta.reward, tokens=meta.tokens)

    def drop(self, ticket: Ticket, trajectory_id: str, reason: str, error: str | None = None) -> None:
        self._one("drop", ticket, trajectory_id, verdict="dropped", reason=reason, error=error)

    def lost(self, ticket: Ticket, trajectory_id: str, reason: str, error: str | None = None) -> None:
        self._one("lost", ticket, trajectory_id, verdict="lost", reason=reason, error=error)

    def admission(self, chunk: Chunk) -> None:
        self.write(
            "admission",
            step=chunk.step,
            mini_batch=chunk.mini_batch,
            chunk=chunk.chunk,
            last_of_mini_batch=chunk.last_of_mini_batch,
            train_version=chunk.train_version,
            trajectories=[t.trajectory_id for t in chunk.trajectories],
        )

    def _one(self, event: str, ticket: Ticket, trajectory_id: str, **fields: Any) -> None:
        self._sink(
            {
                "event": event,
                "t": self._wall(),
                "trajectory": trajectory_id,
                "group_id": ticket.group_id,
                "source": ticket.source,
                "rollout_step": ticket.rollout_step,
                **fields,
            }
        )
