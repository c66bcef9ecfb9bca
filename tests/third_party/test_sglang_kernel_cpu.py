"""The stand-in for sglang-kernel: what it computes, and that SGLang finds in it exactly the names it needs."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version

import pytest

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif("+cpu.torch" not in version("sglang-kernel"), reason="GPU hosts have the compiled package"),
]


def murmur3(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0, as published (whole 4-byte blocks only)."""
    state = 0
    for i in range(0, len(data), 4):
        block = int.from_bytes(data[i : i + 4], "little") * 0xCC9E2D51 & 0xFFFFFFFF
        block = ((block << 15 | block >> 17) & 0xFFFFFFFF) * 0x1B873593 & 0xFFFFFFFF
        state ^= block
        state = ((state << 13 | state >> 19) & 0xFFFFFFFF) * 5 + 0xE6546B64 & 0xFFFFFFFF
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    state = (state ^ state >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return state ^ state >> 16


def test_the_sampling_hash_is_murmur3():
    import sgl_kernel  # noqa: F401
    import torch

    seeds, positions, columns = [0, 1, 2**40 + 7, -3], [0, 5, 2**31 - 1, 9], [0, 1, 4095]
    got = torch.ops.sgl_kernel.murmur_hash32_cpu(
        torch.tensor(seeds), torch.tensor(positions, dtype=torch.int32), torch.tensor(columns, dtype=torch.int32)
    )
    want = [
        [
            murmur3((s % 2**64).to_bytes(8, "little") + p.to_bytes(4, "little") + c.to_bytes(4, "little"))
            for c in columns
        ]
        for s, p in zip(seeds, positions, strict=True)
    ]
    assert got.to(torch.int64).tolist() == want


@pytest.mark.parametrize("neox", [True, False])
def test_qk_norm_and_rope_equal_the_complex_rotation_of_normed_heads(neox):
    import sgl_kernel  # noqa: F401
    import torch

    torch.manual_seed(0)
    tokens, q_heads, k_heads, dim, rotary, eps = 7, 4, 2, 16, 8, 1e-6
    q, k = torch.randn(tokens, q_heads * dim), torch.randn(tokens, k_heads * dim)
    q_weight, k_weight = torch.rand(dim) + 0.5, torch.rand(dim) + 0.5
    positions = torch.randint(0, 50, (tokens,))
    angles = torch.outer(torch.arange(50.0), 10000 ** -(torch.arange(rotary // 2) / (rotary // 2)))
    turn = torch.polar(torch.ones_like(angles), angles)[positions][:, None]

    def expected(x, weight):
        heads = torch.nn.functional.rms_norm(x.view(tokens, -1, dim), (dim,), weight, eps)
        pairs = heads[..., :rotary].unflatten(-1, (2, -1) if neox else (-1, 2))
        pairs = pairs.transpose(-1, -2) if neox else pairs
        turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
        turned = (turned.transpose(-1, -2) if neox else turned).flatten(-2)
        return torch.cat((turned, heads[..., rotary:]), -1).flatten(1)

    want = expected(q, q_weight), expected(k, k_weight)
    cache = torch.cat((angles.cos(), angles.sin()), -1)
    torch.ops.sgl_kernel.fused_qk_norm_rope_cpu(q, k, q_weight, k_weight, eps, neox, positions, cache, rotary)
    torch.testing.assert_close((q, k), want, atol=1e-6, rtol=1e-5)


def test_new_cache_slots_go_to_each_request_s_row():
    import torch
    from sgl_kernel import assign_req_to_token_pool_cpu

    table = torch.zeros(3, 6, dtype=torch.int32)
    rows, start, end = torch.tensor([2, 0]), torch.tensor([1, 4]), torch.tensor([4, 6])
    assign_req_to_token_pool_cpu(rows, table, start, end, torch.tensor([11, 12, 13, 14, 15]), 6)
    assert table.tolist() == [[0, 0, 0, 0, 14, 15], [0] * 6, [0, 11, 12, 13, 0, 0]]


def test_what_is_not_implemented_raises_by_name_or_is_absent():
    import sgl_kernel
    import torch

    with pytest.raises(NotImplementedError, match="verify_tree_greedy_cpu"):
        sgl_kernel.verify_tree_greedy_cpu()
    with pytest.raises(NotImplementedError, match="fused_gdn_gating_cpu"):
        torch.ops.sgl_kernel.fused_gdn_gating_cpu()
    assert not hasattr(sgl_kernel, "silu_and_mul")
    assert not hasattr(torch.ops.sgl_kernel, "convert_weight_packed")  # it would switch SGLang to AMX code


def test_sglang_imports_its_scheduler_and_the_models_that_knit_supports():
    """In a process of its own: whether SGLang takes its CPU paths is decided when it is imported."""
    modules = "sglang.srt.managers.scheduler", *(f"sglang.srt.models.{m}" for m in ("qwen3", "qwen3_moe", "qwen3_vl"))
    code = f"import {', '.join(modules)}; from sglang.srt.plugins import load_plugins; load_plugins(); print('ok')"
    environment = os.environ | {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=environment)
    assert done.stdout.endswith("ok\n"), done.stderr[-3000:]
    assert "Failed to load plugin" not in done.stderr
