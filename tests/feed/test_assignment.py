from hypothesis import given
from hypothesis import strategies as st

from knit.feed.assignment import plan_chunk
from knit.types import Chunk, SegmentMeta, TrajectoryMeta, VersionRange


def chunk(lengths):
    def trajectory(i, tokens):
        segment = SegmentMeta(f"{i}/s0", tokens, 1, tokens - 1, (VersionRange(0, 0, tokens - 1, 0.0),))
        return TrajectoryMeta(str(i), i, 0, "a", 1, 0, (segment,), 1.0, 0.5, 0.0, 0.0)

    made = tuple(trajectory(i, n) for i, n in enumerate(lengths))
    return Chunk(1, 0, 0, True, False, 0, 0.0, made)


@given(st.lists(st.integers(2, 300), max_size=60), st.integers(1, 8), st.integers(64, 400))
def test_every_segment_is_planned_once_and_all_ranks_have_equally_many_micro_batches(lengths, dp, budget):
    plan = plan_chunk(chunk(lengths), dp=dp, max_tokens_per_micro=budget, normaliser="trajectory")
    assert sorted(plan.units) == sorted(f"{i}/s0" for i in range(len(lengths)))
    assert len({len(rank) for rank in plan.ranks}) == 1
    for rank in plan.ranks:
        for micro in rank:
            assert micro.tokens <= budget or len(micro.sequences) == 1
    again = plan_chunk(chunk(lengths), dp=dp, max_tokens_per_micro=budget, normaliser="trajectory")
    assert again == plan


@given(st.lists(st.integers(2, 300), min_size=1, max_size=60), st.integers(1, 8))
def test_no_rank_carries_more_than_the_mean_and_one_sequence(lengths, dp):
    plan = plan_chunk(chunk(lengths), dp=dp, max_tokens_per_micro=1000, normaliser="token")
    loads = [sum(m.tokens for m in rank) for rank in plan.ranks]
    assert max(loads) <= sum(lengths) / dp + max(lengths) * 1.02


def test_token_weights_follow_the_normaliser():
    (rank,) = plan_chunk(chunk([5, 9]), dp=1, max_tokens_per_micro=100, normaliser="trajectory").ranks
    assert {s.token_weight * s.trained_tokens for m in rank for s in m.sequences} == {1.0}
    (rank,) = plan_chunk(chunk([5, 9]), dp=1, max_tokens_per_micro=100, normaliser="token").ranks
    assert {s.token_weight for m in rank for s in m.sequences} == {1.0}
