"""Real processes that stand still are named, and go on; a learner that is slow but moves is waited for."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.integration.harness import SMALL, check_books, events, metrics, program, summary
from tests.thorough import takes_minutes

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

# A trajectory a micro-batch: up to 64 of them in a step, of 8 s each.
LIMIT_S = 60
HEAVY = ("model.max_model_len=16", "learner.micro_batch_tokens=16", "sampling.max_new_tokens=6")


@takes_minutes  # in virtual time: tests/sim/test_deadlines.py
def test_a_learner_and_a_worker_that_stand_still_are_named_and_go_on(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = (*SMALL, "run.steps=5000", "eval.every=0", "fleet=single")
    impatient = ("tests.integration.harness", "impatient")
    with program(tmp_path / "work", run_dir, *words, command=impatient) as running:
        running.wait_for_step(3)
        for title, what in (("ray::LearnerProc", "learner step"), ("ray::WorkerProc", "sampling")):

            def named(what: str = what) -> bool:
                texts = [one["text"] for one in events(run_dir, "stalled")]
                return any(f"{what} has stood still" in text and "does not answer" in text for text in texts)

            process = running.actor(title)
            os.kill(process.pid, signal.SIGSTOP)
            try:
                running.wait_until(named, f"{title} was named")
            finally:
                os.kill(process.pid, signal.SIGCONT)
        before = len(events(run_dir, "publication"))
        running.wait_until(lambda: len(events(run_dir, "publication")) > before + 2, "more steps")
        running.interrupt()
        running.wait()
    assert summary(run_dir)["status"] == "stopped"
    assert summary(run_dir)["lost_trajectories"] == 0


@takes_minutes
@pytest.mark.parametrize("kind", ["heavy", "mute"])
def test_a_step_longer_than_the_limit_is_waited_for_as_long_as_it_moves(tmp_path: Path, kind: str) -> None:
    """The control tells no progress, and ends by the limit."""
    run_dir = tmp_path / "run"
    words = (*SMALL, *HEAVY, "run.steps=1", "eval.every=0", "fleet=single", f"run.wait_limit_s={LIMIT_S}")
    with program(tmp_path / "work", run_dir, *words, command=("tests.integration.harness", kind)) as running:
        status = running.wait()
        if kind == "heavy":
            assert status == 0, running.tail()
            check_books(run_dir, 1)
            assert metrics(run_dir)[0]["t_train_s"] > 2 * LIMIT_S
        else:
            assert status != 0
            assert f"timed out after {LIMIT_S} s without progress" in running.stderr
            assert "learner step" in running.stderr
