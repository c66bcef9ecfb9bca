"""Makes rules, trajectories and a small simulated run for the tests of the buffer."""

from __future__ import annotations

from typing import Any

from knit.buffer.rules import Rules, resolve_rules
from knit.buffer.streaming import StreamingBuffer
from knit.config.schema import AdmissionConf, BatchConf, KnitConf, RolloutConf, SourceConf
from knit.types import Completion, GroupReport, SegmentMeta, Ticket, TrajectoryMeta, VersionRange


def make_conf(
    ratios: dict[str, float],
    size: int = 16,
    mini_batches: int = 4,
    group_size: int = 1,
    max_ratios: dict[str, float] | None = None,
    rollout: dict[str, Any] | None = None,
    **admission: Any,
) -> KnitConf:
    sources = [
        SourceConf(name=name, ratio=ratio, reward="tests:none", max_ratio=(max_ratios or {}).get(name, 1.0))
        for name, ratio in ratios.items()
    ]
    return KnitConf(
        sources=sources,
        batch=BatchConf(size=size, mini_batches=mini_batches, group_size=group_size),
        admission=AdmissionConf(**admission),
        rollout=RolloutConf(**(rollout or {})),
    )


def make_rules(ratios: dict[str, float], **settings: Any) -> Rules:
    return resolve_rules(make_conf(ratios, **settings))


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def make_buffer(
    ratios: dict[str, float], clock: Clock | None = None, sink: Any = None, **settings: Any
) -> StreamingBuffer:
    clock = clock or Clock()
    return StreamingBuffer(make_rules(ratios, **settings), sink or (lambda event: None), clock, clock)


def ranges(*versions: int, tokens: int = 4, at_s: float = 0.0) -> tuple[VersionRange, ...]:
    """``tokens`` sampled tokens of each of the versions."""
    return tuple(VersionRange(v, k * tokens, (k + 1) * tokens, at_s) for k, v in enumerate(versions))


def make_meta(ticket: Ticket, member: int, versions: tuple[VersionRange, ...], reward: float = 1.0) -> TrajectoryMeta:
    tokens = sum(r.tokens for r in versions)
    segment = SegmentMeta(f"{ticket.group_id}.{member}/s0", tokens + 3, 3, tokens, versions)
    return TrajectoryMeta(
        trajectory_id=f"{ticket.group_id}.{member}",
        group_id=ticket.group_id,
        member=member,
        source=ticket.source,
        rollout_step=ticket.rollout_step,
        attempt=ticket.attempt,
        segments=(segment,),
        reward=reward,
        advantage=0.5,
        launched_s=ticket.launched_s,
        completed_s=0.0,
    )


def accept(buffer: StreamingBuffer, ticket: Ticket, *versions: int, reward: float = 1.0) -> list[str]:
    """Report a whole group as sampled and accepted; returns its trajectory ids."""
    spans = ranges(*(versions or (ticket.version,)))
    metas = tuple(make_meta(ticket, m, spans, reward) for m in range(ticket.size))
    done = [Completion(m.trajectory_id, 0.0, spans) for m in metas]
    report = GroupReport(ticket.group_id, metas, {}, tuple(m.reward for m in metas))
    buffer.report("w", done, [report])
    return [m.trajectory_id for m in metas]


def drop(buffer: StreamingBuffer, ticket: Ticket, reason: str = "zero_std", retry: bool = False) -> None:
    buffer.report(
        "w", [], [GroupReport(ticket.group_id, (), dict.fromkeys(ticket.trajectory_ids(), reason), (), retry)]
    )


def launch(buffer: StreamingBuffer, groups: int = 10**6, worker: str = "w") -> dict[str, list[Ticket]]:
    """Acquire until nothing is left (or ``groups``); tickets by source."""
    tickets: dict[str, list[Ticket]] = {}
    for ticket in buffer.acquire(worker, groups):
        tickets.setdefault(ticket.source, []).append(ticket)
    return tickets


def train_and_publish(buffer: StreamingBuffer, version: int) -> None:
    assert buffer.batch is not None
    for m in range(buffer.batch.trained_mini_batches, buffer.rules.mini_batches):
        buffer.trained(buffer.step, m)
    buffer.publish_started(version)
    buffer.published(version)
