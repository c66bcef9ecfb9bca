"""The learning rate as a function of the train batch."""

from __future__ import annotations

import math

from knit.config.schema import OptimConf
from knit.errors import ConfigError

SCHEDULES = ("constant", "cosine")


def learning_rate(conf: OptimConf, step: int, steps: int) -> float:
    """Learning rate of train batch ``step`` (from 1) of ``steps``.

    Linear warm-up reaches ``lr`` at batch ``warmup_steps``; ``cosine`` then falls to ``min_lr`` at the last.
    """
    if conf.schedule not in SCHEDULES:
        raise ConfigError(f"optim.schedule={conf.schedule}: use one of {', '.join(SCHEDULES)}")
    if step <= conf.warmup_steps:
        return conf.lr * step / conf.warmup_steps
    if conf.schedule == "constant":
        return conf.lr
    progress = min(1.0, (step - conf.warmup_steps) / max(1, steps - conf.warmup_steps))
    return conf.min_lr + (conf.lr - conf.min_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))
