"""Cutting and joining tensors; reading and writing folders. No Megatron."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from knit.errors import ConfigError
from knit.train.families import Split, architecture_of
from tests.train.cases import MODELS

pytestmark = pytest.mark.megatron
ARCH = architecture_of(MODELS["qwen3"])


def local_shape(split: Split, tp: int) -> tuple[int, ...]:
    d, h = ARCH.head_dim, ARCH.hidden
    return {
        Split.WHOLE: (h,),
        Split.COLUMNS: (h, ARCH.heads * d // tp),
        Split.QKV: ((ARCH.heads + 2 * ARCH.kv_heads) * d // tp, h),
        Split.GATED: (2 * ARCH.ffn // tp, h),
        Split.VOCAB: (ARCH.padded_vocab(tp) // tp, h),
    }[split]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("split", list(Split))
def test_joining_the_shards_gives_the_tensors_back(split: Split, tp: int) -> None:
    import torch

    from knit.train.convert import cut, hf_shapes, join

    local = local_shape(split, tp)
    whole = [torch.randn(s) for s in hf_shapes(split, ARCH, local, tp)]

    def read(i: int, part: Any) -> torch.Tensor:
        return whole[i] if part is None else whole[i].narrow(part[0], part[1], part[2] - part[1])

    shards = [cut(split, ARCH, local, rank, tp, read) for rank in range(tp)]
    assert all(tuple(s.shape) == local for s in shards)
    for ours, theirs in zip(join(split, ARCH, shards), whole, strict=True):
        assert torch.equal(ours, theirs)


def folder(path: Path, **tensors: Any) -> Path:
    from safetensors.torch import save_file

    path.mkdir()
    (path / "config.json").write_text(json.dumps(MODELS["qwen3"]))
    save_file(tensors, path / "model.safetensors")
    return path


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    import torch

    from knit.train.convert import SafetensorsFolder

    with ExitStack() as files:
        source = SafetensorsFolder(folder(tmp_path / "m", a=torch.zeros(2)), files)
        assert source.names() == {"a"}
        with pytest.raises(ConfigError, match=r"no tensor model.norm.weight"):
            source.shape("model.norm.weight", (2,))


def test_a_large_model_is_written_in_shards_with_an_index(tmp_path: Path) -> None:
    import torch
    from safetensors import safe_open

    from knit.train.folder import write_folder

    source = folder(tmp_path / "source", a=torch.zeros(2))
    (source / "tokenizer.json").write_text("{}")
    tensors = {f"t{i}": torch.full((8,), float(i)) for i in range(5)}
    write_folder(tmp_path / "out", source, tensors.items(), "float32", shard_bytes=70)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 160
    assert sorted(set(index["weight_map"].values())) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    for name, tensor in tensors.items():
        with safe_open(tmp_path / "out" / index["weight_map"][name], "pt") as file:
            assert torch.equal(file.get_tensor(name), tensor)
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_a_failed_write_leaves_the_old_folder_as_it_was(tmp_path: Path) -> None:
    import torch

    from knit.train.folder import write_folder

    source = folder(tmp_path / "source", a=torch.zeros(2))
    write_folder(tmp_path / "out", source, [("x", torch.ones(3))], "float32")

    def failing() -> Any:
        yield "x", torch.zeros(3)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_folder(tmp_path / "out", source, failing(), "float32")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]
    from safetensors.torch import load_file

    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["x"], torch.ones(3))
