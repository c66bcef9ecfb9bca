import numpy as np
import pytest

from knit.errors import CorruptUnitError
from knit.store.unit import Unit, checksum, receipt, select, verify


def unit(key="u", length=5):
    fields = {"tokens": np.arange(length, dtype=np.int32), "image": np.ones((2, 3), np.uint8)}
    return Unit(key, fields, length, frozenset({"tokens"}))


def test_a_sequence_field_must_have_the_declared_length():
    with pytest.raises(ValueError, match="field tokens has shape"):
        Unit("u", {"tokens": np.zeros(4)}, 5, frozenset({"tokens"}))


def test_the_checksum_sees_values_names_types_and_shapes_but_not_order():
    a = {"x": np.arange(6, dtype=np.int32), "y": np.zeros(2)}
    assert checksum(a) == checksum(dict(reversed(list(a.items()))))
    for other in (
        {**a, "x": a["x"] + 1},
        {**a, "x": a["x"].astype(np.int64)},
        {**a, "x": a["x"].reshape(2, 3)},
        {"z": a["x"], "y": a["y"]},
    ):
        assert checksum(a) != checksum(other)


def test_a_short_or_altered_read_raises_and_names_the_key():
    u = unit()
    expected = receipt(u)
    verify(expected, u.fields, "ray")
    with pytest.raises(CorruptUnitError, match=r"unit u .*read 22 bytes of 26"):
        verify(expected, {**u.fields, "tokens": u.fields["tokens"][:-1]}, "ray")
    with pytest.raises(CorruptUnitError, match="checksum"):
        verify(expected, {**u.fields, "tokens": u.fields["tokens"][::-1]}, "ray")


def test_an_unknown_field_is_named():
    with pytest.raises(CorruptUnitError, match="no field 'mask'"):
        select("u", unit().fields, ("mask",))


def test_an_empty_field_has_a_checksum():
    assert checksum({"x": np.zeros((0, 3))}) != checksum({"x": np.zeros((0, 4))})
