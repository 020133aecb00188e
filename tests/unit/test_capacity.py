"""The overlap rule of ECHO-2."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_planes.errors import ConfigError
from echo_planes.fleet.capacity import (
    RECENT_STEPS,
    Need,
    Pace,
    UninformativeShare,
    needed_capacity,
    predicted_bubble,
    staleness_bound,
    useful_instances,
)


def test_a_worked_example() -> None:
    # Four steps of 10 s on one snapshot; 8 s of them go to the broadcast: 4 x 256 trajectories in 32 s.
    assert needed_capacity(4, 256, 10.0, 8.0) == pytest.approx(32.0)
    assert needed_capacity(1, 256, 10.0, 10.0) is None
    assert needed_capacity(1, 256, 10.0, 12.0) is None


def test_what_is_left_of_a_run_is_its_steps_at_the_pace_of_recent_ones() -> None:
    pace = Pace(100)
    assert pace.left_s(50.0) is None
    for step, step_s in enumerate((50.0, 10.0, 12.0), 1):
        pace.observe(step, step_s, 60.0 + 10.0 * step)
    assert pace.left_s(90.0) == pytest.approx(97 * 12.0)
    # A step that does not end: whoever is needed for it may be bought again.
    assert pace.left_s(90.0 + 500.0) == pytest.approx(97 * 500.0)
    for step in range(4, 100):
        pace.observe(step, 2.0, 1000.0)
    assert pace.left_s(1001.0) == pytest.approx(2.0)
    pace.observe(100, 2.0, 1002.0)
    assert pace.left_s(5000.0) == 0.0


def test_what_refill_replaces_is_sampled_as_well() -> None:
    share = UninformativeShare(per_step=100)
    assert share.share == 0.0
    share.observe(5000)  # of an earlier part of the run
    assert share.share == 0.0
    for step in range(1, 4):
        share.observe(5000 + 300 * step)
        assert share.share == pytest.approx(0.75)  # 300 of the 400 that are sampled for a step
    for _ in range(100):
        share.observe(5900)
    assert share.share == 0.0
    need = replace(NEED, uninformative=0.75)
    assert need.sampled == 4 * 256
    assert need.mu_min == pytest.approx(4 * 512 / 14)
    assert predicted_bubble(need, 4 * 512 / 14) == pytest.approx(0.0, abs=1e-12)
    assert predicted_bubble(need, 512 / 14) > 0.5
    assert staleness_bound(need, 64.0) == 4  # 6 s of broadcast and 16 s of sampling: three steps


def test_the_share_is_of_the_recent_steps() -> None:
    share = UninformativeShare(per_step=100)
    for replaced in [0, 1600, *[1600] * (RECENT_STEPS - 1)]:
        share.observe(replaced)
    assert share.share == pytest.approx(1600 / (1600 + 100 * RECENT_STEPS))
    share.observe(1600)
    assert share.share == 0.0


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


NEED = Need(max_staleness=3, kappa=2, per_step=256, t_train_s=10.0, t_bcast_s=6.0)


def test_a_need_takes_the_whole_rate_and_every_sample_unless_told_otherwise() -> None:
    assert (NEED.rate_factor, NEED.sampled) == (1.0, 256)


def test_the_staleness_bound_of_equation_7() -> None:
    # 6 s of broadcast and 256 / 64 = 4 s of sampling are one step: 2 + 1 - 1.
    assert staleness_bound(NEED, 64.0) == 2
    assert staleness_bound(NEED, 63.0) == 3
    assert staleness_bound(NEED, 16.0) == 4  # 22 s: three steps
    assert staleness_bound(NEED, 0.0) is None
    assert staleness_bound(replace(NEED, max_staleness=0), 16.0) == 0


@given(
    max_staleness=st.integers(2, 8),
    per_step=st.integers(1, 4096),
    t_train_s=st.floats(0.1, 100),
    share=st.floats(0, 0.99),
    more=st.floats(1, 4),
)
def test_kappa_of_s_minus_1_keeps_the_bound(
    max_staleness: int, per_step: int, t_train_s: float, share: float, more: float
) -> None:
    """Appendix B: with T_bcast < T_train and the overlap rule, kappa = S - 1 keeps staleness within S."""
    need = Need(max_staleness, max_staleness - 1, per_step, t_train_s, share * t_train_s)
    assert need.mu_min is not None
    bound = staleness_bound(need, more * need.mu_min)
    assert bound is not None
    assert bound <= max_staleness


def test_the_bubble_is_nothing_from_mu_min_on_and_all_without_workers() -> None:
    assert NEED.mu_min == pytest.approx(512 / 14)
    assert NEED.mu_target == pytest.approx(1.1 * 512 / 14)
    assert replace(NEED, t_bcast_s=20.0).mu_target is None  # no fleet is enough
    assert predicted_bubble(NEED, NEED.mu_min) == pytest.approx(0.0, abs=1e-12)
    assert predicted_bubble(NEED, 1000.0) == 0.0
    assert predicted_bubble(NEED, 512 / 34) == pytest.approx(0.5)  # 6 s + 34 s against 20 s
    assert predicted_bubble(NEED, 0.5) == pytest.approx(1 - 20 / 1030)
    assert predicted_bubble(NEED, 0.0) == 1.0
    # Nothing overlaps at S = 0: 6 s + 4 s + 10 s.
    assert predicted_bubble(replace(NEED, max_staleness=0, kappa=1), 64.0) == pytest.approx(0.5)


def test_the_useful_number_of_instances() -> None:
    # 30 s x 5 workers + 10 s x 2 engines in worker-seconds, done within 40 s by 4.25 workers.
    assert useful_instances(30.0, 5.0, 10.0, 2, 40.0) == 5
    assert useful_instances(40.0, 4.0, 0.0, 0, 40.0) == 4
    assert useful_instances(0.0, 0.0, 0.0, 0, 40.0) == 0
    for wrong in ((30.0, 5.0, 10.0, 2, 0.0), (-1.0, 5.0, 10.0, 2, 40.0), (30.0, float("nan"), 10.0, 2, 40.0)):
        with pytest.raises(ConfigError, match="t_train_s"):
            useful_instances(*wrong)
