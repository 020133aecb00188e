"""Detection of runs that ended as collapsed, from their rewards alone."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from echo_planes.learning.fall import ENOUGH_STEPS, collapse_of, fall_of

Shape = Callable[[float], float]  # of the share of the run that is over, 0 to 1


def series(shape: Shape, steps: int, seed: int, answers: int = 256) -> tuple[list[float], list[float]]:
    """Mean rewards and spreads of so many answers a step, right or wrong, with a slow wave on top."""
    draw, wave, rewards, spreads = random.Random(seed), 0.0, [], []
    for step in range(steps):
        wave = 0.6 * wave + 0.8 * draw.gauss(0, 0.02)
        chance = min(max(shape(step / steps) + wave, 0.0), 1.0)
        mean = sum(draw.random() < chance for _ in range(answers)) / answers
        rewards.append(mean)
        spreads.append((mean * (1 - mean)) ** 0.5)
    return rewards, spreads


def rise(share: float) -> float:
    return 0.2 + 0.77 / (1 + math.exp((0.3 - share) / 0.08))


HEALTHY: dict[str, Shape] = {
    "learns": rise,
    "learns early": lambda share: 0.97 - 0.6 * math.exp(-share / 0.03),
    "learns nothing": lambda share: 0.3,
    "never right": lambda share: 0.0,
    "always right": lambda share: 1.0,
    "begins well": lambda share: 0.9 + 0.07 * share,
    "ends a little lower": lambda share: rise(share) - 0.1 * max(share - 0.8, 0) / 0.2,
    "dips and comes back": lambda share: rise(share) - (0.3 if 0.6 < share < 0.75 else 0.0),
}
COLLAPSED: dict[str, Shape] = {
    "learns and forgets": lambda share: rise(share) if share < 0.6 else 0.02,
    "forgets slowly": lambda share: min(rise(share), max(1.6 * (1 - share), 0.05)),
    "forgets what it came with": lambda share: 0.6 if share < 0.1 else 0.01,
    "falls back to the start": lambda share: rise(share) if share < 0.7 else 0.2,
    "never got anywhere, then lost it": lambda share: 0.5 if share < 0.5 else 0.15,
}


@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.parametrize("steps", [20, 60, 120, 400])
def test_a_healthy_run_has_not_collapsed(name: str, steps: int) -> None:
    wrong = [seed for seed in range(25) if collapse_of(*series(HEALTHY[name], steps, seed))]
    assert not wrong


def test_the_noise_of_small_steps_is_no_fall() -> None:
    wrong = [seed for seed in range(300) if collapse_of(*series(lambda _: 0.3, 40, seed, answers=4))]
    assert not wrong


@pytest.mark.parametrize("name", COLLAPSED)
@pytest.mark.parametrize("steps", [60, 120, 400])
def test_a_run_that_lost_what_it_had_has(name: str, steps: int) -> None:
    missed = [seed for seed in range(25) if not collapse_of(*series(COLLAPSED[name], steps, seed))]
    assert not missed


@pytest.mark.parametrize(("shift", "scale"), [(-5.0, 1.0), (0.0, 40.0), (-300.0, 100.0), (12.0, 0.01)])
def test_where_the_zero_of_the_rewards_lies_and_their_unit_do_not_matter(shift: float, scale: float) -> None:
    for shapes, fell in ((HEALTHY, False), (COLLAPSED, True)):
        for shape in shapes.values():
            rewards, spreads = series(shape, 120, seed=1)
            told = collapse_of([shift + scale * r for r in rewards], [scale * s for s in spreads])
            assert bool(told) == fell


def test_a_short_run_says_nothing() -> None:
    rewards = [1.0] * 10 + [0.0] * (ENOUGH_STEPS - 11)
    assert collapse_of(rewards, [0.4] * len(rewards)) == ""
    assert collapse_of([], []) == ""
    assert collapse_of([*rewards, 0.0], [0.4] * ENOUGH_STEPS)


def test_steps_are_compared_within_the_newest_level_that_has_enough() -> None:
    ups = [0.2 + 0.03 * i for i in range(25)]
    rewards, spreads = [*ups, *(one / 3 for one in ups), *[0.05] * 10], [0.4] * 60
    levels = [0] * 25 + [1] * 25 + [2] * 10
    assert collapse_of(rewards, spreads)
    assert collapse_of(rewards, spreads, levels) == ""
    fallen = [*ups, *ups, *[0.0] * 10]
    assert "of level 1 from" in collapse_of(fallen, spreads, [0] * 25 + [1] * 35)
    assert "of level 0 from" in collapse_of(fallen, spreads, [0] * 25 + [1] * 15 + [0] * 20)


def test_it_says_from_where_to_where_and_what_to_change() -> None:
    rewards, spreads = [0.2] * 20 + [0.9] * 60 + [0.0] * 20, [0.4] * 100
    text = collapse_of(rewards, spreads)
    for part in ("fell to 0 in the last 10 steps", "from 0.9", "1.29 of", "0.5 is the limit", "learner.lr"):
        assert part in text
    assert "\n" not in text


def test_a_fall_is_told_in_what_was_gained_or_in_spreads() -> None:
    assert fall_of(0.2, 0.8, 0.5, spread=0.1) == pytest.approx(0.5)
    assert fall_of(-0.5, -0.4, -0.6, spread=0.4) == pytest.approx(0.5)
    assert fall_of(1.0, 1.0, 1.0, spread=0.0) == 0.0
