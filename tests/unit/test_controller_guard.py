"""Response of the loop to a verdict of the guard: each rung, the end of the run, and a resume."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from echo_planes.config.schema import Config, GuardConfig
from echo_planes.loop import events as ev
from echo_planes.loop.controller import Controller
from echo_planes.testing.simulation import replace_section
from echo_planes.types import Adjustment, InstallReport, StepStats
from tests.unit.test_controller import STATS, batch, manifest, report, settings

HEALTHY, BAD = replace(STATS, k3=0.01), replace(STATS, k3=0.4)


def config(*, s: int = 3, steps: int = 60, checkpoint_every: int = 0, **guard: Any) -> Config:
    base = settings(steps=steps, s=s, checkpoint_every=checkpoint_every)
    return replace_section(base, guard=GuardConfig(**{"patience": 3, **guard}).model_dump())  # type: ignore[no-any-return]


class Drive:
    """A controller whose every action is carried out at once, and what it asked for, in order."""

    def __init__(
        self,
        given: Config,
        stats: Callable[[int], StepStats],
        *,
        step: int = 0,
        guard: Mapping[str, Any] | None = None,
        until: int = 1000,
        mismatch: float | None = None,
        evaluated: float | None = None,
        stop_at: int | None = None,
    ) -> None:
        self.controller = Controller(given, ["w0"], 0, guard)
        self.asked: list[ev.Action] = []
        self._stats, self._until, self._mismatch, self._stop_at = stats, until, mismatch, stop_at
        self._evaluated = evaluated  # mismatch of every evaluation
        pending = [*self.controller.begin(), *self._tell(ev.LearnerReady(step))]
        while pending:
            action = pending.pop(0)
            self.asked.append(action)
            for event in self._answers(action):
                pending += self._tell(event)

    def _tell(self, event: ev.Event) -> list[ev.Action]:
        return self.controller.handle(event, 0.0)

    def _answers(self, action: ev.Action) -> list[ev.Event]:
        match action:
            case ev.StartWorker(worker_id, epoch):
                return [ev.WorkerReady(worker_id, epoch)]
            case ev.Publish(version):
                done = InstallReport("w0", version, f"d{version}", True, 0.1)
                return [ev.Published(manifest(version)), ev.Installed(done, 0)]
            case ev.FormBatch(step):
                return [ev.BatchReady(batch(step))] if step < self._until else []
            case ev.Train(trained):
                asks = [ev.StopRequested("Ctrl-C")] if trained.step == self._stop_at else []
                own = self._stats(trained.step)
                stats = replace(own, step=trained.step, mismatch_mean=self._mismatch)
                return [*asks, ev.StepDone(stats)]
            case ev.Checkpoint(step):
                return [ev.Checkpointed(step)]
            case ev.AdjustLearner() | ev.LimitStaleness():
                return [ev.Adjusted()]
            case ev.Evaluate(step):
                return [ev.Evaluated(report(step), self._evaluated)]
            case _:
                return []

    def of(self, *wanted: type) -> list[ev.Action]:
        return [action for action in self.asked if isinstance(action, wanted)]

    @property
    def told(self) -> list[str]:
        return [action.text for action in self.asked if isinstance(action, ev.TellGuard)]

    @property
    def published(self) -> list[int]:
        return [action.version for action in self.asked if isinstance(action, ev.Publish)]

    @property
    def finish(self) -> ev.Finish:
        last = self.asked[-1]
        assert isinstance(last, ev.Finish)
        return last


def between(actions: list[ev.Action], first: int, last: int) -> list[ev.Action]:
    """Actions asked for after the batch of `first` is formed and before that of `last` is."""
    return actions[actions.index(ev.FormBatch(first)) + 2 : actions.index(ev.FormBatch(last))]


def test_a_healthy_run_hears_nothing_of_it() -> None:
    run = Drive(config(), lambda _: HEALTHY)
    assert run.finish == ev.Finish("done")
    assert not run.of(ev.AdjustLearner, ev.LimitStaleness, ev.TellGuard)


def test_each_rung_takes_force_before_the_next_batch_is_formed() -> None:
    run = Drive(config(), lambda _: BAD)
    masked, slowed = Adjustment(mask_outliers=True), Adjustment(0.5, mask_outliers=True)
    assert [text.rpartition(": ")[2] for text in run.told[:3]] == [
        "outliers are masked",
        "S is lowered from 3 to 1, every step published",
        "the learning rate is halved",
    ]
    assert between(run.asked, 2, 3)[1:] == [ev.AdjustLearner(masked), ev.LimitStaleness(3)]
    lowered = between(run.asked, 5, 6)
    assert lowered[1:3] == [ev.AdjustLearner(masked), ev.LimitStaleness(1)]
    assert lowered[3] == ev.Publish(6)
    assert ev.AdjustLearner(slowed) in between(run.asked, 11, 12)
    # Every second step at first, and every one since S is lowered.
    assert run.published == [0, 2, 4, *range(6, run.published[-1] + 1)]


def test_it_ends_as_collapsed_where_there_is_no_checkpoint_to_go_back_to() -> None:
    run = Drive(config(), lambda _: BAD)
    assert run.finish.status == "collapsed"
    for part in ("k3", "0.4 nats", "guard.k3=0.3", "no good checkpoint", "lower learner.lr"):
        assert part in run.finish.error
    assert run.told[-1] == run.finish.error
    assert not run.of(ev.Checkpoint)  # of what collapsed nothing is kept


def test_it_goes_back_to_a_good_checkpoint() -> None:
    run = Drive(config(checkpoint_every=5), lambda step: BAD if step >= 20 else HEALTHY)
    assert run.finish.status == "rollback"
    good = run.controller.guard.report.good_step
    assert good == 5
    assert f"step {good}" in run.told[-1]
    assert run.controller.guard.report.rollbacks == 1


def test_who_asks_to_stop_is_heard_first() -> None:
    given, stats = config(checkpoint_every=5), lambda step: BAD if step >= 20 else HEALTHY
    back = Drive(given, stats)
    assert back.finish.status == "rollback"
    (*_, last) = [action.batch.step for action in back.asked if isinstance(action, ev.Train)]
    run = Drive(given, stats, stop_at=last)
    assert run.finish == ev.Finish("stopped", "Ctrl-C")
    assert run.controller.guard.report.rollbacks == 0


def test_warning_tells_as_often_and_changes_nothing() -> None:
    run = Drive(config(mode="warn", steps=30), lambda _: BAD)
    assert run.finish == ev.Finish("done")
    assert len(run.told) == 10
    assert not run.of(ev.AdjustLearner, ev.LimitStaleness)


def test_switched_off_it_is_not_heard_of() -> None:
    run = Drive(config(mode="off", steps=30), lambda _: BAD, mismatch=9.0)
    assert run.finish == ev.Finish("done")
    assert run.told == []


def test_calm_brings_the_old_settings_back() -> None:
    run = Drive(config(calm=10, steps=80), lambda step: BAD if step < 6 else HEALTHY)
    assert run.finish == ev.Finish("done")
    assert run.of(ev.LimitStaleness)[-1] == ev.LimitStaleness(3)
    assert run.of(ev.AdjustLearner)[-1] == ev.AdjustLearner(Adjustment())
    assert run.published[-3:] == [76, 78, 80]


# --- mismatch at the start -----------------------------------------------------------------------


def test_a_mismatch_at_the_first_step_ends_the_run() -> None:
    run = Drive(config(), lambda _: HEALTHY, mismatch=0.3)
    assert run.finish.status == "failed"
    for part in ("0.3", "guard.mismatch=0.1", "dtype", "temperature", "template"):
        assert part in run.finish.error
    assert run.told == [run.finish.error]


@pytest.mark.parametrize(("mode", "mismatch"), [("warn", 0.3), ("act", 0.09), ("act", None)])
def test_otherwise_it_goes_on(mode: Any, mismatch: float | None) -> None:
    run = Drive(config(mode=mode), lambda _: HEALTHY, mismatch=mismatch)
    assert run.finish == ev.Finish("done")
    assert len(run.told) == (mode == "warn")


def test_the_tail_of_weights_is_not_judged_where_rollouts_are_sparse() -> None:
    tail = replace(HEALTHY, log_weight=(0.0, 1.0, 12.0, 20.0))
    assert Drive(config(), lambda _: tail).finish.status == "collapsed"
    sparse = replace_section(config(), sparse={"schedule": [20]})
    run = Drive(sparse, lambda _: tail, evaluated=0.05)
    assert run.finish == ev.Finish("done")
    assert not run.of(ev.AdjustLearner, ev.LimitStaleness)
    # The other figures of drift still are: sparse attention that reads far too little ends the run.
    far = replace(tail, k3=1.0)
    assert Drive(sparse, lambda _: far, evaluated=0.05).finish.status == "collapsed"


def test_where_rollouts_are_sparse_the_first_evaluation_tells_which_is_dense() -> None:
    sparse = replace_section(config(), sparse={"schedule": [20]})
    assert Drive(sparse, lambda _: HEALTHY, mismatch=9.0, evaluated=0.05).finish == ev.Finish("done")
    run = Drive(sparse, lambda _: HEALTHY, mismatch=9.0, evaluated=0.3)
    assert run.finish.status == "failed"
    assert "guard.mismatch=0.1" in run.finish.error
    assert not run.told[:-1]
    # An evaluation that ended too late says so.
    (late,) = Drive(sparse, lambda _: HEALTHY, mismatch=9.0).told
    assert "not compared" in late
    assert not Drive(replace_section(sparse, guard={"mode": "off"}), lambda _: HEALTHY).told
    # Where they are dense, the first batch has told.
    assert Drive(config(), lambda _: HEALTHY, mismatch=0.05, evaluated=0.3).finish == ev.Finish("done")


# --- a resume ------------------------------------------------------------------------------------


def test_a_resume_goes_on_with_what_was_in_force() -> None:
    first = Drive(config(calm=40), lambda step: BAD if step < 6 else HEALTHY, until=9)
    record = json.loads(json.dumps(first.controller.guard.record()))
    resumed = Drive(config(calm=40), lambda _: HEALTHY, step=9, guard=record, until=13)
    before = resumed.asked[: resumed.asked.index(ev.FormBatch(9))]
    assert [one for one in before if isinstance(one, (ev.AdjustLearner, ev.LimitStaleness, ev.Publish))] == [
        ev.AdjustLearner(Adjustment(mask_outliers=True)),
        ev.LimitStaleness(1),
        ev.Publish(9),
    ]
    assert resumed.published == [9, 10, 11, 12, 13]
    (told,) = resumed.of(ev.TellGuard)
    assert told == ev.TellGuard(first.controller.guard.report, "")


def test_a_resume_of_a_run_that_had_no_alarm_says_nothing() -> None:
    first = Drive(config(), lambda _: HEALTHY, until=9)
    record = first.controller.guard.record()
    resumed = Drive(config(), lambda _: HEALTHY, step=9, guard=record, until=30)
    assert not resumed.of(ev.TellGuard, ev.AdjustLearner, ev.LimitStaleness)
    assert resumed.controller.guard.report.good_step == 9  # the checkpoint it began with
