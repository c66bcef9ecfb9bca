"""Where the time of a train batch goes. The parts and what is unaccounted for add up to the step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PARTS = ("wait_batch", "wait_data", "train", "sync", "eval")


class StepTimes:
    """Stopwatch of one step, from its creation to :meth:`close`.

    ``with times("train"): …`` counts towards ``train``. Inside another part, the inner one stops the outer's
    clock, so that no moment counts twice. Whole nanoseconds are added, so the parts sum to the step exactly.
    Not for threads; tasks may use it as long as their parts do not overlap.
    """

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._started_ns = self._mark_ns = clock_ns()
        self._spent_ns = dict.fromkeys(PARTS, 0)
        self._open: list[str] = []
        self._unaccounted_ns = 0

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        if part not in self._spent_ns:
            raise ValueError(f"{part!r} is not a part of a step; there are {', '.join(PARTS)}")
        self._settle()
        self._open.append(part)
        try:
            yield
        finally:
            self._settle()
            self._open.pop()

    def move(self, source: str, target: str, seconds: float) -> None:
        """Books time over: a worker reports how much of ``train`` it waited for data. Never more than there is."""
        self._settle()
        amount = min(max(int(seconds * 1e9), 0), self._spent_ns[source])
        self._spent_ns[source] -= amount
        self._spent_ns[target] += amount

    def close(self) -> dict[str, float]:
        """The metrics ``time/…`` of the step up to now, in seconds."""
        self._settle()
        step_ns = self._mark_ns - self._started_ns
        named = {f"time/{part}": ns / 1e9 for part, ns in self._spent_ns.items()}
        return {"time/step": step_ns / 1e9, **named, "time/unaccounted": self._unaccounted_ns / 1e9}

    def _settle(self) -> None:
        """Books the time since the last mark to the innermost open part."""
        now = self._clock_ns()
        passed, self._mark_ns = now - self._mark_ns, now
        if self._open:
            self._spent_ns[self._open[-1]] += passed
        else:
            self._unaccounted_ns += passed
