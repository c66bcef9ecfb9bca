"""Publishes weights from the trainer to every rollout engine: pause, update, verify, continue.

Guarantees:

- The version grows by what the caller says, never shrinks, and only when *every* engine confirmed it.
- A publish ends: an explicit error or a dead engine ends it in seconds, a silent one within
  ``sync.timeout_s``. Putting old weights back and the export of the tensors come on top.
- After a failure each engine is one of three: *confirmed* (runs on the new version), *kept* (runs on the
  old one; if it had loaded a part of the new weights, the old ones were put back from disk first), or
  *failed* (gone, silent, or with weights of unknown state: it stays paused until it is restarted or a
  publish succeeds). Engines of the first two kinds are continued, whatever happens.
- The tensors are consumed to their end in any case: their export is a collective of the training workers.
- The last published weights stay in host memory, so that an engine can be started from exactly these at
  any time (:meth:`WeightPublisher.save_published`). During a publish the new ones are held beside them:
  twice the model in host memory, and two buckets on the device.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from knit.common.net import node_ip
from knit.config.schema import SyncConf
from knit.errors import PublishError
from knit.sync.attempt import Attempt
from knit.sync.buckets import Bucket, mark_last, pack
from knit.sync.engine_api import EngineClient
from knit.sync.folder import FolderWriter, copy_folder, tensor_shapes
from knit.sync.transports import DiskTransport, DistributedTransport, Order, Transport
from knit.types import EngineAddress

MB = 2**20
GRACE_S = 5.0
MAX_THREADS = 1024  # started as needed; every engine of a broadcast needs one at the same time


@dataclass(frozen=True, slots=True)
class PublishResult:
    """``paused_s`` is how long generation stood still, ``size_bytes`` what was sent to each engine."""

    version: int
    seconds: float
    paused_s: float
    size_bytes: int


class WeightPublisher:
    """Lives in the process of training rank 0. Not safe for threads.

    ``version`` is the one the engines run when the publisher is made, ``model_path`` a folder with exactly
    these weights; config and tokenizer files of written folders come from it. ``folder`` is a directory
    that trainer and engines both see. ``device`` is where the exported tensors are: ``cuda`` means NCCL.
    """

    def __init__(
        self,
        conf: SyncConf,
        *,
        pause_mode: str,
        model_path: str | Path,
        folder: str | Path,
        version: int = 0,
        device: str = "cpu",
        host: str | None = None,
    ) -> None:
        self.version = version
        self._conf = conf
        self._pause_mode = pause_mode
        self._model_path = Path(model_path)
        self._folder = Path(folder)
        self._device = device
        self._shapes = tensor_shapes(self._model_path)
        self._published: tuple[Bucket, ...] = ()
        self._saved: dict[Path, int] = {}
        self._pool = ThreadPoolExecutor(thread_name_prefix="publish", max_workers=MAX_THREADS)
        self._transport = self._make_transport(host or node_ip())
        self._restore_lock = threading.Lock()

    def _make_transport(self, host: str) -> Transport:
        if self._conf.transport == "distributed":
            return DistributedTransport("nccl" if self._device.startswith("cuda") else "gloo", host, self._pool)
        if self._conf.transport == "disk":
            return DiskTransport(
                lambda version: FolderWriter(self._folder / f"v{version:06d}", self._model_path), self._pool
            )
        raise ValueError(f"sync.transport={self._conf.transport!r} is not one of distributed, disk")

    def publish(
        self, version: int, tensors: Iterable[tuple[str, torch.Tensor]], engines: Sequence[EngineAddress]
    ) -> PublishResult:
        """Makes all ``engines`` run on ``tensors`` as ``version``. Raises PublishError (see above).

        After an error the same version may be published again, to the same or another list of engines.
        """
        started = time.monotonic()
        stream = iter(tensors)
        try:
            if version <= self.version:
                raise PublishError(f"version {version} cannot follow version {self.version}: versions only grow")
            if not engines:
                raise PublishError(f"version {version} has no engine to be published to")
            buckets, paused_s = self._attempt(version, stream, engines)
        finally:
            for _ in stream:
                pass
        self.version, self._published = version, buckets
        size_bytes = sum(b.size_bytes for b in buckets)
        return PublishResult(version, time.monotonic() - started, paused_s, size_bytes)

    def _attempt(
        self, version: int, stream: Iterator[tuple[str, torch.Tensor]], engines: Sequence[EngineAddress]
    ) -> tuple[tuple[Bucket, ...], float]:
        clients = tuple(EngineClient(e) for e in engines)
        grace_s = min(GRACE_S, self._conf.timeout_s / 8)
        order = Order(
            version=version,
            clients=clients,
            flush_cache=self._pause_mode != "in_place",  # in_place keeps requests on their old KV cache
            deadline=time.monotonic() + self._conf.timeout_s - 3 * grace_s,
            grace_s=grace_s,
        )
        buckets = mark_last(pack(self._checked(stream), int(self._conf.bucket_mb * MB), self._device))
        try:
            return Attempt(order, self._transport, self._pause_mode, self._pool, self._restore).run(buckets)
        finally:
            for client in clients:
                client.close()

    def _checked(self, stream: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Refuses tensors that are not the model's: SGLang skips unknown names and pads shapes without a word."""
        for name, tensor in stream:
            shape = tuple(tensor.shape)
            wanted = self._shapes.get(name)
            if self._shapes and shape != wanted:
                there = f"but {list(wanted)}" if wanted is not None else "which is not"
                raise PublishError(f"the trainer exported {name} {list(shape)}, {there} in {self._model_path}")
            yield name, tensor
            del tensor

    def _restore(self, client: EngineClient) -> None:
        """Puts the last published weights back into an engine that holds a part of newer ones."""
        with self._restore_lock:
            path = self._folder / f"restore-v{self.version:06d}" if self._published else self._model_path
            if self._published:
                self.save_published(path)
        client.load_folder(str(path), str(self.version), flush_cache=False, timeout_s=self._conf.timeout_s)

    def save_published(self, path: str | Path) -> int:
        """Writes a folder from which an engine starts with the published weights; returns their version.

        The folder appears complete or not at all; what was at ``path`` is replaced.
        """
        target = Path(path)
        if self._saved.get(target) == self.version and target.exists():
            return self.version
        if not self._published:
            copy_folder(self._model_path, target)
        else:
            writer = FolderWriter(target, self._model_path)
            for bucket in self._published:
                writer.add(bucket)
            writer.finish()
        self._saved[target] = self.version
        return self.version

    def close(self) -> None:
        """Ends the process group on both sides; engines that are gone are no error."""
        self._transport.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
