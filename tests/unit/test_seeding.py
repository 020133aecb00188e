"""Windows of seeding as the controller decides them, event by event."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echo_planes.loop import events as ev
from echo_planes.loop.seeding import LATE_S, LOOK_S, SERVES_S, Present, Seeding
from echo_planes.testing.simulation import replace_section
from echo_planes.types import Interval
from tests.unit.test_controller import STATS, Loop, batch, manifest, settings

WINDOW_S = 4.0
FORM = ev.FormBatch(0, LOOK_S)
FORM_WHOLE = ev.FormBatch(0, LOOK_S, whole=True)
OPEN, CLOSE = ev.OpenWindow(("s0",)), ev.CloseWindow(("s0",))


def loop(remote: tuple[str, ...] = ("w0",), restarts: int = 3, **seeding: float) -> Loop:
    """A run with a seeder; its learner has published, no engine is ready."""
    config = replace_section(
        settings(s=0, restarts=restarts), seeding={"engines": 1, "first_s": WINDOW_S, "eta": 2.0, **seeding}
    )
    found = Loop(config, (*remote, "s0"))
    found.tell(ev.LearnerReady(0))
    return found


def not_ready(found: Loop) -> list[ev.Action]:
    """Nothing came of the learner's request."""
    return found.tell(ev.BatchNotReady("filling", ""))


def serve(found: Loop, *workers: str, epoch: int = 0) -> None:
    """Their engines are ready and serve version 0; what is due is evaluated."""
    for worker in workers:
        found.tell(ev.WorkerReady(worker, epoch))
        found.installed(0, worker, epoch)


def opened() -> Loop:
    """A run in the open window of its first step, at 10 s."""
    found = loop()
    assert found.tell(ev.Published(manifest(0))) == [FORM]  # no seeder is there yet
    serve(found, "w0", "s0")
    found.now_s = 10.0
    assert not_ready(found) == [OPEN, replace(FORM_WHOLE, wait_s=min(LOOK_S, WINDOW_S))]
    return found


def test_a_window_opens_when_a_seeder_is_there_and_closes_when_its_time_is_over() -> None:
    found = opened()
    found.now_s = 10.0 + WINDOW_S - 0.5
    assert not_ready(found) == [ev.FormBatch(0, 0.5, whole=True)]
    found.now_s = 10.0 + WINDOW_S
    assert not_ready(found) == [CLOSE]
    assert found.tell(ev.SeedersParked()) == [FORM]  # parts from now on
    found.now_s += LATE_S
    assert not_ready(found) == [FORM]  # no second window in this step


def test_its_time_begins_when_a_seeder_serves_the_version_of_the_step() -> None:
    found = loop()
    found.tell(ev.Published(manifest(0)))
    found.tell(ev.WorkerReady("s0", 0))
    serve(found, "w0")
    assert not_ready(found) == [OPEN, FORM_WHOLE]
    found.now_s = 3.0
    assert not_ready(found) == [FORM_WHOLE]  # it installs still
    found.installed(0, "s0")
    found.now_s = 3.0 + WINDOW_S - 0.25
    assert not_ready(found) == [ev.FormBatch(0, 0.25, whole=True)]


def test_a_seeder_that_does_not_serve_holds_no_window_open_beside_remote_workers() -> None:
    found = loop()
    found.tell(ev.Published(manifest(0)))
    found.tell(ev.WorkerReady("s0", 0))
    serve(found, "w0")
    assert not_ready(found) == [OPEN, FORM_WHOLE]
    found.now_s = WINDOW_S + SERVES_S - 0.5
    assert not_ready(found) == [ev.FormBatch(0, 0.5, whole=True)]
    found.now_s = WINDOW_S + SERVES_S
    assert not_ready(found) == [CLOSE]
    assert found.tell(ev.SeedersParked()) == [FORM]


def stuck(found: Loop) -> None:
    """The learner waits in the closed window until remote workers count as stuck."""
    found.now_s += LATE_S
    assert not_ready(found) == [FORM]
    found.now_s += 1.0
    assert not_ready(found) == [OPEN, FORM_WHOLE]


