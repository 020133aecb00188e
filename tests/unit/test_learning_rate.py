"""The learning rate's shape, and the factor that follows the drift."""

from __future__ import annotations

import math

import pytest

from echo_planes.learning.rate import RELEASE, DriftControl, RateSchedule, decay_left, warm_up
from echo_planes.types import LagStats, Noise


def test_warm_up_counts_updates() -> None:
    assert [warm_up(10, updates) for updates in (0, 9, 10, 99)] == pytest.approx([0.1, 1.0, 1.0, 1.0])
    assert warm_up(0, 0) == 1.0


def test_decay_ends_with_the_run_however_many_updates_a_step_makes() -> None:
    assert [decay_left(0.2, done) for done in (0.0, 0.8, 0.9, 0.99)] == pytest.approx([1.0, 1.0, 0.5, 0.05])
    assert decay_left(0.0, 0.999) == 1.0


def test_the_rate_is_never_zero_within_the_run() -> None:
    assert all(0 < decay_left(1.0, step / 100) <= 1.0 for step in range(100))


def test_a_run_that_is_extended_has_its_plateau_and_decay_anew_over_the_added_steps() -> None:
    ended = RateSchedule()
    assert ended.left(0.3, 119, 120) == pytest.approx(1 / 36)
    assert [ended.left(0.3, done, 220) for done in (120, 189)] == [1.0, 1.0]
    assert ended.left(0.3, 205, 220) == pytest.approx(0.5)
    assert ended.left(0.3, 219, 220) == pytest.approx(1 / 30)
    assert ended.left(0.3, 220, 230) == 1.0  # and again


def test_a_plateau_begins_anew_only_where_steps_are_added_and_the_decay_had_begun() -> None:
    early, late, shorter = (RateSchedule(last=100) for _ in range(3))
    assert early.left(0.5, 40, 200) == 1.0
    assert early.left(0.5, 150, 200) == pytest.approx(0.5)  # as of a run of 200 steps from the start
    assert [late.left(0.5, done, 200) for done in (80, 139, 170)] == pytest.approx([1.0, 1.0, 0.5])
    assert shorter.left(0.5, 80, 90) == pytest.approx(2 * (1 - 80 / 90))
    again = RateSchedule(late.first, late.last)  # a resume without further steps
    assert again.left(0.5, 170, 200) == pytest.approx(0.5)


def lag_of(lag: int, drift: float, tokens: int = 100) -> LagStats:
    return LagStats(lag, tokens, drift, 0.0, 0.0, 0.0, 0.0)


def follow(control: DriftControl, lag: int, per_step: float, steps: int) -> list[float]:
    """Drift of the trained tokens where each step at the full rate moves them by `per_step` nats."""
    drifts = []
    for step in range(steps):
        travelled = control.history[-lag:] if lag else []
        drifts.append(per_step * sum(travelled))
        control.observe([lag_of(min(lag, step), drifts[-1])])
        control.stepped(control.factor)
    return drifts


@pytest.mark.parametrize("lag", [1, 3, 11, 32])
def test_drift_settles_at_the_target_and_does_not_swing(lag: int) -> None:
    control = DriftControl(0.1, 0.001)
    drifts = follow(control, lag, per_step=0.2, steps=10 * lag + 20)
    assert drifts[-lag:] == pytest.approx([0.1] * lag, rel=1e-3)
    assert control.factor == pytest.approx(0.5 / lag)


def test_less_drift_than_the_target_costs_nothing() -> None:
    control = DriftControl(0.1, 0.02)
    follow(control, 3, per_step=0.03, steps=30)
    assert control.factor == 1.0


def test_the_estimate_rises_at_once_and_falls_slowly() -> None:
    control = DriftControl(0.1, 0.02, history=[1.0] * 10)
    control.observe([lag_of(5, 0.2)])
    assert control.factor == pytest.approx(0.5)
    control.observe([lag_of(5, 0.05)])
    assert control.factor == pytest.approx(0.1 / (0.2 - RELEASE * 0.15))
    for _ in range(100):
        control.observe([lag_of(5, 0.05)])
    assert control.factor == 1.0


