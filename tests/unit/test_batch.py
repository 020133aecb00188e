"""From whole groups to the learner's columns."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from echo_planes.data.replay.batch import MOST_PARTS, make_batch, part_means
from echo_planes.data.tasks.adapter import (
    TaskAdapter,
    TaskOptions,
    by_batch,
    by_group,
    by_initial_state,
    train_everything,
)
from echo_planes.errors import TaskError
from echo_planes.learning.advantages import EPS, compute_advantages
from echo_planes.learning.packing import joined_batch
from echo_planes.testing.fakes import FakeTask, FakeTokenizer
from echo_planes.types import Group, Omega, Prompt, Reward, TrainBatch
from tests.unit.test_schema import make_group


def test_a_batch_lays_trajectories_end_to_end() -> None:
    batch = make_batch(9, [make_group("a", 4, 5), make_group("b", 6)], train_everything)
    assert batch.step == 9
    assert batch.trajectory_ids == ("a/0", "a/1", "b/0", "b/1")
    assert batch.offsets.tolist() == [0, 5, 10, 15, 20]
    assert batch.token_ids[:5].tolist() == [1, 2, 10, 11, 12]
    assert batch.loss_mask[:5].tolist() == [False, False, True, False, True]
    assert batch.sampler_logprobs[:5].tolist() == pytest.approx([0, 0, -0.1, 0, -0.3])
    assert batch.advantage_groups.tolist() == [0, 0, 1, 1]
    assert batch.versions.tolist() == [4, 4, 6, 6]
    assert all(math.isnan(advantage) for advantage in batch.advantages)
    assert (batch.num_trajectories, batch.num_tokens) == (4, 8)


def test_the_parts_of_a_step_join_to_its_batch() -> None:
    groups = [make_group(name, 4) for name in "abcd"]
    rewards = iter([{"x": 1.0}, {"x": 3.0, "y": 2.0}, {}, {"x": 5.0}, {"y": 4.0}, {}, {"z": 1.0}, {"x": 7.0}])
    groups = [
        replace(
            group,
            trajectories=tuple(
                replace(t, reward=Reward(1.0, True, next(rewards))) for t in group.trajectories
            ),
        )
        for group in groups
    ]
    whole = make_batch(3, groups, train_everything)
    parts = [make_batch(3, some, train_everything) for some in (groups[:1], groups[1:3], groups[3:])]
    found = joined_batch([*(replace(part, last=False) for part in parts[:-1]), parts[-1]])
    assert found.last
    for field in fields(TrainBatch):
        value = getattr(whole, field.name)
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(getattr(found, field.name), value)
        elif field.name == "reward_parts":
            assert found.reward_parts == (("x", 4.0, 4), ("y", 3.0, 2), ("z", 1.0, 1)) == value
        else:
            assert getattr(found, field.name) == value
    assert joined_batch(parts[:1]) is parts[0]
    empty = make_batch(3, [], train_everything)
    for place in range(len(parts) + 1):
        joined = joined_batch([*parts[:place], empty, *parts[place:]])
        assert joined.offsets.tolist() == whole.offsets.tolist()
        assert joined.advantage_groups.tolist() == whole.advantage_groups.tolist()


def test_every_token_has_its_version_and_every_answer_its_end() -> None:
    right, wrong = make_group("a", 4, 5), make_group("b", 6)
    cut, done = (
        replace(t, reward=Reward(0.0, i == 1), episode=replace(t.episode, finish_reason=reason))
        for i, (t, reason) in enumerate(zip(wrong.trajectories, ("length", "stop"), strict=True))
    )
    batch = make_batch(0, [right, replace(wrong, trajectories=(cut, done))], train_everything)
    assert batch.token_versions.tolist() == [-1, -1, 4, 5, 5] * 2 + [-1, -1, 6, 6, 6] * 2
    assert batch.correct.tolist() == [True, True, False, True]
    assert batch.cut_off.tolist() == [False, False, True, False]
    assert batch.scores.tolist() == [0.5, 0.5, 0.0, 0.0]
    assert batch.longest_answer == 0  # nothing was said of it


def test_the_parts_of_rewards_have_means_of_the_answers_that_have_them() -> None:
    first, second = make_group("a"), make_group("b")
    parts: list[dict[str, float]] = [{"format": 1.0, "turns": 3.0}, {"format": 0.0}, {"format": 0.5}, {}]
    trajectories = [
        replace(one, reward=Reward(1.0, True, some))
        for one, some in zip((*first.trajectories, *second.trajectories), parts, strict=True)
    ]
    groups = [
        replace(first, trajectories=tuple(trajectories[:2])),
        replace(second, trajectories=tuple(trajectories[2:])),
    ]
    batch = make_batch(0, groups, train_everything)
    assert batch.reward_parts == (("format", 0.5, 3), ("turns", 3.0, 1))
    assert part_means([]) == ()
    many = [Reward(0.0, False, {f"{i:03}": 1.0 for i in range(n)}) for n in (900, 10)]
    assert len(part_means(many)) == MOST_PARTS
    assert {f"{i:03}" for i in range(10)} <= {name for name, _, _ in part_means(many)}


def test_a_task_may_set_masks_groups_and_advantages() -> None:
    def materialize(trajectories: Any) -> list[Omega]:
        return [Omega((False, False, True), "all", advantage=-1.5) for _ in trajectories]

    batch = make_batch(0, [make_group("a"), make_group("b")], materialize)
    assert batch.advantage_groups.tolist() == [0, 0, 0, 0]
    assert batch.advantages.tolist() == [-1.5] * 4
    assert batch.num_tokens == 4


@pytest.mark.parametrize(
    ("mask", "part"),
    [
        ((True, False), "does not fit"),
        ((True, False, True, True), "does not fit"),
        ((True, True, True), "nobody sampled"),
    ],
)
def test_a_mask_that_cannot_be_right_is_refused(mask: tuple[bool, ...], part: str) -> None:
    with pytest.raises(TaskError, match=f"a/0: .*{part}"):
        make_batch(0, [make_group("a")], lambda trajectories: [Omega(mask, "g") for _ in trajectories])


@pytest.mark.parametrize("num_records", [0, 1, 3])
def test_a_record_too_few_or_too_many_is_refused(num_records: int) -> None:
    with pytest.raises(TaskError, match=f"{num_records} records for 2"):
        make_batch(0, [make_group("a")], lambda _: [Omega((True, False, True), "g")] * num_records)


def test_the_oldest_span_of_the_oldest_sample_is_a_group_s_version() -> None:
    young, old = make_group("a", 5, 6), make_group("a", 7, 3)
    mixed = replace(young, trajectories=(young.trajectories[0], old.trajectories[0]))
    assert (young.version, old.version, mixed.version) == (5, 3, 3)


# --- what is normalised together -----------------------------------------------------------------


class ByGroup(FakeTask):
    materialize = by_group


class ByBatch(FakeTask):
    materialize = by_batch


class ByState(FakeTask):
    materialize = by_initial_state


class ByHand(ByState):
    """A coarse state, as poker's classes of hands: the first token alone."""

    def initial_state(self, prompt: Prompt) -> str:
        return str(prompt.token_ids[0])


