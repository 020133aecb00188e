"""The loop as a state machine: what follows from each event, and that it always ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from echo_planes.config.schema import Config
from echo_planes.loop import events as ev
from echo_planes.loop.controller import (
    MAX_INSTALL_FAILURES,
    MOST_RESTART_DELAY_S,
    STARVED_AGAIN_S,
    STEADY_S,
    Controller,
)
from echo_planes.testing.simulation import replace_section, tiny_config
from echo_planes.types import EvalReport, InstallReport, Manifest, StepStats, TrainBatch

STATS = StepStats(0, 0.0, 0.0, 0.0, 1.0, 0, 0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0, 0)


def settings(
    *,
    steps: int = 6,
    s: int = 3,
    checkpoint_every: int = 0,
    eval_every: int = 0,
    restarts: int = 3,
    wait_limit_s: float = 300.0,
) -> Config:
    config = tiny_config(steps=steps, max_staleness=s)
    return replace_section(  # type: ignore[no-any-return]
        config,
        run={**config.run.model_dump(), "wait_limit_s": wait_limit_s},
        checkpoint={"every": checkpoint_every},
        eval={**config.eval.model_dump(), "every": eval_every},
        fleet={**config.fleet.model_dump(), "restarts": restarts},
    )


def manifest(version: int, base: int = -1) -> Manifest:
    codec: Any = "full" if base < 0 else "overwrite"
    return Manifest("L0", version, version, codec, base, f"d{base}", f"d{version}", "", 0, 0, 0, 0)


def batch(step: int) -> TrainBatch:
    ints, floats, bools = np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros(0, np.bool_)
    return TrainBatch(step, (), ints, ints, bools, floats, floats, ints, floats, ints, bools, ints, bools)


def report(step: int) -> EvalReport:
    return EvalReport(step, step, 1, 1, 0.5, 0.5)


class Loop:
    """A controller with its clock, and what it has asked for."""

    def __init__(self, config: Config, workers: tuple[str, ...] = ("w0",), first_epoch: int = 0) -> None:
        self.controller = Controller(config, list(workers), first_epoch)
        self.now_s = 0.0
        self.actions: list[ev.Action] = self.controller.begin()

    def tell(self, event: ev.Event) -> list[ev.Action]:
        actions = self.controller.handle(event, self.now_s)
        self.actions += actions
        return actions

    def installed(
        self, version: int, worker: str = "w0", epoch: int = 0, error: str = "", mismatches: int = 0
    ) -> list[ev.Action]:
        outcome = InstallReport(worker, version, f"d{version}", not error, 0.1, mismatches, error)
        return self.tell(ev.Installed(outcome, epoch))

    def start(self, step: int = 0, *, evaluated: bool = True) -> None:
        """Learner and workers are up and serve the first publication; `evaluated`: that is answered."""
        assert self.tell(ev.LearnerReady(step)) == [ev.Publish(step)]
        self.tell(ev.Published(manifest(step)))
        for action in list(self.actions):
            if isinstance(action, ev.StartWorker):
                self.tell(ev.WorkerReady(action.worker_id, action.epoch))
                self.installed(step, action.worker_id, action.epoch)
        if evaluated:
            self.tell(ev.Evaluated(report(step)))

    def train(self, step: int) -> list[ev.Action]:
        """The batch of `step` comes and is trained; returns what follows."""
        (train,) = self.tell(ev.BatchReady(batch(step)))
        assert isinstance(train, ev.Train)
        assert train.batch.step == step
        return self.tell(ev.StepDone(STATS))


# --- the course of a run -------------------------------------------------------------------------


def test_it_begins_with_the_workers_and_publishes_before_anything_is_sampled() -> None:
    loop = Loop(settings(), ("w0", "w1"), first_epoch=4)
    assert loop.actions == [ev.StartWorker("w0", 4, 0.0), ev.StartWorker("w1", 4, 0.0)]
    assert loop.tell(ev.WorkerReady("w0", 4)) == []  # there is nothing to install yet
    assert loop.tell(ev.LearnerReady(0)) == [ev.Publish(0)]
    assert loop.tell(ev.Published(manifest(0))) == [ev.Install("w0", 4, fresh=False), ev.FormBatch(0)]
    assert loop.tell(ev.WorkerReady("w1", 4)) == [ev.Install("w1", 4, fresh=False)]


@pytest.mark.parametrize(("s", "kappa"), [(0, 1), (3, 2), (4, 3)])
def test_it_publishes_every_kappa_steps_and_after_the_last(s: int, kappa: int) -> None:
    loop = Loop(settings(steps=7, s=s))
    loop.start()
    published = []
    for step in range(7):
        (after,) = loop.train(step)
        if isinstance(after, ev.Publish):
            published.append(after.version)
            after = loop.tell(ev.Published(manifest(after.version, base=0)))[-1]
        assert isinstance(after, ev.FormBatch if step < 6 else ev.Checkpoint)
    assert published == [v for v in range(1, 8) if v % kappa == 0 or v == 7]


def test_checkpoints_and_evaluations_come_as_often_as_said() -> None:
    loop = Loop(settings(steps=6, s=0, checkpoint_every=2, eval_every=3))
    saved, evaluated = [], []
    pending: list[ev.Action] = [*loop.actions, *loop.tell(ev.LearnerReady(0))]
    while pending:
        action = pending.pop(0)
        match action:
            case ev.StartWorker(worker_id, epoch):
                pending += loop.tell(ev.WorkerReady(worker_id, epoch))
            case ev.Publish(version):
                pending += loop.tell(ev.Published(manifest(version)))
                pending += loop.installed(version)
            case ev.FormBatch(step):
                pending += loop.tell(ev.BatchReady(batch(step)))
            case ev.Train():
                pending += loop.tell(ev.StepDone(STATS))
            case ev.Checkpoint(step):
                saved.append(step)
                pending += loop.tell(ev.Checkpointed(step))
            case ev.Evaluate(step):
                evaluated.append(step)
                pending += loop.tell(ev.Evaluated(report(step)))
            case _:
                assert isinstance(action, (ev.Install, ev.Finish))
    assert saved == [0, 2, 4, 6]  # the guard can go back to the start
    assert evaluated == [0, 3, 6]
    assert loop.actions[-1] == ev.Finish("done")


@pytest.mark.parametrize(
    ("mode", "step", "every", "saved"),
    [
        ("act", 0, 2, True),
        ("warn", 0, 2, False),
        ("off", 0, 2, False),
        ("act", 0, 0, False),
        ("act", 2, 2, False),
    ],
)
def test_the_start_is_saved_where_the_guard_may_go_back_to_it(
    mode: Any, step: int, every: int, saved: bool
) -> None:
    config = replace_section(settings(checkpoint_every=every), guard={"mode": mode})
    loop = Loop(config)
    assert loop.tell(ev.LearnerReady(step)) == [ev.Publish(step)]
    after = loop.tell(ev.Published(manifest(step)))
    assert after == [ev.Checkpoint(step) if saved else ev.FormBatch(step)]


def finish_last_step(loop: Loop) -> list[ev.Action]:
    """From the last batch until only the evaluation is open."""
    assert loop.train(0) == [ev.Publish(1)]
    loop.tell(ev.Published(manifest(1)))
    return loop.tell(ev.Checkpointed(1))


def test_it_is_done_only_when_the_last_version_was_evaluated() -> None:
    loop = Loop(settings(steps=1))
    loop.start()
    assert finish_last_step(loop) == []
    assert loop.installed(1) == [ev.Evaluate(1, ("w0",))]
    assert loop.tell(ev.Evaluated(report(1))) == [ev.Finish("done")]
    assert loop.tell(ev.WorkerReady("w0", 0)) == []  # nothing follows the end


def test_an_evaluation_uses_only_workers_that_serve_its_version_and_one_runs_at_a_time() -> None:
    loop = Loop(settings(steps=1), ("w0", "w1"))
    loop.start(evaluated=False)
    assert [a for a in loop.actions if isinstance(a, ev.Evaluate)] == [ev.Evaluate(0, ("w0",))]
    finish_last_step(loop)
    assert loop.installed(1, "w1") == []  # the first evaluation still runs
    assert loop.tell(ev.Evaluated(report(0))) == [ev.Install("w0", 0, fresh=False), ev.Evaluate(1, ("w1",))]


def test_a_lost_evaluation_is_done_again() -> None:
    loop = Loop(settings(steps=1))
    loop.start(evaluated=False)
    assert loop.tell(ev.EvaluationLost(0)) == [ev.Evaluate(0, ("w0",))]


def publish_next(loop: Loop, *steps: int) -> list[ev.Action]:
    """Train these steps, publish the last one's version; returns the installs that follow at once."""
    for step in steps:
        loop.train(step)
    actions = loop.tell(ev.Published(manifest(steps[-1] + 1)))
    return [action for action in actions if isinstance(action, ev.Install)]


