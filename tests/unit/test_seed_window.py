"""The seeding window against the fluid model of a step, whose best window is known."""

from __future__ import annotations

import pytest

from bench.papers_seeding import PaperWindow
from echo_planes.errors import ConfigError
from echo_planes.loop.seed_window import SeededStep, SeedWindow

ENGINES = 4
TRAIN_S = 100.0


def fluid(work_s: float, remote: float, window_s: float, speed: float = 1.0) -> tuple[float, float]:
    """t_train_wait and t_remote_wait of a step in which work is a fluid, of `work_s` engine-seconds.

    All sample until the window ends, then the remote ones alone. The learner trains from then on. A seeder is
    `speed` times as fast as a remote worker.
    """
    sampled_s = (work_s - window_s * ENGINES * speed) / remote
    late_s = sampled_s - (window_s + TRAIN_S)
    return max(0.0, late_s), max(0.0, -late_s)


def best(work_s: float, remote: float) -> float:
    return max(0.0, (work_s - remote * TRAIN_S) / (remote + ENGINES))


def steps(window: SeedWindow, work_s: float, remote: int, number: int, speed: float = 1.0) -> list[float]:
    """Windows that follow one another, the first as it is."""
    found = [window.seconds]
    for _ in range(number):
        train_wait_s, remote_wait_s = fluid(work_s, remote, window.seconds, speed)
        found.append(window.observe(SeededStep(train_wait_s, remote_wait_s, float(remote), remote)))
    return found


@pytest.mark.parametrize("remote", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("first_s", [0.0, 60.0, 300.0])
def test_it_comes_within_a_twentieth_of_the_best_window_in_ten_steps(remote: int, first_s: float) -> None:
    work_s = 1000.0
    found = steps(SeedWindow(ENGINES, first_s, eta=2.0), work_s, remote, 10)
    assert found[-1] == pytest.approx(best(work_s, remote), rel=0.05)


@pytest.mark.parametrize("speed", [0.3, 2.0, 3.5, 5.0, 8.0])
def test_it_settles_also_where_seeders_are_faster_or_slower(speed: float) -> None:
    work_s, remote = 2000.0, 2
    found = steps(SeedWindow(ENGINES, 10.0, eta=2.0), work_s, remote, 30, speed)
    target = (work_s - remote * TRAIN_S) / (remote + ENGINES * speed)
    assert found[-3:] == pytest.approx([target] * 3, rel=0.05)


def test_the_distance_is_gone_in_one_step_where_all_engines_are_equally_fast() -> None:
    for remote in (2, 3):
        found = steps(SeedWindow(ENGINES, 100.0, eta=1.0), 1000.0, remote, 1)
        assert found[-1] == pytest.approx(best(1000.0, remote))


def test_swings_before_a_worker_came_do_not_slow_what_follows() -> None:
    window = SeedWindow(ENGINES, 10.0, eta=2.0)
    steps(window, 2000.0, 2, 30, speed=5.0)
    found = steps(window, 2000.0, 3, 2)
    assert found[-1] == pytest.approx(best(2000.0, 3), rel=0.01)


def test_the_papers_own_rule_diverges_where_one_worker_meets_four_engines() -> None:
    work_s, first_s = 1000.0, 170.0  # T* is 180
    theirs = steps(PaperWindow(ENGINES, first_s, eta=2.0), work_s, 1, 10)
    swings = [abs(found - best(work_s, 1)) for found in theirs]
    assert swings[:6] == sorted(swings[:6])
    assert min(swings[5:]) > 5 * swings[0]  # until the window is 0, and from there up again
    ours = steps(SeedWindow(ENGINES, first_s, eta=2.0), work_s, 1, 10)
    assert ours[-1] == pytest.approx(best(work_s, 1), rel=0.05)


def test_fewer_workers_need_a_longer_window_and_many_need_none() -> None:
    found = [
        steps(SeedWindow(ENGINES, 10.0, eta=2.0), 600.0, remote, 10)[-1] for remote in (1, 2, 3, 4, 5, 6, 7)
    ]
    assert found == sorted(found, reverse=True)
    assert found[0] > 0 == found[-1]


def test_its_memory_restores_the_window_in_one_step_after_a_loss() -> None:
    work_s = 1000.0
    window = SeedWindow(ENGINES, 10.0, eta=4.0)
    three = steps(window, work_s, 3, 30)[-1]
    six = steps(window, work_s, 6, 30)[-1]
    assert three == pytest.approx(best(work_s, 3), rel=0.01)
    assert six == pytest.approx(best(work_s, 6), rel=0.01)
    # Three of six are lost in mid-step: the next step is one of three workers, as it was before.
    found = window.observe(SeededStep(200.0, 0.0, 4.7, 3))
    assert found == three
    forgetful = SeedWindow(ENGINES, six, eta=4.0)
    assert forgetful.observe(SeededStep(200.0, 0.0, 4.7, 3)) != pytest.approx(three, rel=0.05)


def test_a_step_in_which_workers_came_and_went_is_not_remembered() -> None:
    window = SeedWindow(ENGINES, 50.0, eta=2.0)
    window.observe(SeededStep(30.0, 0.0, 2.5, 2))
    assert window.memory == {}
    window.observe(SeededStep(30.0, 0.0, 2.0, 2))
    assert window.memory == {2: window.seconds}


def test_without_remote_workers_it_stays_as_it_is() -> None:
    window = SeedWindow(ENGINES, 50.0, eta=2.0)
    assert window.observe(SeededStep(500.0, 0.0, 0.0, 0)) == 50.0
    assert window.memory == {}


def test_it_is_never_negative() -> None:
    window = SeedWindow(ENGINES, 5.0, eta=2.0)
    assert window.observe(SeededStep(0.0, 1000.0, 3.0, 3)) == 0.0


@pytest.mark.parametrize("eta", [0.5, 2.0])
def test_at_the_least_eta_one_step_is_enough(eta: float) -> None:
    found = steps(SeedWindow(ENGINES, 60.25, eta), 1000.0, 1, 1)
    assert found[-1] == pytest.approx(best(1000.0, 1))


@pytest.mark.parametrize(("engines", "first_s", "eta"), [(0, 1.0, 2.0), (1, -1.0, 2.0), (1, 1.0, 0.0)])
def test_settings_that_make_no_window_are_refused(engines: int, first_s: float, eta: float) -> None:
    with pytest.raises(ConfigError, match="seeding"):
        SeedWindow(engines, first_s, eta)


def test_each_turn_doubles_the_divisor_and_each_step_onwards_halves_it_again() -> None:
    window = SeedWindow(1, 100.0, eta=2.0)
    found = [
        window.observe(SeededStep(max(difference_s, 0.0), max(-difference_s, 0.0), 1.0, 1))
        for difference_s in (-8.0, 8.0, -8.0, 0.0, -8.0, -8.0, -8.0, -8.0)
    ]
    # over 2, 4, 8; a step in balance says nothing; 8, 4, 2, and never less than 2
    assert found == [96.0, 98.0, 97.0, 97.0, 96.0, 94.0, 90.0, 86.0]
