"""The life of one run: a worker lost in mid-broadcast, a dead learner, a resume, Ctrl-C, another resume.

Weights go to real vLLM workers as patches along a chain. The fixtures stand in the order of events.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from echo_planes.loop.checkpoint import CheckpointMeta, open_lineage
from echo_planes.run import main
from tests.integration.harness import (
    PROMPTS_PER_STEP,
    ROOT,
    SAMPLES_PER_PROMPT,
    SMALL,
    Program,
    check_books,
    events,
    json_lines,
    metrics,
    program,
    run_to_end,
    summary,
    trained,
    trajectories,
)
from tests.thorough import takes_minutes

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

EVERY = 10  # steps between checkpoints
MANY_STEPS = 100_000  # no run here gets that far


def newest_checkpoint(run_dir: Path) -> Path:
    return max((run_dir / "checkpoints").glob("step-*"))


def saved_step(run_dir: Path) -> int:
    """The step of the newest checkpoint."""
    meta = json.loads((newest_checkpoint(run_dir) / "meta.json").read_text())
    return int(meta["step"])


def buffered_groups(run_dir: Path, step: int) -> int:
    """Groups that waited in the buffer when the checkpoint of `step` was made."""
    state = json.loads((run_dir / "checkpoints" / f"step-{step:06d}" / "data" / "state.json").read_text())
    return len(state["groups"])


def is_after_a_full_cut(run_dir: Path) -> bool:
    """Whether steps were made since the newest checkpoint, the first of them of what its buffer held."""
    saved, step = saved_step(run_dir), metrics(run_dir)[-1]["step"]
    # Not shortly before the next checkpoint: it might be made before the learner is killed.
    return saved < step < saved + EVERY - 2 and buffered_groups(run_dir, saved) >= PROMPTS_PER_STEP


def node_beside(running: Program, title: str) -> psutil.Process:
    """The weight node whose parent is the first actor of that name."""
    for process in running.processes():
        parent = process.parent()
        is_node = "echo_planes.weights.node.process" in " ".join(process.cmdline())
        if is_node and parent is not None and parent.name().startswith(title):
            return process
    raise AssertionError(f"no weight node beside {title}")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("long")


@pytest.fixture(scope="module")
def crashed(base: Path) -> Iterator[Program]:
    """A worker's node stands still, so that no publication reaches it, and the worker is killed.

    When it has come back and both have been given more, the learner is killed between two checkpoints.
    """
    run_dir = base / "run"
    words = (
        *SMALL,
        # One trajectory a forward pass: with so slow a learner the buffer holds a whole batch at many a cut.
        "sampling.max_new_tokens=6",
        "model.max_model_len=16",
        "learner.micro_batch_tokens=16",
        f"run.steps={MANY_STEPS}",
        f"checkpoint.every={EVERY}",
        "eval.every=0",
        "weights.snapshot_every=1000",  # one snapshot and then patches, whenever the worker comes back
    )
    with program(base / "crashed", run_dir, *words) as run:
        run.wait_for_step(12)
        node = node_beside(run, "ray::WorkerProc")
        worker = node.parent()
        assert worker is not None
        os.kill(node.pid, signal.SIGSTOP)
        before = len(events(run_dir, "publication"))
        run.wait_until(lambda: len(events(run_dir, "publication")) > before, "a publication")
        os.kill(worker.pid, signal.SIGKILL)
        run.wait_until(lambda: events(run_dir, "caught up"), "the worker came back")
        seen = len(events(run_dir, "publication"))
        run.wait_until(lambda: len(events(run_dir, "publication")) > seen + 5, "publications for both")
        run.wait_until(lambda: is_after_a_full_cut(run_dir), "a checkpoint with a batch in the buffer")
        run.actor("ray::LearnerProc").kill()
        run.wait()
        yield run


@pytest.fixture(scope="module")
def at_the_crash(base: Path, crashed: Program) -> Path:
    """The run's folder as the crash left it."""
    copy = base / "at-the-crash"
    shutil.copytree(crashed.run_dir, copy)
    return copy


@pytest.fixture(scope="module")
def crash_rows(at_the_crash: Path) -> dict[int, dict[str, Any]]:
    """The metrics by step."""
    return {row["step"]: row for row in metrics(at_the_crash)}


@pytest.fixture(scope="module")
def crash_steps(at_the_crash: Path, crash_rows: dict[int, dict[str, Any]]) -> tuple[int, int]:
    """Steps in the newest checkpoint and in the metrics."""
    return saved_step(at_the_crash), max(crash_rows)


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
    """The same run resumed again, on one worker instead of two, to its end."""
    words = (f"run.resume={base / 'run'}", "fleet=single", f"run.steps={last_step + 5}")
    return run_to_end(base / "resumed", base / "run", *words)


# --- a worker is lost in mid-broadcast -----------------------------------------------------------