def test_newer_weights_wait_for_an_evaluation_at_the_workers_that_answer_it() -> None:
    loop = Loop(settings(), ("w0", "w1"))
    loop.start(evaluated=False)
    assert publish_next(loop, 0, 1) == [ev.Install("w1", 0, fresh=False)]
    assert loop.installed(2, "w1") == []
    assert publish_next(loop, 2, 3) == [ev.Install("w1", 0, fresh=False)]
    assert loop.tell(ev.Evaluated(report(0))) == [ev.Install("w0", 0, fresh=False)]
    assert publish_next(loop, 4, 5) == []  # both install


def test_a_worker_that_never_catches_up_evaluates_before_its_next_install() -> None:
    loop = Loop(settings(s=0, eval_every=2))
    loop.start()
    assert publish_next(loop, 0) == [ev.Install("w0", 0, fresh=False)]
    assert publish_next(loop, 1) == publish_next(loop, 2) == []
    assert loop.installed(2) == [ev.Evaluate(2, ("w0",))]
    assert loop.tell(ev.Evaluated(report(2))) == [ev.Install("w0", 0, fresh=False)]


def test_a_step_between_two_publications_is_evaluated_with_the_version_before_it() -> None:
    loop = Loop(settings(s=4, eval_every=2), ("w0", "w1"))
    loop.start()
    for step in range(2):
        loop.train(step)
    loop.tell(ev.WorkerLost("w1", 0, "died"))
    loop.tell(ev.WorkerReady("w1", 1))
    assert loop.installed(0, "w1", 1) == [ev.Evaluate(2, ("w0", "w1"))]  # 0, 3 and 6 are published


