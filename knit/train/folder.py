"""Writes a model as a Hugging Face folder that either is whole or is not there."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")


def write_folder(
    target: str | Path,
    model_folder: str | Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    dtype: str,
    shard_bytes: int = 4 << 30,
) -> None:
    """``target`` gets config, tokenizer and every other small file of ``model_folder``, and ``tensors``.

    Built beside ``target`` and renamed into its place; an older ``target`` gives way at that moment.
    """
    target, model_folder = Path(target).absolute(), Path(model_folder)
    building = target.with_name(f".{target.name}.building-{os.getpid()}")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    try:
        for path in model_folder.iterdir():
            if path.is_file() and not path.name.endswith(_WEIGHTS):
                shutil.copy2(path, building / path.name)
        _write_config(building / "config.json", dtype)
        _write_weights(building, tensors, shard_bytes)
        _swap(building, target)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _write_config(path: Path, dtype: str) -> None:
    config = json.loads(path.read_text())
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    path.write_text(json.dumps(config, indent=2) + "\n")


def _write_weights(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int) -> None:
    shards: list[dict[str, int]] = []
    pending: dict[str, torch.Tensor] = {}

    def flush() -> None:
        save_file(pending, folder / f"{len(shards):05d}", metadata={"format": "pt"})
        shards.append({name: t.nbytes for name, t in pending.items()})
        pending.clear()

    for name, tensor in tensors:
        if pending and sum(t.nbytes for t in pending.values()) + tensor.nbytes > shard_bytes:
            flush()
        pending[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    flush()
    if len(shards) == 1:
        (folder / "00000").rename(folder / "model.safetensors")
        return
    where = {}
    for i, names in enumerate(shards):
        final = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"{i:05d}").rename(folder / final)
        where.update(dict.fromkeys(names, final))
    total = sum(size for names in shards for size in names.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _swap(building: Path, target: Path) -> None:
    old = target.with_name(f".{target.name}.old-{os.getpid()}")
    if target.exists():
        target.rename(old)
    building.rename(target)
    shutil.rmtree(old, ignore_errors=True)
