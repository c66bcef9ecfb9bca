from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from knit.rollout.groups import Failed, GroupRules, centred_advantages, grpo_advantages
from knit.types import Prompt, TrajectoryMeta
from tests.rollout.fakes import ticket

PROMPT = Prompt("a", 0, (1,), "x")


def rules(**changed: Any) -> GroupRules:
    return GroupRules(
        **{"min_size": 2, "drop_zero_std": True, "group_filter": None, "advantage": grpo_advantages} | changed
    )


def done(*rewards: float) -> list[TrajectoryMeta]:
    return [TrajectoryMeta(f"1.{i}", 1, i, "a", 1, 0, (), r, 0.0, 0.0, 0.0) for i, r in enumerate(rewards)]


def failed(member: int, reason: str = "timeout", infrastructure: bool = False) -> Failed:
    return Failed(f"1.{member}", reason, f"{reason}!", infrastructure)


def test_advantages_are_centred_and_scaled() -> None:
    advantages = grpo_advantages(np.array([0.0, 0.0, 0.0, 1.0]))
    assert advantages.sum() == pytest.approx(0)
    assert advantages == pytest.approx(np.array([-0.57722, -0.57722, -0.57722, 1.73165]), abs=1e-4)
    assert centred_advantages(np.array([1.0, 0.0])).tolist() == [0.5, -0.5]


def test_every_member_ends_in_exactly_one_place() -> None:
    report = rules().judge(ticket(1), PROMPT, done(0, 1, 1), [failed(3)])
    assert [t.trajectory_id for t in report.accepted] == ["1.0", "1.1", "1.2"]
    assert report.dropped == {"1.3": "timeout"}
    assert report.rewards == (0, 1, 1)
    assert report.error == "timeout!"
    assert sum(t.advantage for t in report.accepted) == pytest.approx(0)


def test_groups_of_equal_reward_are_dropped_and_keep_their_rewards() -> None:
    report = rules().judge(ticket(1), PROMPT, done(1, 1, 1, 1), [])
    assert set(report.dropped.values()) == {"zero_std"}
    assert report.rewards == (1, 1, 1, 1)
    assert not report.retry
    assert len(rules(drop_zero_std=False).judge(ticket(1), PROMPT, done(1, 1, 1, 1), []).accepted) == 4


def test_a_group_with_too_few_usable_members_is_dropped() -> None:
    report = rules(min_size=3).judge(ticket(1), PROMPT, done(0, 1), [failed(2), failed(3, "failed", True)])
    assert report.dropped == {"1.0": "small_group", "1.1": "small_group", "1.2": "timeout", "1.3": "failed"}
    assert not report.retry


@pytest.mark.parametrize(("infrastructure", "retry"), [((True, True), True), ((True, False), False)])
def test_only_a_group_lost_wholly_to_infrastructure_is_retried(infrastructure: tuple[bool, ...], retry: bool) -> None:
    members = [failed(i, "failed", flag) for i, flag in enumerate(infrastructure)]
    assert rules().judge(ticket(1, size=2), PROMPT, [], members).retry is retry


def test_a_filter_names_its_own_reason() -> None:
    too_easy = rules(group_filter=lambda rewards, prompt: "too_easy" if min(rewards) > 0.5 else None)
    assert set(too_easy.judge(ticket(1, 2), PROMPT, done(0.6, 0.9), []).dropped.values()) == {"too_easy"}
    assert len(too_easy.judge(ticket(1, 2), PROMPT, done(0.1, 0.9), []).accepted) == 2


def test_advantages_of_a_wrong_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"algorithm\.advantage"):
        rules(advantage=lambda rewards: np.zeros(1)).judge(ticket(1, 2), PROMPT, done(0, 1), [])
