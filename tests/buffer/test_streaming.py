"""One train batch and the next, by hand."""

from __future__ import annotations

from tests.buffer.helpers import accept, launch, make_buffer, train_and_publish


def run_batch(buffer, step, version):
    buffer.begin_batch(step)
    chunks = []
    while not buffer.batch.complete:
        for tickets in launch(buffer).values():
            for ticket in tickets:
                accept(buffer, ticket)
        chunk = buffer.admit()
        assert chunk is not None, buffer.explain()
        chunks.append(chunk)
        if chunk.last_of_mini_batch:
            buffer.trained(step, chunk.mini_batch)
        buffer.ledger.check()
    train_and_publish(buffer, version)
    return chunks


def test_a_train_batch_has_exactly_its_mini_batches_and_chunks():
    buffer = make_buffer({"a": 0.5, "b": 0.5}, size=20, mini_batches=2, chunks_per_mini_batch=3, group_size=4)
    chunks = run_batch(buffer, 1, 1)
    assert [len(c.trajectories) for c in chunks] == [4, 3, 3, 4, 3, 3]
    assert [(c.mini_batch, c.chunk, c.last_of_mini_batch, c.last_of_batch) for c in chunks][-1] == (1, 2, True, True)
    chunks = run_batch(buffer, 2, 2)
    assert {c.train_version for c in chunks} == {1}
    counts = buffer.finish()
    assert counts["launched"] == counts["trained"] + counts["left_over"]
    assert counts["trained"] == 40