def rewarded(name: str, tokens: tuple[int, ...], *rewards: float) -> Group:
    group = make_group(name, size=len(rewards))
    prompt = Prompt(ord(name), tokens)
    samples = zip(group.trajectories, rewards, strict=True)
    return replace(
        group, trajectories=tuple(replace(t, prompt=prompt, reward=Reward(r, r > 0)) for t, r in samples)
    )


# Two leases of one question, one of a question that begins alike, and one that does not.
GROUPS = [
    rewarded("a", (1, 2), 1.0, 0.0),
    rewarded("b", (1, 2), 3.0, 2.0),
    rewarded("c", (1, 9), 6.0, 6.0),
    rewarded("d", (5,), 8.0, 2.0),
]


@pytest.mark.parametrize(
    ("kind", "companions", "means"),
    [
        (FakeTask, [[0, 1], [2, 3], [4, 5], [6, 7]], [0.5, 0.5, 2.5, 2.5, 6, 6, 5, 5]),
        (ByGroup, [[0, 1], [2, 3], [4, 5], [6, 7]], [0.5, 0.5, 2.5, 2.5, 6, 6, 5, 5]),
        (ByBatch, [[0, 1, 2, 3, 4, 5, 6, 7]], [3.5] * 8),
        (ByState, [[0, 1, 2, 3], [4, 5], [6, 7]], [1.5, 1.5, 1.5, 1.5, 6, 6, 5, 5]),
        (ByHand, [[0, 1, 2, 3, 4, 5], [6, 7]], [3, 3, 3, 3, 3, 3, 5, 5]),
    ],
)
def test_one_word_says_what_is_normalised_together(
    kind: type[TaskAdapter], companions: list[list[int]], means: list[float]
) -> None:
    batch = make_batch(0, GROUPS, kind(TaskOptions(), FakeTokenizer(), 0).materialize)
    rewards = [1.0, 0.0, 3.0, 2.0, 6.0, 6.0, 8.0, 2.0]
    assert batch.rewards.tolist() == rewards
    tags = batch.advantage_groups.tolist()
    assert [[i for i, tag in enumerate(tags) if tag == known] for known in dict.fromkeys(tags)] == companions
    assert batch.num_tokens == 8 * 2  # environment tokens stay out, however it is normalised

    centred = compute_advantages("centred", batch.rewards, batch.advantage_groups, batch.advantages)
    assert centred.tolist() == pytest.approx([r - m for r, m in zip(rewards, means, strict=True)], abs=1e-6)
    normalised = compute_advantages("standardised", batch.rewards, batch.advantage_groups, batch.advantages)
    for members in companions:
        spread = math.sqrt(sum((rewards[i] - means[i]) ** 2 for i in members) / len(members))
        expected = [(rewards[i] - means[i]) / (spread + EPS) for i in members]
        assert normalised[members].tolist() == pytest.approx(expected, abs=1e-5)
