"""Traces from files: simple JSONL, or the ``events.jsonl`` of a run. ConfigErrors give the number of a wrong line.

A line of a simple trace is one rollout of its source, in launch order::

    {"source": "math", "duration": 812.5, "tokens": 9100}
    {"source": "code", "token_times": [0.8, 1.5, 2.9], "accepted": false, "reason": "zero_std"}

``duration`` in seconds, or ``token_times``, the seconds from its start at which each token existed. Without ``tokens``
a rollout has tokens in proportion to its duration, 1000 on average over the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

import orjson

from knit.errors import ConfigError
from knit.replay.events import read_events
from knit.replay.trace import RecordedTrace, Recording, Rollout

KEYS = ("source", "duration", "token_times", "tokens", "accepted", "reason")
MEAN_TOKENS = 1000


def read_recording(path: Path, sources: Sequence[str] | None = None) -> Recording:
    """Tells the two formats apart by the first line. ``sources``: those the run knows; others are refused."""
    rows = read_lines(path)
    first = next(rows, None)
    if first is None:
        raise ConfigError(f"--trace {path}: the file is empty")
    numbered = chain([first], rows)
    recording = read_events(path, numbered) if "event" in first[1] else _read_simple(path, numbered)
    for source, line in recording.lines.items():
        if sources is not None and source not in sources:
            raise ConfigError(f"{path}:{line}: source {source!r} is unknown; known are {', '.join(sources)}")
    missing = [source for source in sources or () if source not in recording.trace.rollouts]
    if missing:
        raise ConfigError(f"--trace {path} has no rollout of source {missing[0]!r}: leave its quota out")
    return recording


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers, from 1, and their objects; empty lines are skipped."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigError(f"--trace {path}: {error.strerror or error}") from error
    with file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                whole = line.endswith(b"\n")
                what = "is not JSON" if whole else "is cut off (the file ends inside it)"
                raise ConfigError(f"{path}:{number}: the line {what}: {error}") from error
            if not isinstance(row, dict):
                raise ConfigError(f"{path}:{number}: the line is no JSON object, but {type(row).__name__}")
            yield number, row


@dataclass(frozen=True, slots=True)
class _Row:
    source: str
    duration_s: float
    tokens: int | None
    accepted: bool
    reason: str
    token_times_s: tuple[float, ...] | None


def _read_simple(path: Path, rows: Iterator[tuple[int, dict[str, Any]]]) -> Recording:
    read: list[_Row] = []
    lines: dict[str, int] = {}
    for number, fields in rows:
        row = _row(f"{path}:{number}", fields)
        lines.setdefault(row.source, number)
        read.append(row)
    per_second = MEAN_TOKENS / fmean(row.duration_s for row in read)
    rollouts: dict[str, list[Rollout]] = {}
    for row in read:
        tokens = max(1, round(row.duration_s * per_second)) if row.tokens is None else row.tokens
        rollout = Rollout(row.duration_s, tokens, row.accepted, row.reason, row.token_times_s)
        rollouts.setdefault(row.source, []).append(rollout)
    for source, of_source in rollouts.items():
        if not any(rollout.accepted for rollout in of_source):
            raise ConfigError(f"{path}: no rollout of source {source!r} is accepted: its quota could never be met")
    return Recording(RecordedTrace(rollouts), lines)


def _row(where: str, row: dict[str, Any]) -> _Row:
    unknown = [key for key in row if key not in KEYS]
    if unknown:
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}; a rollout has {', '.join(KEYS)}")
    source, reason, accepted = row.get("source"), row.get("reason", "rejected"), row.get("accepted", True)
    if not isinstance(source, str) or not source:
        raise ConfigError(f"{where}: source is {source!r}; give the name of a source")
    if not isinstance(accepted, bool) or not isinstance(reason, str):
        raise ConfigError(f"{where}: accepted must be true or false and reason a text")
    if ("duration" in row) == ("token_times" in row):
        raise ConfigError(f"{where}: give either duration or token_times")
    tokens = row.get("tokens")
    if tokens is not None and (not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1):
        raise ConfigError(f"{where}: tokens is {tokens!r}; give a count of at least 1")
    times = row.get("token_times")
    if times is None:
        return _Row(source, _seconds(where, "duration", row["duration"]), tokens, accepted, reason, None)
    if not isinstance(times, list) or not times:
        raise ConfigError(f"{where}: token_times is {times!r}; give a list of seconds")
    seconds = tuple(_seconds(where, "token_times", t) for t in times)
    if any(a > b for a, b in pairwise(seconds)):
        raise ConfigError(f"{where}: token_times go back in time")
    if tokens not in (None, len(seconds)):
        raise ConfigError(f"{where}: tokens is {tokens}, but there are {len(seconds)} token_times")
    return _Row(source, seconds[-1], len(seconds), accepted, reason, seconds)


def _seconds(where: str, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value <= 0:
        raise ConfigError(f"{where}: {key} is {value!r}; give seconds above 0")
    return float(value)
