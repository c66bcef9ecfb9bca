"""Hugging Face weights ↔ this rank's Megatron shards, one tensor at a time.

Both directions follow the rules of :mod:`knit.train.families`. :func:`cut` and :func:`join` are pure and
inverse to each other. Beyond the model, memory holds one tensor (its HF parts and its Megatron form).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from knit.errors import ConfigError
from knit.train.families import Architecture, Rule, Split
from knit.train.parallel import Ranks

Shape = tuple[int, ...]
Slice = tuple[int, int, int]  # dimension, start, stop
Read = Callable[[int, Slice | None], torch.Tensor]  # a part of the i-th HF tensor of a rule


class Source(Protocol):
    """Somewhere that HF tensors come from. ``read`` gives all of a tensor or a slice of one dimension."""

    def shape(self, name: str, expected: Shape) -> Shape: ...

    def read(self, name: str, part: Slice | None, expected: Shape) -> torch.Tensor: ...

    def names(self) -> set[str]:
        """Every tensor it holds; empty where it makes them up."""
        ...


class SafetensorsFolder:
    """The ``*.safetensors`` of a folder, read lazily: only the asked slice leaves the disk."""

    def __init__(self, folder: str | Path, files: ExitStack) -> None:
        from safetensors import safe_open

        self.folder = Path(folder)
        self._where: dict[str, Any] = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            handle = files.enter_context(safe_open(path, framework="pt"))
            self._where.update(dict.fromkeys(handle.keys(), handle))

    def names(self) -> set[str]:
        return set(self._where)

    def shape(self, name: str, expected: Shape) -> Shape:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, part: Slice | None, expected: Shape) -> torch.Tensor:
        data = self._slice(name)
        if part is None:
            return data[:]
        dim, start, stop = part
        return data[start:stop] if dim == 0 else data[:, start:stop]

    def _slice(self, name: str) -> Any:
        if name not in self._where:
            raise ConfigError(f"{self.folder}: no tensor {name} in its safetensors; the folder does not hold the model")
        return self._where[name].get_slice(name)


class RandomWeights:
    """Normal weights of deviation ``std``, norms one, biases zero. They depend on seed and name, not on ranks."""

    def __init__(self, seed: int, std: float) -> None:
        self.seed, self.std = seed, std

    def names(self) -> set[str]:
        return set()

    def shape(self, name: str, expected: Shape) -> Shape:
        return expected

    def read(self, name: str, part: Slice | None, expected: Shape) -> torch.Tensor:
        if name.endswith(".bias"):
            full = torch.zeros(expected)
        elif len(expected) == 1:
            full = torch.ones(expected)
        else:
            generator = torch.Generator().manual_seed((self.seed << 32) + zlib.crc32(name.encode()))
            full = torch.randn(expected, generator=generator) * self.std
        return full if part is None else full.narrow(part[0], part[1], part[2] - part[1])


def hf_shapes(split: Split, arch: Architecture, local: Shape, tp: int) -> tuple[Shape, ...]:
    """Shapes of the whole HF tensors behind a Megatron tensor whose shard has shape ``local``."""
    rest = local[1:]
    match split:
        case Split.WHOLE:
            return (local,)
        case Split.COLUMNS:
            return ((local[0], local[1] * tp),)
        case Split.GATED:
            return ((local[0] * tp // 2, *rest),) * 2
        case Split.VOCAB:
            return ((arch.vocab, *rest),)
        case Split.QKV:
            kv = (arch.kv_heads * arch.head_dim, *rest)
            return ((arch.heads * arch.head_dim, *rest), kv, kv)


def cut(split: Split, arch: Architecture, local: Shape, rank: int, tp: int, read: Read) -> torch.Tensor:
    """Rank ``rank``'s shard of shape ``local``."""

    def share(i: int, dim: int, size: int) -> torch.Tensor:
        return read(i, (dim, rank * size, (rank + 1) * size))

    match split:
        case Split.WHOLE:
            return read(0, None)
        case Split.COLUMNS:
            return share(0, 1, local[1])
        case Split.GATED:
            return torch.cat([share(i, 0, local[0] // 2) for i in (0, 1)])
        case Split.VOCAB:
            start, stop = (min((rank + k) * local[0], arch.vocab) for k in (0, 1))
            rows = read(0, (0, start, stop))
            return torch.cat([rows, rows.new_zeros(local[0] - len(rows), *local[1:])])
        case Split.QKV:
            groups, d = arch.kv_heads // tp, arch.head_dim
            parts = [share(i, 0, heads // tp * d) for i, heads in enumerate((arch.heads, arch.kv_heads, arch.kv_heads))]
            return torch.cat([p.reshape(groups, -1, *local[1:]) for p in parts], dim=1).reshape(local)


def join(split: Split, arch: Architecture, shards: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The HF tensors behind the shards of all tensor-parallel ranks. May return views of them."""
    match split:
        case Split.WHOLE:
            return (shards[0],)
        case Split.COLUMNS:
            return (_cat(shards, 1),)
        case Split.GATED:
            halves = [s.chunk(2) for s in shards]
            return tuple(_cat([h[i] for h in halves], 0) for i in (0, 1))
        case Split.VOCAB:
            return (_cat(shards, 0)[: arch.vocab],)
        case Split.QKV:
            d, rest = arch.head_dim, shards[0].shape[1:]
            grouped = _cat(shards, 0).reshape(arch.kv_heads, -1, *rest)
            sizes = [arch.heads // arch.kv_heads * d, d, d]
            return tuple(x.reshape(-1, *rest) for x in grouped.split(sizes, dim=1))


def load(model: torch.nn.Module, arch: Architecture, ranks: Ranks, source: Source, where: str) -> None:
    """Fill every parameter of ``model`` from ``source``.

    Raises ConfigError on a tensor that is missing, has another shape, or belongs nowhere.
    """
    parameters = dict(model.named_parameters())
    used: set[str] = set()
    for rule, megatron_prefix, hf_prefix in arch.rules():
        parameter = _take(parameters, rule, megatron_prefix)
        local, names = tuple(parameter.shape), [hf_prefix + n for n in rule.hf]
        shapes = hf_shapes(rule.split, arch, local, ranks.tp)
        for name, expected in zip(names, shapes, strict=True):
            if (found := source.shape(name, expected)) != expected:
                raise ConfigError(f"{where}: {name} has shape {list(found)}; config.json asks for {list(expected)}")

        with torch.no_grad():
            parameter.copy_(cut(rule.split, arch, local, ranks.tp_rank, ranks.tp, _reader(source, names, shapes)))
        used.update(names)
    if parameters:
        raise ConfigError(f"{where}: the family's table says nothing about {sorted(parameters)[0]}")
    spare = {n for n in source.names() - used if not n.endswith("rotary_emb.inv_freq")}
    if arch.tied:
        spare.discard("lm_head.weight")
    if spare:
        raise ConfigError(f"{where}: {len(spare)} tensors are not part of the model, e.g. {sorted(spare)[0]}")


def mark_shards(model: torch.nn.Module, arch: Architecture) -> None:
    """Tell Megatron which parameters are shards: otherwise it takes them for copies and leaves those of ranks
    above 0 out of the gradient norm. Its layers mark them only while they initialise them."""
    parameters = dict(model.named_parameters())
    for rule, prefix, _ in arch.rules():
        parameter = _take(parameters, rule, prefix)
        if rule.split is not Split.WHOLE:
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
            parameter.partition_dim = 1 if rule.split is Split.COLUMNS else 0  # type: ignore[attr-defined]
            parameter.partition_stride = 2 if rule.split is Split.GATED else 1  # type: ignore[attr-defined]


def _reader(source: Source, names: list[str], shapes: tuple[Shape, ...]) -> Read:
    return lambda i, part: source.read(names[i], part, shapes[i])


def export(
    model: torch.nn.Module, arch: Architecture, ranks: Ranks, group: dist.ProcessGroup | None
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """(HF name, whole tensor) in the order of the rules on rank 0; the tensor is None on every other rank.

    Every rank must run it to its end. A tensor may be a view of the live weights.
    """
    parameters = dict(model.named_parameters())
    for rule, megatron_prefix, hf_prefix in arch.rules():
        parameter = _take(parameters, rule, megatron_prefix).detach()
        tensors: tuple[torch.Tensor | None, ...] = (None,) * len(rule.hf)
        if ranks.dp_rank == 0:
            shards = _gather(parameter, rule.split, ranks, group)
            if ranks.rank == 0:
                tensors = join(rule.split, arch, shards)
        yield from zip((hf_prefix + n for n in rule.hf), tensors, strict=True)


def _gather(parameter: torch.Tensor, split: Split, ranks: Ranks, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    if ranks.tp == 1 or split is Split.WHOLE:
        return [parameter]
    shards = [torch.empty_like(parameter) for _ in range(ranks.tp)]
    dist.all_gather(shards, parameter.contiguous(), group=group)
    return shards


def _take(parameters: dict[str, torch.nn.Parameter], rule: Rule, prefix: str) -> torch.nn.Parameter:
    for name in rule.megatron:
        if prefix + name in parameters:
            return parameters.pop(prefix + name)
    raise ConfigError(f"the model has no {prefix + rule.megatron[0]}: its family's table does not fit its layers")


def _cat(tensors: list[torch.Tensor], dim: int) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)


def has_weights(folder: str | Path) -> bool:
    return any(Path(folder).glob("*.safetensors"))
