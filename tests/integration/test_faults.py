"""Whole runs in which something dies, is lost or is interrupted: what must still hold afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.feather as feather
import pytest

from echo_planes.checkpoint import CheckpointMeta, open_lineage
from tests.integration.harness import (
    LOSSY_PROGRAM,
    LOST_VERSIONS,
    RUN_LIMIT_S,
    Program,
    events,
    json_lines,
    metrics,
    program,
    run_to_end,
    staleness,
    summary,
    trained,
    wait_until,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

# Small steps of the embedded job: what is at stake here is not how well it learns.
SMALL = (
    "sampling.prompts_per_step=16",
    "sampling.samples_per_prompt=4",
    "eval.num_prompts=16",
    "eval.samples_per_prompt=1",
)
PROMPTS_PER_STEP, SAMPLES_PER_PROMPT = 16, 4
EVERY = 10  # steps between checkpoints
MANY_STEPS = 100_000  # no run here gets that far


def check_books(run_dir: Path, num_steps: int, max_staleness: int = 3) -> dict[str, Any]:
    """What holds at the end of every run, however bumpy."""
    told = summary(run_dir)
    assert told["status"] == "done"
    assert told["steps"] == num_steps
    assert [step["step"] for step in metrics(run_dir)] == list(range(1, num_steps + 1))
    assert told["lost_trajectories"] == told["duplicate_trajectories"] == told["digest_mismatches"] == 0
    assert told["accepted"] == told["trained"] + told["dropped_stale"] + told["buffered"]
    rows = trained(run_dir)
    assert len(rows) == told["trained"] == num_steps * PROMPTS_PER_STEP * SAMPLES_PER_PROMPT
    assert len({row["trajectory_id"] for row in rows}) == len(rows)
    assert all(0 <= staleness(row) <= max_staleness for row in rows)
    return told


def newest_checkpoint(run_dir: Path) -> Path:
    return max((run_dir / "checkpoints").glob("step-*"))


def saved_step(run_dir: Path) -> int:
    """The step of the newest checkpoint."""
    meta = json.loads((newest_checkpoint(run_dir) / "meta.json").read_text())
    return int(meta["step"])


# --- a worker dies -------------------------------------------------------------------------------


def test_a_killed_worker_is_replaced_and_the_run_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    # The only worker, so that no step can be made before the replacement serves; slow, to be hit at work.
    words = (*SMALL, "run.steps=30", "fleet=single", "fleet.workers.0.slowdown_s=0.5")
    with program(tmp_path / "work", tmp_path / "run", *words) as run:
        run.wait_for_step(3)
        run.actor("ray::WorkerProc").kill()
        assert run.wait() == 0, run.tail()
        assert run.left_behind() == []
    (worker,) = check_books(run.run_dir, 30)["workers"]
    assert worker["restarts"] == 1
    (lost,) = events(run.run_dir, "worker lost")
    assert lost["worker"] == worker["id"]
    assert f"worker {worker['id']} (cpu-large): its process is gone" in lost["text"]
    assert run.stderr == ""


# --- the learner dies, the run is resumed, interrupted, and resumed again ------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def crashed(base: Path) -> Iterator[Program]:
    """A run whose learner was killed some steps after its newest checkpoint."""
    words = (*SMALL, f"run.steps={MANY_STEPS}", f"checkpoint.every={EVERY}")
    with program(base / "crashed", base / "run", *words) as run:
        run.wait_for_step(EVERY + 3)
        run.actor("ray::LearnerProc").kill()
        run.wait()
        yield run


@pytest.fixture(scope="module")
def crash_rows(crashed: Program) -> dict[int, dict[str, Any]]:
    """The metrics by step, as the crash left them."""
    return {row["step"]: row for row in metrics(crashed.run_dir)}


@pytest.fixture(scope="module")
def crash_steps(crashed: Program, crash_rows: dict[int, dict[str, Any]]) -> tuple[int, int]:
    """Steps in the newest checkpoint and in the metrics, as the crash left them."""
    return saved_step(crashed.run_dir), max(crash_rows)


@pytest.fixture(scope="module")
def interrupted(base: Path, crash_steps: tuple[int, int]) -> Iterator[Program]:
    """The same run resumed, and interrupted by Ctrl-C between two checkpoints."""
    words = ("checkpoint.every=1000000",)
    with program(base / "interrupted", base / "run", f"run.resume={base / 'run'}", *words) as run:
        run.wait_for_step(crash_steps[1] + 4)
        run.interrupt()
        run.wait()
        yield run


@pytest.fixture(scope="module")
def last_step(interrupted: Program) -> int:
    """Updates made when Ctrl-C was obeyed."""
    return int(metrics(interrupted.run_dir)[-1]["step"])


@pytest.fixture(scope="module")
def resumed(base: Path, last_step: int) -> Program:
    """The same run resumed again, to its end."""
    words = (f"run.resume={base / 'run'}", f"run.steps={last_step + 5}")
    return run_to_end(base / "resumed", base / "run", *words)


def test_a_killed_learner_ends_the_run_with_one_line_that_says_how_to_go_on(crashed: Program) -> None:
    assert crashed.process.returncode == 1, crashed.tail()
    (line,) = crashed.stderr.splitlines()
    assert line.startswith("error: learner rank 0 ")
    assert f"run.resume={crashed.run_dir}" in line
    assert crashed.left_behind() == []


def test_a_killed_learner_leaves_a_report(crashed: Program) -> None:
    told = summary(crashed.run_dir)
    assert told["status"] == "failed"
    assert "learner rank 0" in told["error"]
    assert told["accepted"] == told["trained"] + told["dropped_stale"] + told["buffered"]
    assert told["trained"] >= told["steps"] * PROMPTS_PER_STEP * SAMPLES_PER_PROMPT > 0
    assert (crashed.run_dir / "report.html").is_file()


def test_ctrl_c_ends_with_130_a_checkpoint_of_the_last_step_and_no_process(
    interrupted: Program, last_step: int
) -> None:
    assert interrupted.process.returncode == 130, interrupted.tail()
    assert interrupted.stderr == ""
    assert summary(interrupted.run_dir)["status"] == "stopped"
    assert saved_step(interrupted.run_dir) == last_step
    assert interrupted.left_behind() == []


def test_a_resumed_run_starts_at_its_checkpoint(crash_steps: tuple[int, int], interrupted: Program) -> None:
    publications = events(interrupted.run_dir, "publication")
    times_s = [event["time_s"] for event in publications]
    restart = next(i for i in range(1, len(times_s)) if times_s[i] < times_s[i - 1])
    saved, reached = crash_steps
    assert publications[restart]["version"] == saved
    assert saved % EVERY == 0
    assert 0 < saved < reached


def test_a_resume_repeats_the_unbroken_run_as_far_as_it_is_determined(
    crash_rows: dict[int, dict[str, Any]], crash_steps: tuple[int, int], interrupted: Program
) -> None:
    """The learner and what was buffered are restored bit for bit, so the first step is the same step.

    Later batches are sampled anew: which requests share an engine's batch depends on timing.
    """
    saved = crash_steps[0]
    data = interrupted.run_dir / "checkpoints" / f"step-{saved:06d}" / "data"
    buffered = feather.read_table(data / "buffered.arrow").num_rows // SAMPLES_PER_PROMPT
    if buffered < PROMPTS_PER_STEP:
        pytest.skip(f"only {buffered} groups were buffered at the cut, a step takes {PROMPTS_PER_STEP}")
    again = {row["step"]: row for row in metrics(interrupted.run_dir)}[saved + 1]
    for key in ("loss", "grad_norm", "reward_mean", "tokens", "mismatch_mean", "entropy", "staleness_max"):
        assert again[key] == crash_rows[saved + 1][key], key


def test_a_run_resumed_twice_has_every_step_and_every_trajectory_exactly_once(
    resumed: Program, last_step: int
) -> None:
    check_books(resumed.run_dir, last_step + 5)
    assert resumed.stderr == ""
    assert {row["lineage"] for row in trained(resumed.run_dir)} == {"L0", "L1", "L2"}
    aside = list((resumed.run_dir / "trajectories" / "quarantined").glob("*.arrow"))
    assert [path.name.partition("-")[0] for path in aside] == ["L0"] * len(aside)


def test_a_run_resumed_twice_skips_no_prompt(resumed: Program) -> None:
    indices = [row["prompt_index"] for row in trained(resumed.run_dir)]
    done = set(indices)
    assert len(indices) == len(done) * SAMPLES_PER_PROMPT  # each once: nothing was dropped as stale
    data = newest_checkpoint(resumed.run_dir) / "data"
    state = json.loads((data / "state.json").read_text())
    buffered = {row["prompt_index"] for row in feather.read_table(data / "buffered.arrow").to_pylist()}
    # Whatever was handed out was trained, waits in the buffer, or goes out again next.
    assert done | buffered | set(state["returned"]) == set(range(state["next_index"]))
    assert not done & buffered
    assert len(state["returned"]) <= 2 * PROMPTS_PER_STEP


def test_two_resumes_of_one_checkpoint_are_two_lineages(tmp_path: Path) -> None:
    """The first one died before its next checkpoint: its versions and files must not be taken again."""
    saved = CheckpointMeta(step=10, lineage_number=1, next_epoch=1)
    assert [open_lineage(tmp_path, saved).lineage_number for _ in range(3)] == [1, 2, 3]
    later = CheckpointMeta(step=20, lineage_number=7, next_epoch=2)
    assert open_lineage(tmp_path, later).lineage_number == 7


def test_ctrl_c_while_the_run_starts_ends_it_too(tmp_path: Path) -> None:
    with program(tmp_path / "work", tmp_path / "run", *SMALL) as run:
        wait_until(lambda: "imports ..." in run.stdout, RUN_LIMIT_S, "the first phase")
        run.interrupt()
        assert run.wait() == 130, run.tail()
        assert run.left_behind() == []
    (line,) = run.stderr.splitlines()
    assert line.startswith("error: interrupted")
    assert not metrics(run.run_dir)


# --- messages are lost ---------------------------------------------------------------------------


def test_lost_publications_and_a_slow_worker_neither_hang_the_run_nor_break_the_bound(
    tmp_path: Path,
) -> None:
    run = run_to_end(
        tmp_path / "work",
        tmp_path / "run",
        *SMALL,
        "run.steps=12",
        "staleness.max_staleness=1",
        "fleet.workers.1.slowdown_s=1.5",
        f"run.wait_limit_s={2 * RUN_LIMIT_S}",  # what frees the run must not be this limit
        command=LOSSY_PROGRAM,
    )
    told = check_books(run.run_dir, 12, max_staleness=1)
    assert told["publish_every"] == 1
    assert told["dropped_stale"] == 0
    large, slow = told["workers"]
    assert large["trajectories"] > slow["trajectories"] > 0
    assert large["restarts"] == slow["restarts"] == 0
    again = [event["version"] for event in json_lines(run.run_dir / "events.jsonl") if "version" in event]
    assert any(again.count(version) > 1 for version in LOST_VERSIONS)
