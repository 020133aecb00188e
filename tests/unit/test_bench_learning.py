"""`bench.learning`: that every verdict can be false, and what counts as collapsed, lost or reached."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from bench.learning import controls, guarding, real, staleness
from bench.learning.controls import Outcome
from bench.learning.harness import Trace
from bench.learning.intervals import Interval, interval
from bench.learning.staleness import Result, Table
from echo_planes.learning.guard import GuardFigures

SEEDS = (0, 1, 2)


def result(method: str, lag: int, times: int, seed: int, area: float = 0.9, **changes: Any) -> Result:
    plain = Result(
        method, lag, times, 1, seed, area + seed * 0.001, 0.98, 0.9, 0.99, 25_000, 0.05, 0.5, [], [], 1.0
    )
    return replace(plain, **changes)


def grid() -> list[Result]:
    """A table in which every claim holds."""
    rows = [result("default", lag, 1, seed, 0.9 - lag / 200) for lag in (0, 1, 3, 6) for seed in SEEDS]
    rows += [result("default", lag, times, seed) for lag, times in ((11, 4), (32, 8)) for seed in SEEDS]
    rows += [result("proximal", 3, 1, seed, 0.88) for seed in SEEDS]
    rows += [result(method, 11, 4, 0, final=0.1) for method in ("uncorrected", "proximal")]
    rows += [result("default", lag, times, 0) for lag in (64, 128, 256) for times in (1, 4)]
    rows += [result("noisy", 3, 1, 0, watched=[{"rate_factor": 0.85}, {"rate_factor": 0.99}])]
    return rows


@pytest.mark.parametrize(
    ("claim", "method", "lag", "times", "changes"),
    [
        ("default: lag up to 6 within 5 %", "default", 6, 1, {"area": 0.8}),
        ("lag >= 11 breaks the uncorrected", "uncorrected", 11, 4, {"final": 0.9}),
        ("lag >= 11 breaks the plain", "proximal", 11, 4, {"final": 0.9}),
        ("default: no collapse at any lag up to 32", "default", 32, 8, {"final": 0.49}),
        ("default: no collapse at lag 64", "default", 256, 4, {"final": 0.49}),
        ("noisy engine", "noisy", 3, 1, {"watched": [{"rate_factor": 0.89}]}),
        ("default: reaches 0.9", "default", 11, 4, {"tokens_to_reach": None}),
        ("default: drift control costs nothing", "default", 3, 1, {"area": 0.8}),
    ],
)
def test_each_claim_of_the_table_can_fail(
    claim: str, method: str, lag: int, times: int, changes: dict[str, Any]
) -> None:
    assert all(staleness.verdicts(Table(grid())).values())
    cell = (method, lag, times)
    worse = [replace(one, **changes) if (one.method, one.lag, one.times) == cell else one for one in grid()]
    told = staleness.verdicts(Table(worse))
    assert [name for name, holds in told.items() if not holds and name.startswith(claim)]


def test_the_picture_has_a_square_a_cell() -> None:
    drawn = staleness.picture(Table(grid()), ["default", "proximal"])
    assert drawn.count("<rect") == 1 + 6 + 2  # the ground, six cells of the default, two of the other


def test_a_guard_that_is_shown_a_run_tells_its_first_alarm_and_when_the_reward_was_lost() -> None:
    calm, wild = asdict(GuardFigures(k3=0.01, log_weight=1.0)), asdict(GuardFigures(k3=0.9, log_weight=1.0))
    rewards = [0.9] * 30 + [0.5] * 30
    told = guarding.warn(
        result("proximal", 3, 4, 0, rewards=rewards, watched=[calm] * 20 + [wild] * 40, final=0.1)
    )
    assert told.collapsed
    assert told.alarms[0] == 21  # twice beyond the limit counts two, and the patience is four
    assert "k3" in told.first
    assert told.lost_at == 31  # the mean of ten: 0.9, then 0.86, then 0.82
    assert not guarding.warn(result("default", 0, 1, 0, rewards=rewards, watched=[calm] * 60)).alarms


def test_a_reward_that_comes_back_is_not_lost() -> None:
    assert guarding._lost_at([0.9] * 20 + [0.5] * 20 + [0.9] * 20) is None


def test_a_control_that_learns_is_told() -> None:
    gains = {"trains": Interval(0.4, 0.05), "rate 0": Interval(0.0, 0.01)}
    assert all(controls.control_verdicts([Outcome(name, gain) for name, gain in gains.items()]).values())
    for name, gain in (("trains", Interval(0.4, 0.2)), ("rate 0", Interval(0.05, 0.06))):
        worse = [Outcome(one, gain if one == name else own) for one, own in gains.items()]
        assert not all(controls.control_verdicts(worse).values())


def run(staleness: int, rate: float, seed: int, **changes: Any) -> real.Run:
    """A run of the embedded job whose tokens cost their delay and nothing more."""
    tokens = round(25_000 + 100 * seed + staleness * 500)
    plain = real.Run(staleness, rate, seed, "done", 0.98, 0.9, 0.98, tokens, 1000.0, staleness / 2, None)
    return replace(plain, **changes)


@pytest.mark.parametrize(
    ("claim", "cell", "changes"),
    [
        ("S = 3, 2.5e-4: tokens", (3, 2.5e-4), {"tokens_to_reach": 40_000}),
        ("S = 6, 2.5e-4: tokens", (6, 2.5e-4), {"tokens_to_reach": None}),
        ("S = 3, 1e-3: ends", (3, 1e-3), {"accuracy": 0.89}),
        ("S = 16, 1e-3: learns", (16, 1e-3), {"accuracy": 0.1}),
        ("no run that collapsed says done", (16, 1e-3), {"final": 0.1}),
    ],
)
def test_each_claim_of_the_real_table_can_fail(
    claim: str, cell: tuple[int, float], changes: dict[str, Any]
) -> None:
    runs = [run(lag, rate, seed) for lag, rate in real.CELLS for seed in SEEDS]
    assert all(real.verdicts(runs).values())
    worse = [replace(one, **changes) if (one.staleness, one.rate) == cell else one for one in runs]
    assert [name for name, holds in real.verdicts(worse).items() if not holds and name.startswith(claim)]


def test_tokens_to_reach_are_those_trained_until_five_steps_are_good() -> None:
    trace = Trace([0.5] * 5 + [0.9] * 5, [100] * 10, [100] * 10, [], [], [], 1.0)
    assert trace.tokens_to_reach == 1000
    assert replace(trace, rewards=[0.5] * 5 + [0.9] * 4 + [0.89]).tokens_to_reach is None


def test_few_runs_have_wide_intervals() -> None:
    assert interval([1.0]).half == float("inf")
    assert interval([1.0, 3.0]) == pytest.approx((2.0, 12.706))
