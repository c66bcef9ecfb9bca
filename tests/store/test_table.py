import pytest

from knit.errors import DuplicateKeyError, MissingUnitError
from knit.store.table import UnitTable
from knit.store.unit import Receipt


def receipts(*keys, size=10):
    return [Receipt(k, size, 0) for k in keys]


def test_a_key_is_written_once():
    table = UnitTable("ray", 100)
    table.add(receipts("a"), "bulk")
    with pytest.raises(DuplicateKeyError, match="unit a"):
        table.add(receipts("b", "a"), "other")
    with pytest.raises(DuplicateKeyError):
        table.check_new(receipts("c", "c"))
    assert len(table) == 1


def test_a_bulk_goes_with_its_last_unit_and_gives_its_bytes_back():
    table = UnitTable("ray", 30)
    table.add(receipts("a", "b", "c"), "bulk")
    assert not table.has_room(receipts("d"))
    assert table.release(["a", "c"]) == []
    assert table.bytes == 10
    assert table.find("b")[0] == "bulk"
    assert table.release(["b"]) == ["bulk"]
    assert table.bytes == 0


def test_a_missing_unit_is_named_and_nothing_is_released_then():
    table = UnitTable("ray", 100)
    table.add(receipts("a"), "bulk")
    with pytest.raises(MissingUnitError, match="unit x is not in store ray"):
        table.release(["a", "x"])
    assert table.find("a")[1] == 0
