"""Groups that carry a signal, and treatment of long answers: against their definitions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pytest

from echo_planes.config.schema import Config
from echo_planes.data.replay.batch import make_batch
from echo_planes.data.replay.overlong import Overlong, overlong_of
from echo_planes.data.replay.refill import Refill, check_companions, refill_of
from echo_planes.data.tasks.adapter import (
    TaskOptions,
    by_batch,
    by_group,
    by_initial_state,
    train_everything,
)
from echo_planes.errors import ConfigError
from echo_planes.learning.advantages import compute_advantages, zero_groups
from echo_planes.testing.fakes import FakeTask, FakeTokenizer
from echo_planes.testing.simulation import replace_section, tiny_config
from echo_planes.types import Episode, Group, Omega, Prompt, Reward, Span, Trajectory


def episode(*mask: bool, finish_reason: str = "stop") -> Episode:
    n = len(mask)
    spans = (Span(0, n, 3, "d3"),)
    return Episode(tuple(range(n)), mask, (-0.5,) * n, spans, finish_reason)


def group(*samples: tuple[float, bool, Episode]) -> Group:
    trajectories = tuple(
        Trajectory(f"g/{i}", "g", Prompt(0, (1, 2)), said, Reward(value, correct), "w0", "L0")
        for i, (value, correct, said) in enumerate(samples)
    )
    return Group("g", trajectories)


def answered(said: Episode, prompt: tuple[int, ...] = (1, 2)) -> Trajectory:
    return Trajectory("g/0", "g", Prompt(0, prompt), said, Reward(0.0, False), "w0", "L0")


def of_length(length: int, *, finish_reason: str = "stop") -> Episode:
    return episode(*(True,) * length, finish_reason=finish_reason)


# --- overlong answers ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "expected"),
    [(1, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (99, -0.95), (100, -1.0), (150, -1.0)],
)
def test_the_penalty_falls_linearly_to_minus_one_at_the_limit(length: int, expected: float) -> None:
    assert Overlong("penalty", 100, 20).penalty(answered(of_length(length))) == pytest.approx(expected)
    assert Overlong("keep", 100, 20).penalty(answered(of_length(length))) == 0.0


def test_what_cuts_an_answer_is_its_limit() -> None:
    of_context = Overlong("penalty", 100, 20, context=60)
    assert of_context.penalty(answered(of_length(40), tuple(range(10)))) == -0.5  # 50 tokens of room
    assert of_context.penalty(answered(of_length(20), tuple(range(10)))) == 0.0
    assert of_context.penalty(answered(of_length(7, finish_reason="length"))) == -1.0  # cut by its turns, say
    assert overlong_of(tiny_config(), 10).context == tiny_config().model.max_model_len


def test_of_several_turns_the_longest_call_is_punished_and_the_environment_s_tokens_are_not() -> None:
    overlong = Overlong("penalty", 10, 4)
    assert overlong.penalty(answered(episode(*[True] * 6, *[False] * 9, *[True] * 6))) == 0.0
    assert overlong.penalty(answered(episode(*[True] * 2, *[False] * 9, *[True] * 8))) == -0.5
    # Where all of the limit is the stretch, one token costs; the environment's own do not.
    assert Overlong("penalty", 4, 4).penalty(answered(episode(True, False))) == -0.25
    assert Overlong("penalty", 4, 4).penalty(answered(episode(False, False))) == 0.0


def test_what_is_trained_has_the_penalty_and_what_is_shown_has_not() -> None:
    groups = [group((1.0, True, of_length(5)), (1.0, True, of_length(10)))]
    batch = make_batch(0, groups, train_everything, Overlong("penalty", 10, 4))
    assert batch.rewards.tolist() == [1.0, 0.0]
    assert batch.task_rewards.tolist() == [1.0, 1.0]
    assert batch.num_tokens == 15


def test_a_masked_answer_is_not_trained_and_still_counts_in_its_group_s_mean() -> None:
    cut = of_length(10, finish_reason="length")
    groups = [group((0.0, False, cut), (1.0, True, of_length(5)))]
    batch = make_batch(0, groups, train_everything, Overlong("mask", 10, 4))
    assert batch.cut_off.tolist() == [True, False]
    assert batch.loss_mask.tolist() == [False] * (2 + 10 + 2) + [True] * 5
    assert batch.rewards.tolist() == [0.0, 1.0]
    advantages = compute_advantages("centred", batch.rewards, batch.advantage_groups, batch.advantages)
    assert advantages.tolist() == [-0.5, 0.5]
    kept = make_batch(0, groups, train_everything)
    assert kept.num_tokens == 15


def with_sampling(**sampling: Any) -> Config:
    return replace_section(tiny_config(), sampling=sampling)


def test_the_limit_is_the_task_s_own_and_the_stretch_a_fifth_of_it() -> None:
    config = with_sampling(overlong="penalty", max_new_tokens=100)
    assert overlong_of(config, None) == Overlong("penalty", 100, 20, 512)
    assert overlong_of(config, 10) == Overlong("penalty", 10, 2, 512)
    assert overlong_of(config, 4) == Overlong("penalty", 4, 1, 512)
    config = with_sampling(overlong="penalty", max_new_tokens=100, overlong_tokens=40)
    assert overlong_of(config, None) == Overlong("penalty", 100, 40, 512)
    assert overlong_of(config, 40) == Overlong("penalty", 40, 40, 512)
    with pytest.raises(ConfigError, match=r"overlong_tokens=40 is more than the 10 tokens"):
        overlong_of(config, 10)


# --- groups without a signal ---------------------------------------------------------------------

SHORT, LONG = of_length(5), of_length(10)
CUT = of_length(10, finish_reason="length")
PENALTY = Overlong("penalty", 10, 4)


@pytest.mark.parametrize(
    ("by", "overlong", "samples", "carries"),
    [
        ("reward", Overlong(), [(1.0, True, SHORT), (1.0, True, LONG)], False),
        ("reward", Overlong(), [(1.0, True, SHORT), (0.5, True, SHORT)], True),
        ("reward", PENALTY, [(1.0, True, SHORT), (1.0, True, LONG)], True),  # longer is worse
        ("correct", PENALTY, [(1.0, True, SHORT), (1.0, True, LONG)], False),
        ("correct", Overlong(), [(1.0, True, SHORT), (0.5, True, SHORT)], False),
        ("correct", Overlong(), [(1.0, True, SHORT), (1.0, False, SHORT)], True),
        ("reward", Overlong("mask", 10, 4), [(1.0, True, CUT), (0.0, False, CUT)], False),  # nothing trained
        ("reward", Overlong("mask", 10, 4), [(1.0, True, SHORT), (0.0, False, CUT)], True),
    ],
)
def test_what_carries_a_signal(by: Any, overlong: Overlong, samples: list[Any], carries: bool) -> None:
    assert Refill(by, 1, overlong).carries_signal(group(*samples)) is carries


def test_by_reward_a_group_carries_a_signal_exactly_where_its_advantages_are_not_all_zero() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        samples = [
            (float(rng.choice([0.0, 0.1, 0.3])), True, of_length(int(rng.integers(1, 12)))) for _ in range(2)
        ]
        one = group(*samples)
        batch = make_batch(0, [one], train_everything, PENALTY)
        advantages = compute_advantages("grpo", batch.rewards, batch.advantage_groups, batch.advantages)
        empty = bool(zero_groups(advantages, batch.advantage_groups).all())
        assert Refill("reward", 1, PENALTY).carries_signal(one) is not empty


def test_refill_is_off_unless_asked_for_and_a_part_of_dapo() -> None:
    assert refill_of(tiny_config(), Overlong(), train_everything) is None
    dapo = replace_section(tiny_config(), objective={"name": "dapo"})
    assert refill_of(dapo, PENALTY, train_everything) == Refill(
        "correct", 4 * dapo.sampling.prompts_per_step, PENALTY
    )
    config = with_sampling(refill="correct", refill_limit=1.5, prompts_per_step=3)
    assert refill_of(config, Overlong(), train_everything) == Refill("correct", 4)


class ByGroup(FakeTask):
    materialize = by_group


class ByBatch(FakeTask):
    materialize = by_batch


class ByState(FakeTask):
    materialize = by_initial_state


class CallsByBatch(FakeTask):
    """A method of the task's own that leaves the companions to another."""

    def materialize(self, trajectories: Sequence[Trajectory]) -> list[Omega]:
        return by_batch(self, trajectories)


