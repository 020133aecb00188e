"""The guard: which figures are an alarm, what is done about it in which order, and what is none."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from echo_planes.config.schema import GuardConfig
from echo_planes.learning.guard import (
    HISTORY,
    SIGNALS,
    SLOW_STEPS,
    WINDOW,
    Guard,
    GuardFigures,
    figures_of,
)
from echo_planes.types import Adjustment, LagStats, Noise, StepStats, TrainBatch

CALM = GuardFigures(
    k3=0.01,
    effective_samples=0.95,
    truncated=0.002,
    log_weight=1.5,
    entropy=0.3,
    grad_norm=1.0,
    cut_off=0.02,
    reward=0.8,
    spread=0.4,
)
# Of each signal, the figures of a step beyond its limit, given how many such steps were before.
BEYOND: dict[str, Callable[[int], GuardFigures]] = {
    "k3": lambda _: replace(CALM, k3=0.4),
    "effective_samples": lambda _: replace(CALM, effective_samples=0.08),
    "truncated": lambda _: replace(CALM, truncated=0.15),
    "log_weight": lambda _: replace(CALM, log_weight=9.0),
    "entropy_slope": lambda i: replace(CALM, entropy=0.3 + 0.15 * i),
    "grad_norm": lambda i: replace(CALM, grad_norm=12.0 ** (1 + i // (HISTORY // 2))),
    "cut_off": lambda i: replace(CALM, cut_off=0.5),
    "reward_drop": lambda _: replace(CALM, reward=0.4),
}
LADDER = ["mask", "limit", "slow", "rollback"]


def guard(max_staleness: int = 3, patience: int = 3, **settings: Any) -> Guard:
    return Guard(GuardConfig(patience=patience, **settings), max_staleness)


def calm(watch: Guard, steps: int) -> None:
    """So many healthy steps, in which nothing must be said."""
    for _ in range(steps):
        assert watch.observe(CALM) is None


def rungs(watch: Guard, figures: Callable[[int], GuardFigures], steps: int) -> list[str]:
    """Rungs taken in so many steps."""
    verdicts = [watch.observe(figures(i)) for i in range(steps)]
    return [verdict.rung for verdict in verdicts if verdict is not None and verdict.rung is not None]


def with_good_checkpoint(max_staleness: int = 3, **settings: Any) -> Guard:
    """A guard after healthy steps, with a good checkpoint of step 20."""
    watch = guard(max_staleness, **settings)
    calm(watch, 20)
    watch.saved(20)
    calm(watch, watch._settings.good_after)
    assert watch.report.good_step == 20
    return watch


# --- ladder --------------------------------------------------------------------------------------


def test_every_signal_has_a_limit_among_the_settings_and_a_case_here() -> None:
    assert {signal.setting for signal in SIGNALS} == set(BEYOND)
    assert {signal.setting for signal in SIGNALS} <= set(GuardConfig.model_fields)


@pytest.mark.parametrize("setting", BEYOND)
def test_each_signal_alone_reaches_each_rung(setting: str) -> None:
    watch = with_good_checkpoint()
    told = []
    for i in range(120):
        verdict = watch.observe(BEYOND[setting](i))
        if verdict is not None:
            told.append(verdict)
        if verdict is not None and verdict.rung == "rollback":
            break
    assert [verdict.rung for verdict in told] == LADDER
    assert dict(watch.report.alarms) == {setting: 4}
    assert dict(watch.report.actions) == dict.fromkeys(LADDER, 1)
    limit = getattr(GuardConfig(), setting)
    for verdict in told:
        assert f"guard.{setting}={limit:g}" in verdict.text
    assert "step 20" in told[-1].text


def test_what_each_rung_puts_in_force() -> None:
    watch = with_good_checkpoint(max_staleness=7)
    seen = []
    for i in range(60):
        verdict = watch.observe(BEYOND["k3"](i))
        if verdict is not None:
            seen.append((verdict.rung, watch.max_staleness, watch.limits_staleness, watch.adjustment))
        if verdict is not None and verdict.rung == "rollback":
            break
    masked, slowed = Adjustment(mask_outliers=True), Adjustment(0.5, mask_outliers=True)
    assert seen == [
        ("mask", 7, False, masked),
        ("limit", 3, True, masked),
        ("slow", 3, True, slowed),
        ("rollback", 3, True, slowed),
    ]


def test_a_synchronous_run_has_no_staleness_to_lower() -> None:
    watch = with_good_checkpoint(max_staleness=0)
    assert rungs(watch, BEYOND["k3"], 9) == ["mask", "slow", "rollback"]
    assert watch.max_staleness == 0
    assert not watch.limits_staleness


def test_data_that_was_under_way_when_a_rung_was_taken_does_not_count() -> None:
    watch = guard(max_staleness=8, patience=2)
    acted = [i for i in range(24) if (v := watch.observe(BEYOND["k3"](i))) is not None and v.rung]
    assert acted == [1, 3, 3 + 8 + 2, 3 + 2 * (8 + 2)]  # mask, limit, slow, stop


@pytest.mark.parametrize(
    ("watch", "why"),
    [
        (lambda: guard(), "no good checkpoint"),
        (lambda: with_good_checkpoint(max_rollbacks=0), "after 0 rollbacks"),
    ],
)
def test_it_stops_where_it_cannot_go_back_and_says_what_to_change(
    watch: Callable[[], Guard], why: str
) -> None:
    watching, last = watch(), None
    for i in range(60):
        last = watching.observe(BEYOND["truncated"](i)) or last
        if last is not None and last.rung == "stop":
            break
    assert last is not None
    assert last.rung == "stop"
    for part in ("truncated weights", "0.15", "above guard.truncated=0.1", why, "lower learner.lr"):
        assert part in last.text
    assert "\n" not in last.text


def test_after_a_rollback_the_ladder_begins_anew_and_the_count_goes_on() -> None:
    watch, done = with_good_checkpoint(max_rollbacks=2), []
    for _ in range(3):
        for i in range(60):
            verdict = watch.observe(BEYOND["k3"](i))
            if verdict is not None:
                done.append(verdict.rung)
            if verdict is not None and verdict.rung in ("rollback", "stop"):
                break
        watch = Guard(GuardConfig(), 1, watch.record_after_rollback({}))
        assert watch.report.rung == 0
        assert watch.report.good_step == 20
    assert done == [*LADDER, *LADDER, "mask", "limit", "slow", "stop"]
    assert watch.report.rollbacks == 2


def test_after_a_rollback_to_a_policy_that_was_not_good_the_rewards_tell_it() -> None:
    watch = with_good_checkpoint()
    saved = json.loads(json.dumps(watch.record()))
    rungs(watch, BEYOND["k3"], 20)
    back = Guard(GuardConfig(), 1, watch.record_after_rollback(saved))
    assert rungs(back, lambda _: replace(CALM, reward=0.1, spread=0.3), 2 * WINDOW)[:1] == ["mask"]


def test_after_a_rollback_the_best_is_that_of_the_checkpoint() -> None:
    watch = guard()
    for step in range(20):
        watch.observe(replace(CALM, reward=0.1 + 0.01 * step, spread=0.3))
    saved = watch.record()
    for _ in range(20):
        watch.observe(replace(CALM, reward=0.9, spread=0.3))
    back = Guard(GuardConfig(), 1, watch.record_after_rollback(saved))
    assert rungs(back, lambda i: replace(CALM, reward=0.2 + 0.004 * i, spread=0.3), 60) == []


# --- levels --------------------------------------------------------------------------------------


def at(level: int, **changes: Any) -> GuardFigures:
    return replace(CALM, level=level, **changes)


def test_a_harder_level_is_no_alarm_and_a_fall_within_one_is() -> None:
    """Also one that comes back to a level, and also after a resume."""
    watch = guard(mode="warn")
    harder = {"reward": 0.1, "spread": 0.3, "cut_off": 0.5, "entropy": 2.5, "grad_norm": 15.0}
    for _ in range(3):
        for level, figures in ((0, at(0)), (1, at(1, **harder))):
            assert [watch.observe(figures) for _ in range(2 * WINDOW)] == [None] * 2 * WINDOW, level
    watch = Guard(watch._settings, 3, json.loads(json.dumps(watch.record())))
    told = [verdict.text for _ in range(2 * WINDOW) if (verdict := watch.observe(at(0, reward=0.1)))]
    assert told[0].startswith("fall of the reward from its best")


def test_figures_are_of_the_level_and_of_all_accepted_answers() -> None:
    accepted = replace(
        batch([0.0, 1.0], [True, False]),
        accepted_scores=np.array([0.0, 1.0, 1.0, 1.0, 5.0], np.float32),
        accepted_cut_off=np.array([True, False, False, False, True]),
        accepted_levels=np.array([2, 2, 2, 2, 0]),
    )
    figures = figures_of(accepted, stats())
    assert (figures.level, figures.reward, figures.cut_off) == (2, 0.75, 0.25)
    assert figures.spread == pytest.approx(0.1875**0.5)


# --- hysteresis ----------------------------------------------------------------------------------


def test_single_outliers_are_no_alarm_however_many_there_are() -> None:
    watch = guard()
    for _ in range(100):
        assert watch.observe(replace(CALM, k3=0.4)) is None
        calm(watch, 1)


def test_a_signal_that_comes_and_goes_is_one() -> None:
    watch = guard()
    pattern = [0.4, 0.4, 0.01] * 2
    assert rungs(watch, lambda i: replace(CALM, k3=pattern[i]), 5) == ["mask"]


def test_one_twice_beyond_its_limit_counts_two() -> None:
    assert rungs(guard(), lambda _: replace(CALM, k3=0.61), 2) == ["mask"]
    assert rungs(guard(), lambda _: replace(CALM, k3=0.59), 2) == []
    assert rungs(guard(), lambda _: replace(CALM, effective_samples=0.049), 2) == ["mask"]


def test_different_signals_do_not_add_up() -> None:
    watch = guard()
    kinds = ["k3", "truncated", "log_weight"]
    for i in range(3):
        assert watch.observe(BEYOND[kinds[i]](i)) is None


def test_the_signal_furthest_beyond_is_named() -> None:
    watch = guard()
    both = replace(CALM, k3=0.31, log_weight=12.0)
    verdicts = [watch.observe(both) for _ in range(3)]
    assert verdicts[-1] is not None
    assert "|log weight|" in verdicts[-1].text


def test_a_reward_that_came_back_does_not_tell_of_its_fall_again() -> None:
    watch = guard()
    calm(watch, 2 * WINDOW)
    while not watch.report.alarms:
        watch.observe(replace(CALM, reward=0.1))
    calm(watch, 4 * WINDOW)


def test_steps_in_which_nothing_was_scored_say_nothing() -> None:
    watch = guard()
    watch.observe(BEYOND["k3"](0))
    watch.observe(BEYOND["k3"](1))
    for _ in range(30):
        assert watch.observe(GuardFigures()) is None
    assert rungs(watch, BEYOND["k3"], 1) == ["mask"]  # nor do they forget


def test_calm_takes_the_rungs_back_in_turn() -> None:
    watch = guard(calm=30)
    assert rungs(watch, BEYOND["k3"], 14) == ["mask", "limit", "slow"]
    told = [(i, verdict.text) for i in range(200) if (verdict := watch.observe(CALM))]
    assert [text.rpartition(": ")[2] for _, text in told] == [
        "the learning rate is as it was",
        "S is 3 again",
        "outliers are no longer masked",
    ]
    assert [b - a for (a, _), (b, _) in pairwise(told)] == [30, 30]
    assert watch.adjustment == Adjustment()
    assert watch.max_staleness == 3
    assert dict(watch.report.actions)["relax"] == 3


def test_a_rung_is_not_taken_back_while_a_signal_still_comes() -> None:
    watch = guard(calm=30)
    rungs(watch, BEYOND["k3"], 3)
    for _ in range(10):
        calm(watch, 29)
        assert watch.observe(BEYOND["k3"](0)) is None
    assert watch.report.rung == 1


def test_calm_is_counted_from_the_step_after_a_signal() -> None:
    watch = guard(calm=30)
    assert rungs(watch, BEYOND["k3"], 3) == ["mask"]
    assert watch.observe(BEYOND["k3"](3)) is None  # one more, and no alarm
    assert [i for i in range(1, 61) if watch.observe(CALM)] == [30]
    assert watch.adjustment == Adjustment()


def test_a_synchronous_run_is_taken_back_without_a_word_about_staleness() -> None:
    watch = guard(0, calm=30)
    assert rungs(watch, BEYOND["k3"], 6) == ["mask", "slow"]
    told = [verdict.text for _ in range(100) if (verdict := watch.observe(CALM))]
    assert [text.rpartition(": ")[2] for text in told] == [
        "the learning rate is as it was",
        "outliers are no longer masked",
    ]


# --- modes ---------------------------------------------------------------------------------------


def test_warning_tells_and_does_nothing() -> None:
    watch = guard(mode="warn")
    told = [verdict for i in range(9) if (verdict := watch.observe(BEYOND["k3"](i)))]
    assert [verdict.rung for verdict in told] == [None] * 3
    assert all("nothing is done" in verdict.text for verdict in told)
    assert watch.report.rung == 0
    assert dict(watch.report.alarms) == {"k3": 3}
    assert watch.report.actions == ()


def test_switched_off_it_says_nothing() -> None:
    watch = guard(mode="off")
    assert rungs(watch, BEYOND["k3"], 50) == []
    assert watch.compare(5.0) == ""


def test_a_mismatch_on_the_same_weights_names_the_likely_causes() -> None:
    watch = guard()
    assert watch.compare(0.1) == ""
    text = watch.compare(0.25)
    for part in ("0.25", "guard.mismatch=0.1", "dtype", "temperature", "top_p", "template", "logprobs mode"):
        assert part in text


# --- checkpoints ---------------------------------------------------------------------------------


def test_a_checkpoint_is_good_only_after_steps_without_an_alarm() -> None:
    watch = guard(good_after=10)
    calm(watch, 5)
    watch.saved(5)
    calm(watch, 9)
    assert watch.report.good_step == -1
    assert watch.kept_checkpoints == {5}
    calm(watch, 1)
    assert watch.report.good_step == 5
    watch.saved(15)
    assert watch.kept_checkpoints == {5, 15}
    rungs(watch, BEYOND["k3"], 3)
    calm(watch, 20)
    assert watch.report.good_step == 5  # the alarm came too soon after the other one
    assert watch.kept_checkpoints == {5}


def test_what_the_run_was_given_is_good_and_what_nobody_looked_at_is_not() -> None:
    watch = guard()
    assert watch.kept_checkpoints == frozenset()
    watch.saved(0)
    assert (watch.report.good_step, watch.kept_checkpoints) == (0, {0})
    assert "rollback" in rungs(watch, BEYOND["k3"], 60)
    resumed = guard()
    resumed.saved(7)
    assert resumed.kept_checkpoints == frozenset()
    calm(resumed, 1)
    resumed.saved(8)
    assert resumed.kept_checkpoints == {8}


def test_a_checkpoint_written_while_a_signal_counted_is_none() -> None:
    watch = guard(good_after=10)
    watch.observe(BEYOND["k3"](0))
    watch.saved(1)
    calm(watch, 20)
    assert watch.report.good_step == -1


def test_a_checkpoint_of_a_policy_that_has_fallen_is_none_while_its_rewards_are_counted_anew() -> None:
    watch = guard()
    calm(watch, 20)
    fallen = replace(CALM, reward=0.1)
    while not watch.report.alarms:
        watch.observe(fallen)
    for step in range(WINDOW):
        watch.observe(fallen)
        watch.saved(100 + step)
    assert watch.kept_checkpoints == frozenset()


def test_checkpoints_that_come_faster_than_they_prove_good_do_not_pile_up() -> None:
    watch = guard(good_after=10)
    good = []
    for step in range(1, 61):
        calm(watch, 1)
        watch.saved(step)
        assert len(watch.kept_checkpoints) <= 2
        good.append(watch.report.good_step)
    assert good[-1] > 40


# --- a resume ------------------------------------------------------------------------------------


def rough(seed: int, steps: int) -> Iterator[GuardFigures]:
    """Figures that go through alarms and calm."""
    draw = random.Random(seed)
    for step in range(steps):
        bad = (step // 30) % 2 == 1
        yield replace(
            CALM,
            k3=math.exp(draw.gauss(-0.5 if bad else -4.0, 0.8)),
            reward=draw.gauss(0.5 if bad else 0.8, 0.05),
            grad_norm=math.exp(draw.gauss(1.0 if bad else 0.0, 0.8)),
            entropy=draw.gauss(0.3, 0.1),
        )


def test_a_record_of_older_code_is_read_as_far_as_it_is_known() -> None:
    old = {"rung": 2, "good_step": 40, "entropies": [1.0], "reward_best": 0.5}
    assert Guard(GuardConfig(), 3, old).report.good_step == 40


@pytest.mark.parametrize("cut", range(1, 200, 13))
def test_a_resumed_guard_goes_on_as_if_nothing_had_happened(cut: int) -> None:
    figures = list(rough(seed=4, steps=200))
    whole = guard(calm=20, max_rollbacks=9)
    first = [whole.observe(one) for one in figures[:cut]]
    resumed = Guard(whole._settings, 3, json.loads(json.dumps(whole.record())))
    assert [resumed.observe(one) for one in figures[cut:]] == [whole.observe(one) for one in figures[cut:]]
    assert resumed.report == whole.report
    assert cut < 100 or any(first)


# --- false alarms --------------------------------------------------------------------------------


def healthy(seed: int, steps: int) -> Iterator[GuardFigures]:
    """A run that learns, with figures as wide and as bound to the step before as those of recorded runs:
    lags of 3 and 6 at up to twice the best learning rate, the rate controlled by the drift.
    """
    draw = random.Random(seed)
    wave = dict.fromkeys(("k3", "ess", "cut", "log", "entropy", "norm", "reward"), 0.0)
    middle, width = draw.uniform(10, 400), draw.uniform(5, 150)
    for step in range(steps):
        for key in wave:
            wave[key] = 0.75 * wave[key] + 0.66 * draw.gauss(0, 1)
        skill = 0.2 + 0.75 / (1 + math.exp((middle - step) / width))
        right = min(max(skill + 0.03 * wave["reward"], 0.0), 1.0)
        right = sum(draw.random() < right for _ in range(256)) / 256
        scored = draw.random() > 0.05
        yield GuardFigures(
            k3=0.033 * math.exp(0.8 * wave["k3"]) if scored else None,
            effective_samples=1 / (1 + 0.05 * math.exp(1.0 * wave["ess"])) if scored else None,
            truncated=min(0.003 * math.exp(0.8 * wave["cut"]), 1.0) if scored else None,
            log_weight=1.9 * math.exp(0.45 * wave["log"]) if scored else None,
            entropy=(0.1 + 0.5 * (1 - skill)) * math.exp(0.3 * wave["entropy"]) if scored else None,
            grad_norm=1.2 * math.exp(0.55 * wave["norm"]) if scored else None,
            cut_off=sum(draw.random() < 0.03 + 0.05 * skill for _ in range(256)) / 256,
            reward=right,
            spread=(right * (1 - right)) ** 0.5,
        )


def test_fewer_than_one_false_alarm_in_ten_thousand_healthy_steps() -> None:
    alarms, steps = 0, 0
    for seed in range(10):
        watch = Guard(GuardConfig(mode="warn"), 3)
        for figures in healthy(seed, 2000):
            alarms += watch.observe(figures) is not None
            steps += 1
    assert alarms / steps < 1e-4


# --- figures -------------------------------------------------------------------------------------


def stats(**changes: Any) -> StepStats:
    return replace(StepStats(0, 0.0, 2.0, 0.0, 1.0, 0, 0, 0.0, 0.0, 0.0, 1.0, 0.5, 0.0, 0, 0), **changes)


def batch(rewards: list[float], cut_off: list[bool]) -> TrainBatch:
    ints, floats, bools = np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros(0, np.bool_)
    given = np.array(rewards, np.float32)
    return TrainBatch(
        0, (), ints, ints, bools, floats, given, ints, floats, ints, bools, ints, np.array(cut_off, np.bool_)
    )


def test_figures_are_those_of_the_worst_lag_that_has_tokens_enough() -> None:
    lags = (
        LagStats(0, 300, 0.0, 0.01, 0.0, 0.0, 0.0),
        LagStats(3, 100, 0.0, 0.2, 0.04, 0.0, 0.0),
        LagStats(9, 5, 0.0, 7.0, 1.0, 0.0, 0.0),
    )
    given = stats(
        lags=lags, k3=0.06, effective_samples=0.9, log_weight=(0.1, 1.0, 3.0, 8.0), truncated_fraction=0.03
    )
    figures = figures_of(batch([0.0, 1.0, 1.0, 0.0], [True, False, False, False]), given)
    assert figures.k3 == 0.2
    assert figures.truncated == 0.03
    assert figures.log_weight == 3.0
    assert (figures.effective_samples, figures.entropy, figures.grad_norm) == (0.9, 0.5, 2.0)
    assert (figures.reward, figures.spread, figures.cut_off) == (0.5, 0.5, 0.25)


def test_the_noise_of_an_engine_is_no_movement_of_the_policy() -> None:
    lags = (LagStats(2, 300, 0.1, 0.05, 0.0, 0.0, 0.0),)
    noise = Noise(0.06, 0.02, 0.8, 0.01, 4.0)
    given = stats(
        lags=lags,
        noise=noise,
        mismatch_mean=0.1,
        effective_samples=0.6,
        truncated_fraction=0.03,
        log_weight=(0.1, 1.0, 5.0, 8.0),
        rate_factor=0.7,
    )
    figures = figures_of(batch([0.0, 1.0], [True, False]), given)
    assert figures.k3 == pytest.approx(0.03)
    assert figures.effective_samples == pytest.approx(0.75)
    assert figures.truncated == pytest.approx(0.02)
    assert figures.log_weight == pytest.approx(3.0)
    assert (figures.drift, figures.noise, figures.lag, figures.rate_factor) == (0.1, 0.06, 2.0, 0.7)
    quieter = figures_of(
        batch([0.0, 1.0], [True, False]), replace(given, k3=0.01, lags=(), log_weight=(0,) * 4)
    )
    assert (quieter.k3, quieter.log_weight) == (0.0, 0.0)


def test_a_rate_far_below_its_schedule_is_told_once_with_its_cause() -> None:
    watch = guard()
    slow = replace(CALM, rate_factor=0.05, drift=0.3, noise=0.03, lag=2.0)
    told = [watch.observe(slow) for _ in range(2 * SLOW_STEPS)]
    (verdict,) = [one for one in told if one is not None]
    assert told.index(verdict) == SLOW_STEPS - 1
    assert verdict.rung is None
    assert "below 0.1 of its schedule" in verdict.text
    assert "moves 0.3 nats under tokens of 2.0 steps" in verdict.text
    assert "learner.lr" in verdict.text
    assert watch.observe(CALM) is None
    again = Guard(GuardConfig(patience=3), 3, json.loads(json.dumps(watch.record())))
    noisy = [again.observe(replace(slow, drift=0.2, noise=0.18)) for _ in range(SLOW_STEPS)]
    assert noisy[-1] is not None
    assert "differ by 0.18 nats on equal weights" in noisy[-1].text
    assert "learner.drift_target" in noisy[-1].text


def test_an_alarm_at_the_same_step_only_puts_it_off() -> None:
    watch = guard(patience=1)
    slow = replace(CALM, rate_factor=0.05, drift=0.3, lag=2.0)
    for _ in range(SLOW_STEPS - 1):
        assert watch.observe(slow) is None
    alarm, told = watch.observe(replace(slow, k3=0.4)), watch.observe(slow)
    assert alarm is not None
    assert alarm.rung == "mask"
    assert told is not None
    assert "of its schedule" in told.text


def test_a_factor_that_is_low_now_and_then_is_no_news() -> None:
    watch = guard()
    for step in range(60):
        assert watch.observe(replace(CALM, rate_factor=0.05 if step % SLOW_STEPS else 0.2)) is None


def test_figures_of_a_step_that_scored_nothing_are_none() -> None:
    figures = figures_of(batch([], []), stats(grad_norm=None, entropy=None, mismatch_mean=None))
    assert figures == GuardFigures(rate_factor=1.0)
    few = stats(lags=(LagStats(1, 5, 0.0, 7.0, 0.0, 0.0, 0.0),), k3=0.3)
    assert figures_of(batch([], []), few).k3 == 0.3  # of all lags together


def test_the_windows_are_as_the_settings_say() -> None:
    said = {name: field.description or "" for name, field in GuardConfig.model_fields.items()}
    assert f"over {WINDOW} steps" in said["entropy_slope"]
    assert f"over {WINDOW} steps" in said["reward_drop"]
    assert f"last {HISTORY} steps" in said["grad_norm"]
    assert f"of {HISTORY} steps" in said["cut_off"]
