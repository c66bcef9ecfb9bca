"""From a scored trajectory to what is stored (units), reported (metadata) and shown (text)."""

from __future__ import annotations

from knit.rollout.agent import Segment, Trajectory
from knit.rollout.trajectory import Scored
from knit.store.unit import Unit
from knit.track.console import Sample
from knit.types import Prompt, SegmentMeta, Ticket, TrajectoryMeta, trajectory_id

SHOWN_CHARACTERS = 600


def meta_of(ticket: Ticket, member: int, scored: Scored) -> TrajectoryMeta:
    """Metadata with advantage 0; the group's verdict sets it."""
    trajectory = scored.trajectory
    name = trajectory_id(ticket.group_id, member)
    segments = trained_segments(trajectory)
    total = sum(s.trained_tokens for s in segments)
    return TrajectoryMeta(
        trajectory_id=name,
        group_id=ticket.group_id,
        member=member,
        source=ticket.source,
        rollout_step=ticket.rollout_step,
        attempt=ticket.attempt,
        segments=tuple(_segment_meta(name, k, s, s.trained_tokens / total) for k, s in enumerate(segments)),
        reward=scored.reward,
        advantage=0.0,
        launched_s=ticket.launched_s,
        completed_s=scored.completed_s,
        truncated=trajectory.truncated,
        stats={"response_len": float(sum(len(s.response) for s in segments)), **trajectory.stats},
    )


def units_of(name: str, trajectory: Trajectory) -> list[Unit]:
    """One atomic unit per segment, keyed ``<trajectory id>/s<k>``."""
    units = []
    for k, segment in enumerate(trained_segments(trajectory)):
        fields = segment.fields()
        units.append(Unit(unit_key(name, k), fields, len(segment.tokens), frozenset(fields)))
    return units


def trained_segments(trajectory: Trajectory) -> list[Segment]:
    return [s for s in trajectory.segments if s.trained_tokens]


def unit_key(name: str, segment: int) -> str:
    return f"{name}/s{segment}"


def _segment_meta(name: str, k: int, segment: Segment, weight: float) -> SegmentMeta:
    return SegmentMeta(
        unit=unit_key(name, k),
        tokens=len(segment.tokens),
        prompt_tokens=segment.prompt_tokens,
        trained_tokens=segment.trained_tokens,
        versions=segment.versions,
        weight=weight,
    )


def readable(name: str, prompt: Prompt, scored: Scored) -> Sample:
    """A trajectory as a person wants to see it; long texts are cut in the middle."""
    versions = [r.version for s in scored.trajectory.segments for r in s.versions]
    response = shorten(scored.response) + ("" if scored.trajectory.finished else " … (truncated)")
    return Sample(name, prompt.source, shorten(prompt.text), response, scored.reward, tuple(versions))


def shorten(text: str) -> str:
    half = SHOWN_CHARACTERS // 2
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:half]} … {text[-half:]}"
