"""Stand-in for the compiled package ``sglang-kernel`` on CPU hosts, in pure torch, for SGLang 0.5.23.

The published wheels need a CUDA driver or AVX-512/AMX. With ``SGLANG_USE_CPU_ENGINE=1`` and no AMX,
SGLang computes nearly everything in torch, but some of its modules still bind kernels by name when they
are imported, and a few call one. This package defines exactly those names:

- kernels that a supported path calls are implemented (here, and in :mod:`sgl_kernel.ops`);
- names that are bound at import but belong to paths we do not run raise ``NotImplementedError`` when called;
- every other name is absent, so that SGLang's own feature tests (``hasattr``, ``except ImportError``)
  come out right. In particular the op ``convert_weight_packed`` must stay undefined: its presence
  switches SGLang to its AMX code (``srt/utils/common.py``).

GPU hosts install the real package under the same name.
"""

from __future__ import annotations

import torch

from sgl_kernel import ops as _ops  # noqa: F401  (defines torch.ops.sgl_kernel.*)
from sgl_kernel._missing import missing

__version__ = "0.4.10+cpu.torch"


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write each request's new KV-cache slots into its row of the token table, in place.

    Request ``i`` takes the next ``end[i] - start[i]`` entries of ``out_cache_loc`` into
    ``req_to_token[req_pool_indices[i], start[i]:end[i]]``. Bound by ``srt/mem_cache/allocation.py``.
    """
    taken = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        slots = out_cache_loc[taken : taken + last - first]
        req_to_token[row, first:last] = slots.to(req_to_token.dtype)
        taken += last - first


# kernels/ops/kvcache/cache_move.py
copy_all_layer_kv_cache_cpu = missing("copy_all_layer_kv_cache_cpu")
# kernels/ops/speculative/{eagle,multi_layer_eagle,cache_locs,spec_tree}.py: imported by the scheduler
# whether or not speculative decoding is on.
fill_accept_out_cache_loc_cpu = missing("fill_accept_out_cache_loc_cpu")
fill_bonus_tokens_cpu = missing("fill_bonus_tokens_cpu")
rotate_input_ids_cpu = missing("rotate_input_ids_cpu")
assign_draft_cache_locs_contiguous_cpu = missing("assign_draft_cache_locs_contiguous_cpu")
assign_extend_cache_locs_cpu = missing("assign_extend_cache_locs_cpu")
build_tree_kernel_efficient_cpu = missing("build_tree_kernel_efficient_cpu")
verify_tree_greedy_cpu = missing("verify_tree_greedy_cpu")