def test_digests_are_equal_after_every_publication(at_the_crash: Path) -> None:
    told = summary(at_the_crash)
    assert told["digest_mismatches"] == 0
    assert events(at_the_crash, "refused") == []
    assert told["lost_trajectories"] == told["duplicate_trajectories"] == 0
    assert told["reward_last"] > told["reward_first"]


def test_patches_travel_and_what_they_cost_is_told(at_the_crash: Path) -> None:
    rows = summary(at_the_crash)["publications"]
    versions = [row["published_version"] for row in rows]
    assert versions == list(range(0, 2 * len(rows), 2))
    assert rows[0]["codec"] == "full"
    patches = rows[1:]
    assert {row["codec"] for row in patches} <= {"compact", "fast", "overwrite"}
    assert all(row["patch_ratio"] > 1 for row in patches)
    reached = [row for row in rows if row["t_bcast_s"] is not None]
    assert len(reached) > len(rows) - 5
    assert all(row["pause_s"] > 0 for row in reached)
    steps = json_lines(at_the_crash / "metrics.jsonl")
    assert {"t_bcast_s", "t_extract_s", "patch_ratio", "pause_s", "repairs"} <= steps[-1].keys()


def test_the_worker_came_back_by_a_snapshot_and_patches(at_the_crash: Path) -> None:
    told = summary(at_the_crash)
    assert sum(worker["restarts"] for worker in told["workers"]) == 1
    (caught_up,) = events(at_the_crash, "caught up")
    assert "full" in caught_up["text"]
    assert "compact" in caught_up["text"] or "fast" in caught_up["text"] or "overwrite" in caught_up["text"]


