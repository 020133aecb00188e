"""Whole runs that end by kill -9 of one of their processes: nothing of them stays on the machine.

A run that ends well is looked at in test_run.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.integration import leftovers
from tests.integration.harness import ROOT, RUN_LIMIT_S, SMALL, events, program, wait_until
from tests.integration.leftovers import KILLED_S, Left, Room, left_within
from tests.thorough import takes_minutes

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(leftovers.missing()), reason=leftovers.missing()),
]

RAY_S = 15.0  # a cluster of others ends the actors of a driver that is gone when it has noticed
HEAD_S = 120.0  # until a head is up, on a busy machine
STEPS = 4


@pytest.fixture(scope="module")
def room() -> Iterator[Room]:
    with Room() as opened:
        yield opened


# An engine of two ranks, and nobody else who wants a processor.
TWO_RANKS = (
    "fleet=single",
    "fleet.workers.0.engine.tensor_parallel_size=2",
    "fleet.workers.0.resources.CPU=2",
    "learner.resources.CPU=0",
)


def still_there(processes: list[psutil.Process]) -> list[str]:
    """Those that live, with their titles."""
    alive = []
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(f"{process.pid} {process.name()}")
        except psutil.NoSuchProcess:
            continue
    return alive


def kill_with_all_it_started(victim: psutil.Process) -> list[str]:
    """Kill a process; list those it had started that are still there when they should have gone."""
    started = victim.children(recursive=True)
    victim.kill()
    try:
        wait_until(lambda: not still_there(started), KILLED_S, "what it had started to go")
    except AssertionError:
        return still_there(started)
    return []


@takes_minutes
@pytest.mark.parametrize("who", ["driver", "raylet"])
def test_nothing_is_left_seconds_after_a_kill(room: Room, tmp_path: Path, who: str) -> None:
    with program(tmp_path / "work", tmp_path / "run", *SMALL, "run.steps=1000", room=room) as run:
        run.wait_for_step(2)
        (psutil.Process(run.process.pid) if who == "driver" else run.actor(who)).kill()
        left = left_within(room.look, KILLED_S)
        status = run.wait()
    assert left == Left(), str(left)
    assert status == (-9 if who == "driver" else 1)
    kept = list(run.run_dir.glob("ray_logs/session_*/raylet.out"))
    assert len(kept) == (0 if who == "driver" else 1)
    assert who == "driver" or run.stderr.endswith("its raylet has ended\n"), run.tail()


@takes_minutes
@pytest.mark.parametrize("who", ["ray::LearnerProc", "ray::DataService"])
def test_a_run_that_lost_a_plane_ends_by_itself_and_leaves_nothing(
    room: Room, tmp_path: Path, who: str
) -> None:
    with program(tmp_path / "work", tmp_path / "run", *SMALL, "run.steps=1000", room=room) as run:
        run.wait_for_step(2)
        assert kill_with_all_it_started(run.actor(who)) == []
        assert run.wait() == 1, run.tail()
        left = left_within(room.look, KILLED_S)
    assert left == Left(), str(left)


@takes_minutes
def test_an_engine_of_several_ranks_goes_with_its_worker_and_with_the_driver(
    room: Room, tmp_path: Path
) -> None:
    with program(tmp_path / "work", tmp_path / "run", *SMALL, "run.steps=1000", *TWO_RANKS, room=room) as run:
        run.wait_for_step(1)
        assert len([p for p in room.processes() if p.name().startswith("VLLM")]) == 3
        assert kill_with_all_it_started(run.actor("ray::WorkerProc")) == []
        wait_until(lambda: events(run.run_dir, "worker lost"), RUN_LIMIT_S, "the worker's loss to be told")
        # While the replacement's engine starts: its processes have not come to any code of ours yet.
        wait_until(lambda: engine_starts(room), RUN_LIMIT_S, "another engine to start")
        run.process.kill()
        left = left_within(room.look, KILLED_S)
    assert left == Left(), str(left)


def engine_starts(room: Room) -> bool:
    """Whether a child of the new worker's has begun, that has no title yet."""
    return any("spawn_main" in " ".join(process.cmdline()) for process in room.processes())


# --- on a cluster that somebody else started -----------------------------------------------------


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[Room, str]]:
    """A Ray head in a room of its own, and its address; the session of that head is nobody's to clear."""
    (tmp_path / "head").mkdir()
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--port=0", "--num-cpus=2"]
    quiet = ["--include-dashboard=false", "--disable-usage-stats", "--node-ip-address=127.0.0.1"]
    with Room() as room:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "ECHO_"))}
        # On loopback alone, where nobody else is asked for a token; the driver must find it so as well.
        room.environment |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "disabled"}
        told = tmp_path / "told"  # not a pipe: what it starts would hold it open
        with told.open("wb") as output:
            started = subprocess.run(
                [*room.prefix(tmp_path / "head"), *ray, *quiet],
                env={**kept, **room.environment, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                check=False,
                timeout=HEAD_S,
            )
        assert started.returncode == 0, told.read_text()
        yield room, room.folder(f"{Room.TEMPORARY}/ray/ray_current_cluster").read_text().strip()


def ours(left: Left) -> Left:
    """All but Ray's own processes."""
    kept = frozenset(one for one in left.processes if "VLLM" in one or "echo_planes" in one)
    return Left(kept, left.files, left.shared_memory, left.semaphores, left.control_groups)


@takes_minutes
@pytest.mark.parametrize("how", ["ends well", "kill -9 of the driver"])
def test_on_a_cluster_of_others_our_own_files_go_and_no_others(
    cluster: tuple[Room, str], tmp_path: Path, how: str
) -> None:
    room, address = cluster
    before = room.look()
    assert before.files == {"ray"}
    steps = STEPS if how == "ends well" else 1000
    words = (*SMALL, f"run.steps={steps}", f"run.ray_address={address}")
    with program(tmp_path / "work", tmp_path / "run", *words, room=room) as run:
        if how == "ends well":
            assert run.wait() == 0, run.tail()
        else:
            run.wait_for_step(2)
            assert len(room.look().files) > len(before.files)
            run.process.kill()
        left = left_within(lambda: ours(room.look() - before), RAY_S)
    assert left == Left(), str(left)
    assert room.look().files == before.files
