"""One trajectory from its prompt to its reward, within its deadline. Failures come out as TrajectoryFailed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from knit.config.schema import RolloutConf
from knit.errors import EngineError, KnitError
from knit.rollout.agent import AgentLoop, Env, Generate, Trajectory, TrajectoryFailed
from knit.rollout.client import EngineClient, Generation, Sampling
from knit.rollout.rewards import Rewarder, RewardSample
from knit.rollout.tokenizer import Tokenizer
from knit.types import Prompt


@dataclass(frozen=True, slots=True)
class Scored:
    trajectory: Trajectory
    completed_s: float  # when sampling ended; the reward came later
    response: str
    reward: float


class TrajectoryRunner:
    """Runs agent loops against the engines and asks the rewards. Shared by rollout and evaluation."""

    def __init__(
        self,
        conf: RolloutConf,
        context_length: int,
        client: EngineClient,
        tokenizer: Tokenizer,
        loop: AgentLoop,
        rewarder: Rewarder,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.conf = conf
        self.context_length = context_length
        self.client = client
        self.tokenizer = tokenizer
        self.loop = loop
        self.rewarder = rewarder
        self.clock = clock

    async def sample(self, trajectory_id: str, prompt: Prompt, temperature: float) -> Trajectory:
        """Runs the agent loop. What is the trajectory's or an engine's fault comes out as TrajectoryFailed."""
        limit = self.conf.trajectory_timeout_s
        env = Env(
            trajectory_id=trajectory_id,
            eos_ids=self.tokenizer.eos_ids,
            context_length=self.context_length,
            max_response_tokens=self.conf.max_response_tokens,
            deadline_s=asyncio.get_running_loop().time() + limit,
            tokenizer=self.tokenizer,
        )
        try:
            trajectory = await asyncio.wait_for(self.loop.run(prompt, self._generate(temperature), env), limit)
            check(trajectory_id, trajectory)
        except TrajectoryFailed:
            raise
        except TimeoutError:
            message = f"trajectory {trajectory_id} took longer than rollout.trajectory_timeout_s={limit:g}"
            raise TrajectoryFailed("timeout", message) from None
        except EngineError as error:
            raise TrajectoryFailed("failed", f"trajectory {trajectory_id}: {error}", infrastructure=True) from error
        except Exception as error:  # an agent loop is user code: it may raise anything
            message = f"trajectory {trajectory_id}: {type(error).__name__}: {error}"
            raise TrajectoryFailed("failed", message) from error
        return trajectory

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> Scored:
        """Asks the source's reward. Raises TrajectoryFailed."""
        completed_s = self.clock()
        response = self.tokenizer.decode(trajectory.response)
        sample = RewardSample(prompt, response, list(trajectory.response), trajectory.finished)
        return Scored(trajectory, completed_s, response, await self.rewarder.score(sample))

    def _generate(self, temperature: float) -> Generate:
        async def generate(input_ids: Sequence[int], max_tokens: int | None = None) -> Generation:
            room = self.context_length - len(input_ids) - 1  # SGLang keeps one position to itself
            if room <= 0:
                message = f"{len(input_ids)} tokens leave no room in engine.context_length={self.context_length}"
                raise TrajectoryFailed("context_full", message)
            sampling = Sampling(
                max_new_tokens=min(max_tokens or self.conf.max_response_tokens, room),
                temperature=temperature,
                top_p=self.conf.top_p,
                stop_token_ids=self.tokenizer.eos_ids,
            )
            return await self.client.generate(input_ids, sampling)

        return generate


def check(trajectory_id: str, trajectory: Trajectory) -> None:
    """Refuses what training could not use; guards against mistakes of an agent loop."""
    if not trajectory.segments or not any(s.trained_tokens for s in trajectory.segments):
        raise TrajectoryFailed("empty", f"trajectory {trajectory_id} has no trained token")
    for segment in trajectory.segments:
        sizes = {len(segment.response), len(segment.loss_mask), len(segment.logprobs)}
        covered = sum(r.tokens for r in segment.versions)
        if len(sizes) != 1 or covered < segment.trained_tokens:
            raise TrajectoryFailed("malformed", f"trajectory {trajectory_id}: mask, log-probs and versions do not fit")


def root_cause(error: BaseException) -> str:
    """One line for the log and the group report."""
    text = str(error) if isinstance(error, KnitError) else f"{type(error).__name__}: {error}"
    return text.splitlines()[0] if text else type(error).__name__
