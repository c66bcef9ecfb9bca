"""The trainer: one rank of a Megatron training world, as a plain object.

    trainer = Trainer(conf, ranks)            # after parallel.start(ranks, address, conf)
    trainer.load_hf(conf.model.path)          # or init_from_config
    trainer.set_progress(step)                # once per train batch
    trainer.begin_mini_batch()
    trainer.forward_backward(micro_batches)   # once per chunk: raw sums accumulate
    metrics = trainer.finish(normaliser)      # one reduction, one optimizer step

Every rank of the world makes the same calls in the same order. The gradient of a mini-batch is
``Σ token terms / normaliser`` over all chunks, micro-batches and data-parallel ranks: how its tokens were
split has no influence on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads

from knit.common.paths import load_path
from knit.config.schema import KnitConf
from knit.errors import RunError
from knit.feed.packing import PackedMicro
from knit.train import convert
from knit.train.families import read_architecture
from knit.train.folder import write_folder
from knit.train.layers import pack_layout
from knit.train.logprobs import token_logprobs
from knit.train.losses import LossFn, Tokens
from knit.train.model import build_model, build_optimizer, dtype_of, rotary_frequencies, transformer_config, wrap
from knit.train.parallel import Ranks, device_of
from knit.train.schedule import learning_rate


class Trainer:
    """Builds model and optimizer for ``model.path`` with undefined weights: load or initialise them next."""

    def __init__(self, conf: KnitConf, ranks: Ranks) -> None:
        self.conf, self.ranks, self.device = conf, ranks, device_of(conf)
        self.arch = read_architecture(str(conf.model.path))
        self.loss: LossFn = load_path(conf.algorithm.loss)
        self.config = transformer_config(self.arch, ranks, conf)
        self.model = build_model(self.arch, self.config)
        self.ddp = wrap(self.model, self.config)
        self.optimizer = build_optimizer(self.ddp, conf.optim, dtype_of(conf))
        self._frequencies = rotary_frequencies(self.arch, self.device)
        self._tp_group = parallel_state.get_tensor_model_parallel_group()
        self._dp_group = parallel_state.get_data_parallel_group()
        self._step = 0
        self._lr = conf.optim.lr
        self._loaded = False
        self._sums: dict[str, torch.Tensor] = {}
        self._tokens = 0

    # -- training

    def set_progress(self, step: int) -> None:
        """Train batch ``step`` (from 1) of ``conf.steps`` begins: sets the learning rate."""
        self._step = step
        self._lr = learning_rate(self.conf.optim, step, self.conf.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = self._lr

    def begin_mini_batch(self) -> None:
        """Forget gradients and sums."""
        self._require_weights()
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._sums, self._tokens = {}, 0

    def forward_backward(self, micro_batches: Iterable[PackedMicro], loss: LossFn | None = None) -> dict[str, int]:
        """Add the gradients of these micro-batches; ``loss`` stands in for ``algorithm.loss``.

        One without trained tokens costs no pass: tensor-parallel ranks see the same micro-batches and
        data-parallel ranks meet only in :meth:`finish`. Returns the counts of this rank.
        """
        counts = {"micro_batches": 0, "tokens": 0, "trained_tokens": 0}
        for micro in micro_batches:
            trained = int(micro.mask.sum())
            self._one(micro, trained, loss or self.loss)
            counts["micro_batches"] += 1
            counts["tokens"] += len(micro.tokens)
            counts["trained_tokens"] += trained
        return counts

    def finish(self, normaliser: float) -> dict[str, float]:
        """Reduce, divide by ``normaliser`` (the same on all ranks) and take one optimizer step.

        Returns the metrics of the mini-batch over all ranks, the same on every one. Raises RunError, before any
        weight has changed, when the gradient is not finite.
        """
        if not normaliser > 0:
            raise RunError(f"train batch {self._step}: a mini-batch was finished with normaliser {normaliser:g}")
        finalize_model_grads([self.ddp])
        self.ddp.scale_gradients(1.0 / normaliser)
        metrics = self._reduce_sums(normaliser)
        metrics["train/grad_norm"] = self._gradient_norm()
        self.optimizer.step()
        metrics["train/lr"] = self._lr
        return metrics

    def _one(self, micro: PackedMicro, trained: int, loss_fn: LossFn) -> None:
        if trained:
            rows = self._tensor(micro.mask).nonzero()[:, 0]
            logprobs, entropy = self._score(micro, rows, self.conf.rollout.temperature)
        else:  # keeps the keys of the sums the same on all ranks
            rows = torch.empty(0, dtype=torch.long, device=self.device)
            logprobs = entropy = torch.empty(0, device=self.device)
        tokens = Tokens(
            logprobs=logprobs,
            entropy=entropy if self.conf.algorithm.entropy_coef else entropy.detach(),
            rollout_logprobs=self._tensor(micro.rollout_logprobs)[rows],
            advantages=self._tensor(micro.advantages)[rows],
            weights=self._tensor(micro.weights)[rows],
        )
        loss, sums = loss_fn(tokens, self.conf.algorithm)
        if trained:
            loss.backward()
        for name, value in {"train/loss": loss.detach().double(), **sums}.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        self._tokens += trained

    def _score(self, micro: PackedMicro, rows: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probability, entropy) of the labels at ``rows``."""
        layout = pack_layout(micro.cu_seqlens.tolist(), self.device, self._frequencies)
        logits = self.ddp(
            self._tensor(micro.tokens)[None], self._tensor(micro.positions)[None], None, packed_seq_params=layout
        )[0]
        chosen = logits[rows].float()
        if temperature != 1.0:
            chosen = chosen / temperature
        labels = self._tensor(micro.labels)[rows]
        return token_logprobs(chosen, labels, vocab=self.arch.vocab, group=self._tp_group)

    def _reduce_sums(self, normaliser: float) -> dict[str, float]:
        """One all-reduce for all metrics. Every rank has seen at least one micro-batch, if an empty one."""
        names = sorted(self._sums)
        if not names:
            raise RunError(f"train batch {self._step}: a mini-batch was finished without a micro-batch")
        values = torch.stack([self._sums[n] for n in names] + [self._sums[names[0]].new_tensor(self._tokens)])
        dist.all_reduce(values, group=self._dp_group)
        *totals, tokens = values.tolist()
        means = {n: total / max(1.0, tokens) for n, total in zip(names, totals, strict=True)}
        means["train/loss"] = totals[names.index("train/loss")] / normaliser
        return means

    def _gradient_norm(self) -> float:
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if not math.isfinite(norm):
            raise RunError(f"train batch {self._step}: the gradient norm is {norm}; no weight was changed")
        return norm

    # -- scoring

    @torch.no_grad()
    def logprobs(self, micro: PackedMicro, temperature: float | None = None) -> np.ndarray[Any, Any]:
        """Log-probability of the label at every position, fp32 [T]; 0 at the last of each sequence.

        ``temperature`` is the sampling temperature of the policy; by default ``rollout.temperature``.
        """
        self._require_weights()
        if not len(micro.tokens):
            return np.zeros(0, np.float32)
        rows = torch.arange(len(micro.tokens), device=self.device)
        scale = self.conf.rollout.temperature if temperature is None else temperature
        out: np.ndarray[Any, Any] = self._score(micro, rows, scale)[0].cpu().numpy()
        out[micro.cu_seqlens[1:] - 1] = 0.0
        return out

    # -- weights

    def load_hf(self, folder: str) -> None:
        """Take the weights of a HF folder; reads only this rank's slices. Optimizer moments stay as they are."""
        with ExitStack() as files:
            self._fill(convert.SafetensorsFolder(folder, files), folder)

    def init_from_config(self, folder: str, seed: int) -> None:
        """Random weights (``model.init_std``) for a folder that has only a ``config.json``; equal for any ranks."""
        self._fill(convert.RandomWeights(seed, self.conf.model.init_std), folder)

    def named_hf_tensors(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """See :func:`knit.train.convert.export`: whole tensors on rank 0, None elsewhere; every rank iterates."""
        self._require_weights()
        return convert.export(self.model, self.arch, self.ranks, self._tp_group)

    def save_hf(self, folder: str) -> None:
        """Write a HF folder, config and tokenizer from ``model.path``; atomic. It is there when any rank returns."""
        tensors = self.named_hf_tensors()
        if self.ranks.rank == 0:
            whole = ((name, tensor) for name, tensor in tensors if tensor is not None)
            write_folder(folder, str(self.conf.model.path), whole, self.conf.model.dtype)
        else:
            for _ in tensors:
                pass
        dist.barrier()

    def _fill(self, source: convert.Source, where: str) -> None:
        convert.load(self.model, self.arch, self.ranks, source, where)
        self.optimizer.reload_model_params()
        self._loaded = True

    def _require_weights(self) -> None:
        if not self._loaded:
            raise RunError("the trainer has no weights yet: call load_hf or init_from_config first")

    def _tensor(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.as_tensor(array).to(self.device, non_blocking=True)
