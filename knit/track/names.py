"""Every metric that knit writes: its name, what it says and its unit. Other names are refused.

``<…>`` stands for one part of a name, e.g. a source. JSON results nest the same names.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass

Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    unit: str
    description: str


def _metrics(table: str) -> tuple[Metric, ...]:
    rows = (line.split("|", 2) for line in table.strip().splitlines())
    return tuple(Metric(*(cell.strip() for cell in row)) for row in rows)


METRICS = _metrics("""
staleness/token/mean         | versions | v_train - v_gen of the trained tokens: mean
staleness/token/p95          | versions | 95th percentile
staleness/token/max          | versions | largest
staleness/trajectory/mean    | versions | staleness of a trajectory's oldest token: mean
staleness/trajectory/max     | versions | largest
staleness/update_lag         | steps    | optimizer steps between the batch's start and the use of a token: mean
partial/mixed_version_ratio  | share    | trained trajectories with tokens of more than one weight version
partial/spans                | count    | version ranges per trained trajectory: mean
partial/carried              | count    | unfinished trajectories of earlier rollout steps when the batch closed
admission/wait_s             | s        | wait for admission, of all chunks of the batch
admission/blocked_by/<name>  | s        | of it, time in which this quota or guard was in the way
quota/<source>/target        | count    | trajectories of the batch guaranteed to the source
quota/<source>/ready         | count    | ready trajectories of the source, now
quota/<source>/admitted      | count    | trajectories of the source in the batch
quota/<source>/deficit       | count    | what its target lacked when the batch closed
quota/<source>/starved_s     | s        | time the source could launch nothing
guard/rejections             | count    | candidates a guard refused
drop/<reason>/<source>       | count    | trajectories dropped since the run's start
lost/<reason>/<source>       | count    | trajectories lost since the run's start
buffer/running               | count    | trajectories being sampled
buffer/paused                | count    | trajectories paused for a publish
buffer/completed             | count    | sampled to their end, waiting for siblings or reward
buffer/ready                 | count    | accepted, waiting for admission
buffer/bytes                 | bytes    | payload in the store
transfer/exposed_s           | s        | time training waited for data
transfer/bytes_read          | bytes    | payload read by training
transfer/bytes_unique        | bytes    | of it, without repeated reads
encoder/unique               | count    | media inputs encoded once
encoder/references           | count    | uses of them
encoder/forward_backward_s   | s        | time in the encoder
sync/seconds                 | s        | duration of the publish
sync/bytes                   | bytes    | weights sent to one engine
sync/version                 | version  | weight version after the publish
sync/engines                 | count    | engines that confirmed it
mismatch/logprob_abs_diff    | nats     | trained tokens: |log-prob in training - as sampled|, staleness included
mismatch/kl                  | nats     | k3 estimate of KL(sampling || training) on trained tokens
mismatch/tis_clip_frac       | share    | tokens whose importance ratio was truncated
mismatch/probe               | nats     | mean absolute log-prob difference at equal weights, on a fixed probe
mismatch/probe_max           | nats     | largest of it
time/step                    | s        | one train batch, publish and evaluation included
time/wait_batch              | s        | waiting for admission
time/wait_data               | s        | waiting for payload
time/train                   | s        | forward, backward, optimizer
time/sync                    | s        | publishing
time/eval                    | s        | evaluating
time/unaccounted             | s        | the rest of the step
idle/train                   | share    | of the step, training waited
idle/rollout                 | share    | of the step, engines had nothing to sample or were paused
perf/tokens_per_s            | tokens/s | sampled tokens
perf/train_tokens_per_s      | tokens/s | trained tokens, by the time of training alone
perf/mfu                     | share    | model FLOPs utilisation of training
perf/memory_bytes            | bytes    | resident memory of all processes of the run
reward/<source>/mean         | reward   | of all rewarded trajectories, dropped ones included
reward/<source>/std          | reward   | standard deviation of the same
eval/<set>/avg_at_n          | score    | mean reward over problems and samples
eval/<set>/standard_error    | score    | of avg_at_n, over problems
eval/<set>/greedy            | score    | mean reward at temperature 0
eval/<set>/<source>/avg_at_n | score    | of one source
eval/<set>/<source>/greedy   | score    | of one source
rollout/response_len         | tokens   | mean response length
rollout/truncated_ratio      | share    | responses cut at max_response_tokens
rollout/zero_std_groups      | count    | groups dropped because all rewards were equal
rollout/retries              | count    | engine failures that trajectories survived
rollout/engine_restarts      | count    | servers restarted since the run's start
train/loss                   | -        | policy loss, mean over mini-batches
train/grad_norm              | -        | gradient norm before clipping
train/clip_frac              | share    | tokens at the clip bound
train/entropy                | nats     | of the next-token distribution on trained tokens
train/kl                     | nats     | penalty term, before its coefficient
train/lr                     | -        | learning rate of the last mini-batch
train/tokens                 | tokens   | trained tokens
""")


@functools.cache
def _patterns() -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(re.sub(r"<\w+>", "[^/]+", re.escape(m.name))) for m in METRICS)


@functools.lru_cache(maxsize=4096)
def is_known(name: str) -> bool:
    return any(p.fullmatch(name) for p in _patterns())


def refuse_unknown(names: Iterable[str]) -> None:
    """Raises ``ValueError`` that names the first unknown metric and the nearest known one."""
    for name in names:
        if not is_known(name):
            near = difflib.get_close_matches(name, [m.name for m in METRICS], n=1, cutoff=0.0)
            raise ValueError(f"{name!r} is not a metric of knit (nearest: {near[0]}); add it to knit/track/names.py")


def nest(metrics: dict[str, float]) -> dict[str, object]:
    """``{"staleness/token/mean": 1}`` → ``{"staleness": {"token": {"mean": 1}}}``."""
    tree: dict[str, object] = {}
    for name, value in metrics.items():
        *above, last = name.split("/")
        node = tree
        for part in above:
            node = node.setdefault(part, {})  # type: ignore[assignment]
        node[last] = value
    return tree
