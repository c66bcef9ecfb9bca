import numpy as np
import pytest

from knit.dump import read_chunks, write_chunk
from knit.errors import ConfigError
from knit.types import Chunk, SegmentMeta, TrajectoryMeta, VersionRange


def chunk(step=1, mini_batch=0):
    segment = SegmentMeta("3.1/s0", 5, 2, 3, (VersionRange(0, 0, 2, 1.5), VersionRange(1, 2, 3, 2.5)))
    trajectory = TrajectoryMeta("3.1", 3, 1, "gcd", step, 0, (segment,), 1.0, -0.5, 0.0, 2.5, stats={"turns": 2.0})
    return Chunk(step, mini_batch, 0, True, False, 1, 9.0, (trajectory,))


PAYLOAD = {"3.1/s0": {"tokens": np.arange(5, dtype=np.int32), "logprobs": np.linspace(-1, 0, 5, dtype=np.float32)}}


def test_what_was_dumped_is_read_back_equal_and_in_order(tmp_path):
    for step, mini_batch in ((2, 0), (1, 1), (1, 0)):
        write_chunk(tmp_path, chunk(step, mini_batch), PAYLOAD)
    read = list(read_chunks(tmp_path))
    assert [c for c, _ in read] == [chunk(1, 0), chunk(1, 1), chunk(2, 0)]
    (unit,) = read[0][1]
    assert unit.key == "3.1/s0"
    assert unit.length == 5
    for name, array in PAYLOAD["3.1/s0"].items():
        assert np.array_equal(unit.fields[name], array)
        assert unit.fields[name].dtype == array.dtype


def test_an_empty_folder_says_how_to_make_a_dump(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no dumped chunk; make one with debug\.mode=rollout_only"):
        list(read_chunks(tmp_path))


def test_missing_payload_is_named(tmp_path):
    write_chunk(tmp_path, chunk(), {})
    with pytest.raises(ConfigError, match=r"lacks the payload of 3\.1/s0"):
        list(read_chunks(tmp_path))


def test_a_torn_file_is_named(tmp_path):
    write_chunk(tmp_path, chunk(), PAYLOAD)
    path = next(tmp_path.glob("*.npz"))
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ConfigError, match=r"step_000001_mb_00_chunk_00\.npz cannot be read"):
        list(read_chunks(tmp_path))
