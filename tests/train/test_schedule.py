from __future__ import annotations

import pytest

from knit.config.schema import OptimConf
from knit.errors import ConfigError
from knit.train.schedule import learning_rate


def test_constant_warms_up_linearly_and_stays() -> None:
    conf = OptimConf(lr=1.0, warmup_steps=4)
    assert [learning_rate(conf, s, 10) for s in (1, 2, 4, 5, 10)] == [0.25, 0.5, 1.0, 1.0, 1.0]


def test_without_warm_up_the_first_batch_has_the_full_rate() -> None:
    assert learning_rate(OptimConf(lr=0.5), 1, 10) == 0.5


def test_cosine_falls_from_the_end_of_warm_up_to_min_lr_at_the_last_batch() -> None:
    conf = OptimConf(lr=1.0, min_lr=0.1, warmup_steps=2, schedule="cosine")
    assert learning_rate(conf, 2, 12) == 1.0
    assert learning_rate(conf, 7, 12) == pytest.approx(0.55)
    assert learning_rate(conf, 12, 12) == pytest.approx(0.1)
    rates = [learning_rate(conf, s, 12) for s in range(2, 13)]
    assert rates == sorted(rates, reverse=True)


def test_an_unknown_schedule_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"optim.schedule=step.*constant, cosine"):
        learning_rate(OptimConf(schedule="step"), 1, 10)
