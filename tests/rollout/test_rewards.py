from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from knit.rollout.agent import TrajectoryFailed
from knit.rollout.rewards import Rewarder, RewardSample, exact_match
from knit.types import Prompt


def sample(response: str = "4", label: Any = 4, finished: bool = True) -> RewardSample:
    return RewardSample(Prompt("a", 0, (1,), "2+2=", label), response, [1], finished)


async def score(function: Any, timeout_s: float = 5.0) -> float:
    return await Rewarder({"a": function}, timeout_s, 4).score(sample())


class AsyncService:
    async def __call__(self, s: RewardSample) -> float:
        await asyncio.sleep(0)
        return 0.25


async def test_sync_async_and_callable_objects_all_work() -> None:
    async def coroutine(s: RewardSample) -> float:
        return 0.5

    assert await score(lambda s: 1) == 1.0
    assert await score(coroutine) == 0.5
    assert await score(AsyncService()) == 0.25


@pytest.mark.parametrize("value", [None, "x", float("nan"), float("inf"), [1]])
async def test_what_is_no_finite_number_is_a_failure_and_never_zero(value: Any) -> None:
    with pytest.raises(TrajectoryFailed) as error:
        await score(lambda s: value)
    assert error.value.reason == "reward_failed"


async def test_an_exception_names_the_function_and_its_cause() -> None:
    def broken(s: RewardSample) -> float:
        raise KeyError("answer")

    with pytest.raises(TrajectoryFailed, match=r"broken raised KeyError: 'answer'") as error:
        await score(broken)
    assert error.value.reason == "reward_failed"


async def test_a_hanging_reward_times_out_sync_or_async() -> None:
    async def hangs(s: RewardSample) -> float:
        await asyncio.sleep(60)
        return 1.0

    for function in (lambda s: time.sleep(3), hangs):
        with pytest.raises(TrajectoryFailed, match="reward_timeout_s") as error:
            await score(function, timeout_s=0.1)
        assert error.value.reason == "reward_timeout"


async def test_no_more_rewards_run_at_once_than_allowed() -> None:
    running = most = 0

    async def counted(s: RewardSample) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return 1.0

    rewarder = Rewarder({"a": counted}, 5, 3)
    await asyncio.gather(*[rewarder.score(sample()) for _ in range(12)])
    assert most == 3


def test_exact_match_needs_the_answer_and_a_proper_end() -> None:
    assert exact_match(sample(" 4\n")) == 1
    assert exact_match(sample("5")) == 0
    assert exact_match(sample("4", finished=False)) == 0
