"""Admitted trajectories on disk: what a run that only samples writes and a run that only trains reads.

A dump has two files per chunk, ``step_000001_mb_00_chunk_00``: ``.json`` with the metadata and ``.npz`` with the
payload, keyed ``<unit>|<field>``.
"""

from __future__ import annotations

import dataclasses
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from pydantic import TypeAdapter

from knit.errors import ConfigError
from knit.store.unit import Unit
from knit.types import Chunk

CHUNK = TypeAdapter(Chunk)
SEPARATOR = "|"


def write_chunk(folder: Path, chunk: Chunk, payload: dict[str, dict[str, Any]]) -> None:
    """``payload``: unit key → fields."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"step_{chunk.step:06d}_mb_{chunk.mini_batch:02d}_chunk_{chunk.chunk:02d}"
    arrays = {f"{key}{SEPARATOR}{name}": array for key, fields in payload.items() for name, array in fields.items()}
    with open(stem.with_suffix(".npz"), "wb") as file:
        np.savez(file, **arrays)
    stem.with_suffix(".json").write_bytes(orjson.dumps(dataclasses.asdict(chunk)))


def read_chunks(folder: Path) -> Iterator[tuple[Chunk, list[Unit]]]:
    """In the order in which they were admitted. Raises ConfigError when there is none, or one is not whole."""
    files = sorted(folder.glob("step_*.json"))
    if not files:
        raise ConfigError(f"debug.dump={folder} holds no dumped chunk; make one with debug.mode=rollout_only")
    for path in files:
        chunk = CHUNK.validate_json(path.read_bytes())
        yield chunk, _units(path.with_suffix(".npz"), chunk)


def _units(path: Path, chunk: Chunk) -> list[Unit]:
    try:
        with np.load(path) as arrays:
            fields: dict[str, dict[str, Any]] = {}
            for key in arrays.files:
                unit, _, name = key.rpartition(SEPARATOR)
                fields.setdefault(unit, {})[name] = arrays[key]
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    segments = [s for t in chunk.trajectories for s in t.segments]
    missing = [s.unit for s in segments if s.unit not in fields]
    if missing:
        raise ConfigError(f"{path} lacks the payload of {missing[0]} and {len(missing) - 1} more")
    return [Unit(s.unit, fields[s.unit], s.tokens, frozenset(fields[s.unit])) for s in segments]
