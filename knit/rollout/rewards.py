"""Rewards: user functions named by Python path, sync or async, with a time-out and a concurrency limit.

A reward that raises, hangs or returns no finite number drops its trajectory with a reason. It never counts
as reward 0: that would teach the policy from a failure of ours.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from knit.rollout.agent import TrajectoryFailed
from knit.types import Prompt


@dataclass(frozen=True, slots=True)
class RewardSample:
    """What a reward function sees. ``response`` is ``tokens`` decoded without special tokens.

    ``finished``: the policy ended the response itself; false when a limit cut it.
    """

    prompt: Prompt
    response: str
    tokens: list[int]
    finished: bool


Reward = Callable[[RewardSample], float | Awaitable[float]]


class Rewarder:
    """Calls reward functions for one worker. Sync ones run in threads of their own."""

    def __init__(self, functions: dict[str, Reward], timeout_s: float, concurrency: int) -> None:
        self.functions = functions
        self.timeout_s = timeout_s
        self._slots = asyncio.Semaphore(concurrency)

    async def score(self, sample: RewardSample) -> float:
        """The reward; raises TrajectoryFailed with reason ``reward_failed`` or ``reward_timeout``."""
        function = self.functions[sample.prompt.source]
        name = f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', function)}"
        async with self._slots:
            try:
                value = await asyncio.wait_for(self._call(function, sample), self.timeout_s)
            except TimeoutError:
                limit = f"rollout.reward_timeout_s={self.timeout_s:g}"
                raise TrajectoryFailed("reward_timeout", f"reward {name} took longer than {limit}") from None
            except Exception as error:  # a user's function may raise anything
                message = f"reward {name} raised {type(error).__name__}: {error}"
                raise TrajectoryFailed("reward_failed", message) from error
        return _finite(value, name)

    async def _call(self, function: Reward, sample: RewardSample) -> Any:
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
            return await function(sample)  # type: ignore[misc]
        value = await in_thread(function, sample)
        return await value if inspect.isawaitable(value) else value


async def in_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Runs a function in a daemon thread: one that never returns can be given up, and cannot hold up the exit."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def deliver(set_it: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            set_it(value)

    def run() -> None:
        try:
            outcome: tuple[Callable[[Any], None], Any] = (future.set_result, function(*args))
        except StopIteration as error:  # asyncio refuses to carry this one
            outcome = (future.set_exception, RuntimeError(f"StopIteration: {error}"))
        except BaseException as error:  # carried over to the awaiting task
            outcome = (future.set_exception, error)
        if not loop.is_closed():
            loop.call_soon_threadsafe(deliver, *outcome)

    threading.Thread(target=run, name="knit-reward", daemon=True).start()
    return await future


def _finite(value: Any, name: str) -> float:
    try:
        reward = float(value)
    except (TypeError, ValueError):
        raise TrajectoryFailed("reward_failed", f"reward {name} returned {value!r}, not a number") from None
    if not math.isfinite(reward):
        raise TrajectoryFailed("reward_failed", f"reward {name} returned {reward}")
    return reward


def exact_match(sample: RewardSample) -> float:
    """1 when the response, stripped, equals the label."""
    return float(sample.finished and sample.response.strip() == str(sample.prompt.label).strip())
