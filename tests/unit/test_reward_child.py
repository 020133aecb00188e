"""Limits of a reward: what the data plane would refuse is refused where the reward is made."""

from __future__ import annotations

import json

import pytest

from echo_planes.data.claims import (
    MOST_NAME_CHARS,
    MOST_PARTS,
    MOST_REWARD,
    Rules,
    group_fault,
)
from echo_planes.data.tasks.reward_child import MOST_NOTES, _answer, checked, outcomes
from echo_planes.rollout.scoring import _MAX_REPLY_BYTES
from echo_planes.types import Episode, Group, Lease, Prompt, Reward, RewardFailure, Span, Trajectory

PROMPT = Prompt(3, (1, 2), "gold", "1+1=")
EPISODE = Episode((5, 6), (True, True), (-0.5, 0.0), (Span(0, 2, 1, "d1"),), "stop", "2")


class Task:
    """A task whose reward is given."""

    def __init__(self, reward: Reward) -> None:
        self._reward = reward

    def prepare(self, prompt: Prompt, episodes: object) -> None:
        pass

    def reward(self, prompt: Prompt, episode: Episode) -> Reward:
        return self._reward


def is_refused(reward: Reward) -> bool:
    """Whether the data plane calls a group with this reward malformed."""
    lease = Lease("lease", "g", 0, "w0", PROMPT, 1, 0, 0.0)
    sample = Trajectory("g/0", "g", PROMPT, EPISODE, reward, "w0", "run")
    fault = group_fault(lease, Group("g", (sample,)), lambda one: True, Rules(10, 100))
    return fault is not None and fault.is_malformed


@pytest.mark.parametrize(
    ("reward", "limit"),
    [
        (Reward(1.0, True, {str(i): 0.0 for i in range(MOST_PARTS + 1)}), "1024"),
        (Reward(1.0, True, {"x" * (MOST_NAME_CHARS + 1): 0.0}), "256"),
        (Reward(1.0, True, {"\ud800": 0.0}), "half a character"),
        (Reward(1.0, True, notes="good\udfff"), "half a character"),
        (Reward(2 * MOST_REWARD, True), "1e.12"),
        (Reward(-2 * MOST_REWARD, True), "1e.12"),
        (Reward(1.0, True, {"part": 2 * MOST_REWARD}), "1e.12"),
        (Reward(10**400, True), "1e.12"),
        (Reward(float("nan"), True), "finite"),
    ],
    ids=range(9),
)
def test_what_would_get_the_worker_fenced_is_a_counted_failure(reward: Reward, limit: str) -> None:
    assert is_refused(reward)
    with pytest.raises(ValueError, match=limit) as why:
        checked(reward)
    assert str(why.value).isprintable()
    [outcome] = outcomes(Task(reward), PROMPT, [EPISODE])
    assert outcome == RewardFailure("reward_invalid", str(why.value))


def test_the_largest_reward_is_taken_everywhere() -> None:
    names = (chr(0x10000 + i) * MOST_NAME_CHARS for i in range(MOST_PARTS))
    reward = checked(Reward(-MOST_REWARD, True, dict.fromkeys(names, MOST_REWARD), "\U0001f600" * MOST_NOTES))
    assert not is_refused(reward)
    assert len(json.dumps(_answer(reward))) <= _MAX_REPLY_BYTES
