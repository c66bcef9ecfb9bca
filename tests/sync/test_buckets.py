from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from knit.sync.buckets import mark_last, pack

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
MODELS = st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), max_size=12)


def tensors(model):
    return [(f"w{i}", (torch.rand(shape) * 100).to(dtype)) for i, (dtype, shape) in enumerate(model)]


@settings(deadline=None, max_examples=60)
@given(MODELS, st.integers(1, 600))
def test_what_is_packed_comes_out_again(model, limit):
    named = tensors(model)
    out = dict(t for bucket in pack(named, limit) for t in bucket.tensors())
    assert out.keys() == dict(named).keys()
    for name, tensor in named:
        assert out[name].dtype == tensor.dtype
        assert torch.equal(out[name], tensor)


@settings(deadline=None, max_examples=60)
@given(MODELS, st.integers(1, 600))
def test_a_bucket_exceeds_its_bound_only_for_a_single_tensor(model, limit):
    for bucket in pack(tensors(model), limit):
        assert bucket.size_bytes <= limit or len(bucket.specs) == 1


@settings(deadline=None, max_examples=60)
@given(MODELS)
def test_every_tensor_is_aligned_to_its_item_size(model):
    for bucket in pack(tensors(model), 10_000):
        start = 0
        for spec in bucket.specs:
            assert start % spec.dtype.itemsize == 0
            start += spec.size_bytes


def test_packing_is_lazy_and_holds_one_bucket():
    alive = 0

    class Counted(torch.Tensor):
        def __del__(self):
            nonlocal alive
            alive -= 1

    worst = 0

    def export():
        nonlocal alive, worst
        for i in range(40):
            tensor = torch.zeros(25).as_subclass(Counted)
            alive += 1
            worst = max(worst, alive)
            yield f"w{i}", tensor
            del tensor

    for _ in pack(export(), 400):
        pass
    assert worst <= 400 // 100 + 2


def test_a_name_that_comes_twice_is_refused():
    with pytest.raises(ValueError, match="'w' was exported twice"):
        list(pack([("w", torch.zeros(1)), ("w", torch.zeros(1))], 100))


def test_views_and_transposed_tensors_are_packed_by_value():
    base = torch.arange(12.0).reshape(3, 4)
    (bucket,) = pack([("t", base.T), ("row", base[1])], 1000)
    out = dict(bucket.tensors())
    assert torch.equal(out["t"], base.T)
    assert torch.equal(out["row"], base[1])


def test_mark_last_marks_only_the_last():
    assert list(mark_last([])) == []
    assert list(mark_last("abc")) == [("a", False), ("b", False), ("c", True)]
