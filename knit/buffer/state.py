"""Writing the buffer out and reading it back, as plain JSON values.

Kept: ready trajectories, prompt cursors, retries, quarantine, counts by end, versions, step, pace. Trajectories
that were admitted but not trained are kept as ready. Those still being sampled cannot be kept: they end as
lost (``restart``) and their prompts are launched again first. Trained ones stay trained; so the state is exact
when it is taken between ``published`` and ``begin_batch``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from knit.buffer.lifecycle import UNFINISHED, Group, Live
from knit.buffer.pacing import PromptVisit
from knit.errors import RunError
from knit.types import SegmentMeta, State, Ticket, TrajectoryMeta, VersionRange

if TYPE_CHECKING:
    from knit.buffer.streaming import StreamingBuffer

FORMAT = 1
RESTART = "restart"


def save(buffer: StreamingBuffer) -> dict[str, Any]:
    ledger = buffer.ledger
    kept = [*buffer.pool, *(meta for metas in buffer.handed.values() for meta in metas)]
    groups = {meta.group_id: ledger.groups[meta.group_id] for meta in kept}
    unfinished: Counter[str] = Counter()
    again = []
    for group in ledger.open.values():
        unfinished[group.ticket.source] += len(ledger.members(group, UNFINISHED))
        again.append([group.ticket.source, group.ticket.prompt_index, group.ticket.attempt + 1, group.failures])
    return {
        "format": FORMAT,
        "version": buffer.version,
        "step": buffer.step,
        "next_group": buffer.intake.next_group,
        "pacing": buffer.pacing.state_dict(),
        "again": again,
        "pace": [buffer.pace.expected_s, buffer.pace.chunk_train_s, buffer.pace.margin_s],
        "launched": dict(ledger.launched),
        "trained": dict(ledger.trained),
        "dropped": _listed(ledger.dropped),
        "lost": _listed(ledger.lost + Counter({(RESTART, s): n for s, n in unfinished.items()})),
        "groups": [[asdict(g.ticket), g.worker, g.failures] for g in groups.values()],
        "ready": [asdict(meta) for meta in kept],
        "quota_records": buffer.quota_records,
    }


def load(buffer: StreamingBuffer, saved: dict[str, Any]) -> None:
    ledger = buffer.ledger
    if ledger.launched or buffer.step:
        raise RunError("a buffer that has launched trajectories cannot load a state: load it into a new one")
    if saved["format"] != FORMAT:
        raise RunError(f"the buffer state has format {saved['format']}, this knit reads {FORMAT}")
    unknown = set(saved["launched"]) - set(buffer.rules.sources)
    if unknown:
        raise RunError(f"the buffer state has sources {sorted(unknown)}, which the configuration lacks: add them")
    buffer.intake.version, buffer.step, buffer.intake.next_group = saved["version"], saved["step"], saved["next_group"]
    buffer.quota_records = list(saved["quota_records"])
    buffer.pacing.load_state_dict(saved["pacing"])
    for source, *visit in reversed(saved["again"]):
        buffer.pacing.retries[source].appendleft(PromptVisit(*visit))
    buffer.pace.expected_s, buffer.pace.chunk_train_s, buffer.pace.margin_s = saved["pace"]
    groups = {g.ticket.group_id: g for g in (Group(Ticket(**t), w, f, open=False) for t, w, f in saved["groups"])}
    ready = [decode(meta) for meta in saved["ready"]]
    ledger.restore(
        launched=Counter(saved["launched"]),
        trained=Counter(saved["trained"]),
        dropped=Counter({(reason, source): n for reason, source, n in saved["dropped"]}),
        lost=Counter({(reason, source): n for reason, source, n in saved["lost"]}),
        ready={meta.trajectory_id: Live(groups[meta.group_id], State.READY) for meta in ready},
    )
    for meta in ready:
        buffer.pool.add(meta)
    ledger.check()


def decode(value: dict[str, Any]) -> TrajectoryMeta:
    """A trajectory from its JSON value."""
    segments = tuple(
        SegmentMeta(**s | {"versions": tuple(VersionRange(**r) for r in s["versions"])}) for s in value["segments"]
    )
    return TrajectoryMeta(**value | {"segments": segments, "media": tuple(value["media"])})


def _listed(counts: Counter[tuple[str, str]]) -> list[list[Any]]:
    return [[reason, source, n] for (reason, source), n in counts.items()]
