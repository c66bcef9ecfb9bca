"""A Hugging Face folder written from buckets, from which an engine can be started.

Guarantee: the folder appears under its final name complete or not at all.
"""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path

import orjson
from safetensors import safe_open
from safetensors.torch import save_file

from knit.sync.buckets import Bucket

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


class FolderWriter:
    """Writes one safetensors file per bucket beside ``path``; :meth:`finish` moves the whole into place.

    Config, tokenizer and whatever else is no weight file is copied from ``template``.
    """

    def __init__(self, path: Path, template: Path) -> None:
        self.path = path
        self._template = template
        self._partial = partial_folder(path)
        self._partial.mkdir(parents=True)
        self._files: dict[str, str] = {}  # tensor name -> file name
        self._size_bytes = 0
        self._count = 0
        self._finished = False

    def add(self, bucket: Bucket) -> None:
        """Writes one bucket of host memory."""
        self._count += 1
        file = f"model-{self._count:05d}.safetensors"
        save_file(dict(bucket.tensors()), self._partial / file, metadata={"format": "pt"})
        self._files |= dict.fromkeys((s.name for s in bucket.specs), file)
        self._size_bytes += bucket.size_bytes

    def finish(self) -> Path:
        """Completes the folder and moves it to ``path``, in place of what was there."""
        index = {"metadata": {"total_size": self._size_bytes}, "weight_map": self._files}
        (self._partial / "model.safetensors.index.json").write_bytes(orjson.dumps(index))
        copy_description(self._template, self._partial)
        put_in_place(self._partial, self.path)
        self._finished = True
        return self.path

    def discard(self) -> None:
        """Removes what this writer wrote, finished or not."""
        path = self.path if self._finished else self._partial
        if path.exists():
            shutil.rmtree(path)


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor in the safetensors files of ``folder``, read from their headers."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return shapes


def copy_description(source: Path, target: Path) -> None:
    """Copies the top-level files of a model folder that are neither weights nor an index of weights."""
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.endswith((*WEIGHT_SUFFIXES, ".index.json")):
            shutil.copyfile(file, target / file.name)


def copy_folder(source: Path, target: Path) -> None:
    """Copies a whole model folder; ``target`` appears complete, in place of what was there."""
    partial = partial_folder(target)
    shutil.copytree(source, partial)
    put_in_place(partial, target)


def partial_folder(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial-{uuid.uuid4().hex[:8]}")


def put_in_place(partial: Path, path: Path) -> None:
    old = partial.with_name(f"{partial.name}.old")
    if path.exists():
        os.rename(path, old)
    os.rename(partial, path)
    if old.exists():
        shutil.rmtree(old)