class OwnTags(FakeTask):
    """Compares the first half of a group and the second, each by itself."""

    def materialize(self, trajectories: Sequence[Trajectory]) -> list[Omega]:
        half = len(trajectories) // 2
        return [
            Omega(one.episode.response_mask, f"{one.group_id}/{i >= half}")
            for i, one in enumerate(trajectories)
        ]


class OwnAdvantages(FakeTask):
    """Gives every answer its advantage: the reward above a half."""

    def materialize(self, trajectories: Sequence[Trajectory]) -> list[Omega]:
        return [Omega(one.episode.response_mask, "all", one.reward.value - 0.5) for one in trajectories]


def checked(config: Config, task: type[FakeTask]) -> None:
    made = task(TaskOptions(), FakeTokenizer(), 0)
    check_companions(config, made, made.prompt(0))


@pytest.mark.parametrize("by", ["reward", "correct"])
def test_the_task_s_own_advantages_decide_what_carries_a_signal(by: Literal["reward", "correct"]) -> None:
    def carries(task: type[FakeTask], *rewards: float) -> bool:
        made = task(TaskOptions(), FakeTokenizer(), 0)
        samples = [(reward, reward > 0.5, SHORT) for reward in rewards]
        return Refill(by, 1, materialize=made.materialize).carries_signal(group(*samples))

    assert carries(OwnAdvantages, 1.0, 1.0)  # equal rewards, and a gradient all the same
    assert not carries(OwnAdvantages, 0.5, 0.5)
    assert not carries(OwnTags, 1.0, 1.0, 0.0, 0.0)  # unequal rewards, but not among companions
    assert carries(OwnTags, 1.0, 0.0, 0.0, 0.0)


