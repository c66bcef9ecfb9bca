"""Layers of the model without Transformer Engine: RMSNorm and packed attention in plain torch.

Attention over many short sequences is the hot spot of small models: a call per sequence costs more than
its arithmetic. :class:`PackLayout` groups sequences of similar length, once per micro-batch; each group is
one padded, batched ``scaled_dot_product_attention``. Padding sits behind a sequence's last token, so under
the causal mask no real token sees it, and what it outputs is thrown away: the result is exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule

_SHORT_TOKENS = 32  # sequences up to this length share a group whatever their lengths
_LEAST_FILL = 0.75  # of a longer group's longest sequence


@dataclass
class PackLayout(PackedSeqParams):
    """Where the sequences of a packed stream lie, for Megatron (thd) and for :class:`PackedAttention`.

    ``pad`` [R] are the stream positions that fill the groups' rectangles, one group after the other
    (padding repeats the last token of its sequence); ``unpad`` [T] says where in them each token is.
    ``groups`` holds (sequences, longest) of every rectangle; their areas sum to R.
    """

    pad: torch.Tensor | None = None
    unpad: torch.Tensor | None = None
    groups: tuple[tuple[int, int], ...] = ()


def pack_layout(cu_seqlens: Sequence[int], device: torch.device) -> PackLayout:
    """``cu_seqlens`` [S + 1] with S ≥ 1 sequences, none of them empty."""
    lengths = [end - start for start, end in pairwise(cu_seqlens)]
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    groups = _group([lengths[i] for i in order])
    pad: list[torch.Tensor] = []
    unpad = torch.empty(cu_seqlens[-1], dtype=torch.long)
    offset, taken = 0, 0
    for count, longest in groups:
        members = order[taken : taken + count]
        start = torch.tensor([cu_seqlens[i] for i in members])[:, None]
        length = torch.tensor([lengths[i] for i in members])[:, None]
        column = torch.arange(longest)[None]
        positions = start + torch.minimum(column, length - 1)  # [count, longest]
        real = (column < length).flatten().nonzero()[:, 0]
        pad.append(positions.flatten())
        unpad[pad[-1][real]] = real + offset
        offset, taken = offset + count * longest, taken + count
    cu = torch.tensor(cu_seqlens, dtype=torch.int32, device=device)
    return PackLayout(
        qkv_format="thd",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        pad=torch.cat(pad).to(device),
        unpad=unpad.to(device),
        groups=groups,
    )


def _group(lengths: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Cuts lengths, longest first, into (count, longest) runs of similar ones."""
    out: list[tuple[int, int]] = []
    for length in lengths:
        if out and (out[-1][1] <= _SHORT_TOKENS or length >= _LEAST_FILL * out[-1][1]):
            out[-1] = (out[-1][0] + 1, out[-1][1])
        else:
            out.append((1, length))
    return tuple(out)


class _Pad(torch.autograd.Function):
    """[T, heads, dim] → [R, heads, dim]. Gradients of padding are zero, so the way back only selects."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, pad: torch.Tensor, unpad: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(unpad)
        return x.index_select(0, pad)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (unpad,) = ctx.saved_tensors
        return grads[0].index_select(0, unpad), None, None


class _Unpad(torch.autograd.Function):
    """[R, heads, dim] → [T, heads, dim]; the gradient of what is dropped is zero."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, unpad: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(unpad)
        ctx.rows = x.size(0)
        return x.index_select(0, unpad)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (unpad,) = ctx.saved_tensors
        (grad,) = grads
        return grad.new_zeros(ctx.rows, *grad.shape[1:]).index_copy_(0, unpad, grad), None


class TorchRMSNorm(torch.nn.RMSNorm):
    """RMSNorm for a layer spec; its gradient is summed over TP where the sequence is split."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


class PackedAttention(MegatronModule):
    """Core attention for a layer spec: causal, grouped-query, packed (thd) with a :class:`PackLayout`."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        if attn_mask_type != AttnMaskType.causal or config.attention_dropout:
            raise NotImplementedError("packed attention is causal and without dropout")
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackLayout | None = None,
    ) -> torch.Tensor:
        """query [T, heads, dim], key and value [T, kv heads, dim] → [T, heads * dim]."""
        layout = packed_seq_params
        if layout is None:
            raise ValueError("packed attention needs the layout of its sequences")
        areas = [count * longest for count, longest in layout.groups]
        rectangles = [_Pad.apply(x, layout.pad, layout.unpad).split(areas) for x in (query, key, value)]
        out = [
            self._attend(*(x.unflatten(0, shape) for x in parts))
            for shape, *parts in zip(layout.groups, *rectangles, strict=True)
        ]
        return _Unpad.apply(torch.cat(out), layout.unpad).flatten(1)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[batch, length, heads, dim] → [batch * length, heads, dim]."""
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.size(1) != k.size(1)
        )
        return out.transpose(1, 2).flatten(0, 1)