def test_workers_of_several_versions_do_not_answer_one_evaluation() -> None:
    loop = Loop(settings(steps=12, eval_every=2), ("w0", "w1", "w2"))
    loop.start(evaluated=False)
    publish_next(loop, 0, 1)
    for worker in ("w1", "w2"):
        loop.installed(2, worker)
    publish_next(loop, 2, 3)
    loop.installed(4, "w1")  # w2 never answers
    starve(loop)
    for _ in range(2):  # what the evaluation of step 0 holds back comes first
        loop.now_s += STARVED_AGAIN_S
        starve(loop)
    assert loop.actions[-1] == ev.Publish(4)
    assert loop.tell(ev.Evaluated(report(0))) == [ev.Evaluate(2, ("w1",))]  # and not w2, which serves 2


def test_an_evaluation_that_is_lost_goes_to_others_with_a_newer_version() -> None:
    loop = Loop(settings(eval_every=2), ("w0", "w1"))
    loop.start(evaluated=False)
    publish_next(loop, 0, 1)
    loop.installed(2, "w1")
    loop.tell(ev.WorkerLost("w0", 0, "died"))
    assert loop.tell(ev.EvaluationLost(0)) == [ev.Evaluate(0, ("w1",))]
    assert publish_next(loop, 2, 3) == []


