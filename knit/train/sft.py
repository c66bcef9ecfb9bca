"""Supervised training with the trainer of reinforcement learning: demonstrations in, losses out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from knit.feed.assignment import MicroBatch, SequenceRef
from knit.feed.packing import PackedMicro, pack
from knit.train.losses import sft_loss
from knit.train.trainer import Trainer

Pair = tuple[Sequence[int], Sequence[int]]  # prompt and response ids


def warm_up(
    trainer: Trainer,
    batches: Iterable[Sequence[Pair]],
    *,
    max_tokens_per_micro: int = 16384,
    on_step: Callable[[int, float], None] | None = None,
) -> list[float]:
    """One optimizer step per batch; the loss is the mean over response tokens. Returns the losses.

    Every rank is given the same batches and takes its data-parallel share. The learning rate follows
    ``optim`` over ``conf.steps``. ``on_step(step, loss)`` is called after each.
    """
    ranks, losses = trainer.ranks, []
    for step, batch in enumerate(batches, 1):
        trainer.set_progress(step)
        trainer.begin_mini_batch()
        mine = batch[ranks.dp_rank :: ranks.dp]
        trainer.forward_backward(pack_pairs(mine, max_tokens_per_micro), loss=sft_loss)
        metrics = trainer.finish(float(sum(len(response) for _, response in batch)))
        losses.append(metrics["train/loss"])
        if on_step is not None:
            on_step(step, losses[-1])
    return losses


def pack_pairs(pairs: Sequence[Pair], max_tokens: int) -> list[PackedMicro]:
    """Micro-batches of at most ``max_tokens`` (or one longer pair), in which every response token weighs 1.

    At least one, if an empty one: a rank without pairs still takes part.
    """
    bins: list[list[Pair]] = [[]]
    used = 0
    for pair in pairs:
        size = len(pair[0]) + len(pair[1])
        if bins[-1] and used + size > max_tokens:
            bins.append([])
            used = 0
        bins[-1].append(pair)
        used += size
    return [_pack(b) for b in bins]


def _pack(pairs: Sequence[Pair]) -> PackedMicro:
    refs: list[SequenceRef] = []
    units: list[dict[str, np.ndarray[Any, Any]]] = []
    for i, (prompt, response) in enumerate(pairs):
        size = len(prompt) + len(response)
        refs.append(
            SequenceRef(
                unit=str(i),
                trajectory_id=str(i),
                tokens=size,
                trained_tokens=len(response),
                advantage=0.0,
                token_weight=1.0,
                train_version=0,
            )
        )
        units.append(
            {
                "tokens": np.array([*prompt, *response], np.int32),
                "logprobs": np.zeros(size, np.float32),
                "loss_mask": np.repeat(np.array([0, 1], np.uint8), [len(prompt), len(response)]),
                "versions": np.full(size, -1, np.int32),
            }
        )
    return pack(MicroBatch(tuple(refs)), units)
