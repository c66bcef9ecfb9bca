import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from knit.track.scores import Scores, gain, standard_error

SCORES = st.lists(st.floats(0, 1), min_size=2, max_size=30)


def test_every_problem_counts_the_same():
    scores = Scores({"a": [[0, 1], [0, 0], [1, 1]], "b": [[1, 1]]}, {"a": [0, 0, 1], "b": [1]})
    summary = scores.summary()
    assert summary["avg_at_n"] == (0.5 + 0 + 1 + 1) / 4
    assert summary["greedy"] == 0.5
    assert (summary["problems"], summary["samples_per_problem"]) == (4, 2)
    assert summary["sources"]["a"]["avg_at_n"] == 0.5
    assert scores.metrics("heldout")["eval/heldout/b/greedy"] == 1


@given(SCORES)
def test_the_standard_error_of_one_source_is_the_textbooks(values):
    n, center = len(values), math.fsum(values) / len(values)
    textbook = math.sqrt(sum((v - center) ** 2 for v in values) / (n - 1) / n)
    assert standard_error({"a": values}) == pytest.approx(textbook, abs=1e-12)


@given(SCORES, st.floats(-5, 5))
def test_what_lies_between_sources_is_no_noise(values, shift):
    together = {"a": values, "b": [v + shift for v in values]}
    assert standard_error(together) == pytest.approx(standard_error({"a": values}) / math.sqrt(2), abs=1e-9)


def test_a_gain_is_paired_by_problem():
    before = Scores({"a": [[0.0], [0.5], [0.9]]})
    after = Scores({"a": [[0.1], [0.6], [1.0]]})
    found = gain(before, after)
    assert found["avg_at_n"] == pytest.approx(0.1)
    assert found["paired_standard_error"] == pytest.approx(0, abs=1e-12)
    assert found["greedy"] is None


def test_greedy_is_absent_when_not_asked_for():
    scores = Scores({"a": [[1.0]]})
    assert scores.summary()["greedy"] is None
    assert not [name for name in scores.metrics("s") if name.endswith("greedy")]