def test_a_successor_of_a_worker_that_evaluated_is_given_weights_at_once() -> None:
    loop = Loop(settings(), ("w0", "w1"))
    loop.start(evaluated=False)
    loop.tell(ev.WorkerLost("w0", 0, "died"))
    assert loop.tell(ev.WorkerReady("w0", 1)) == [ev.Install("w0", 1, fresh=False)]
    loop.installed(0, "w0", epoch=1)
    assert publish_next(loop, 0, 1) == [ev.Install("w0", 1, fresh=False), ev.Install("w1", 0, fresh=False)]


def test_a_learner_that_starves_takes_precedence_over_an_evaluation() -> None:
    loop = Loop(settings(s=0))
    loop.start(evaluated=False)
    assert publish_next(loop, 0) == []
    assert starve(loop) == [ev.FormBatch(1)]
    loop.now_s += STARVED_AGAIN_S
    assert starve(loop) == [ev.Install("w0", 0, fresh=False), ev.FormBatch(1)]  # nothing is published anew
    loop.installed(1)
    assert publish_next(loop, 1) == [ev.Install("w0", 0, fresh=False)]  # the evaluation holds nothing back


# --- installs ------------------------------------------------------------------------------------


def test_a_patch_goes_to_whom_has_its_base_and_everything_to_the_others() -> None:
    loop = Loop(settings(), ("w0", "w1"))
    loop.start()
    loop.tell(ev.WorkerLost("w1", 0, "died"))
    loop.train(0)
    loop.train(1)
    installs = loop.tell(ev.Published(manifest(2, base=0)))[:-1]
    assert installs == [ev.Install("w0", 0, fresh=False)]
    assert loop.tell(ev.WorkerReady("w1", 1)) == [ev.Install("w1", 1, fresh=False)]


def test_a_worker_that_installs_is_left_alone_and_gets_the_newest_afterwards() -> None:
    loop = Loop(settings(s=0))
    loop.start()
    loop.train(0)
    assert loop.tell(ev.Published(manifest(1, base=0)))[0] == ev.Install("w0", 0, fresh=False)
    loop.train(1)
    assert loop.tell(ev.Published(manifest(2, base=1))) == [ev.FormBatch(2)]
    assert loop.installed(1) == [ev.Install("w0", 0, fresh=False)]


def test_a_refused_install_is_repaired_in_full_and_a_stubborn_worker_replaced() -> None:
    loop = Loop(settings())
    loop.start()
    loop.train(0)
    loop.train(1)
    loop.tell(ev.Published(manifest(2, base=0)))
    refused: dict[str, Any] = {"error": "the live weights are wrong", "mismatches": 1}
    for _ in range(MAX_INSTALL_FAILURES):
        assert loop.installed(0, **refused) == [ev.Install("w0", 0, fresh=True)]
    assert loop.installed(0, **refused) == [ev.StartWorker("w0", 1, 0.0)]
    assert loop.controller.digest_mismatches == MAX_INSTALL_FAILURES + 1
    assert loop.controller.restarts == {"w0": 1}


def test_a_successor_is_as_often_forgiven_as_its_predecessor() -> None:
    loop = Loop(settings())
    loop.start()
    for _ in range(MAX_INSTALL_FAILURES + 1):
        loop.installed(0, error="wrong base")
    assert loop.actions[-1] == ev.StartWorker("w0", 1, 0.0)
    assert loop.tell(ev.WorkerReady("w0", 1)) == [ev.Install("w0", 1, fresh=False)]
    for _ in range(MAX_INSTALL_FAILURES):
        assert loop.installed(0, epoch=1, error="wrong base") == [ev.Install("w0", 1, fresh=True)]
    assert loop.installed(0, epoch=1, error="wrong base") == [ev.StartWorker("w0", 2, 1.0)]


