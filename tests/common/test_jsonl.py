import math
import threading

import numpy as np
import pytest

from knit.common.jsonl import JsonlWriter, read_jsonl


def test_each_record_is_readable_at_once(tmp_path):
    with JsonlWriter(tmp_path / "deep" / "a.jsonl") as writer:
        writer.write({"a": np.float32(0.5), 3: np.arange(2), "nan": math.nan})
        assert read_jsonl(writer.path) == [{"a": 0.5, "3": [0, 1], "nan": None}]


def test_a_writer_appends_and_refuses_after_close(tmp_path):
    for number in range(2):
        with JsonlWriter(tmp_path / "a.jsonl") as writer:
            writer.write({"n": number})
    assert read_jsonl(writer.path) == [{"n": 0}, {"n": 1}]
    writer.close()
    with pytest.raises(ValueError):
        writer.write({})


def test_lines_of_many_threads_stay_whole(tmp_path):
    writer = JsonlWriter(tmp_path / "a.jsonl")

    def write(name):
        for n in range(200):
            writer.write({"thread": name, "n": n, "fill": "x" * 100})

    threads = [threading.Thread(target=write, args=(t,)) for t in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    records = read_jsonl(writer.path)
    assert sorted((r["thread"], r["n"]) for r in records) == [(t, n) for t in range(4) for n in range(200)]


def test_a_malformed_line_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n\n{"a": \n')
    with pytest.raises(ValueError, match="line 3"):
        read_jsonl(tmp_path / "a.jsonl")