def test_an_answer_that_the_task_does_not_train_carries_no_signal() -> None:
    class Untrained(FakeTask):
        def materialize(self, trajectories: Sequence[Trajectory]) -> list[Omega]:
            return [Omega((False,) * len(t.episode.response_ids), t.group_id) for t in trajectories]

    made = Untrained(TaskOptions(), FakeTokenizer(), 0)
    rule = Refill("reward", 1, materialize=made.materialize)
    assert not rule.carries_signal(group((1.0, True, SHORT), (0.0, False, SHORT)))


def test_refill_is_refused_where_a_group_is_not_compared_by_itself() -> None:
    config = with_sampling(refill="reward")
    for alone in (FakeTask, ByGroup, OwnTags, OwnAdvantages):
        checked(config, alone)
    with pytest.raises(ConfigError, match=r"materialize = by_batch.*set sampling.refill=off"):
        checked(config, ByBatch)
    with pytest.raises(ConfigError, match="materialize = by_initial_state"):
        checked(config, ByState)
    with pytest.raises(ConfigError, match=r"materialize = CallsByBatch.materialize.*set sampling.refill=off"):
        checked(config, CallsByBatch)
    checked(with_sampling(refill="off"), ByBatch)
    dapo = replace_section(tiny_config(), objective={"name": "dapo"})
    with pytest.raises(ConfigError, match=r"sampling.refill=correct"):
        checked(dapo, ByState)


def test_parts_of_a_step_are_refused_where_answers_are_compared_over_the_whole_of_it() -> None:
    config = replace_section(tiny_config(max_staleness=0), learner={"micro_batch_groups": 2})
    checked(config, FakeTask)
    checked(config, OwnTags)
    for task, name in (
        (ByBatch, "by_batch"),
        (ByState, "by_initial_state"),
        (CallsByBatch, "CallsByBatch.materialize"),
    ):
        with pytest.raises(ConfigError, match=rf"micro_batch_groups=2: .*materialize = {name}.*leave it out"):
            checked(config, task)