def test_a_good_install_forgives_earlier_refusals() -> None:
    loop = Loop(settings())
    loop.start()
    loop.train(0)
    loop.train(1)
    loop.tell(ev.Published(manifest(2, base=0)))
    for _ in range(3 * MAX_INSTALL_FAILURES):
        assert loop.installed(0, error="wrong base") == [ev.Install("w0", 0, fresh=True)]
        loop.installed(2)
    assert loop.controller.digest_mismatches == 0  # the base was wrong, not the digest


def test_damage_that_a_full_publication_repaired_is_counted_all_the_same() -> None:
    loop = Loop(settings())
    loop.start()
    loop.installed(0, mismatches=1)
    assert loop.controller.digest_mismatches == 1


# --- losses --------------------------------------------------------------------------------------


def test_a_lost_worker_comes_back_with_a_new_epoch_and_a_growing_delay() -> None:
    loop = Loop(settings(restarts=3), ("w0", "w1"))
    loop.start()
    delays = []
    for epoch in range(3):
        (again,) = loop.tell(ev.WorkerLost("w0", epoch, "died"))
        assert isinstance(again, ev.StartWorker)
        assert (again.worker_id, again.epoch) == ("w0", epoch + 1)
        delays.append(again.delay_s)
    assert delays == sorted(set(delays))
    assert loop.tell(ev.WorkerLost("w0", 3, "died")) == [ev.StopWorker("w0")]  # given up; w1 goes on
    assert loop.controller.restarts == {"w0": 3, "w1": 0}


def test_a_worker_that_would_fail_alike_is_not_started_again() -> None:
    loop = Loop(settings(restarts=3), ("w0", "w1"))
    loop.start()
    assert loop.tell(ev.WorkerLost("w0", 0, "page size", is_final=True)) == [ev.StopWorker("w0")]
    assert loop.controller.restarts == {"w0": 0, "w1": 0}  # w1 goes on
    (end,) = loop.tell(ev.WorkerLost("w1", 0, "page size of w1", is_final=True))
    assert end == ev.Finish("failed", "no worker is left; the last one, w1: page size of w1")


def test_losses_far_apart_are_not_in_a_row() -> None:
    """Over weeks every worker is lost more often than a broken one would be started again."""
    loop = Loop(settings(restarts=2), ("w0", "w1"))
    loop.start()
    for epoch in range(9):
        loop.now_s += STEADY_S
        again = loop.tell(ev.WorkerLost("w0", epoch, "died"))
        assert again == [ev.StartWorker("w0", epoch + 1, 0.0)]
        loop.tell(ev.WorkerReady("w0", epoch + 1))
    assert loop.controller.restarts == {"w0": 9, "w1": 0}
    loop.now_s += STEADY_S - 1.0
    assert loop.tell(ev.WorkerLost("w0", 9, "died")) == [ev.StartWorker("w0", 10, 1.0)]  # the second in a row
    loop.now_s += 10 * STEADY_S  # of starting, without an engine
    assert loop.tell(ev.WorkerLost("w0", 10, "died")) == [ev.StopWorker("w0")]


def test_the_delay_of_a_lost_worker_has_a_ceiling() -> None:
    """Also where a float could not hold what doubling comes to."""
    loop = Loop(settings(restarts=2000), ("w0", "w1"))
    loop.start()
    delays = []
    for epoch in range(2000):
        (again,) = loop.tell(ev.WorkerLost("w0", epoch, "died"))
        assert isinstance(again, ev.StartWorker)
        delays.append(again.delay_s)
    assert delays[:8] == [0.0, 1.0, 3.0, 7.0, 15.0, 31.0, MOST_RESTART_DELAY_S, MOST_RESTART_DELAY_S]
    assert set(delays[8:]) == {MOST_RESTART_DELAY_S}


