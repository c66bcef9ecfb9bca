"""Reads the ``events.jsonl`` of a run (written by :mod:`knit.buffer.journal`) as a trace.

A rollout's duration is the time from its launch to its last token, pauses for publishes left out. It is what it
took under the load of that run: a replay takes it as the time at constant speed. Groups whose verdict the run did
not see (it ended, a worker died) are left out and counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from knit.errors import ConfigError
from knit.replay.trace import RecordedTrace, Recording, Rollout

NO_VERDICT = {"left_over"}  # reasons of a drop that say nothing about the rollout
LATER = {"stale", "payload"}  # it was accepted before


@dataclass(slots=True)
class _Group:
    source: str
    launched_s: float
    ended_s: dict[str, float] = field(default_factory=dict)  # trajectory -> last token
    tokens: dict[str, int] = field(default_factory=dict)
    verdicts: dict[str, str] = field(default_factory=dict)  # trajectory -> "" (accepted) or reason
    members: tuple[str, ...] = ()

    @property
    def judged(self) -> bool:
        return all(member in self.verdicts and member in self.ended_s for member in self.members)


@dataclass(slots=True)
class _Run:
    groups: dict[int, _Group] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    pauses: list[tuple[float, float]] = field(default_factory=list)
    paused_s: float | None = None
    train_started: dict[tuple[int, int], float] = field(default_factory=dict)
    chunks: dict[tuple[int, int], int] = field(default_factory=dict)
    trained_s: dict[int, list[float]] = field(default_factory=dict)  # step -> seconds of its mini-batches

    def launch(self, e: dict[str, Any]) -> None:
        self.groups[e["group_id"]] = _Group(e["source"], e["t"], members=tuple(e["trajectories"]))

    def completion(self, e: dict[str, Any]) -> None:
        group = self.groups[e["group_id"]]
        group.ended_s[e["trajectory"]] = max([end_s for _, _, end_s in e["versions"]], default=e["t"])
        group.tokens[e["trajectory"]] = sum(tokens for _, tokens, _ in e["versions"])

    def accept(self, e: dict[str, Any]) -> None:
        self.groups[e["group_id"]].verdicts[e["trajectory"]] = ""

    def drop(self, e: dict[str, Any]) -> None:
        if e["reason"] not in NO_VERDICT | LATER:
            group = self.groups[e["group_id"]]
            group.verdicts[e["trajectory"]] = e["reason"]
            group.ended_s.setdefault(e["trajectory"], e["t"])

    def publish_start(self, e: dict[str, Any]) -> None:
        self.paused_s = e["t"]

    def publish(self, e: dict[str, Any]) -> None:
        if self.paused_s is not None:
            self.pauses.append((self.paused_s, e["t"]))
            self.paused_s = None

    def train_start(self, e: dict[str, Any]) -> None:
        key = e["step"], e["mini_batch"]
        self.train_started[key] = e["t"]
        self.chunks[key] = self.chunks.get(key, 0) + 1

    def train_end(self, e: dict[str, Any]) -> None:
        """Chunks of a mini-batch take about equally long; only the end of the last one is known."""
        key = e["step"], e["mini_batch"]
        last_s = e["t"] - self.train_started[key]
        self.trained_s.setdefault(e["step"], []).append(last_s * self.chunks[key])


READ = ("launch", "completion", "accept", "drop", "publish_start", "publish", "train_start", "train_end")


def read_events(path: Path, rows: Iterator[tuple[int, dict[str, Any]]]) -> Recording:
    run = _Run()
    for number, row in rows:
        name = row.get("event")
        if not isinstance(name, str):
            raise ConfigError(f"{path}:{number}: the line has no event; the lines before it are events of a run")
        if name not in READ:
            continue
        try:
            getattr(run, name)(row)
            if "source" in row:
                run.lines.setdefault(row["source"], number)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}:{number}: {name} event without {error}: not written by this knit?") from error
    return _recording(path, run)


def _recording(path: Path, run: _Run) -> Recording:
    judged = [group for group in run.groups.values() if group.judged]
    sizes = {len(group.members) for group in run.groups.values()}
    if not judged or len(sizes) != 1:
        raise ConfigError(
            f"--trace {path}: {len(judged)} finished prompt groups of sizes {sorted(sizes)}: nothing to replay"
        )
    rollouts: dict[str, list[Rollout]] = {}
    for group in judged:
        rollouts.setdefault(group.source, []).extend(_rollout(group, member, run.pauses) for member in group.members)
    never = [s for s, of_source in rollouts.items() if not any(r.accepted for r in of_source)]
    if never:
        raise ConfigError(
            f"--trace {path}: no rollout of source {never[0]!r} was accepted: its quota could never be met"
        )
    notes = []
    if len(judged) < len(run.groups):
        notes.append(
            f"{len(run.groups) - len(judged)} of {len(run.groups)} prompt groups are left out: the run did not see "
            "their end. Long ones are more likely to be among them."
        )
    return Recording(
        RecordedTrace(rollouts),
        {source: line for source, line in run.lines.items() if source in rollouts},
        group_size=sizes.pop(),
        concurrency=_peak(run),
        train_s=_train_s(run),
        publish_s=fmean(end - begin for begin, end in run.pauses) if run.pauses else None,
        notes=tuple(notes),
    )


def _rollout(group: _Group, member: str, pauses: list[tuple[float, float]]) -> Rollout:
    begin_s, end_s = group.launched_s, group.ended_s[member]
    paused_s = sum(max(0.0, min(end_s, b) - max(begin_s, a)) for a, b in pauses)
    reason = group.verdicts[member]
    duration_s = max(1e-3, end_s - begin_s - paused_s)
    return Rollout(duration_s, max(1, group.tokens.get(member, 1)), not reason, reason or "rejected")


def _train_s(run: _Run) -> float | None:
    """Of a whole train batch; the last one of a run that was cut off does not count."""
    whole = max((len(parts) for parts in run.trained_s.values()), default=0)
    return fmean(sum(parts) for parts in run.trained_s.values() if len(parts) == whole) if whole else None


def _peak(run: _Run) -> int:
    """Most rollouts in flight at once."""
    changes = []
    for group in run.groups.values():
        for member in group.members:
            changes.append((group.launched_s, 1))
            if member in group.ended_s:
                changes.append((group.ended_s[member], -1))
    peak = now = 0
    for _, change in sorted(changes):
        now += change
        peak = max(peak, now)
    return peak
