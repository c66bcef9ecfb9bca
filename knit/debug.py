"""Half a run: only sampling, whose admitted trajectories are dumped, or only training, on such a dump."""

from __future__ import annotations

import asyncio
from itertools import groupby
from typing import Any

from knit.dump import read_chunks, write_chunk
from knit.errors import ConfigError
from knit.loop import Loop
from knit.meter import Metrics, TrainMeter
from knit.store.unit import Read
from knit.track.summary import Ends
from knit.track.times import StepTimes
from knit.types import Chunk


class RolloutOnly(Loop):
    """Samples and admits as ever; instead of being trained, chunks go to ``debug.dump``. The version stays 0."""

    async def begin(self) -> None:
        self.start_sampling()

    async def mini_batch(self, step: int, times: StepTimes, meter: TrainMeter) -> None:
        while True:
            with times("wait_batch"):
                chunk = await self.next_chunk()
            with times("wait_data"):
                await self._dump(chunk)
            if chunk.last_of_mini_batch:
                break
        await self.crew.admit("trained", step, chunk.mini_batch)

    async def publish(self, version: int) -> Metrics:
        """Frees the slots of the batch; no weights change."""
        await self.crew.admit("published", self.crew.version)
        await self.release_payload()
        return {}

    async def end(self) -> dict[str, Any]:
        await self.stop_sampling()
        return self.summary(Ends.of(await self.crew.admit("finish")))

    async def _dump(self, chunk: Chunk) -> None:
        keys = [s.unit for t in chunk.trajectories for s in t.segments]
        payload = await asyncio.to_thread(self.crew.store.read, [Read(k) for k in keys])
        units = dict(zip(keys, payload, strict=True))
        await asyncio.to_thread(write_chunk, self.crew.resolved.dump_dir, chunk, units)


class TrainOnly(Loop):
    """Trains on the chunks of a dump, batch by batch, as they were admitted then. Nothing is published."""

    async def run(self) -> dict[str, Any]:
        folder = self.crew.resolved.dump_dir
        trained = 0
        for step, chunks in groupby(read_chunks(folder), key=lambda pair: pair[0].step):
            if step > self.conf.steps:
                break
            trained += await self._train_batch(step, list(chunks))
        if self.record.steps < self.conf.steps:
            raise ConfigError(f"debug.dump={folder} holds {self.record.steps} train batches, steps={self.conf.steps}")
        await self.save_final()
        return self.summary(Ends(launched=trained, trained=trained))

    async def _train_batch(self, step: int, chunks: list[Any]) -> int:
        times, meter = StepTimes(), TrainMeter()
        normaliser = 0
        for chunk, units in chunks:
            if chunk.chunk == 0:
                await self.crew.train("begin_mini_batch", step)
                normaliser = 0
            with times("wait_data"):
                await asyncio.to_thread(self.crew.store.write, units)
            normaliser += await self.train_chunk(chunk, times, meter)
            if chunk.last_of_mini_batch:
                with times("train"):
                    meter.mini_batch((await self.crew.train("finish", float(normaliser)))[0])
            await asyncio.to_thread(self.crew.store.release, [u.key for u in units])
        metrics, closed = meter.metrics(), times.close()
        self.record.add_step(step, metrics, closed)
        self.tracker.step(step, metrics, closed)
        return sum(len(chunk.trajectories) for chunk, _ in chunks)
