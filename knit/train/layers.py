"""Layers of the model without Transformer Engine: RMSNorm, rotary embedding, packed attention in plain torch.

Attention over many short sequences is the hot spot of small models: a call per sequence costs more than
its arithmetic. :class:`PackLayout` groups sequences of similar length, once per micro-batch; each group is
one padded, batched ``scaled_dot_product_attention``. Padding sits behind a sequence's last token, so under
the causal mask no real token sees it, and what it outputs is thrown away: the result is exact.

Norm and rotary embedding have hand-written backward passes: on a CPU the number of passes over memory is
what they cost, and autograd through the single operations takes about three times as many.
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
    ``groups`` holds (sequences, longest) of every rectangle; their areas sum to R. ``cos`` and ``sin``
    [R, 1, dim / 2] rotate the rows of the rectangles.
    """

    pad: torch.Tensor | None = None
    unpad: torch.Tensor | None = None
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    groups: tuple[tuple[int, int], ...] = ()


def pack_layout(cu_seqlens: Sequence[int], device: torch.device, frequencies: torch.Tensor | None = None) -> PackLayout:
    """``cu_seqlens`` [S + 1] with S ≥ 1 sequences, none of them empty.

    ``frequencies`` [dim / 2] are those of the rotary embedding, for :class:`PackedAttention`.
    """
    lengths = [end - start for start, end in pairwise(cu_seqlens)]
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    groups = _group([lengths[i] for i in order])
    pad: list[torch.Tensor] = []
    places: list[torch.Tensor] = []  # of the tokens in their sequences
    unpad = torch.empty(cu_seqlens[-1], dtype=torch.long)
    offset, taken = 0, 0
    for count, longest in groups:
        members = order[taken : taken + count]
        start = torch.tensor([cu_seqlens[i] for i in members])[:, None]
        length = torch.tensor([lengths[i] for i in members])[:, None]
        column = torch.arange(longest)[None]
        places.append(torch.minimum(column, length - 1).flatten())
        pad.append((start + torch.minimum(column, length - 1)).flatten())
        real = (column < length).flatten().nonzero()[:, 0]
        unpad[pad[-1][real]] = real + offset
        offset, taken = offset + count * longest, taken + count
    cu = torch.tensor(cu_seqlens, dtype=torch.int32, device=device)
    angles = None if frequencies is None else torch.outer(torch.cat(places).to(device), frequencies)[:, None]
    return PackLayout(
        qkv_format="thd",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        pad=torch.cat(pad).to(device),
        unpad=unpad.to(device),
        cos=None if angles is None else angles.cos(),
        sin=None if angles is None else angles.sin(),
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
    def forward(ctx: Any, x: torch.Tensor, layout: PackLayout) -> torch.Tensor:
        ctx.layout = layout
        return x.index_select(0, layout.pad)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0].index_select(0, ctx.layout.unpad), None


class _PadAndRotate(torch.autograd.Function):
    """:class:`_Pad`, then the rotary embedding (rotate-half form); the way back rotates backwards."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layout: PackLayout) -> torch.Tensor:
        ctx.layout = layout
        return _rotate(x.index_select(0, layout.pad), layout, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _rotate(grads[0], ctx.layout, -1.0).index_select(0, ctx.layout.unpad), None


def _rotate(x: torch.Tensor, layout: PackLayout, direction: float) -> torch.Tensor:
    """Pairs (x1, x2) of the halves of the last dimension → (x1 cos - x2 sin, x2 cos + x1 sin)."""
    if layout.cos is None or layout.sin is None:
        raise ValueError("the layout was made without rotary tables")
    cos, sin = layout.cos.to(x.dtype), layout.sin.to(x.dtype)
    out = torch.empty_like(x)
    (x1, x2), (out1, out2) = x.chunk(2, -1), out.chunk(2, -1)
    torch.mul(x1, cos, out=out1)
    out1.addcmul_(x2, sin, value=-direction)
    torch.mul(x2, cos, out=out2)
    out2.addcmul_(x1, sin, value=direction)
    return out


class _Unpad(torch.autograd.Function):
    """[R, heads, dim] → [T, heads, dim]; the gradient of what is dropped is zero."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layout: PackLayout) -> torch.Tensor:
        ctx.layout, ctx.rows = layout, x.size(0)
        return x.index_select(0, layout.unpad)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (grad,) = grads
        return grad.new_zeros(ctx.rows, *grad.shape[1:]).index_copy_(0, ctx.layout.unpad, grad), None


class _RMSNorm(torch.autograd.Function):
    """x / rms(x) * weight over the last dimension, in fp32, like the Hugging Face models."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        full = x.float()
        scale = torch.linalg.vector_norm(full, dim=-1, keepdim=True).square_().div_(x.size(-1)).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (full * scale).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        full, full_weight, grad = x.float(), weight.float(), grads[0].float()
        product = grad * full
        of_weight = scale.flatten() @ product.flatten(0, -2)
        along_x = (product @ full_weight).unsqueeze(-1) * scale.pow(3) / x.size(-1)
        of_x = (grad * full_weight).mul_(scale).addcmul_(full, along_x, value=-1.0)
        return of_x.to(x.dtype), of_weight.to(weight.dtype), None


class TorchRMSNorm(torch.nn.Module):
    """RMSNorm for a layer spec; its gradient is summed over TP where the sequence is split."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _RMSNorm.apply(x, self.weight, self.eps)
        return out


class PackedAttention(MegatronModule):
    """Core attention for a layer spec: causal, grouped-query, packed (thd) with a :class:`PackLayout`.

    It applies the rotary embedding too: the model around it has ``position_embedding_type="none"``.
    """

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
        if layout is None or layout.cos is None:
            raise ValueError("packed attention needs the layout of its sequences, with rotary frequencies")
        areas = [count * longest for count, longest in layout.groups]
        ways = ((_PadAndRotate, query), (_PadAndRotate, key), (_Pad, value))
        rectangles = [way.apply(x, layout).split(areas) for way, x in ways]
        out = [
            self._attend(*(x.unflatten(0, shape) for x in parts))
            for shape, *parts in zip(layout.groups, *rectangles, strict=True)
        ]
        joined = torch.cat(out) if len(out) > 1 else out[0]
        return _Unpad.apply(joined, layout).flatten(1)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[batch, length, heads, dim] → [batch * length, heads, dim]."""
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.size(1) != k.size(1)
        )
        return out.transpose(1, 2).flatten(0, 1)