def test_a_remote_worker_that_finishes_nothing_does_not_keep_the_seeders_parked() -> None:
    found = opened()
    found.now_s = 20.0
    assert not_ready(found) == [CLOSE]
    assert found.tell(ev.SeedersParked()) == [FORM]
    stuck(found)
    seeding = found.controller.seeding
    assert seeding is not None
    assert seeding.report(found.now_s).train_wait_s == 10.0 + LATE_S + 1.0  # what it waited is not forgotten
    assert found.tell(ev.BatchReady(batch(0))) == [CLOSE]
    found.tell(ev.SeedersParked())
    found.tell(ev.StepDone(STATS))
    found.tell(ev.Published(manifest(1, base=0)))
    for worker in ("w0", "s0"):
        found.installed(1, worker)
    assert seeding.report(found.now_s).t_seed_s == WINDOW_S  # such a step does not move the window
    assert not seeding.is_open or not_ready(found)[-1] != FORM  # it serves: the next window is a planned one


def test_a_remote_worker_that_never_serves_is_waited_for_once() -> None:
    found = loop(first_s=0.0)
    found.tell(ev.Published(manifest(0)))
    found.tell(ev.WorkerReady("w0", 0))
    found.tell(ev.WorkerReady("s0", 0))
    found.installed(0, "s0")
    assert not_ready(found) == [OPEN, FORM_WHOLE]  # no remote worker has served yet
    found.installed(0, "w0")
    assert not_ready(found) == [CLOSE]
    assert found.tell(ev.SeedersParked()) == [FORM]
    found.tell(ev.BatchReady(batch(0)))
    for step in (1, 2):  # from now on its installs hang
        found.tell(ev.StepDone(STATS))
        form = found.tell(ev.Published(manifest(step, base=step - 1)))[-1]
        found.installed(step, "s0")
        if step == 1:
            assert form == ev.FormBatch(1, LOOK_S)
            found.now_s += LATE_S + 1.0
            assert not_ready(found)[0] == OPEN
        else:
            assert form == ev.FormBatch(2, LOOK_S, whole=True)  # it opened at once
        assert found.tell(ev.BatchReady(batch(step))) == [CLOSE]
        found.tell(ev.SeedersParked())


def test_evaluations_are_of_remote_workers_where_there_are_any() -> None:
    for remote, asked in ((("w0",), "w0"), ((), "s0")):
        found = loop(remote=remote)
        found.tell(ev.Published(manifest(0)))
        found.tell(ev.WorkerReady("s0", 0))
        actions = []
        for worker in remote:
            found.tell(ev.WorkerReady(worker, 0))
        for worker in ("s0", *remote):
            actions += [a for a in found.installed(0, worker) if isinstance(a, ev.Evaluate)]
        assert [evaluate.worker_ids for evaluate in actions] == [(asked,)]


def test_a_seeder_that_gives_up_does_not_end_a_run_whose_machines_boot() -> None:
    for scale, ends in (("ray", False), ("fixed", True)):
        config = replace_section(
            settings(s=0), seeding={"engines": 1}, fleet={"restarts": 0, "scale": scale, "workers": [{}]}
        )
        found = Loop(config, ("s0",))
        found.tell(ev.WorkerReady("s0", 0))
        actions = found.tell(ev.WorkerLost("s0", 0, "killed"))
        assert any(isinstance(action, ev.Finish) for action in actions) == ends


def test_a_begun_step_is_cured_of_starvation_also_where_the_run_is_to_stop() -> None:
    found = opened()
    found.now_s = 20.0
    not_ready(found)
    found.tell(ev.SeedersParked())
    found.tell(ev.BatchReady(replace(batch(0), last=False)))
    found.tell(ev.PartDone())
    found.tell(ev.StopRequested("Ctrl-C", "stopped"))
    published = []
    for _ in range(60):
        found.now_s += 1.0
        published += [a for a in found.tell(ev.BatchNotReady("starved", "")) if isinstance(a, ev.Publish)]
        if published:
            break
    assert published == [ev.Publish(0)]


def test_a_batch_that_is_whole_is_trained_once_the_seeders_are_parked() -> None:
    found = opened()
    assert found.tell(ev.BatchReady(batch(0))) == [CLOSE]
    (train,) = found.tell(ev.SeedersParked())
    assert isinstance(train, ev.Train)


