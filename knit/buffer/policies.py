"""Admission policies: when a train batch's mini-batches may be taken from the ready pool (paper §5.1, §7.3).

All of them are one shape: readiness coefficients, guards or none, and where the targets apply. The final
source targets hold before the last mini-batch of every policy but ``on_completion``.

| policy        | source targets at mini-batch t      | guards | like                    |
|---------------|-------------------------------------|--------|-------------------------|
| train_batch   | the whole batch before the first    | yes    | slime                   |
| on_completion | none                                | no     | StreamRL, AsyncFlow     |
| linear        | t/n                                 | yes    |                         |
| no_guards     | the configured schedule             | no     |                         |
| progressive   | the configured schedule             | yes    | KnitTrans               |
| balanced      | only the final ones; an even mix    | yes    | ours                    |
|               | while that does not delay the batch |        |                         |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from knit.buffer.schedules import Schedule, at_end, linear
from knit.errors import ConfigError

NAMES = ("train_batch", "on_completion", "linear", "no_guards", "progressive", "balanced")


@dataclass(frozen=True, slots=True)
class Policy:
    """``schedules``: coefficients per predicate (a source's name or ``completion``); None: no targets at all."""

    name: str
    schedules: Mapping[str, Schedule] | None
    guarded: bool = True
    whole_batch: bool = False  # size and targets of the whole batch hold at its first chunk
    even_mix: bool = False

    def schedule(self, predicate: str) -> Schedule | None:
        return self.schedules[predicate] if self.schedules is not None else None


def make_policy(name: str, mini_batches: int, configured: Mapping[str, Schedule]) -> Policy:
    """``configured``: the schedule of every predicate (source names and ``completion``)."""

    def same(schedule: Schedule) -> dict[str, Schedule]:
        return dict.fromkeys(configured, schedule)

    if name == "train_batch":
        return Policy(name, same((Fraction(1),) * mini_batches), whole_batch=True)
    if name == "on_completion":
        return Policy(name, None, guarded=False)
    if name == "linear":
        return Policy(name, same(linear(mini_batches)))
    if name == "no_guards":
        return Policy(name, dict(configured), guarded=False)
    if name == "progressive":
        return Policy(name, dict(configured))
    if name == "balanced":
        return Policy(name, same(at_end(mini_batches)), even_mix=True)
    raise ConfigError(f"admission.policy={name!r} is unknown: use one of {', '.join(NAMES)}")


@dataclass(slots=True)
class Pace:
    """How the batch keeps time: the part of ``balanced`` that knows when waiting for an even mix costs nothing.

    The whole batch is expected to be ready ``expected_s`` after the previous one was (a moving average). A
    mini-batch that is j places before the last may wait until the trainer needs the time that is left for the
    ones after it; ``margin_s`` grows while the last one nevertheless queues behind the trainer.
    """

    begin_s: float = 0.0  # final admission of the previous batch
    expected_s: float | None = None
    chunk_train_s: float | None = None
    margin_s: float = 0.0
    whole_s: float | None = None  # when all quotas and N could first be met in this batch
    _chunk_started_s: float | None = None

    def chunk_admitted(self, now_s: float) -> None:
        self._chunk_started_s = now_s

    def trainer_free(self, now_s: float) -> None:
        """The trainer asks for more, or has finished: the last chunk's training time is known."""
        if self._chunk_started_s is not None:
            self.chunk_train_s = _average(self.chunk_train_s, now_s - self._chunk_started_s)
            self._chunk_started_s = None

    def deadline_s(self, chunks_after: int) -> float:
        """Until when the next chunk may wait, with ``chunks_after`` chunks of this batch to come after it."""
        later_s = chunks_after * (self.chunk_train_s or 0.0)
        return self.begin_s + (self.expected_s or 0.0) - later_s - self.margin_s

    def final_admission(self, now_s: float) -> None:
        whole_s = self.whole_s if self.whole_s is not None else now_s
        self.expected_s = _average(self.expected_s, whole_s - self.begin_s)
        late_s = now_s - whole_s
        self.margin_s = min(self.expected_s, max(0.0, self.margin_s + 0.3 * (late_s - 0.02 * self.expected_s)))
        self.begin_s, self.whole_s = now_s, None


def _average(old: float | None, new: float) -> float:
    return new if old is None else old + 0.2 * (new - old)