def test_news_of_an_older_incarnation_changes_nothing() -> None:
    loop = Loop(settings())
    loop.start()
    loop.tell(ev.WorkerLost("w0", 0, "died"))
    assert loop.tell(ev.WorkerLost("w0", 0, "died")) == []
    assert loop.tell(ev.WorkerReady("w0", 0)) == []
    assert loop.installed(0, epoch=0) == []
    assert loop.tell(ev.WorkerReady("w0", 1)) == [ev.Install("w0", 1, fresh=False)]


def test_the_run_fails_with_the_reason_when_the_last_worker_is_gone() -> None:
    loop = Loop(settings(restarts=0), ("w0", "w1"))
    loop.start()
    assert loop.tell(ev.WorkerLost("w0", 0, "out of memory")) == [ev.StopWorker("w0")]
    (end,) = loop.tell(ev.WorkerLost("w1", 0, "engine died"))
    assert isinstance(end, ev.Finish)
    assert end.status == "failed"
    assert "w1" in end.error
    assert "engine died" in end.error


def test_a_worker_that_is_still_starting_is_not_given_up() -> None:
    loop = Loop(settings(restarts=0), ("w0", "w1"))
    assert loop.tell(ev.WorkerLost("w1", 0, "no GPU")) == [ev.StopWorker("w1")]
    loop = Loop(settings(restarts=1), ("w0", "w1"))
    loop.start()
    loop.tell(ev.WorkerLost("w0", 0, "died"))  # starts for the last time
    loop.tell(ev.WorkerLost("w1", 0, "died"))
    assert loop.tell(ev.WorkerLost("w1", 1, "died")) == [ev.StopWorker("w1")]
    assert loop.tell(ev.WorkerReady("w0", 1)) == [ev.Install("w0", 1, fresh=False)]


# --- waiting -------------------------------------------------------------------------------------


def starve(loop: Loop) -> list[ev.Action]:
    return loop.tell(ev.BatchNotReady("starved", "nothing admissible"))


def test_a_starved_learner_publishes_again_and_again() -> None:
    loop = Loop(settings(wait_limit_s=1000.0))
    loop.start()
    loop.train(0)
    assert starve(loop) == [ev.FormBatch(1)]
    for seconds in (2, 4, 8, 16, 32, 64, 120, 120):  # ever later, because it may only be slow on its way
        loop.now_s += seconds - 0.5
        assert starve(loop) == [ev.FormBatch(1)]
        loop.now_s += 0.5
        assert starve(loop) == [ev.Publish(1)]
        # Also where an earlier install never came back: that one is given up.
        assert loop.tell(ev.Published(manifest(1))) == [ev.Install("w0", 0, fresh=False), ev.FormBatch(1)]


@pytest.mark.parametrize("reason", ["holding", "filling"])
def test_work_on_its_way_ends_starvation(reason: Any) -> None:
    loop = Loop(settings())
    loop.start()
    starve(loop)
    loop.now_s += 2 * STARVED_AGAIN_S
    assert loop.tell(ev.BatchNotReady(reason, "")) == [ev.FormBatch(0)]
    assert starve(loop) == [ev.FormBatch(0)]


def test_waiting_for_a_batch_has_an_end_that_says_what_was_missing() -> None:
    loop = Loop(settings(wait_limit_s=100.0))
    loop.start()
    loop.now_s = 100.0
    assert loop.tell(ev.BatchNotReady("filling", "3 of 4 groups buffered")) == [ev.FormBatch(0)]
    loop.now_s = 100.5
    (end,) = loop.tell(ev.BatchNotReady("filling", "3 of 4 groups buffered"))
    assert isinstance(end, ev.Finish)
    assert end.status == "failed"
    for part in ("100 s", "step 1", "filling", "3 of 4 groups buffered", "raise run.wait_limit_s"):
        assert part in end.error


