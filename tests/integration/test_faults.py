"""Whole runs in which something dies, goes wrong or is lost: what must still hold afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.harness import (
    LOSSY_PROGRAM,
    RUN_LIMIT_S,
    SAMPLES_PER_PROMPT,
    SMALL,
    Program,
    check_books,
    events,
    metrics,
    program,
    run_to_end,
    summary,
    trajectories,
)
from tests.thorough import takes_minutes

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

STEPS = 10

# --- rewards go wrong, and the only worker dies --------------------------------------------------


@pytest.fixture(scope="module")
def battered(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """A run whose rewards hang, raise and lie for some prompts, and whose only worker is killed."""
    folder = tmp_path_factory.mktemp("battered")
    # The only worker, so that no step can be made before the replacement serves; slow, to be hit at work.
    words = (
        *SMALL,
        f"run.steps={STEPS}",
        "task=tests.integration.badly_rewarded:SometimesBadlyRewarded",
        "fleet=single",
        "fleet.workers.0.slowdown_s=0.5",
    )
    with program(folder / "work", folder / "run", *words) as run:
        run.wait_for_step(3)
        run.wait_until(lambda: events(run.run_dir, "eval"), "the first evaluation")
        run.actor("ray::WorkerProc").kill()
        assert run.wait() == 0, run.tail()
        assert run.left_behind() == []
    return run


@takes_minutes
def test_a_killed_worker_is_replaced_and_the_run_ends_as_if_nothing_had_happened(battered: Program) -> None:
    (worker,) = check_books(battered.run_dir, STEPS)["workers"]
    assert worker["restarts"] == 1
    (lost,) = events(battered.run_dir, "worker lost")
    assert lost["worker"] == worker["id"]
    assert f"worker {worker['id']} (cpu-large): its process is gone" in lost["text"]
    assert battered.stderr == ""
    assert "(raylet)" not in battered.stdout  # Ray's paragraph about it
    assert worker["trajectories"] == summary(battered.run_dir)["accepted"]  # its first incarnation's too


@takes_minutes
def test_rewards_that_hang_raise_or_lie_leave_the_run_going(battered: Program) -> None:
    told = summary(battered.run_dir)
    # Prompts 3, 5 and 7 were among the first. A group's later answers are not scored after one that hung.
    assert told["reward_timeout"] >= 1
    assert told["reward_error"] >= SAMPLES_PER_PROMPT
    assert told["reward_invalid"] >= SAMPLES_PER_PROMPT
    assert metrics(battered.run_dir)[-1]["reward_error"] >= SAMPLES_PER_PROMPT
    rows = trajectories(battered.run_dir)
    assert not {3, 5, 7} & {row["prompt_index"] % 40 for row in rows}
    evaluations = [event["text"] for event in events(battered.run_dir, "eval")]
    assert len(evaluations) == 2
    assert all("3 answers have no reward" in text for text in evaluations)
    for place in (battered.stdout, (battered.run_dir / "report.html").read_text()):
        assert "timed out" in place
        assert "their groups were not trained" in place


# --- interrupted before it began -----------------------------------------------------------------


def test_ctrl_c_while_the_run_starts_ends_it_too(tmp_path: Path) -> None:
    with program(tmp_path / "work", tmp_path / "run", *SMALL) as run:
        run.wait_until(lambda: "imports ..." in run.stdout, "the first phase")
        run.interrupt()
        assert run.wait() == 130, run.tail()
        assert run.left_behind() == []
    (line,) = run.stderr.splitlines()
    assert line.startswith("error: interrupted")
    assert not metrics(run.run_dir)


# --- messages are lost ---------------------------------------------------------------------------


@takes_minutes
def test_lost_publications_and_a_slow_worker_neither_hang_the_run_nor_break_the_bound(
    tmp_path: Path,
) -> None:
    run = run_to_end(
        tmp_path / "work",
        tmp_path / "run",
        *SMALL,
        "run.steps=12",
        "staleness.max_staleness=1",
        "fleet.workers.0.slowdown_s=0.5",  # so that the other finds work left when it comes much later
        "fleet.workers.1.slowdown_s=1.5",
        f"run.wait_limit_s={2 * RUN_LIMIT_S}",  # what frees the run must not be this limit
        command=LOSSY_PROGRAM,
    )
    told = check_books(run.run_dir, 12, max_staleness=1)
    assert told["publish_every"] == 1
    assert told["dropped_stale"] == 0
    large, slow = told["workers"]
    # Which of them did more depends on who began first, and from whom a publication was kept.
    assert large["trajectories"] > 0
    assert slow["trajectories"] > 0
    assert large["restarts"] == slow["restarts"] == 0
    # Starved of them, the learner published once more: a lost version, or the one it had come to meanwhile.
    published = [event["version"] for event in events(run.run_dir, "publication")]
    assert len(set(published)) < len(published)