def test_parts_are_trained_at_once_outside_the_window() -> None:
    found = opened()
    found.now_s = 20.0
    assert not_ready(found) == [CLOSE]
    found.tell(ev.SeedersParked())
    found.now_s = 23.0
    (train,) = found.tell(ev.BatchReady(replace(batch(0), last=False)))
    assert isinstance(train, ev.Train)
    found.now_s = 25.0
    assert found.tell(ev.PartDone()) == [FORM]
    seeding = found.controller.seeding
    assert seeding is not None
    found.now_s = 26.0
    assert seeding.report(26.0).intervals == (Interval("seed", 10.0, 20.0), Interval("train", 23.0, 25.0))
    found.tell(ev.BatchReady(replace(batch(0), waited_s=0.5)))
    told = seeding.report(29.0)
    assert told.intervals == (
        Interval("seed", 10.0, 20.0),
        Interval("train", 23.0, 25.0),
        Interval("train", 26.0, 29.0),
    )
    # It waited before the window, and before each part.
    assert (told.train_wait_s, told.remote_s, told.remote_wait_s) == (10.0 + 3.0 + 1.0, 25.5, 3.5)
    assert told.seeded_s == 10.0  # measured, where T_seed is 4


def test_without_remote_workers_the_window_has_no_end() -> None:
    found = loop(remote=())
    found.tell(ev.Published(manifest(0)))
    serve(found, "s0")
    assert not_ready(found) == [OPEN, FORM_WHOLE]
    found.now_s = 100.0
    assert not_ready(found) == [FORM_WHOLE]


def test_the_loss_of_the_last_remote_worker_opens_the_window_again() -> None:
    found = opened()
    found.now_s = 20.0
    assert not_ready(found) == [CLOSE]
    assert found.tell(ev.SeedersParked()) == [FORM]
    found.tell(ev.WorkerLost("w0", 0, "killed"))
    assert not_ready(found) == [OPEN, FORM_WHOLE]
    found.now_s = 60.0
    assert not_ready(found) == [FORM_WHOLE]
    found.tell(ev.WorkerReady("w0", 1))
    assert not_ready(found) == [FORM_WHOLE]  # it installs still
    found.installed(0, "w0", 1)
    assert not_ready(found) == [CLOSE]  # at once: this window was for want of it
    assert found.tell(ev.SeedersParked()) == [FORM]


def test_a_window_whose_seeders_are_all_lost_is_over() -> None:
    found = opened()
    assert found.tell(ev.WorkerLost("s0", 0, "killed")) == [ev.StartWorker("s0", 1, 0.0)]
    assert not_ready(found) == [ev.CloseWindow(())]
    assert found.tell(ev.SeedersParked()) == [FORM]


def test_a_seeder_that_comes_in_an_open_window_takes_part_in_it() -> None:
    found = opened()
    assert found.tell(ev.WorkerReady("s0", 0))[-1] == OPEN
    found.now_s = 10.0 + WINDOW_S
    assert not_ready(found) == [CLOSE]
    assert OPEN not in found.tell(ev.WorkerReady("s0", 0))


@pytest.mark.parametrize("scale", ["static", "fixed"])
def test_a_lost_seeder_is_started_again_whoever_keeps_the_fleet(scale: str) -> None:
    config = replace_section(
        settings(s=0),
        seeding={"engines": 1},
        fleet={"restarts": 3, "scale": scale, "workers": [{"count": 1}]},
    )
    found = Loop(config, ("s0",))
    found.tell(ev.WorkerReady("s0", 0))
    assert found.tell(ev.WorkerLost("s0", 0, "killed")) == [ev.StartWorker("s0", 1, 0.0)]


def test_the_first_step_leaves_the_window_as_it_is_and_later_ones_move_it() -> None:
    found = opened()
    seeding = found.controller.seeding
    assert seeding is not None
    for step in range(2):
        found.now_s += WINDOW_S
        assert not_ready(found) == [CLOSE]
        found.tell(ev.SeedersParked())
        found.now_s += 6.0  # the learner waits
        found.tell(ev.BatchReady(batch(step)))
        found.now_s += 2.0  # the remote worker waits
        found.tell(ev.StepDone(STATS))
        if step == 0:
            assert seeding.report(found.now_s).t_seed_s == WINDOW_S
            found.tell(ev.Published(manifest(1, base=0)))
            for worker in ("w0", "s0"):
                found.installed(1, worker)
            not_ready(found)
    # eta is at least 1 + N_resv / n = 2
    assert seeding.report(found.now_s).t_seed_s == pytest.approx(WINDOW_S + (6.0 - 2.0) / 2.0)


def alone_with(first_s: float) -> Seeding:
    """The decisions without a controller around them; the first window has so many seconds."""
    return Seeding(replace_section(settings(s=0), seeding={"engines": 1, "first_s": first_s}).seeding)


