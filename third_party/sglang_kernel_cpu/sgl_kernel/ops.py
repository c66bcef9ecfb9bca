"""The ``torch.ops.sgl_kernel.*`` ops that SGLang reaches on a CPU without AMX."""

from __future__ import annotations

import torch

from sgl_kernel._missing import missing

_LIBRARY = torch.library.Library("sgl_kernel", "FRAGMENT")
_U32 = 0xFFFFFFFF


def _mul_u32(a: torch.Tensor, factor: int) -> torch.Tensor:
    """Low 32 bits of ``a * factor`` for ``0 <= a < 2**32`` held in int64, without overflowing it."""
    low, high = a & 0xFFFF, a >> 16
    return (low * factor + ((high * factor & 0xFFFF) << 16)) & _U32


def _rotate_left_u32(a: torch.Tensor, bits: int) -> torch.Tensor:
    return ((a << bits) | (a >> (32 - bits))) & _U32


def _mix(state: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """One round of MurmurHash3 (x86, 32 bit)."""
    block = _mul_u32(_rotate_left_u32(_mul_u32(block, 0xCC9E2D51), 15), 0x1B873593)
    return (_rotate_left_u32(state ^ block, 13) * 5 + 0xE6546B64) & _U32


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 of (64-bit seed, 32-bit position, 32-bit column) as uint32 ``[rows, columns]``.

    Equal to the Triton kernel in ``kernels/ops/sampling/murmur_hash.py``, which calls this op on CPU: the
    Gumbel noise of seeded sampling under ``--enable-deterministic-inference`` comes from it.
    """
    seed = seed.to(torch.int64)
    state = _mix(torch.zeros_like(seed), seed & _U32)
    state = _mix(state, (seed >> 32) & _U32)
    state = _mix(state, positions.to(torch.int64) & _U32)
    state = _mix(state[:, None], (columns.to(torch.int64) & _U32)[None, :])
    state = state ^ 16  # bytes hashed
    state = _mul_u32(state ^ (state >> 16), 0x85EBCA6B)
    state = _mul_u32(state ^ (state >> 13), 0xC2B2AE35)
    return (state ^ (state >> 16)).to(torch.uint32)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def fused_qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    neox: bool,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    rotary_dim: int,
) -> None:
    """RMS-norm each head of ``q`` and ``k`` and rotate its first ``rotary_dim`` dimensions, in place.

    ``q``, ``k``: ``[tokens, heads * head_dim]``; ``cos_sin_cache``: ``[positions, rotary_dim]``, cosines first.
    ``srt/models/qwen3_moe.py`` calls it without a fallback.
    """
    cos, sin = cos_sin_cache.index_select(0, positions).float()[:, None, :].chunk(2, dim=-1)
    for packed, weight in ((q, q_weight), (k, k_weight)):
        heads = packed.view(packed.shape[0], -1, weight.numel())
        normed = _rms_norm(heads, weight, eps).float()
        rotated, rest = normed[..., :rotary_dim], normed[..., rotary_dim:]
        if neox:
            a, b = rotated.chunk(2, dim=-1)
            rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        else:
            a, b = rotated[..., ::2], rotated[..., 1::2]
            rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        heads.copy_(torch.cat((rotated, rest), dim=-1).to(packed.dtype))


_LIBRARY.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
_LIBRARY.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
_LIBRARY.define(
    "fused_qk_norm_rope_cpu(Tensor(a!) q, Tensor(b!) k, Tensor q_weight, Tensor k_weight, float eps, bool neox, "
    "Tensor positions, Tensor cos_sin_cache, int rotary_dim) -> ()"
)
_LIBRARY.impl("fused_qk_norm_rope_cpu", fused_qk_norm_rope, "CPU")

_BOUND_AT_IMPORT = (
    # srt/models/qwen3_5.py, which the Qwen-VL models import
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    # srt/layers/attention/linear/{kernels/gdn_triton,gdn_backend}.py
    "fused_sigmoid_gating_delta_rule_update_cpu",
    "fused_gdn_gating_cpu",
    # srt/models/grok.py
    "fused_moe_router_cpu",
    "rmsnorm_cpu",
    "fused_dual_residual_rmsnorm_cpu",
)
for _name in _BOUND_AT_IMPORT:
    setattr(torch.ops.sgl_kernel, _name, missing(_name))
