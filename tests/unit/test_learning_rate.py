"""The learning rate's shape, and the factor that follows the drift."""

from __future__ import annotations

import math

import pytest

from echo_planes.learning.rate import RELEASE, DriftControl, decay_left, warm_up
from echo_planes.types import LagStats


def test_warm_up_counts_updates() -> None:
    assert [warm_up(10, updates) for updates in (0, 9, 10, 99)] == pytest.approx([0.1, 1.0, 1.0, 1.0])
    assert warm_up(0, 0) == 1.0


def test_decay_ends_with_the_run_however_many_updates_a_step_makes() -> None:
    assert [decay_left(0.2, done) for done in (0.0, 0.8, 0.9, 0.99)] == pytest.approx([1.0, 1.0, 0.5, 0.05])
    assert decay_left(0.0, 0.999) == 1.0


def test_the_rate_is_never_zero_within_the_run() -> None:
    assert all(0 < decay_left(1.0, step / 100) <= 1.0 for step in range(100))


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


def test_lags_count_by_their_tokens_and_what_was_travelled_meanwhile() -> None:
    control = DriftControl(0.1, 0.02, history=[0.5, 0.5, 0.0, 1.0])  # one step made no update
    control.observe([lag_of(0, 0.001, tokens=100), lag_of(4, 0.4, tokens=100)])
    # Travelled: 2 of 4 steps for half of the tokens, so at the full rate the mean drift is twice 0.2005.
    assert control.at_full_rate == pytest.approx(0.401)


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