def test_a_step_without_an_update_counts_neither_as_way_nor_as_time() -> None:
    control = DriftControl(0.1, 0.02, history=[0.5, 0.5, 0.0, 1.0])
    control.observe([lag_of(4, 0.4)])
    # Three updates at a mean factor of two thirds, so at the full rate they would have moved 0.6 nats.
    assert control.at_full_rate == pytest.approx(0.6)
    before = control.factor
    control.stepped(0.0)
    control.observe([lag_of(5, 0.4)])
    assert control.factor == pytest.approx(before)


def noise_of(drift: float) -> Noise:
    return Noise(drift, 0.0, 1.0, 0.0, 0.0)


@pytest.mark.parametrize("lag", [1, 3, 6, 32])
def test_noise_is_not_taken_for_movement(lag: int) -> None:
    """0.03 nats between engine and learner, every second step without an update."""
    control = DriftControl(0.1, 0.02)
    for step in range(20 * lag):
        moved = 0.02 * sum(control.history[-lag:])
        drift = math.hypot(moved, 0.03)
        age = min(lag, step)
        still = noise_of(drift) if control.is_still(age) else None
        control.observe([lag_of(age, drift)], still)
        control.stepped(control.factor if step % 2 else 0.0)
    full = 0.02 * (lag + 1) // 2 if lag > 1 else 0.02
    assert control.noise is not None
    assert control.noise.drift == pytest.approx(0.03)
    assert control.factor == pytest.approx(min(1.0, 0.1 / max(full, 0.02 * lag / 2)), rel=0.2)


def test_movement_much_larger_than_the_noise_is_seen_as_it_is() -> None:
    quiet, noisy = DriftControl(0.1, 0.001, history=[1.0] * 3), DriftControl(0.1, 0.001, history=[1.0] * 3)
    noisy.noise = noise_of(0.03)
    quiet.observe([lag_of(3, 1.0)])
    noisy.observe([lag_of(3, 1.0)])
    assert noisy.factor == pytest.approx(quiet.factor, rel=1e-3)


def test_of_noise_beyond_twice_the_target_no_more_is_taken_off() -> None:
    control = DriftControl(0.1, 0.02, history=[1.0], noise=noise_of(5.0))
    control.observe([lag_of(1, 5.0)])
    assert control.factor == pytest.approx(0.1 / math.sqrt(5.0**2 - 0.2**2))


def test_few_moved_tokens_among_many_still_ones_count_little() -> None:
    control = DriftControl(0.1, 0.02, history=[1.0])
    control.observe([lag_of(0, 0.0, tokens=90), lag_of(1, 0.4, tokens=10)], noise_of(0.0))
    assert control.at_full_rate == pytest.approx(0.04)


def test_the_learners_own_step_is_measured_without_an_engine() -> None:
    control = DriftControl(0.1, 0.02, history=[0.5], noise=noise_of(0.09))
    control.observe_own_step(0.1)
    assert control.factor == pytest.approx(0.5)
    control.stepped(0.0)
    control.observe_own_step(9.0)  # of a step without an update
    assert control.factor == pytest.approx(0.5)


@pytest.mark.parametrize("lags", [[], [lag_of(0, 0.5)], [lag_of(2, math.nan)]])
def test_nothing_stale_or_nothing_measured_changes_nothing(lags: list[LagStats]) -> None:
    control = DriftControl(0.1, 0.02, at_full_rate=0.2, history=[1.0, 1.0])
    control.observe(lags)
    assert control.factor == pytest.approx(0.5)


def test_the_factor_never_falls_below_its_floor() -> None:
    control = DriftControl(0.1, 0.02, history=[1.0])
    control.observe([lag_of(1, 50.0)])
    assert control.factor == 0.02


def test_target_zero_switches_it_off() -> None:
    control = DriftControl(0.0, 0.02, history=[1.0])
    control.observe([lag_of(1, 9.0)])
    assert control.factor == 1.0


def test_nothing_is_taken_off_the_rate_before_any_drift_was_measured() -> None:
    control = DriftControl(0.1, 0.02)
    assert control.factor == 1.0
    control.observe([lag_of(0, 0.3)])  # the first step: nothing was travelled yet
    assert control.factor == 1.0
