"""Metrics of one train batch, from ``begin_batch`` to the next publish; rollout-side ones since the last publish."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import sqrt

from knit.buffer import staleness
from knit.buffer.batch import Block, TrainBatch
from knit.buffer.lifecycle import SAMPLING, Ledger
from knit.buffer.ready import ReadyPool
from knit.types import Completion, GroupReport, State, TrajectoryMeta


@dataclass(slots=True)
class Waits:
    """How long the trainer waited for admissions, and for what. Time goes to what blocked at its start."""

    total_s: float = 0.0
    by_block_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _since_s: float | None = None
    _blocks: Sequence[Block] = ()

    def blocked(self, now_s: float, blocks: Sequence[Block]) -> None:
        self._account(now_s)
        self._since_s, self._blocks = now_s, blocks

    def admitted(self, now_s: float) -> None:
        self._account(now_s)
        self._since_s, self._blocks = None, ()

    def _account(self, now_s: float) -> None:
        if self._since_s is None:
            return
        waited_s = now_s - self._since_s
        self.total_s += waited_s
        for block in self._blocks:
            self.by_block_s[block.name] += waited_s


@dataclass(slots=True)
class Moments:
    """Mean and standard deviation of a stream of numbers."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.squares += value * value

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    @property
    def std(self) -> float:
        return sqrt(max(0.0, self.squares / self.count - self.mean**2)) if self.count else 0.0


@dataclass(slots=True)
class Meter:
    """Collects while the batch runs; ``close`` turns it into metric names. A new one is made for every batch."""

    waits: Waits = field(default_factory=Waits)
    token_staleness: Counter[int] = field(default_factory=Counter)
    trajectory_staleness: Counter[int] = field(default_factory=Counter)
    lagged_tokens: int = 0  # tokens × optimizer steps taken before them in this batch
    mixed: int = 0
    spans: int = 0
    rewards: dict[str, Moments] = field(default_factory=dict)
    response_tokens: int = 0
    responses: int = 0
    retries: int = 0
    accepted: int = 0
    truncated: int = 0
    zero_std_groups: int = 0

    def completed(self, completion: Completion) -> None:
        self.responses += 1
        self.response_tokens += sum(r.tokens for r in completion.versions)
        self.retries += completion.retries

    def judged(self, source: str, report: GroupReport) -> None:
        moments = self.rewards.setdefault(source, Moments())
        for reward in report.rewards:
            moments.add(reward)
        self.accepted += len(report.accepted)
        self.truncated += sum(t.truncated for t in report.accepted)
        self.zero_std_groups += "zero_std" in report.dropped.values()

    def trained(self, trajectories: Iterable[TrajectoryMeta], train_version: int, mini_batch: int) -> None:
        for meta in trajectories:
            histogram = staleness.token_histogram(meta, train_version)
            self.token_staleness.update(histogram)
            self.trajectory_staleness[max(histogram)] += 1
            self.lagged_tokens += mini_batch * sum(histogram.values())
            self.mixed += len(histogram) > 1
            self.spans += len(meta.version_ranges)

    def close(self, batch: TrainBatch, pool: ReadyPool, ledger: Ledger) -> dict[str, float]:
        """All metrics of the finished batch."""
        metrics = self._staleness() | self._rollout() | self._counts(pool, ledger)
        metrics["guard/rejections"] = batch.guard_rejections
        metrics["partial/carried"] = sum(
            p.launched - p.sampled for step, p in ledger.steps.items() if step < batch.step
        )
        metrics["admission/wait_s"] = self.waits.total_s
        metrics |= {f"admission/blocked_by/{name}": s for name, s in self.waits.by_block_s.items()}
        for source, quota in batch.rules.sources.items():
            admitted = batch.by_source[source]
            metrics[f"quota/{source}/target"] = quota.minimum
            metrics[f"quota/{source}/ready"] = pool.by_source[source]
            metrics[f"quota/{source}/admitted"] = admitted
            metrics[f"quota/{source}/deficit"] = max(0, quota.minimum - admitted)
            metrics[f"quota/{source}/starved_s"] = self.waits.by_block_s.get(f"source.{source}", 0.0)
        return metrics

    def _staleness(self) -> dict[str, float]:
        tokens, trajectories = self.token_staleness, self.trajectory_staleness
        count = max(1, trajectories.total())
        return {
            "staleness/token/mean": staleness.mean(tokens),
            "staleness/token/p95": staleness.quantile(tokens, 0.95),
            "staleness/token/max": max(tokens, default=0),
            "staleness/trajectory/mean": staleness.mean(trajectories),
            "staleness/trajectory/max": max(trajectories, default=0),
            "staleness/update_lag": self.lagged_tokens / max(1, tokens.total()),
            "partial/mixed_version_ratio": self.mixed / count,
            "partial/spans": self.spans / count,
        }

    def _rollout(self) -> dict[str, float]:
        metrics: dict[str, float] = {
            "rollout/response_len": self.response_tokens / max(1, self.responses),
            "rollout/truncated_ratio": self.truncated / max(1, self.accepted),
            "rollout/zero_std_groups": self.zero_std_groups,
            "rollout/retries": self.retries,
        }
        for source, moments in self.rewards.items():
            if moments.count:
                metrics |= {f"reward/{source}/mean": moments.mean, f"reward/{source}/std": moments.std}
        return metrics

    def _counts(self, pool: ReadyPool, ledger: Ledger) -> dict[str, float]:
        metrics: dict[str, float] = {f"buffer/{s}": ledger.count(s) for s in (*SAMPLING, State.COMPLETED)}
        metrics["buffer/ready"] = len(pool)
        metrics |= {f"drop/{reason}/{source}": n for (reason, source), n in ledger.dropped.items()}
        metrics |= {f"lost/{reason}/{source}": n for (reason, source), n in ledger.lost.items()}
        return metrics
