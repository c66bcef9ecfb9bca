import pytest

from knit.track.names import METRICS, is_known, nest, refuse_unknown


def test_every_metric_is_described_and_named_once():
    assert len({m.name for m in METRICS}) == len(METRICS)
    assert all(m.unit and m.description for m in METRICS)


def test_placeholders_stand_for_one_part():
    for name in ("quota/gcd/target", "drop/zero_std/my-source", "eval/heldout/avg_at_n", "eval/heldout/gcd/avg_at_n"):
        assert is_known(name)
    for name in ("quota//target", "quota/a/b/target", "quota/gcd", "reward/mean", "loss", "train/loss/x"):
        assert not is_known(name)


def test_an_unknown_name_is_refused_with_the_nearest():
    refuse_unknown(["train/loss", "staleness/token/mean"])
    with pytest.raises(ValueError, match=r"'train/los' is not a metric of knit \(nearest: train/loss\)"):
        refuse_unknown(["train/loss", "train/los"])


def test_results_nest_the_names():
    assert nest({"staleness/token/mean": 1, "staleness/token/max": 2, "a": 3}) == {
        "staleness": {"token": {"mean": 1, "max": 2}},
        "a": 3,
    }
