"""A micro-batch as the training framework reads it: sequences end to end, labels shifted before any split.

All per-token arrays have the length T of the packed stream, and position t speaks of the prediction made
at token t: its label is token t + 1 of the same sequence. The last position of a sequence predicts
nothing (mask 0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from knit.errors import CorruptUnitError
from knit.feed.assignment import MicroBatch, SequenceRef
from knit.store.unit import Fields

Array = np.ndarray[Any, Any]

FIELDS = ("tokens", "logprobs", "loss_mask", "versions")


@dataclass(frozen=True, slots=True)
class PackedMicro:
    tokens: Array  # int64 [T]
    positions: Array  # int64 [T], from 0 in every sequence
    cu_seqlens: Array  # int32 [S + 1]
    labels: Array  # int64 [T]
    mask: Array  # float32 [T], 1 where the label is trained
    rollout_logprobs: Array  # float32 [T], of the label under the policy that sampled it
    advantages: Array  # float32 [T]
    weights: Array  # float32 [T], loss weight of the label
    versions: Array  # int32 [T], weight version that sampled the label, -1 where none did

    def __len__(self) -> int:
        return len(self.tokens)


def pack(micro: MicroBatch, units: Sequence[Fields]) -> PackedMicro:
    """Concatenates the units of ``micro.sequences``; raises CorruptUnitError where one isn't as planned."""
    parts = [_row(ref, fields) for ref, fields in zip(micro.sequences, units, strict=True)]
    lengths = np.array([0] + [ref.tokens for ref in micro.sequences])

    def join(name: str, dtype: type) -> Array:
        return np.concatenate([p[name] for p in parts]).astype(dtype) if parts else np.zeros(0, dtype)

    return PackedMicro(
        tokens=join("tokens", np.int64),
        positions=join("positions", np.int64),
        cu_seqlens=lengths.cumsum().astype(np.int32),
        labels=join("labels", np.int64),
        mask=join("mask", np.float32),
        rollout_logprobs=join("rollout_logprobs", np.float32),
        advantages=join("advantages", np.float32),
        weights=join("weights", np.float32),
        versions=join("versions", np.int32),
    )


def _row(ref: SequenceRef, fields: Fields) -> dict[str, Array]:
    tokens, mask = fields["tokens"], _shift(fields["loss_mask"], 0)
    if len(tokens) != ref.tokens or int(mask.sum()) != ref.trained_tokens:
        raise CorruptUnitError(
            f"unit {ref.unit}: {len(tokens)} tokens, {int(mask.sum())} of them trained; "
            f"its metadata says {ref.tokens} and {ref.trained_tokens}"
        )
    return {
        "tokens": tokens,
        "positions": np.arange(len(tokens)),
        "labels": _shift(tokens, 0),
        "mask": mask,
        "rollout_logprobs": _shift(fields["logprobs"], 0.0),
        "advantages": np.full(len(tokens), ref.advantage),
        "weights": mask * np.float32(ref.token_weight),
        "versions": _shift(fields["versions"], -1),
    }


def _shift(array: Array, fill: float) -> Array:
    """Value of the next token at every position; ``fill`` at the last."""
    return np.append(array[1:], np.asarray([fill], array.dtype))


def tokens_only(sequences: Sequence[Sequence[int]]) -> PackedMicro:
    """Sequences to be scored, not trained: labels are set, weights and everything about sampling are zero."""
    rows = [np.asarray(s, np.int64) for s in sequences]
    total = sum(len(r) for r in rows)
    zeros = np.zeros(total, np.float32)
    return PackedMicro(
        tokens=np.concatenate(rows),
        positions=np.concatenate([np.arange(len(r)) for r in rows]),
        cu_seqlens=np.cumsum([0] + [len(r) for r in rows]).astype(np.int32),
        labels=np.concatenate([_shift(r, 0) for r in rows]),
        mask=zeros,
        rollout_logprobs=zeros,
        advantages=zeros,
        weights=zeros,
        versions=np.full(total, -1, np.int32),
    )
