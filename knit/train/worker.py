"""The Ray shell of one training rank: plans in, metrics out; rank 0 publishes weights.

torch is imported when the actor starts, not with this module: the driver imports the class to create it.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from knit.common.net import free_port, node_ip
from knit.common.procs import redirect_output
from knit.config.schema import KnitConf
from knit.feed.assignment import Plan
from knit.feed.reader import FeedReader
from knit.store.base import UnitStore
from knit.types import EngineAddress


class TrainWorker:
    """Wrap it with ``ray.remote`` in the placement group ``train``. All ranks get the same calls in the same order."""

    def __init__(self, log_path: str, rank: int, conf: KnitConf, weights_dir: Path, store: UnitStore) -> None:
        redirect_output(log_path)
        self._rank, self._conf, self._weights_dir = rank, conf, weights_dir
        self._reader = FeedReader(store)
        self._trainer: Any = None
        self._publisher: Any = None

    def address(self) -> str:
        """Where the training world meets; asked of rank 0."""
        return f"{node_ip()}:{free_port()}"

    def start(self, address: str) -> dict[str, Any]:
        """Joins the world at ``address``, builds the model and loads the initial weights."""
        from knit.sync.publisher import WeightPublisher
        from knit.train import parallel
        from knit.train.trainer import Trainer

        ranks = parallel.Ranks(self._rank, self._conf.parallel.tp, self._conf.parallel.dp)
        parallel.start(ranks, address, self._conf)
        self._trainer = Trainer(self._conf, ranks)
        model_path = str(self._conf.model.path)
        self._trainer.load_hf(model_path)
        if self._rank == 0:
            self._publisher = WeightPublisher(
                self._conf.sync,
                pause_mode=self._conf.engine.pause_mode,
                model_path=model_path,
                folder=self._weights_dir,
                device=self._trainer.device.type,
            )
        return {"host": socket.gethostname(), "device": str(self._trainer.device)}

    def begin_mini_batch(self, step: int) -> None:
        self._trainer.set_progress(step)
        self._trainer.begin_mini_batch()

    def forward_backward(self, plan: Plan) -> dict[str, float]:
        """Adds the gradients of this rank's share. ``exposed_s`` is what it waited for data meanwhile."""
        micros = plan.ranks[self._trainer.ranks.dp_rank]
        counts = self._trainer.forward_backward(self._reader.micro_batches(micros))
        stats = self._reader.take_stats()
        return {**counts, "exposed_s": stats.exposed_s, "bytes_read": stats.bytes_read}

    def finish(self, normaliser: float) -> dict[str, float]:
        return dict(self._trainer.finish(normaliser))

    def logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-probability, at temperature 1, of every token after the first of each sequence (0 for the first)."""
        import numpy as np

        from knit.feed.packing import tokens_only

        packed = tokens_only(sequences)
        flat = self._trainer.logprobs(packed, temperature=1.0)
        parts = np.split(flat, packed.cu_seqlens[1:-1])
        return [[0.0, *part[:-1].tolist()] for part in parts]

    def publish(self, version: int, engines: list[EngineAddress]) -> dict[str, float]:
        """Every rank takes part in the export; rank 0 sends and returns seconds and bytes."""
        tensors = self._trainer.named_hf_tensors()
        if self._publisher is None:
            for _ in tensors:
                pass
            return {}
        result = self._publisher.publish(version, tensors, engines)
        return {"seconds": result.seconds, "paused_s": result.paused_s, "bytes": result.size_bytes}

    def save_published(self, folder: str) -> int:
        """Rank 0: writes the weights last published to ``folder``; returns their version."""
        return int(self._publisher.save_published(folder))

    def save_hf(self, folder: str) -> None:
        """The current weights as a Hugging Face folder; every rank takes part."""
        self._trainer.save_hf(folder)

    def stop(self) -> None:
        from knit.train import parallel

        if self._publisher is not None:
            self._publisher.close()
        parallel.stop()
