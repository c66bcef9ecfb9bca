from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from knit.common.net import free_port
from knit.sync.engine_api import EngineClient
from knit.sync.group import GroupError, WeightGroup, rank_layout
from knit.types import EngineAddress


@pytest.mark.parametrize(
    ("tps", "world_size", "offsets"), [([], 1, ()), ([1], 2, (1,)), ([2, 1, 4], 8, (1, 3, 4)), ([8, 8], 17, (1, 9))]
)
def test_engines_take_consecutive_ranks_after_the_trainer(tps, world_size, offsets):
    layout = rank_layout([EngineAddress(f"e{i}", "http://x", tp) for i, tp in enumerate(tps)])
    assert (layout.world_size, layout.offsets) == (world_size, offsets)


def test_a_group_with_an_absent_engine_fails_at_once_and_names_it():
    client = EngineClient(EngineAddress("engine-9", f"http://127.0.0.1:{free_port()}"))
    started = time.monotonic()
    with ThreadPoolExecutor() as pool, pytest.raises(GroupError, match=r"engine engine-9 .* is gone"):
        WeightGroup.form([client], "gloo", "127.0.0.1", 30.0, pool)
    assert time.monotonic() - started < 10
