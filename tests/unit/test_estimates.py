"""Measured estimates: outliers, waiting, restarts, claims that nothing confirms, interruptions."""

from __future__ import annotations

import math
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_planes.errors import RefusedError
from echo_planes.fleet.estimates import LIE_FACTOR, CapacityModel, InterruptionRates, ThroughputSample


class Worker:
    """Counters of a worker that samples `rate` tokens/s in trajectories of `length`, all of them accepted."""

    def __init__(
        self, model: CapacityModel, name: str, instance_type: str = "spot", length: int = 100
    ) -> None:
        self.model, self.name, self.instance_type, self.length = model, name, instance_type, length
        self.saturated_tokens, self.saturated_s, self.tokens, self.now_s = 0, 0.0, 0, 0.0

    def works(
        self, rate: float, seconds: float = 10.0, *, saturated: bool = True, claim: float = 1.0
    ) -> None:
        """`claim`: how many times its rate the worker says that it samples."""
        self.tokens += int(rate * seconds)
        if saturated:
            self.saturated_tokens += int(rate * seconds * claim)
            self.saturated_s += seconds
        self.now_s += seconds
        done = self.tokens // self.length
        stats = ThroughputSample(self.saturated_tokens, self.saturated_s, done * self.length, done)
        self.model.observe_worker(self.name, self.instance_type, stats, self.now_s)


def test_a_need_once_both_times_were_seen() -> None:
    model = CapacityModel()
    assert model.need(3, 2, 256, mu_first=1.0) is None
    model.observe_step(10.0)
    assert model.need(3, 2, 256, mu_first=1.0) is None
    model.observe_broadcast(6.0)
    need = model.need(3, 2, 256, mu_first=1.0)
    assert need is not None
    assert (need.t_train_s, need.t_bcast_s, need.gamma) == (10.0, 6.0, 1.1)


@pytest.mark.parametrize(
    ("mu_first", "mu_target", "t_bcast_s"),
    [(56.32, 56.32, 10.0), (14.0, 28.16, 0.0), (0.0, 28.16, 0.0)],  # gamma R / T_train = 28.16
)
def test_before_the_first_broadcast_the_first_fleet_is_the_need_unless_a_step_says_more(
    mu_first: float, mu_target: float, t_bcast_s: float
) -> None:
    model = CapacityModel()
    worker = Worker(model, "w0")
    for _ in range(3):
        worker.works(50.0)
    assert model.need(3, 2, 256, mu_first=mu_first) is None  # no step yet
    model.observe_step(10.0)
    need = model.need(3, 2, 256, mu_first=mu_first)
    assert need is not None
    assert need.mu_target == pytest.approx(mu_target)
    assert need.t_bcast_s == pytest.approx(t_bcast_s)
    assert need.assumed
    model.observe_broadcast(6.0)
    need = model.need(3, 2, 256, mu_first=mu_first)
    assert need is not None
    assert need.t_bcast_s == 6.0
    assert not need.assumed


def test_an_outlier_moves_no_estimate() -> None:
    model = CapacityModel()
    for t_train_s in (10.0, 10.0, 500.0, 10.0, 10.0):
        model.observe_step(t_train_s)
        model.observe_broadcast(t_train_s / 2)
    need = model.need(3, 2, 256, mu_first=1.0)
    assert need is not None
    assert (need.t_train_s, need.t_bcast_s) == (10.0, 5.0)
    worker = Worker(model, "w0")
    for rate in (50.0, 50.0, 5000.0, 50.0, 1.0, 50.0):
        worker.works(rate)
    assert model.mu("w0", prior=9.0) == pytest.approx(0.5)


def test_windows_slide() -> None:
    model = CapacityModel()
    worker = Worker(model, "w0")
    for t_train_s in [10.0] * 40 + [20.0] * 16:
        model.observe_step(t_train_s)
        model.observe_broadcast(1.0)
        worker.works(5 * t_train_s)
    need = model.need(3, 2, 256, mu_first=1.0)
    assert need is not None
    assert need.t_train_s == 20.0
    assert model.mu("w0", prior=9.0) == pytest.approx(1.0)


def test_the_prior_holds_until_enough_was_measured() -> None:
    model = CapacityModel()
    worker = Worker(model, "w0")
    worker.works(50.0)
    worker.works(50.0)
    assert model.mu("w0", prior=9.0) == 9.0
    assert model.mu_of_instance_type("spot", prior=9.0) == 9.0
    worker.works(50.0)
    assert model.mu("w0", prior=9.0) == pytest.approx(0.5)
    assert model.mu_of_instance_type("spot", prior=9.0) == pytest.approx(0.5)
    assert model.mu("nobody", prior=9.0) == 9.0


def test_waiting_for_permits_does_not_make_a_worker_look_slow() -> None:
    model = CapacityModel()
    worker = Worker(model, "w0")
    for _ in range(5):
        worker.works(50.0)
        worker.works(5.0, saturated=False)
    assert model.mu("w0", prior=9.0) == pytest.approx(0.5)


def test_what_was_measured_stands_where_a_worker_is_hardly_ever_full() -> None:
    model = CapacityModel(window_s=100.0)
    worker = Worker(model, "w0")
    for _ in range(4):
        worker.works(50.0)
    for _ in range(5):
        worker.works(10.0, 200.0, saturated=False)
        worker.works(50.0)
        assert model.mu("w0", prior=9.0) == pytest.approx(0.5)


