"""JSON lines, one object per line, readable while they are being written."""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson

OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS | orjson.OPT_APPEND_NEWLINE


class JsonlWriter:
    """Appends objects to a file, each as one whole line that is flushed at once. Safe for threads.

    NaN and infinities are written as ``null``. Writing after :meth:`close` raises ``ValueError``.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "ab")  # noqa: SIM115 - lives as long as the writer
        self._lock = threading.Lock()

    def write(self, record: dict[str, Any]) -> None:
        line = orjson.dumps(record, option=OPTIONS)
        with self._lock:
            self._file.write(line)
            self._file.flush()

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """All records of a file; raises ``ValueError`` with the line number where one is malformed."""
    records = []
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                records.append(orjson.loads(line))
            except orjson.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    return records
