"""Lets Megatron-core 0.16.1 run in a process without CUDA. Does nothing where CUDA is there.

Megatron asks ``torch.cuda`` for its device and writes ``device="cuda"`` in many places. Only what
Megatron sees is changed: inside its own modules the name ``torch`` is bound to a copy of the module whose
CUDA entries mean the CPU. The process's real ``torch`` stays as it is, but for ``Tensor.type`` while three
functions of the optimizer run. Works alike with a CPU and a CUDA build of torch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

_CPU = torch.device("cpu")

# Tensor factories that Megatron calls with device="cuda" or device=torch.cuda.current_device().
_FACTORIES = ("tensor", "empty", "zeros", "ones", "full", "arange", "empty_like", "zeros_like", "ones_like")

# Everything the trainer uses of Megatron; modules imported later would still see the real torch.
_MEGATRON = (
    "megatron.core.distributed",
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.parallel_state",
    "megatron.core.pipeline_parallel",
    "megatron.core.tensor_parallel.random",
)

_installed = False


def install() -> None:
    """Redirect Megatron to the CPU unless CUDA is available. Idempotent; call before building anything."""
    global _installed
    if _installed or torch.cuda.is_available():
        return
    for name in _MEGATRON:
        importlib.import_module(name)
    stand_in = _torch_on_cpu()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = stand_in  # type: ignore[attr-defined]
    _keep_rng_on_cpu()
    _accept_cpu_parameters()
    _installed = True


class _Stream:
    """A ``torch.cuda.Stream`` or ``Event`` on a device with one queue: everything is already in order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, _: Any) -> None:
        pass

    def wait_event(self, _: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event if event is not None else self

    def record(self, _: Any = None) -> None:
        pass

    def wait(self, _: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


def _copy_of(module: ModuleType) -> ModuleType:
    """A module object with the same names; ones that ``module`` gains later are found too."""
    copy = ModuleType(module.__name__)
    copy.__dict__.update({k: v for k, v in module.__dict__.items() if k != "__getattr__"})
    copy.__dict__["__getattr__"] = lambda name: getattr(module, name)
    return copy


def _torch_on_cpu() -> ModuleType:
    """What Megatron's modules see as ``torch``.

    - ``torch.cuda.current_device()``: distributed/param_and_grad_buffer.py, optimizer/distrib_optimizer.py,
      tensor_parallel/{layers,mappings}.py, models/common/embeddings/rotary_pos_embedding.py
    - ``device="cuda"``: optimizer/{optimizer,clip_grads}.py, tensor_parallel/data.py
    - streams: distributed/{distributed_data_parallel,param_and_grad_buffer}.py
    - ``synchronize``: parallel_state.py; ``manual_seed``, ``get_rng_state``: tensor_parallel/random.py
    """
    out = _copy_of(torch)
    out.cuda = cuda = _copy_of(torch.cuda)  # type: ignore[attr-defined]
    queue = _Stream()
    changes: dict[str, Any] = {
        "current_device": lambda: _CPU,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "current_stream": lambda device=None: queue,
        "default_stream": lambda device=None: queue,
        "stream": lambda stream: contextlib.nullcontext(),
        "Stream": _Stream,
        "Event": _Stream,
        "manual_seed": torch.manual_seed,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    }
    cuda.__dict__.update(changes)
    for name in _FACTORIES:
        out.__dict__[name] = _on_cpu(getattr(torch, name))
    return out


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: Any, device: Any = None, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return factory(*args, device=None if _means_cuda(device) else device, **kwargs)

    return make


def _means_cuda(device: Any) -> bool:
    return device is not None and not isinstance(device, int) and str(device).startswith("cuda")


def _keep_rng_on_cpu() -> None:
    """tensor_parallel/random.py: the tracker forks the CUDA generator by index; here, the CPU's."""
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    # It also warns at every fork that the CPU's state changed, which is what is wanted.
    logging.getLogger(random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def _accept_cpu_parameters() -> None:
    """optimizer/{distrib_optimizer,optimizer,clip_grads}.py ask for ``tensor.type() == "torch.cuda.FloatTensor"``.

    ``type`` is a method of every tensor, so it is changed only while those three functions run.
    """
    from megatron.core.optimizer import distrib_optimizer, optimizer

    for kind in (distrib_optimizer.DistributedOptimizer, optimizer.Float16OptimizerWithFloat16Params):
        kind.__init__ = _with_cuda_types(kind.__init__)
    optimizer.clip_grad_by_total_norm_fp32 = _with_cuda_types(optimizer.clip_grad_by_total_norm_fp32)


def _with_cuda_types(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _type_says_cuda():
            return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def _type_says_cuda() -> Iterator[None]:
    real = torch.Tensor.type

    def named(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        out = real(tensor, *args, **kwargs)
        return out.replace("torch.", "torch.cuda.", 1) if isinstance(out, str) else out

    torch.Tensor.type = named  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.type = real  # type: ignore[method-assign]
