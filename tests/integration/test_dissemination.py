"""Weights on their way to real vLLM workers: patches along a chain, and a worker lost in mid-broadcast."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.integration.harness import (
    ROOT,
    RUN_LIMIT_S,
    Program,
    events,
    json_lines,
    program,
    summary,
    wait_until,
)

pytestmark = pytest.mark.integration


def node_beside(running: Program, title: str) -> psutil.Process:
    """The weight node whose parent is the first actor of that name."""
    for process in running.processes():
        parent = process.parent()
        is_node = "echo_planes.weights.node" in " ".join(process.cmdline())
        if is_node and parent is not None and parent.name().startswith(title):
            return process
    raise AssertionError(f"no weight node beside {title}")


@pytest.fixture(scope="module")
def lost_in_mid_broadcast(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which a worker's node stands still, so that no publication reaches it; then it is killed."""
    folder = tmp_path_factory.mktemp("broadcast")
    run_dir = folder / "run"
    # More steps than will be made: the run is stopped when everything was seen.
    words = ("run.steps=2000", "eval.num_prompts=32", "eval.every=0", "weights.anchor_every=6")
    with program(folder / "cwd", run_dir, *words) as running:
        running.wait_for_step(12)
        node = node_beside(running, "ray::WorkerProc")
        worker = node.parent()
        assert worker is not None
        os.kill(node.pid, signal.SIGSTOP)
        before = len(events(run_dir, "publication"))
        wait_until(lambda: len(events(run_dir, "publication")) > before, RUN_LIMIT_S, "a publication")
        os.kill(worker.pid, signal.SIGKILL)
        wait_until(lambda: events(run_dir, "caught up"), RUN_LIMIT_S, "the worker to come back")
        seen = len(events(run_dir, "publication"))
        wait_until(
            lambda: len(events(run_dir, "publication")) > seen + 5, RUN_LIMIT_S, "publications for both"
        )
        running.interrupt()
        assert running.wait() == 130, running.tail()
        assert running.left_behind() == []
    return run_dir


def test_digests_are_equal_after_every_publication(lost_in_mid_broadcast: Path) -> None:
    told = summary(lost_in_mid_broadcast)
    assert told["digest_mismatches"] == 0
    assert events(lost_in_mid_broadcast, "refused") == []
    assert told["lost_trajectories"] == told["duplicate_trajectories"] == 0
    assert told["reward_last"] > told["reward_first"]


def test_patches_travel_and_what_they_cost_is_told(lost_in_mid_broadcast: Path) -> None:
    rows = summary(lost_in_mid_broadcast)["publications"]
    versions = [row["published_version"] for row in rows]
    assert versions == list(range(0, 2 * len(rows), 2))
    assert rows[0]["codec"] == "full"
    patches = rows[1:]
    assert {row["codec"] for row in patches} <= {"compact", "fast", "overwrite"}
    assert all(row["patch_ratio"] > 1 for row in patches)
    reached = [row for row in rows if row["t_bcast_s"] is not None]
    assert len(reached) > len(rows) - 5
    assert all(row["pause_s"] > 0 for row in reached)
    steps = json_lines(lost_in_mid_broadcast / "metrics.jsonl")
    assert {"t_bcast_s", "t_extract_s", "patch_ratio", "pause_s", "repairs"} <= steps[-1].keys()


def test_the_worker_came_back_by_a_snapshot_and_patches(lost_in_mid_broadcast: Path) -> None:
    told = summary(lost_in_mid_broadcast)
    assert sum(worker["restarts"] for worker in told["workers"]) == 1
    (caught_up,) = events(lost_in_mid_broadcast, "caught up")
    assert "full" in caught_up["text"]
    assert "compact" in caught_up["text"] or "fast" in caught_up["text"] or "overwrite" in caught_up["text"]


def test_the_store_holds_every_version_and_each_can_be_rebuilt(lost_in_mid_broadcast: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "echo_planes.weights", "verify", str(lost_in_mid_broadcast)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shown = subprocess.run(
        [sys.executable, "-m", "echo_planes.weights", "inspect", str(lost_in_mid_broadcast)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout
    stored = [line.split() for line in shown.splitlines() if line[:1].isdigit()]
    versions = {int(fields[2]) for fields in stored if len(fields) > 5}
    published = {row["published_version"] for row in summary(lost_in_mid_broadcast)["publications"]}
    # The newest may still have been on their way to the store when the run was stopped.
    assert versions >= {version for version in published if version <= max(published) - 4}


def test_no_secret_is_in_the_books(lost_in_mid_broadcast: Path) -> None:
    key = (lost_in_mid_broadcast / "signing_key.pem").read_text()
    assert (lost_in_mid_broadcast / "signing_key.pem").stat().st_mode & 0o777 == 0o600
    body = key.splitlines()[1]
    books = itertools.chain(lost_in_mid_broadcast.glob("*.json*"), lost_in_mid_broadcast.glob("*.html"))
    assert not any(body in book.read_text() for book in books)
