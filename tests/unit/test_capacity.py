"""The overlap rule of ECHO-2."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_planes.rollout.capacity import needed_capacity


def test_a_worked_example() -> None:
    # Four steps of 10 s on one snapshot; 8 s of them go to the broadcast: 4 x 256 trajectories in 32 s.
    assert needed_capacity(4, 256, 10.0, 8.0) == pytest.approx(32.0)
    assert needed_capacity(1, 256, 10.0, 10.0) is None
    assert needed_capacity(1, 256, 10.0, 12.0) is None


@given(
    kappa=st.integers(1, 8),
    per_step=st.integers(1, 4096),
    t_train_s=st.floats(0.1, 100),
    t_bcast_s=st.floats(0, 500),
)
def test_exactly_the_needed_capacity_keeps_the_learner_busy(
    kappa: int, per_step: int, t_train_s: float, t_bcast_s: float
) -> None:
    capacity = needed_capacity(kappa, per_step, t_train_s, t_bcast_s)
    if capacity is None:
        assert kappa * t_train_s <= t_bcast_s
    else:
        assert kappa * t_train_s == pytest.approx(t_bcast_s + kappa * per_step / capacity, rel=1e-6)
