import numpy as np
import pytest
import ray

from knit.errors import DuplicateKeyError, MissingUnitError, StoreFullError
from knit.store.ray_store import PayloadKeeper, RayStore
from knit.store.unit import Read, Unit

pytestmark = pytest.mark.ray


@pytest.fixture
def store(ray_session, tmp_path):
    keeper = ray.remote(num_cpus=0)(PayloadKeeper).remote(str(tmp_path / "keeper.log"), 4096)
    yield RayStore(keeper, timeout_s=2.0)
    ray.kill(keeper)


def unit(key, n=8):
    return Unit(key, {"tokens": np.arange(n, dtype=np.int32)}, n, frozenset({"tokens"}))


def test_what_is_written_is_read_back_in_the_order_asked(store):
    written = store.write([unit("a", 3), unit("b", 5)])
    assert [r.bytes for r in written] == [12, 20]
    b, a = store.read([Read("b"), Read("a", ("tokens",))])
    assert b["tokens"].tolist() == [0, 1, 2, 3, 4]
    assert a["tokens"].tolist() == [0, 1, 2]
    assert store.stored_bytes() == 32


def test_missing_and_duplicate_keys_raise(store):
    store.write([unit("a")])
    with pytest.raises(DuplicateKeyError):
        store.write([unit("a")])
    with pytest.raises(MissingUnitError, match="unit z"):
        store.read([Read("z")])
    store.release(["a"])
    with pytest.raises(MissingUnitError):
        store.read([Read("a")])


def test_a_full_store_holds_the_writer_back_and_never_evicts(store):
    store.write([unit("a", 1000)])
    with pytest.raises(StoreFullError, match=r"4,000 of 4,096 bytes held, 4,000 more wanted"):
        store.write([unit("b", 1000)])
    assert len(store.read([Read("a")])[0]["tokens"]) == 1000
    store.release(["a"])
    store.write([unit("b", 1000)])


def test_payload_outlives_the_process_that_wrote_it(store):
    @ray.remote(num_cpus=0)
    class Writer:
        def write(self, store):
            store.write([unit("mine", 20_000 // 64)])

    writer = Writer.remote()
    ray.get(writer.write.remote(store))
    ray.kill(writer)
    assert len(store.read([Read("mine")])[0]["tokens"]) == 312