def test_progress_renews_the_wait_for_a_batch() -> None:
    loop = Loop(settings(wait_limit_s=100.0))
    loop.start()
    for moves in range(1, 20):
        loop.now_s += 90.0
        assert loop.tell(ev.BatchNotReady("filling", "", moves)) == [ev.FormBatch(0)]
    loop.now_s += 90.0
    assert loop.tell(ev.BatchNotReady("filling", "", moves)) == [ev.FormBatch(0)]
    loop.now_s += 11.0
    (end,) = loop.tell(ev.BatchNotReady("filling", "", moves))
    assert isinstance(end, ev.Finish)


def test_the_time_in_which_weights_arrive_does_not_count_for_the_wait() -> None:
    """An install has a limit of its own."""
    loop = Loop(settings(wait_limit_s=100.0), workers=("w0", "w1"))
    loop.start()
    loop.train(0)
    loop.tell(ev.Published(manifest(1)))  # version 1 is on its way to both
    for _ in range(30):
        loop.now_s += 15.0
        assert not any(isinstance(a, ev.Finish) for a in loop.tell(ev.BatchNotReady("filling", "")))
    for worker in ("w0", "w1"):
        loop.installed(1, worker)
    ends: list[ev.Action] = []
    for _ in range(7):
        loop.now_s += 15.0
        ends = [a for a in loop.tell(ev.BatchNotReady("filling", "")) if isinstance(a, ev.Finish)]
    assert ends


def test_the_wait_for_a_batch_begins_when_an_engine_is_there() -> None:
    loop = Loop(settings(wait_limit_s=100.0))
    loop.tell(ev.LearnerReady(0))
    loop.tell(ev.Published(manifest(0)))
    loop.now_s = 99.0
    loop.tell(ev.WorkerLost("w0", 0, "timed out in phase 'engine start'"))  # it is started again
    for loop.now_s in (150.0, 190.0):
        assert loop.tell(ev.BatchNotReady("starved", "")) == [ev.FormBatch(0)]
    loop.tell(ev.WorkerReady("w0", 1))
    loop.installed(0, epoch=1)
    loop.now_s = 289.0
    assert not any(isinstance(a, ev.Finish) for a in loop.tell(ev.BatchNotReady("filling", "")))
    loop.now_s = 291.0
    assert any(isinstance(a, ev.Finish) for a in loop.tell(ev.BatchNotReady("filling", "")))


def test_the_wait_is_counted_anew_for_every_batch() -> None:
    loop = Loop(settings(wait_limit_s=100.0))
    loop.start()
    for step in range(4):
        loop.now_s += 90.0
        loop.tell(ev.BatchNotReady("filling", ""))
        for action in loop.train(step):
            if isinstance(action, ev.Publish):
                loop.tell(ev.Published(manifest(action.version)))
    assert not any(isinstance(a, ev.Finish) for a in loop.actions)


# --- stopping ------------------------------------------------------------------------------------


def stop(loop: Loop) -> list[ev.Action]:
    return loop.tell(ev.StopRequested("Ctrl-C"))


def test_a_stop_before_the_learner_is_there_ends_at_once() -> None:
    assert stop(Loop(settings())) == [ev.Finish("stopped", "Ctrl-C")]


def test_a_stop_finishes_the_step_in_hand_then_saves() -> None:
    loop = Loop(settings())
    loop.start()
    loop.tell(ev.BatchReady(batch(0)))
    assert stop(loop) == []
    assert loop.tell(ev.StepDone(STATS)) == [ev.Checkpoint(1)]
    assert loop.tell(ev.Checkpointed(1)) == [ev.Finish("stopped", "Ctrl-C")]


def test_a_stop_while_no_batch_comes_saves_and_ends() -> None:
    loop = Loop(settings())
    loop.start()
    loop.train(0)
    assert stop(loop) == []
    assert loop.tell(ev.BatchNotReady("filling", "")) == [ev.Checkpoint(1)]
    assert loop.tell(ev.Checkpointed(1)) == [ev.Finish("stopped", "Ctrl-C")]


