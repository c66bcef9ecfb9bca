"""The verdict on a group: which members are usable, whether the group is, and the advantages if so.

Decided once, in numpy, when the last member has ended; the advantages travel as metadata. Every member of the
ticket ends up in exactly one of ``accepted`` and ``dropped``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from knit.types import GroupReport, Prompt, Ticket, TrajectoryMeta

Array = np.ndarray[Any, Any]
Filter = Callable[[list[float], Prompt], str | None]


def grpo_advantages(rewards: Array) -> Array:
    """(r - mean) / (std + 1e-4) over the members of one group (GRPO, arXiv 2402.03300, section 4.1.2)."""
    return (rewards - rewards.mean()) / (rewards.std() + 1e-4)


def centred_advantages(rewards: Array) -> Array:
    """r - mean, not divided by the spread (Dr. GRPO, arXiv 2503.20783)."""
    return rewards - rewards.mean()


@dataclass(frozen=True, slots=True)
class Failed:
    """A member that gave nothing usable. ``infrastructure``: not the prompt's fault."""

    trajectory_id: str
    reason: str
    error: str
    infrastructure: bool = False


@dataclass(frozen=True, slots=True)
class GroupRules:
    min_size: int
    drop_zero_std: bool
    group_filter: Filter | None
    advantage: Callable[[Array], Array]

    def judge(
        self, ticket: Ticket, prompt: Prompt, done: Sequence[TrajectoryMeta], failed: Sequence[Failed]
    ) -> GroupReport:
        """``done`` are members with a reward (advantage still 0). Raises ValueError on advantages of a wrong shape."""
        rewards = [t.reward for t in done]
        dropped = {f.trajectory_id: f.reason for f in failed}
        error = failed[0].error if failed else None
        reason = self._reason(ticket, prompt, done)
        if reason is not None:
            dropped |= {t.trajectory_id: reason for t in done}
            retry = not done and all(f.infrastructure for f in failed)
            return GroupReport(ticket.group_id, (), dropped, tuple(rewards), retry, error)
        advantages = np.asarray(self.advantage(np.array(rewards, np.float64)), np.float64)
        if advantages.shape != (len(done),) or not np.isfinite(advantages).all():
            raise ValueError(f"algorithm.advantage returned {advantages!r} for {len(done)} rewards")
        accepted = tuple(replace(t, advantage=float(a)) for t, a in zip(done, advantages, strict=True))
        return GroupReport(ticket.group_id, accepted, dropped, tuple(rewards), False, error)

    def _reason(self, ticket: Ticket, prompt: Prompt, done: Sequence[TrajectoryMeta]) -> str | None:
        rewards = [t.reward for t in done]
        if len(done) < max(1, min(self.min_size, ticket.size)):
            return "small_group"
        if self.group_filter is not None:
            reason = self.group_filter(rewards, prompt)
            if reason:
                return str(reason)
        if self.drop_zero_std and max(rewards) == min(rewards):
            return "zero_std"
        return None
