"""The guard over many runs: how often it acts without need, and how soon with need. All answers are drawn."""

from __future__ import annotations

import numpy as np
import pytest

from echo_planes.config.kv_schedule import Schedule
from echo_planes.rollout.sparsity.acceptance import Audit
from echo_planes.rollout.sparsity.guard import Guard

TARGET, TOKENS, EVERY = 0.86, 100, 4  # tokens of an answer; audited answers between two looks


def answer(rng: np.random.Generator, tail: float, share: float, together: float) -> tuple[float, ...]:
    """Acceptance of an answer's tokens, of which `share` lie below `tail`.

    The smaller `together`, the more do the tokens of one answer share their fate.
    """
    below = rng.random(TOKENS) < rng.beta(share * together, (1 - share) * together)
    alphas = np.where(below, tail * rng.beta(8, 1, TOKENS), tail + (1 - tail) * rng.beta(8, 1, TOKENS))
    return tuple(np.minimum(alphas, 1.0).tolist())


def answers_until_a_rise(
    rng: np.random.Generator, tail: float, share: float, together: float, most: int
) -> int:
    """Answers after which the guard acts; 0: it did not."""
    guard = Guard(Schedule(pages=(64,)), TARGET, 0.05, 10**6)
    for number in range(1, most + 1):
        guard.add(Audit(0, 1, 10, answer(rng, tail, share, together), 0.0))
        if number % EVERY == 0 and guard.raises():
            return number
    return 0


@pytest.mark.parametrize("together", [5.0, 50.0])
def test_a_tail_above_target_alarms_at_most_once_in_a_thousand_runs(together: float) -> None:
    rng = np.random.default_rng(1)
    alarms = sum(answers_until_a_rise(rng, 0.88, 0.05, together, 128) > 0 for _ in range(1000))
    assert alarms <= 1


@pytest.mark.parametrize("together", [5.0, 50.0])
def test_a_tail_far_below_target_is_seen_within_64_audited_answers(together: float) -> None:
    rng = np.random.default_rng(2)
    for _ in range(200):
        assert 0 < answers_until_a_rise(rng, TARGET, 0.2, together, 64) <= 64
