"""Metrics that only the driver can know: means over mini-batches, rates, and idle shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Metrics = dict[str, float]


class TrainMeter:
    """Collects the reports of one train batch; every mini-batch counts the same."""

    def __init__(self) -> None:
        self._sums: Metrics = {}
        self._mini_batches = 0
        self._last: Metrics = {}
        self.trained_tokens = 0
        self.bytes_read = 0.0
        self.exposed_s = 0.0

    def chunk(self, trained_tokens: int, reports: Sequence[Mapping[str, float]]) -> float:
        """Reports of all ranks on one chunk; returns for how long the slowest waited for data."""
        exposed_s = max(r["exposed_s"] for r in reports)
        self.trained_tokens += trained_tokens
        self.bytes_read += sum(r["bytes_read"] for r in reports)
        self.exposed_s += exposed_s
        return exposed_s

    def mini_batch(self, metrics: Mapping[str, float]) -> None:
        self._mini_batches += 1
        self._last = dict(metrics)
        for name, value in metrics.items():
            self._sums[name] = self._sums.get(name, 0.0) + value

    def metrics(self) -> Metrics:
        """{} when nothing was trained."""
        if not self._mini_batches:
            return {}
        means = {n: total / self._mini_batches for n, total in self._sums.items()}
        return {
            **means,
            "train/lr": self._last["train/lr"],
            "train/tokens": float(self.trained_tokens),
            "transfer/exposed_s": self.exposed_s,
            "transfer/bytes_read": self.bytes_read,
        }


class RateMeter:
    """Turns running totals of the rollout workers and the times of a step into rates and shares of the step."""

    def __init__(self) -> None:
        self._sampled_tokens = 0.0
        self._idle_s = 0.0

    def metrics(
        self, workers: Sequence[Mapping[str, float]], times: Mapping[str, float], trained_tokens: int, paused_s: float
    ) -> Metrics:
        step_s = max(times["time/step"], 1e-9)
        sampled = sum(w["sampled_tokens"] for w in workers)
        idle_s = sum(w["idle_s"] for w in workers) / max(len(workers), 1)
        # A replaced worker counts from zero again.
        sampled_now, self._sampled_tokens = max(sampled - self._sampled_tokens, 0.0), sampled
        idle_now, self._idle_s = max(idle_s - self._idle_s, 0.0), idle_s
        waited_s = times["time/wait_batch"] + times["time/wait_data"]
        return {
            "perf/tokens_per_s": sampled_now / step_s,
            "perf/train_tokens_per_s": trained_tokens / max(times["time/train"], 1e-9),
            "idle/train": min(waited_s / step_s, 1.0),
            "idle/rollout": min((idle_now + paused_s) / step_s, 1.0),
            "rollout/retries": sum(w["engine_retries"] for w in workers),
        }
