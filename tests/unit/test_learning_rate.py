"""The learning rate's shape, and the factor that follows the drift."""

from __future__ import annotations

import math

import pytest

from echo_planes.learning.rate import DriftControl, decay_left, warm_up


def test_warm_up_counts_updates() -> None:
    assert [warm_up(10, updates) for updates in (0, 9, 10, 99)] == pytest.approx([0.1, 1.0, 1.0, 1.0])
    assert warm_up(0, 0) == 1.0


def test_decay_ends_with_the_run_however_many_updates_a_step_makes() -> None:
    assert [decay_left(0.2, done) for done in (0.0, 0.8, 0.9, 0.99)] == pytest.approx([1.0, 1.0, 0.5, 0.05])
    assert decay_left(0.0, 0.999) == 1.0


def test_the_rate_is_never_zero_within_the_run() -> None:
    assert all(0 < decay_left(1.0, step / 100) <= 1.0 for step in range(100))


def test_drift_above_the_target_shrinks_the_rate_and_calm_lets_it_grow() -> None:
    control = DriftControl(0.1, 0.02)
    control.observe(0.125)
    assert control.factor == pytest.approx(0.8)
    control.observe(10.0)  # at most halved in one step
    assert control.factor == pytest.approx(0.4)
    control.observe(0.001)  # at most half as much again
    assert control.factor == pytest.approx(0.6)
    for _ in range(10):
        control.observe(0.001)
    assert control.factor == 1.0


def test_the_factor_never_falls_below_its_floor() -> None:
    control = DriftControl(0.1, 0.02)
    for _ in range(20):
        control.observe(5.0)
    assert control.factor == 0.02


@pytest.mark.parametrize("nothing", [None, 0.0, math.nan, math.inf])
def test_a_step_without_a_measure_changes_nothing(nothing: float | None) -> None:
    control = DriftControl(0.1, 0.02, 0.5)
    control.observe(nothing)
    assert control.factor == 0.5


def test_target_zero_switches_it_off() -> None:
    control = DriftControl(0.0, 0.02)
    control.observe(9.0)
    assert control.factor == 1.0
