"""Why not yet? The buffer's answers in words and numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from knit.buffer.lifecycle import UNFINISHED
from knit.types import State

if TYPE_CHECKING:
    from knit.buffer.streaming import StreamingBuffer

SHOWN = 8


def waiting(buffer: StreamingBuffer) -> str:
    """What the next admission waits for."""
    batch = buffer.batch
    if batch is None:
        return f"no train batch is open (last: {buffer.step}); {_flight(buffer)}"
    if batch.complete:
        return f"train batch {batch.step} is admitted completely and waits for its publish; {_flight(buffer)}"
    where = f"train batch {batch.step}, mini-batch {batch.mini_batch + 1} of {buffer.rules.mini_batches}"
    where += f", chunk {batch.chunk + 1} ({batch.chunk_size} trajectories)"
    blocks = batch.blocks(buffer.pool, buffer.ledger.steps) or buffer.blocked
    reasons = "; ".join(block.text for block in blocks) or "nothing blocks"
    return f"{where}: {reasons}. {_flight(buffer)}"


def _flight(buffer: StreamingBuffer) -> str:
    """Where trajectories are, per source, and the oldest that is not finished."""
    ledger, outstanding = buffer.ledger, buffer.outstanding()
    parts = []
    for source in buffer.rules.sources:
        counts = {s: ledger.count(s, source) for s in (*State,)[:4] if ledger.count(s, source)}
        shown = ", ".join(f"{n} {s}" for s, n in counts.items()) or "nothing in flight"
        parts.append(f"{source}: {shown}{_note(buffer, source)}")
    text = f"Slots {buffer.pacing.used(outstanding)} of {buffer.pacing.slots}; " + "; ".join(parts)
    if not buffer.launching:
        text += "; launching is stopped"
    oldest = next(iter(ledger.open.values()), None)
    if oldest is not None:
        age_s = buffer.clock() - oldest.ticket.launched_s
        text += (
            f"; oldest open group {oldest.ticket.group_id} ({oldest.ticket.source}, {oldest.worker}) for {age_s:.1f} s"
        )
    return text


def _note(buffer: StreamingBuffer, source: str) -> str:
    notes = []
    if source in buffer.pacing.exhausted:
        notes.append("exhausted")
    if buffer.pacing.quarantined[source]:
        notes.append(f"{buffer.pacing.quarantined[source]} prompts quarantined")
    return f" ({', '.join(notes)})" if notes else ""


def infeasible(buffer: StreamingBuffer) -> str | None:
    """Why the open batch can no longer be filled, or None. Only exhausted sources can make it so."""
    pacing, batch = buffer.pacing, buffer.batch
    if batch is None or not pacing.exhausted:
        return None
    at_most = {}
    for source in pacing.exhausted:
        retries = len(pacing.retries[source]) * buffer.rules.group_size
        ready = buffer.pool.by_source[source] + buffer.ledger.unfinished(source)
        at_most[source] = batch.by_source[source] + ready + retries
    guarded = buffer.rules.policy.schedules is not None
    for source, most in at_most.items():
        need = buffer.rules.sources[source].minimum
        if guarded and most < need:
            return (
                f"train batch {batch.step} cannot be filled any more: source {source!r} is exhausted after "
                f"{pacing.cursors[source]} prompts{_note(buffer, source)} and can give at most {most} of the {need} "
                f"trajectories of its quota; lower its ratio or steps, or give it more prompts. {_flight(buffer)}"
            )
    others = set(buffer.rules.sources) - pacing.exhausted
    if not others and sum(at_most.values()) < buffer.rules.size:
        return (
            f"train batch {batch.step} cannot be filled any more: all sources are exhausted and can give at most "
            f"{sum(at_most.values())} of {buffer.rules.size} trajectories; lower steps. {_flight(buffer)}"
        )
    return None


def refill_budget(buffer: StreamingBuffer) -> str:
    dropped = buffer.intake.dropped_since_admission
    listed = ", ".join(f"{source} {reason} {n}" for (reason, source), n in sorted(dropped.items()))
    return (
        f"{sum(dropped.values())} trajectories were dropped since the last admission, more than "
        f"admission.refill_budget={buffer.rules.refill_budget:g} train batches of {buffer.rules.size}: {listed}. "
        f"{waiting(buffer)}"
    )


def overdue(buffer: StreamingBuffer, now_s: float) -> str:
    """Names the trajectories whose worker seems stuck."""
    groups = [g for g in buffer.ledger.open.values() if g.ticket.deadline_s < now_s]
    members = [m for g in groups for m in buffer.ledger.members(g, UNFINISHED)]
    workers = ", ".join(sorted({g.worker for g in groups}))
    return (
        f"trajectories {shorten(members)} of {workers} are past rollout.group_timeout_s="
        f"{buffer.rules.group_timeout_s:g} (launched {now_s - groups[0].ticket.launched_s:.0f} s ago): "
        f"the worker or its engine is stuck. {waiting(buffer)}"
    )


def shorten(ids: Iterable[str]) -> str:
    listed = list(ids)
    shown = ", ".join(listed[:SHOWN])
    return f"{shown} and {len(listed) - SHOWN} more" if len(listed) > SHOWN else shown
