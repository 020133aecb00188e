"""Seeding on the real parts: a seeder beside one remote worker, which is killed and comes back."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import psutil
import pytest

from tests.integration.harness import (
    PROMPTS_PER_STEP,
    SAMPLES_PER_PROMPT,
    SMALL,
    Program,
    check_books,
    events,
    metrics,
    program,
    run_to_end,
    staleness,
    summary,
    trained,
    trajectories,
)
from tests.thorough import takes_minutes

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

STEPS_ALONE = 5  # of the seeder, while the remote worker is away


def workers(running: Program) -> list[psutil.Process]:
    return [process for process in running.processes() if process.name().startswith("ray::WorkerProc")]


def accepted_of(run_dir: Path) -> Counter[str]:
    """Accepted trajectories by the worker that finished them."""
    return Counter(row["worker_id"] for row in trajectories(run_dir))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose only remote worker is killed in mid-step; it ends after its return."""
    base = tmp_path_factory.mktemp("seeding")
    folder = base / "run"
    words = (
        *SMALL,
        "fleet=single",
        "staleness.max_staleness=0",
        "seeding.engines=1",
        "seeding.first_s=0.05",
        "learner.micro_batch_groups=4",
        "run.steps=100000",
        "eval.every=0",
    )
    with program(base / "work", folder, *words) as running:
        # The seeder's process comes later, because it is placed where the learner is.
        (remote,) = running.wait_until(lambda: workers(running), "the remote worker's process")
        running.wait_until(lambda: set(accepted_of(folder)) == {"w0", "s0"}, "both have sampled")
        step = len(metrics(folder))
        remote.kill()
        running.wait_until(lambda: events(folder, "worker lost"), "w0 was missed")
        running.wait_for_step(step + STEPS_ALONE)
        before = accepted_of(folder)["w0"]
        running.wait_until(lambda: accepted_of(folder)["w0"] > before, "w0 samples again")
        running.interrupt()
        running.wait()
        assert running.left_behind() == []
    return folder


@takes_minutes
def test_the_seeder_alone_ends_the_step_and_the_worker_joins_again(run_dir: Path) -> None:
    assert [event["worker"] for event in events(run_dir, "worker lost")] == ["w0"]
    told = summary(run_dir)
    assert told["lost_trajectories"] == told["duplicate_trajectories"] == told["digest_mismatches"] == 0
    assert told["accepted"] == told["trained"] + told["dropped_stale"] + told["buffered"]
    assert told["trained"] == told["steps"] * PROMPTS_PER_STEP * SAMPLES_PER_PROMPT
    lost_s = events(run_dir, "worker lost")[0]["time_s"]
    alone = [row for row in metrics(run_dir) if row["time_s"] > lost_s][:STEPS_ALONE]
    print(f"steps after the loss took {[round(row['t_step_s'], 2) for row in alone]} s")


@takes_minutes
def test_every_answer_is_of_the_version_it_is_trained_at_and_none_is_trained_twice(run_dir: Path) -> None:
    rows = trained(run_dir)
    assert {staleness(row) for row in rows} == {0}
    assert len({row["trajectory_id"] for row in rows}) == len(rows)


@takes_minutes
def test_the_metrics_tell_of_windows_and_parts(run_dir: Path) -> None:
    rows = metrics(run_dir)
    assert all(row["t_seed_s"] >= 0 <= row["t_train_wait_s"] for row in rows)
    assert max(row["num_parts"] for row in rows) > 1
    for row in rows:
        ends_s = 0.0
        for what, start_s, stop_s in row["timeline"]:
            if what == "remote":
                continue
            assert ends_s - 1e-3 <= start_s <= stop_s  # the learner trains in no open window
            ends_s = stop_s


def test_one_machine_without_a_fleet_runs_and_learns_in_lockstep(tmp_path: Path) -> None:
    words = (*SMALL, "fleet=colocated", "run.steps=6")
    run_to_end(tmp_path / "work", tmp_path / "run", *words)
    told = check_books(tmp_path / "run", 6, max_staleness=0)
    assert [worker["id"] for worker in told["workers"]] == ["s0"]
    assert told["max_staleness_observed"] == 0