def test_a_stop_during_a_publication_saves_before_it_ends() -> None:
    loop = Loop(settings())
    loop.start()
    loop.train(0)
    assert loop.train(1) == [ev.Publish(2)]
    assert stop(loop) == []
    assert loop.tell(ev.Published(manifest(2, base=0)))[-1] == ev.Checkpoint(2)
    assert loop.tell(ev.Checkpointed(2)) == [ev.Finish("stopped", "Ctrl-C")]


def test_a_stop_during_a_checkpoint_does_not_save_twice() -> None:
    loop = Loop(settings(checkpoint_every=1))
    loop.start()
    assert loop.train(0) == [ev.Checkpoint(1)]
    assert stop(loop) == []
    assert loop.tell(ev.Checkpointed(1)) == [ev.Finish("stopped", "Ctrl-C")]


def test_a_spent_budget_is_an_end_of_its_own_and_the_first_reason_to_stop_counts() -> None:
    spent = ev.StopRequested("the money is gone", "spent")
    assert Loop(settings()).tell(spent) == [ev.Finish("spent", "the money is gone")]
    for first, second, end in (
        (spent, ev.StopRequested("Ctrl-C"), ev.Finish("spent", "the money is gone")),
        (ev.StopRequested("Ctrl-C"), spent, ev.Finish("stopped", "Ctrl-C")),
    ):
        loop = Loop(settings())
        loop.start()
        loop.tell(ev.BatchReady(batch(0)))
        assert loop.tell(first) == []
        assert loop.tell(ev.StepDone(STATS)) == [ev.Checkpoint(1)]
        assert loop.tell(second) == []
        assert loop.tell(ev.Checkpointed(1)) == [end]


def test_a_stop_does_not_wait_for_the_last_evaluation() -> None:
    loop = Loop(settings(steps=1))
    loop.start()
    finish_last_step(loop)
    assert stop(loop) == [ev.Finish("stopped", "Ctrl-C")]


def test_a_resume_starts_where_it_was_and_publishes_at_once() -> None:
    loop = Loop(settings(), first_epoch=2)
    assert loop.tell(ev.LearnerReady(5)) == [ev.Publish(5)]
    assert loop.tell(ev.Published(manifest(5))) == [ev.FormBatch(5)]
    assert loop.tell(ev.WorkerReady("w0", 2)) == [ev.Install("w0", 2, fresh=False)]
    assert loop.installed(5, epoch=2) == [ev.Evaluate(5, ("w0",))]


def last_step_done() -> Loop:
    """A run of one step whose last evaluation is due, and whose only worker is lost."""
    loop = Loop(settings(steps=1, s=0))
    loop.start()
    loop.train(0)
    loop.tell(ev.Published(manifest(1, base=0)))
    loop.tell(ev.WorkerLost("w0", 0, "gone"))
    assert loop.tell(ev.Checkpointed(1)) == []
    assert loop.controller.missing_evaluations == (1,)
    return loop


def test_an_evaluation_that_no_worker_begins_does_not_hold_the_run_for_ever() -> None:
    limit_s = settings(steps=1, s=0).run.wait_limit_s
    loop = last_step_done()
    loop.now_s = limit_s - 1.0
    assert loop.tell(ev.NothingHeard()) == []
    loop.now_s = limit_s
    assert loop.tell(ev.NothingHeard()) == [ev.Finish("done")]
    assert loop.controller.missing_evaluations == (1,)


def test_an_evaluation_that_has_begun_has_its_own_limit() -> None:
    limit_s = settings(steps=1, s=0).run.wait_limit_s
    loop = last_step_done()
    loop.now_s = limit_s - 1.0
    loop.tell(ev.WorkerReady("w0", 1))
    assert loop.installed(1, epoch=1) == [ev.Evaluate(1, ("w0",))]
    loop.now_s = 2 * limit_s
    assert loop.tell(ev.NothingHeard()) == []
    assert loop.tell(ev.Evaluated(report(1))) == [ev.Finish("done")]
    assert loop.controller.missing_evaluations == ()
