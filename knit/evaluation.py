"""Held-out evaluation on the rollout engines, split over the rollout workers."""

from __future__ import annotations

from knit.config.schema import EvalConf
from knit.errors import RunError
from knit.launch import Crew
from knit.track.scores import Scores


async def evaluate(crew: Crew, conf: EvalConf) -> Scores:
    """``samples_per_prompt`` samples of every problem and, with ``eval.greedy``, one at temperature 0.

    Raises RunError when a problem has no score, or when the deadline ``eval.timeout_s`` passes.
    """
    samples = await _scores(crew, conf, conf.samples_per_prompt, conf.temperature)
    greedy: dict[str, list[float]] = {}
    if conf.greedy:
        once = await _scores(crew, conf, 1, 0.0)
        greedy = {source: [scores[0] for scores in problems] for source, problems in once.items()}
    return Scores(samples, greedy)


async def _scores(crew: Crew, conf: EvalConf, samples: int, temperature: float) -> dict[str, list[tuple[float, ...]]]:
    workers = list(crew.workers.values())
    merged: dict[str, list[tuple[float, ...]]] = {}
    for shard in await crew.sample_each(
        "evaluate", [(samples, temperature, (i, len(workers))) for i in range(len(workers))], timeout_s=conf.timeout_s
    ):
        for part in shard:
            merged.setdefault(part.source, []).extend(part.scores)
            if any(not scores for scores in part.scores):
                raise RunError(f"evaluation of {part.source}: a problem got no score; {part.error}")
    return merged
