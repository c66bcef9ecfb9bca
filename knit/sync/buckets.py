"""Flattened buckets: many named tensors as one run of bytes, so that a publish is a few broadcasts.

The layout is the one SGLang's ``load_format="flattened_bucket"`` expects (tensors back to back as
bytes, each aligned to its own item size) and, by the same token, the data section of a safetensors file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, type and shape of one tensor of a bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Bucket:
    """``flat`` (uint8, ``[size_bytes]``) holds the tensors of ``specs`` back to back, widest type first."""

    specs: tuple[TensorSpec, ...]
    flat: torch.Tensor

    @property
    def size_bytes(self) -> int:
        return self.flat.numel()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and view (no copy) of every tensor."""
        start = 0
        for spec in self.specs:
            end = start + spec.size_bytes
            yield spec.name, self.flat[start:end].view(spec.dtype).reshape(spec.shape)
            start = end

    def description(self) -> dict[str, list[Any]]:
        """The bucket's contents in the fields of SGLang's ``/update_weights_from_distributed``."""
        return {
            "names": [s.name for s in self.specs],
            "dtypes": [str(s.dtype).removeprefix("torch.") for s in self.specs],
            "shapes": [list(s.shape) for s in self.specs],
        }

    def on_host(self) -> Bucket:
        """The same bucket in host memory; itself if it is there already."""
        return self if self.flat.device.type == "cpu" else Bucket(self.specs, self.flat.cpu())


def pack(
    named: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int, device: torch.device | str = "cpu"
) -> Iterator[Bucket]:
    """Packs a stream of named tensors into buckets of at most ``bucket_bytes`` on ``device``.

    A tensor larger than that gets a bucket of its own (the engine loads whole tensors). Lazy: one step
    holds at most ``max(bucket_bytes, largest tensor)`` bytes of collected tensors plus the same again
    for the bucket made of them; never the whole model. Raises ValueError for a name that comes twice.
    """
    seen: set[str] = set()
    held: list[tuple[TensorSpec, torch.Tensor]] = []
    held_bytes = 0
    for name, tensor in named:
        if name in seen:
            raise ValueError(f"tensor {name!r} was exported twice in one publish")
        seen.add(name)
        spec = TensorSpec(name, tensor.dtype, tuple(tensor.shape))
        if held and held_bytes + spec.size_bytes > bucket_bytes:
            yield _flatten(held, held_bytes, device)
            held, held_bytes = [], 0
        held.append((spec, tensor.detach()))
        held_bytes += spec.size_bytes
        del tensor
    if held:
        yield _flatten(held, held_bytes, device)


def _flatten(held: list[tuple[TensorSpec, torch.Tensor]], size_bytes: int, device: torch.device | str) -> Bucket:
    held.sort(key=lambda item: -item[0].dtype.itemsize)  # widest first keeps every offset aligned
    flat = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    bucket = Bucket(tuple(spec for spec, _ in held), flat)
    for (_, view), (_, tensor) in zip(bucket.tensors(), held, strict=True):
        view.copy_(tensor)
    return bucket


def mark_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Pairs every item with whether it is the last; looks one item ahead."""
    stream = iter(items)
    try:
        current = next(stream)
    except StopIteration:
        return
    for following in stream:
        yield current, False
        current = following
    yield current, True