def test_a_window_of_no_seconds_does_not_open() -> None:
    seeding, present = alone_with(0.0), Present(1, 1, ("s0",), seeder_serves=True)
    assert seeding.form_batch(0, 1.0, present, in_parts=False) == [FORM]
    assert alone_with(0.5).form_batch(0, 1.0, present, in_parts=False) == [
        OPEN,
        replace(FORM_WHOLE, wait_s=0.5),
    ]
    resumed = alone_with(WINDOW_S)
    assert resumed.form_batch(0, 1.0, present, in_parts=True) == [FORM]  # its first parts were trained before
    alone = Present(0, 0, ("s0",), seeder_serves=True)
    assert seeding.form_batch(0, 1.0, alone, in_parts=True) == [OPEN, FORM_WHOLE]


@pytest.mark.parametrize(
    ("first_s", "seeders", "serves", "later_s"),
    [
        (WINDOW_S, ("s0",), True, WINDOW_S + (6.0 - 2.0) / 2.0),
        (WINDOW_S, ("s0",), False, WINDOW_S),
        (WINDOW_S, (), False, WINDOW_S),
        (0.0, ("s0",), True, (16.0 - 2.0) / 2.0),  # no seeding is what was planned
    ],
    ids=["seeded", "nobody served", "nobody there", "no window"],
)
def test_only_a_step_with_its_planned_seeding_moves_the_window(
    first_s: float, seeders: tuple[str, ...], serves: bool, later_s: float
) -> None:
    seeding, present = alone_with(first_s), Present(1, 1, seeders, serves)
    seeding.form_batch(0, 0.0, Present(1, 1, (), seeder_serves=False), in_parts=False)
    seeding.step_done(100.0)  # the first step says nothing
    for at_s in (100.0, 100.0 + WINDOW_S + SERVES_S, 110.0):  # its window opens, closes, and is over
        seeding.form_batch(1, at_s, present, in_parts=False)
    seeding.batch_ready(whole := batch(1), ev.Train(whole, whole), present, 116.0)
    seeding.step_done(118.0)
    assert seeding.window.seconds == pytest.approx(later_s)


def test_the_mean_number_of_remote_workers_is_over_the_step() -> None:
    seeding = alone_with(0.0)
    seeding.form_batch(0, 100.0, Present(0, 0, (), seeder_serves=False), in_parts=False)
    for at_s, num_remote in ((100.0, 1), (110.0, 3)):
        seeding.look(Present(num_remote, num_remote, (), seeder_serves=False), at_s)
    assert seeding.report(120.0).mean_remote == pytest.approx(2.0)
    seeding.step_done(120.0)
    assert seeding.report(130.0).mean_remote == pytest.approx(3.0)


def test_seeders_are_no_remote_workers() -> None:
    found = loop(remote=("w0", "w1"))
    found.tell(ev.Published(manifest(0)))
    serve(found, "w0", "w1", "s0")
    not_ready(found)
    seeding = found.controller.seeding
    assert seeding is not None
    assert seeding.report(10.0).mean_remote == pytest.approx(2.0)


def test_answers_from_before_the_step_count_from_its_begin() -> None:
    """A resumed run may begin with them."""
    seeding, present = alone_with(0.0), Present(1, 1, (), seeder_serves=False)
    seeding.form_batch(0, 100.0, present, in_parts=False)
    seeding.batch_ready(old := replace(batch(0), waited_s=1e6), ev.Train(old, old), present, 112.0)
    told = seeding.report(114.0)
    assert (told.remote_s, told.remote_wait_s) == (0.0, 14.0)


def test_after_a_long_step_remote_workers_count_as_stuck_after_twice_its_time() -> None:
    seeding, present = alone_with(0.0), Present(1, 1, ("s0",), seeder_serves=True)
    seeding.form_batch(0, 0.0, present, in_parts=False)
    seeding.step_done(5 * LATE_S)
    begun_s = 5 * LATE_S
    for late_s in (0.0, LATE_S + 1.0, 5 * LATE_S + 1.0, 10 * LATE_S):
        assert seeding.form_batch(1, begun_s + late_s, present, in_parts=False) == [replace(FORM, step=1)]
    (action, _) = seeding.form_batch(1, begun_s + 10 * LATE_S + 1.0, present, in_parts=False)
    assert action == OPEN