def test_longer_answers_are_fewer_trajectories() -> None:
    model = CapacityModel()
    worker = Worker(model, "w0")
    for _ in range(30):
        worker.works(50.0)
    worker.length = 200
    worker.tokens *= 2  # so that accepted trajectories never go back
    for _ in range(30):
        worker.works(50.0)
    assert model.mu("w0", prior=9.0) == pytest.approx(0.25)


def test_a_restarted_worker_begins_anew() -> None:
    model = CapacityModel()
    worker = Worker(model, "w0")
    for _ in range(5):
        worker.works(50.0)
    again = Worker(model, "w0")
    again.now_s = worker.now_s
    again.works(80.0)
    assert model.mu("w0", prior=9.0) == 9.0
    again.works(80.0)
    again.works(80.0)
    assert model.mu("w0", prior=9.0) == pytest.approx(0.8)


def test_what_an_instance_type_was_measured_at_outlives_its_workers() -> None:
    model = CapacityModel()
    workers = [Worker(model, f"w{n}") for n in range(3)]
    for worker, rate in zip(workers, (40.0, 50.0, 90.0), strict=True):
        for _ in range(3):
            worker.works(rate)
    assert model.mu_of_instance_type("spot", prior=9.0) == pytest.approx(0.5)
    for name in ("w0", "w2", "w1", "unknown"):
        model.forget(name)
    assert model.mu("w1", prior=9.0) == 9.0
    assert model.mu_of_instance_type("spot", prior=9.0) == pytest.approx(0.5)
    assert model.mu_of_instance_type("other", prior=9.0) == 9.0


def test_a_claim_counts_up_to_a_factor_of_what_was_accepted() -> None:
    """Alone in its instance type, a worker that claims 100 times its tokens is believed LIE_FACTOR times."""
    model = CapacityModel()
    liar = Worker(model, "w0")
    for _ in range(5):
        liar.works(50.0, claim=100.0)
    assert model.mu("w0", prior=9.0) == pytest.approx(0.5 * LIE_FACTOR)


def test_a_worker_is_believed_up_to_a_factor_of_its_peers() -> None:
    """It says that it was saturated for a tenth of the time: the accepted tokens cannot tell."""
    model = CapacityModel()
    honest = [Worker(model, f"w{n}") for n in range(3)]
    liar, alone = Worker(model, "liar"), Worker(model, "alone", instance_type="other")
    for _ in range(5):
        for worker in honest:
            worker.works(50.0)
        for worker in (liar, alone):
            worker.works(50.0)
            worker.saturated_s -= 8.0  # of 10
    assert model.mu("w1", prior=9.0) == pytest.approx(0.5)
    assert model.mu("liar", prior=9.0) == pytest.approx(0.5 * LIE_FACTOR)
    assert model.mu_of_instance_type("spot", prior=9.0) == pytest.approx(0.5)
    assert model.mu("alone", prior=9.0) > 0.5 * LIE_FACTOR


@settings(max_examples=100, deadline=None)
@given(rates=st.lists(st.integers(1, 9).map(lambda power: 2.0**power), min_size=1, max_size=7))
def test_an_instance_type_is_the_median_of_its_workers_each_within_its_bound(rates: list[float]) -> None:
    model = CapacityModel()
    for number, rate in enumerate(rates):
        worker = Worker(model, f"w{number}", length=1)
        for _ in range(3):
            worker.works(rate)
    each = [model.mu(f"w{number}", prior=math.nan) for number in range(len(rates))]
    assert model.mu_of_instance_type("spot", prior=math.nan) == median(each)


def test_a_worker_of_which_nothing_was_accepted_has_no_estimate() -> None:
    model = CapacityModel()
    for number in range(1, 6):
        model.observe_worker("w0", "spot", ThroughputSample(500 * number, 10.0 * number, 0, 0), 10.0 * number)
    assert model.mu("w0", prior=9.0) == 9.0


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0])
def test_what_is_no_measurement_is_refused_and_changes_nothing(wrong: float) -> None:
    model, rates = CapacityModel(), InterruptionRates(1.0, 20.0)
    worker = Worker(model, "w0")
    for _ in range(3):
        worker.works(50.0)
    for observe in (
        lambda: model.observe_step(wrong),
        lambda: model.observe_broadcast(wrong),
        lambda: model.observe_worker("w0", "spot", ThroughputSample(1, wrong, 1, 1), 99.0),
        lambda: rates.observe_hours("L40S", "eu", "spot", wrong),
    ):
        with pytest.raises(RefusedError, match="not used"):
            observe()
    assert model.need(3, 2, 256, mu_first=1.0) is None
    assert model.mu("w0", prior=9.0) == pytest.approx(0.5)
    assert rates.per_hour("L40S", "eu", "spot") == 1 / 20


def test_interruptions_are_a_prior_and_what_happened() -> None:
    rates = InterruptionRates(prior_events=1.0, prior_hours=20.0)
    rates.observe_hours("L40S", "eu", "spot", 60.0)
    for _ in range(3):
        rates.observe_interruption("L40S", "eu", "spot")
    rates.observe_hours("L40S", "us", "spot", 380.0)
    assert rates.per_hour("L40S", "eu", "spot") == pytest.approx(4 / 80)
    assert rates.per_hour("L40S", "us", "spot") == pytest.approx(1 / 400)
    assert rates.per_hour("L40S", "eu", "on_demand") == pytest.approx(1 / 20)
