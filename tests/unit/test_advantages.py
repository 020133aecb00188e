"""Advantages against values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from echo_planes.learning.advantages import EPS, Advantage, compute_advantages, zero_groups

GROUPS = np.array([7, 7, 7, 7, 2, 2])
REWARDS = np.array([1.0, 0.0, 0.0, 1.0, 3.0, 1.0], np.float32)
NONE = np.full(6, np.nan, np.float32)


def test_normalised_by_population_std() -> None:
    # Group 7: mean 0.5, population std 0.5. Group 2: mean 2, population std 1.
    expected = [0.5 / (0.5 + EPS), -0.5 / (0.5 + EPS), -0.5 / (0.5 + EPS), 0.5 / (0.5 + EPS), 1.0, -1.0]
    assert compute_advantages("standardised", REWARDS, GROUPS, NONE) == pytest.approx(expected, abs=2e-6)


def test_dr_grpo_only_centres() -> None:
    assert compute_advantages("centred", REWARDS, GROUPS, NONE).tolist() == [0.5, -0.5, -0.5, 0.5, 1.0, -1.0]


def test_rloo_leaves_the_trajectory_itself_out() -> None:
    # Trajectory 0: 1 - (0 + 0 + 1) / 3. Trajectory 4: 3 - 1.
    expected = [2 / 3, -2 / 3, -2 / 3, 2 / 3, 2.0, -2.0]
    assert compute_advantages("leave_one_out", REWARDS, GROUPS, NONE) == pytest.approx(expected, abs=1e-6)


def test_given_advantages_pass_through_and_their_rewards_still_count() -> None:
    given = NONE.copy()
    given[1] = -0.125
    result = compute_advantages("centred", REWARDS, GROUPS, given)
    assert result.tolist() == [0.5, -0.125, -0.5, 0.5, 1.0, -1.0]


@pytest.mark.parametrize("kind", ["standardised", "centred", "leave_one_out"])
def test_equal_rewards_give_exactly_zero_and_others_beside_them_do_not(kind: Advantage) -> None:
    # 0.1 summed three times and divided by 3 is not 0.1 in binary: in doubles, that is, into which the three
    # numbers of single precision fit exactly.
    rewards = np.array([0.1, 0.1, 0.1, 0.1, 0.3])
    groups = np.array([0, 0, 0, 1, 1])
    assert rewards[:3].sum() / 3 != 0.1
    advantages = compute_advantages(kind, rewards, groups, np.full(5, np.nan, np.float32))
    assert advantages[:3].tolist() == [0.0, 0.0, 0.0]
    assert advantages[3] < 0.0 < advantages[4]
    assert zero_groups(advantages, groups).tolist() == [True, True, True, False, False]


def test_a_single_sample_has_no_advantage() -> None:
    one = np.ones(1, np.float32)
    assert compute_advantages("leave_one_out", one, np.zeros(1, np.int64), one * np.nan).tolist() == [0.0]


def test_zero_groups_needs_every_member_to_be_zero() -> None:
    advantages = np.array([0.0, 0.5, 0.0, 0.0], np.float32)
    assert zero_groups(advantages, np.array([1, 1, 3, 3])).tolist() == [False, False, True, True]
