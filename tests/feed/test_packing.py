import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from knit.errors import CorruptUnitError
from knit.feed.assignment import MicroBatch, SequenceRef
from knit.feed.packing import pack


def ref(i, tokens, trained):
    return SequenceRef(f"{i}/s0", str(i), tokens, trained, 0.5 + i, 1.0 / max(trained, 1), 3)


def segment(prompt, response, rng):
    n = prompt + response
    sampled = np.arange(n) >= prompt
    return {
        "tokens": rng.integers(0, 99, n).astype(np.int32),
        "logprobs": np.where(sampled, -rng.random(n), 0).astype(np.float32),
        "loss_mask": sampled.astype(np.uint8),
        "versions": np.where(sampled, 2, -1).astype(np.int32),
    }


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=6))
def test_every_trained_token_is_the_label_of_the_position_before_it(shapes):
    rng = np.random.default_rng(0)
    units = [segment(p, r, rng) for p, r in shapes]
    packed = pack(MicroBatch(tuple(ref(i, p + r, r) for i, (p, r) in enumerate(shapes))), units)
    assert len(packed) == packed.cu_seqlens[-1] == sum(p + r for p, r in shapes)
    for i, ((p, r), unit) in enumerate(zip(shapes, units, strict=True)):
        at = slice(packed.cu_seqlens[i], packed.cu_seqlens[i + 1])
        trained = packed.mask[at] == 1
        assert trained.sum() == r
        assert np.array_equal(packed.tokens[at], unit["tokens"])
        assert np.array_equal(packed.labels[at][trained], unit["tokens"][p:])
        assert np.array_equal(packed.rollout_logprobs[at][trained], unit["logprobs"][p:])
        assert set(packed.versions[at][trained]) <= {2}
        assert packed.weights[at].sum() == pytest.approx(1.0 if r else 0.0)
        assert np.array_equal(packed.positions[at], np.arange(p + r))


def test_a_unit_that_is_not_what_its_metadata_says_is_refused():
    unit = segment(3, 4, np.random.default_rng(0))
    with pytest.raises(CorruptUnitError, match="7 tokens, 4 of them trained; its metadata says 8 and 4"):
        pack(MicroBatch((ref(0, 8, 4),)), [unit])
    with pytest.raises(CorruptUnitError, match="says 7 and 5"):
        pack(MicroBatch((ref(0, 7, 5),)), [unit])
