"""Memory of a run: of this process and everything it started on this machine."""

from __future__ import annotations

import threading
from pathlib import Path

import psutil


def tree_bytes() -> int:
    """Resident memory of this process and its descendants; pages that several share count once in all (Linux PSS)."""
    this = psutil.Process()
    return sum(_proportional_bytes(p) for p in [this, *this.children(recursive=True)])


def _proportional_bytes(process: psutil.Process) -> int:
    try:
        for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:  # gone meanwhile, or no such file on this system
        pass
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


class MemoryWatch:
    """Samples :func:`tree_bytes` in a thread until :meth:`close` and keeps the peak."""

    def __init__(self, interval_s: float = 5.0) -> None:
        self.peak_bytes = tree_bytes()
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="knit-memory", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(self._interval_s):
            self.sample()

    def sample(self) -> int:
        now = tree_bytes()
        self.peak_bytes = max(self.peak_bytes, now)
        return now

    def close(self) -> int:
        """Stops; returns the peak. Idempotent."""
        self._stop.set()
        self._thread.join(timeout=self._interval_s)
        return self.peak_bytes
