from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from knit.sync.buckets import pack
from knit.sync.folder import FolderWriter, copy_folder, tensor_shapes

NAMED = [("a.weight", torch.rand(3, 4)), ("b.weight", torch.rand(5).bfloat16()), ("c.weight", torch.rand(2, 2, 2))]


@pytest.fixture
def template(tmp_path):
    path = tmp_path / "template"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "tokenizer.json").write_text("[]")
    (path / "model.safetensors.index.json").write_text("old")
    save_file({"old": torch.zeros(1)}, path / "model.safetensors")
    return path


def write(path, template, named=NAMED):
    writer = FolderWriter(path, template)
    for bucket in pack(named, 50):
        writer.add(bucket)
    return writer


def test_a_folder_holds_the_tensors_and_the_templates_description_but_not_its_weights(tmp_path, template):
    path = write(tmp_path / "out", template).finish()
    loaded = {}
    for file in path.glob("*.safetensors"):
        loaded |= load_file(file)
    assert loaded.keys() == dict(NAMED).keys()
    assert all(torch.equal(loaded[n], t) for n, t in NAMED)
    assert (path / "tokenizer.json").read_text() == "[]"
    assert '"a.weight":"model-0000' in (path / "model.safetensors.index.json").read_text()
    assert tensor_shapes(path) == {n: tuple(t.shape) for n, t in NAMED}


def test_nothing_stands_under_the_final_name_before_the_folder_is_complete(tmp_path, template):
    writer = write(tmp_path / "out", template)
    assert not (tmp_path / "out").exists()
    writer.discard()
    assert [p.name for p in tmp_path.iterdir()] == ["template"]


def test_a_folder_takes_the_place_of_an_older_one(tmp_path, template):
    write(tmp_path / "out", template).finish()
    write(tmp_path / "out", template, [("d", torch.ones(1))]).finish()
    assert tensor_shapes(tmp_path / "out") == {"d": (1,)}
    copy_folder(template, tmp_path / "out")
    assert tensor_shapes(tmp_path / "out") == {"old": (1,)}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "template"]


def test_discarding_an_unfinished_folder_leaves_the_older_one(tmp_path, template):
    write(tmp_path / "out", template).finish()
    write(tmp_path / "out", template).discard()
    assert tensor_shapes(tmp_path / "out").keys() == dict(NAMED).keys()
