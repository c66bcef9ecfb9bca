"""What admission costs: seconds per decision and per completion, on synthetic ready trajectories.

``knit bench admission``, or ``python -m knit.buffer.bench``.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

from knit.buffer.rules import resolve_rules
from knit.buffer.streaming import StreamingBuffer
from knit.config.schema import AdmissionConf, BatchConf, KnitConf, SourceConf
from knit.types import Completion, GroupReport, SegmentMeta, Ticket, TrajectoryMeta, VersionRange, trajectory_id

GROUP = 8


def bench_admission(
    ready: int = 100_000,
    sources: int = 64,
    size: int = 4096,
    mini_batches: int = 4,
    policy: str = "progressive",
    batches: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median seconds of one admission decision (a mini-batch) and of one completion, group verdict included.

    ``ready`` trajectories of ``sources`` sources with equal quotas (90 % of the batch in sum) wait beside the
    batch being admitted; they complete in random order.
    """
    conf = KnitConf(
        sources=[SourceConf(name=f"s{k}", ratio=0.9 / sources, reward="bench:none") for k in range(sources)],
        batch=BatchConf(size=size, mini_batches=mini_batches, group_size=GROUP),
        admission=AdmissionConf(policy=policy, max_staleness=(ready + 2 * size) // size + batches),
    )
    rules = replace(resolve_rules(conf), group_timeout_s=float("inf"))
    buffer = StreamingBuffer(rules)
    tickets = buffer.acquire("bench", (ready + size) // GROUP)
    random.Random(0).shuffle(tickets)
    completions_s = [_report(buffer, ticket, clock) for ticket in tickets]
    decisions_s: list[float] = []
    for step in range(1, batches + 1):
        buffer.begin_batch(step)
        for _ in range(rules.chunks):
            begin_s = clock()
            chunk = buffer.admit()
            decisions_s.append(clock() - begin_s)
            if chunk is None:
                raise AssertionError(buffer.explain())
            buffer.trained(step, chunk.mini_batch)
        buffer.published(buffer.version + 1)
        completions_s += [_report(buffer, ticket, clock) for ticket in buffer.acquire("bench", size // GROUP)]
    return {
        "ready": len(buffer.pool),
        "decision_s": median(decisions_s),
        "decision_max_s": max(decisions_s),
        "completion_s": median(completions_s),
    }


def _report(buffer: StreamingBuffer, ticket: Ticket, clock: Callable[[], float]) -> float:
    """Reports one group; seconds per trajectory."""
    spans = (VersionRange(buffer.version, 0, 512, 0.0),)
    metas = []
    for member in range(ticket.size):
        name = trajectory_id(ticket.group_id, member)
        segment = SegmentMeta(f"{name}/s0", 640, 128, 512, spans)
        metas.append(
            TrajectoryMeta(
                trajectory_id=name,
                group_id=ticket.group_id,
                member=member,
                source=ticket.source,
                rollout_step=ticket.rollout_step,
                attempt=ticket.attempt,
                segments=(segment,),
                reward=0.0,
                advantage=0.0,
                launched_s=ticket.launched_s,
                completed_s=0.0,
            )
        )
    completions = [Completion(meta.trajectory_id, 0.0, spans) for meta in metas]
    report = GroupReport(ticket.group_id, tuple(metas), {}, (0.0,) * ticket.size)
    begin_s = clock()
    buffer.report("bench", completions, [report])
    return (clock() - begin_s) / ticket.size


def run() -> dict[str, dict[str, dict[str, float]]]:
    """Prints a line per policy and number of ready trajectories; returns policy → ready → costs."""
    results: dict[str, dict[str, dict[str, float]]] = {}
    for ready in (10_000, 100_000):
        for policy in ("train_batch", "progressive", "balanced"):
            cost = bench_admission(ready, policy=policy)
            results.setdefault(policy, {})[str(ready)] = cost
            print(
                f"{policy:<12} {ready:>7} ready, 64 sources, mini-batches of 1024: decision "
                f"{cost['decision_s'] * 1e3:.2f} ms (largest {cost['decision_max_s'] * 1e3:.2f}), "
                f"completion {cost['completion_s'] * 1e6:.1f} µs"
            )
    return results


if __name__ == "__main__":
    run()
