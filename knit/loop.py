"""What one run does, from the first evaluation to the summary. Whatever it waits for has a deadline.

The driver sees metadata only: chunks, plans, metrics. It imports no torch.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from knit.config.schema import KnitConf
from knit.errors import PublishError
from knit.evaluation import evaluate
from knit.feed.assignment import plan_chunk
from knit.fleet import Failure
from knit.launch import Crew
from knit.meter import Metrics, RateMeter, TrainMeter
from knit.probe import Probe
from knit.track.memory import MemoryWatch
from knit.track.summary import Ends, RunRecord, build_summary
from knit.track.times import StepTimes
from knit.track.tracker import Tracker
from knit.types import Chunk


class Loop:
    """The disaggregated loop: generation goes on all the time, training takes what is admitted."""

    def __init__(self, conf: KnitConf, crew: Crew, tracker: Tracker, failure: Failure) -> None:
        self.conf, self.crew, self.tracker, self.failure = conf, crew, tracker, failure
        self.record, self.memory, self.rates = RunRecord(), MemoryWatch(), RateMeter()
        self.probe: Probe | None = None
        self._paused_s = 0.0
        self._started = time.monotonic()

    async def run(self) -> dict[str, Any]:
        await self.begin()
        for step in range(1, self.conf.steps + 1):
            await self.train_batch(step)
        return await self.end()

    async def train_batch(self, step: int) -> None:
        """n mini-batches as they are admitted, then a publish."""
        times, meter = StepTimes(), TrainMeter()
        await self.crew.admit("begin_batch", step)
        for _ in range(self.conf.batch.mini_batches):
            await self.mini_batch(step, times, meter)
        with times("sync"):
            sync = await self.publish(self.crew.version + 1)
            await self.start_probe(step)
        if self.conf.eval.every and step % self.conf.eval.every == 0:
            with times("eval"):
                await self.evaluate(f"step_{step}", step)
        await self.report(step, times, meter, sync)

    async def mini_batch(self, step: int, times: StepTimes, meter: TrainMeter) -> None:
        """Chunks accumulate gradients as they come; one reduction and one optimizer step at the end."""
        normaliser = 0
        await self.crew.train("begin_mini_batch", step)
        while True:
            with times("wait_batch"):
                chunk = await self.next_chunk()
            await self.crew.admit("training_started", step, chunk.mini_batch, chunk.chunk)
            normaliser += await self.train_chunk(chunk, times, meter)
            if chunk.last_of_mini_batch:
                break
        with times("train"):
            meter.mini_batch((await self.crew.train("finish", float(normaliser)))[0])
        await self.crew.admit("trained", step, chunk.mini_batch)

    async def train_chunk(self, chunk: Chunk, times: StepTimes, meter: TrainMeter) -> int:
        """Forward and backward on all ranks, by one plan; returns what the chunk adds to the loss normaliser."""
        by = self.conf.algorithm.loss_normaliser
        with times("train"):
            plan = plan_chunk(
                chunk,
                dp=self.conf.parallel.dp,
                max_tokens_per_micro=self.conf.batch.max_tokens_per_micro,
                normaliser=by,
            )
            reports = await self.crew.train("forward_backward", plan)
        times.move("train", "wait_data", meter.chunk(plan.trained_tokens, reports))
        return plan.trajectories if by == "trajectory" else plan.trained_tokens

    async def next_chunk(self) -> Chunk:
        timeout_s = self.conf.admission.stall_timeout_s
        chunk: Chunk = await self.crew.admit("next_chunk", timeout_s, timeout_s=timeout_s + 30)
        return chunk

    async def publish(self, version: int) -> Metrics:
        """New weights on every engine in service. An engine that fails is restarted and the publish tried again."""
        engines, result = self.crew.engines, {}
        await self.settle_probe()
        for attempt in range(self.conf.fault.max_engine_restarts + 1):
            await engines.wait_in_service()
            async with engines.lock:
                serving = engines.in_service
                await self.crew.admit("publish_started", version)
                try:
                    result = (await self.crew.train("publish", version, serving))[0]
                    break
                except PublishError as error:
                    await self.crew.admit("publish_failed", version)
                    if attempt == self.conf.fault.max_engine_restarts or not error.failed:
                        raise
                    self.tracker.note(f"publish of version {version} failed, engines are restarted: {error}")
                    for name in error.failed:
                        engines.suspect(name)
        self.crew.version = version
        await self.crew.admit("published", version)
        await self.release_payload()
        self._paused_s = result["paused_s"]
        return {
            "sync/seconds": result["seconds"],
            "sync/bytes": result["bytes"],
            "sync/version": float(version),
            "sync/engines": float(len(serving)),
        }

    async def start_probe(self, step: int) -> None:
        if self.probe is not None:
            await self.probe.start(step)

    async def settle_probe(self) -> None:
        if self.probe is not None:
            await self.probe.settle()

    def report_probe(self, step: int, metrics: Metrics) -> None:
        self.record.add_probe(metrics)
        self.tracker.log(step, metrics)

    async def release_payload(self) -> None:
        """Payload of trajectories that have ended is deleted; nothing else ever is."""
        keys = await self.crew.admit("drain_releasable")
        await asyncio.to_thread(self.crew.store.release, keys)

    async def evaluate(self, when: str, step: int) -> None:
        scores = await evaluate(self.crew, self.conf.eval)
        self.record.add_eval(when, scores)
        self.tracker.log(step, scores.metrics(self.conf.eval.name))

    async def report(self, step: int, times: StepTimes, meter: TrainMeter, sync: Metrics) -> None:
        workers = await self.crew.sample("metrics")
        metrics = meter.metrics() | sync | await self.crew.admit("metrics")
        metrics["buffer/bytes"] = float(await asyncio.to_thread(self.crew.store.stored_bytes))
        metrics["rollout/engine_restarts"] = float(self.crew.engines.restarts)
        closed = times.close()
        metrics |= self.rates.metrics(workers, closed, meter.trained_tokens, self._paused_s)
        self.record.add_step(step, metrics, closed)
        self.tracker.step(step, metrics, closed)
        every = self.conf.track.sample_every
        if every and step % every == 0:
            self.tracker.samples(step, [s for w in await self.crew.sample("samples") for s in w])

    async def begin(self) -> None:
        """The probe and the first evaluation at version 0; then generation starts and goes on to the end."""
        if self.conf.sync.probe:
            self.probe = await Probe.make(self.crew, self.conf.sync.probe, self.report_probe)
            await self.start_probe(0)
            await self.settle_probe()
        if self.conf.eval.before:
            await self.evaluate("before", 0)
        self.start_sampling()

    def start_sampling(self) -> None:
        for index in range(len(self.crew.workers)):
            self.failure.watch(self.crew.keep_sampling(index))

    async def stop_sampling(self) -> None:
        """Launches no more and gives up what is in flight; it is counted as left over."""
        await self.crew.admit("stop_launching")
        await self.crew.sample("stop_sampling")

    async def end(self) -> dict[str, Any]:
        await self.stop_sampling()
        await self.settle_probe()
        if self.conf.eval.after:
            await self.evaluate("after", self.conf.steps)
        await self.save_final()
        return self.summary(Ends.of(await self.crew.admit("finish")))

    async def save_final(self) -> None:
        """The trained model as a Hugging Face folder, ready to be served or trained on."""
        if self.conf.checkpoint.final:
            await self.crew.train("save_hf", str(self.crew.resolved.run_dir / "weights" / "final"))

    def summary(self, ends: Ends) -> dict[str, Any]:
        return build_summary(
            self.record,
            ends,
            wall_s=time.monotonic() - self._started,
            engine_restarts=self.crew.engines.restarts,
            peak_memory_bytes=self.memory.close(),
        )