def test_the_store_holds_every_version_and_each_can_be_rebuilt(at_the_crash: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "echo_planes.weights", "verify", str(at_the_crash)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shown = subprocess.run(
        [sys.executable, "-m", "echo_planes.weights", "inspect", str(at_the_crash)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout
    stored = [line.split() for line in shown.splitlines() if line[:1].isdigit()]
    versions = {int(fields[2]) for fields in stored if len(fields) > 5}
    published = {row["published_version"] for row in summary(at_the_crash)["publications"]}
    # The newest may still have been on their way to the store when the run was stopped.
    assert versions >= {version for version in published if version <= max(published) - 4}


def test_no_secret_is_in_the_books(at_the_crash: Path) -> None:
    key = (at_the_crash / "signing_key.pem").read_text()
    assert (at_the_crash / "signing_key.pem").stat().st_mode & 0o777 == 0o600
    body = key.splitlines()[1]
    books = itertools.chain(at_the_crash.glob("*.json*"), at_the_crash.glob("*.html"))
    assert not any(body in book.read_text() for book in books)


# --- the learner dies ----------------------------------------------------------------------------


def test_a_killed_learner_ends_the_run_with_one_line_that_says_how_to_go_on(crashed: Program) -> None:
    assert crashed.process.returncode == 1, crashed.tail()
    (line,) = crashed.stderr.splitlines()
    assert line.startswith("error: learner rank 0 ")
    assert f"run.resume={crashed.run_dir}" in line
    assert "(raylet)" not in crashed.stdout  # a paragraph of Ray's for each process that died
    assert crashed.left_behind() == []


def test_a_killed_learner_leaves_a_report(at_the_crash: Path) -> None:
    told = summary(at_the_crash)
    assert told["status"] == "failed"
    assert "learner rank 0" in told["error"]
    assert told["accepted"] == told["trained"] + told["dropped_stale"] + told["buffered"]
    assert told["trained"] >= told["steps"] * PROMPTS_PER_STEP * SAMPLES_PER_PROMPT > 0
    assert (at_the_crash / "report.html").is_file()


def test_ctrl_c_ends_with_130_a_checkpoint_of_the_last_step_and_no_process(
    interrupted: Program, last_step: int
) -> None:
    assert interrupted.process.returncode == 130, interrupted.tail()
    assert interrupted.stderr == ""
    assert summary(interrupted.run_dir)["status"] == "stopped"
    assert saved_step(interrupted.run_dir) == last_step
    assert interrupted.left_behind() == []


def test_ctrl_c_says_how_to_go_on(interrupted: Program, base: Path) -> None:
    assert f"go on      python -m echo_planes.run run.resume={base / 'run'}" in interrupted.stdout


def test_a_resumed_run_has_every_step_and_every_trajectory_exactly_once(
    interrupted: Program, last_step: int
) -> None:
    told = summary(interrupted.run_dir)
    assert [row["step"] for row in metrics(interrupted.run_dir)] == list(range(1, last_step + 1))
    assert told["lost_trajectories"] == told["duplicate_trajectories"] == told["digest_mismatches"] == 0
    assert told["accepted"] == told["trained"] + told["dropped_stale"] + told["buffered"]
    rows = trained(interrupted.run_dir)
    assert len({row["trajectory_id"] for row in rows}) == len(rows) == told["trained"]
    assert len(rows) == last_step * PROMPTS_PER_STEP * SAMPLES_PER_PROMPT
    assert {row["lineage"] for row in rows} == {"L0", "L1"}


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
    assert buffered_groups(interrupted.run_dir, saved) >= PROMPTS_PER_STEP
    again = {row["step"]: row for row in metrics(interrupted.run_dir)}[saved + 1]
    for key in ("loss", "grad_norm", "reward_mean", "tokens", "mismatch_mean", "entropy", "staleness_max"):
        assert again[key] == crash_rows[saved + 1][key], key


@takes_minutes
def test_a_run_resumed_twice_has_every_step_and_every_trajectory_exactly_once(
    resumed: Program, last_step: int
) -> None:
    check_books(resumed.run_dir, last_step + 5)
    assert resumed.stderr == ""
    assert {row["lineage"] for row in trained(resumed.run_dir)} == {"L0", "L1", "L2"}


@takes_minutes
def test_a_run_resumed_twice_skips_no_prompt(resumed: Program) -> None:
    indices = [row["prompt_index"] for row in trained(resumed.run_dir)]
    done = set(indices)
    assert len(indices) == len(done) * SAMPLES_PER_PROMPT  # each once
    # Only what a lost worker had begun may have become too old.
    dropped = {row["prompt_index"] for row in trajectories(resumed.run_dir) if row["fate"] == "dropped"}
    data = newest_checkpoint(resumed.run_dir) / "data"
    state = json.loads((data / "state.json").read_text())
    buffered = {group["prompt_index"] for group in state["groups"]}
    # Whatever was handed out was trained, counted as too old, waits in the buffer, or goes out again next.
    assert done | dropped | buffered | set(state["returned"]) == set(range(state["next_index"]))
    assert not done & (buffered | dropped)
    assert len(state["returned"]) <= 2 * PROMPTS_PER_STEP


@takes_minutes
def test_the_summary_is_of_all_parts_or_says_of_which(at_the_crash: Path, resumed: Program) -> None:
    first, told = summary(at_the_crash), summary(resumed.run_dir)
    assert (first["parts"], told["parts"]) == (1, 3)
    assert told["seconds"] > first["seconds"] + told["seconds_last_part"] > told["seconds_last_part"] > 0
    assert told["eval_first"] == first["eval_first"]
    places = [row["step"] for row in told["evals"]]
    assert places == sorted(set(places))
    assert (places[0], places[-1]) == (0, told["steps"])
    assert told["eval_last"] == told["evals"][-1]["accuracy"]
    assert told["versions_published"] >= told["steps"] // 2
    workers = {row["id"]: row for row in told["workers"]}
    assert set(workers) == {row["id"] for row in first["workers"]}  # also the one that is no longer there
    assert workers["w1"]["trajectories"] >= {row["id"]: row for row in first["workers"]}["w1"]["trajectories"]
    assert sum(row["restarts"] for row in workers.values()) == 1
    assert told["usd_total"] >= first["usd_total"]
    assert f"{told['seconds']:.1f} s ({told['seconds_last_part']:.1f} s of it in the last of 3 parts)" in (
        resumed.stdout
    )


@takes_minutes
def test_a_resume_tells_what_it_changes(resumed: Program, last_step: int) -> None:
    told = [event["text"] for event in events(resumed.run_dir, "setting")]
    assert "checkpoint.every 10 -> 1000000" in told
    assert f"run.steps {MANY_STEPS} -> {last_step + 5}" in told
    assert f"run.steps {MANY_STEPS} -> {last_step + 5}" in resumed.stdout
    assert len(events(resumed.run_dir, "resume")) == 2


@takes_minutes
@pytest.mark.parametrize(
    ("words", "part"),
    [
        ((), "nothing is left to do"),
        (("run.seed=3",), "run.seed was 0 and is now 3"),
        (("model.path=builtin:tiny-code",), "model.path was builtin:tiny-math"),
        (("task=guess",), "task.name was math and is now guess"),
    ],
)
def test_a_resume_that_would_be_another_run_is_refused_before_it_starts(
    resumed: Program, words: tuple[str, ...], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in resumed.run_dir.rglob("*")}
    assert main([f"run.resume={resumed.run_dir}", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert part in line
    assert {path: path.stat().st_mtime_ns for path in resumed.run_dir.rglob("*")} == before


def test_two_resumes_of_one_checkpoint_are_two_lineages(tmp_path: Path) -> None:
    """The first one died before its next checkpoint: its versions and files must not be taken again."""
    saved = CheckpointMeta(step=10, lineage_number=1, next_epoch=1)
    assert [open_lineage(tmp_path, saved).lineage_number for _ in range(3)] == [1, 2, 3]
    later = CheckpointMeta(step=20, lineage_number=7, next_epoch=2)
    assert open_lineage(tmp_path, later).lineage_number == 7
