"""SGLang plugin for a host without CUDA (entry point group ``sglang.srt.plugins``).

SGLang runs :func:`register` in its main, scheduler and detokenizer processes.
"""

from __future__ import annotations

from typing import Any

import torch


def _allocate_unregistered(
    dims: Any,
    dtype: torch.dtype,
    device: str,
    pin_memory: bool,
    allocator: Any,
    registration_granularity_bytes: int | None = None,
) -> torch.Tensor:
    return allocator.allocate(dims, dtype=dtype, device=device)


def register() -> None:
    """Replace the two places where SGLang with ``--device cpu`` still calls into CUDA; where CUDA works, do nothing."""
    if torch.cuda.is_available():
        return
    # srt/mem_cache/pool_host/common.py registers host memory through cudart; the cache of routed experts
    # (--enable-return-routed-experts, srt/state_capturer/base.py) allocates there.
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

    ALLOC_MEMORY_FUNCS["cpu"] = _allocate_unregistered
    # /release_memory_occupation (srt/managers/scheduler_components/weight_updater.py) synchronises the
    # device module, which is torch.cuda whatever --device says; the exception would end the scheduler.
    torch.cuda.synchronize = lambda device=None: None
