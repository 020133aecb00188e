"""The guard of a run's temporary files, with real processes: what it clears, and what is cleared after it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from echo_planes.cluster import scratch
from echo_planes.cluster.scratch import SHARED_MEMORY, sweep, this_process
from tests.integration.harness import wait_until

pytestmark = pytest.mark.integration

LIMIT_S = 60.0

OWNS = """
import subprocess, sys, tempfile, multiprocessing
from multiprocessing.shared_memory import SharedMemory
from echo_planes.cluster import scratch
with scratch.opened() as own:
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    block = SharedMemory(create=True, size=16)
    tempfile.mkdtemp()
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    print(*own.folders, child.pid, flush=True)
    sys.stdin.read()
    block.close(); block.unlink()
    del semaphore
"""


@pytest.fixture
def owner() -> Iterator[subprocess.Popen[str]]:
    """A process with a scratch, things of all kinds in it, and a child that ignores its end."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=scratch.ROOT,
    )
    with process:
        yield process
        process.kill()


def what_it_has(owner: subprocess.Popen[str]) -> tuple[Path, Path, int]:
    assert owner.stdout is not None
    folder, shared, child = owner.stdout.readline().split()
    return Path(folder), Path(shared), int(child)


def named(name: str) -> list[str]:
    return [entry for entry in os.listdir(SHARED_MEMORY) if name in entry]


def is_alive(pid: int) -> bool:
    return scratch._ticks_of(pid) is not None


@pytest.mark.parametrize("how", ["kill -9", "its own end"])
def test_nothing_stays_of_a_process_and_what_it_started(owner: subprocess.Popen[str], how: str) -> None:
    folder, shared, child = what_it_has(owner)
    assert len(list(folder.iterdir())) == 3  # the record, the private folder, the temporary one
    assert len(named(folder.name)) == 3  # the folder, the semaphore, the block
    assert is_alive(child)
    if how == "kill -9":
        owner.kill()
    else:
        owner.communicate()
    wait_until(
        lambda: not (is_alive(child) or folder.exists() or shared.exists()), LIMIT_S, "the guard to clear up"
    )
    wait_until(lambda: named(folder.name) == [], LIMIT_S, "its shared memory to go")


def test_what_a_guard_that_was_killed_too_has_left_the_next_start_clears(
    owner: subprocess.Popen[str],
) -> None:
    folder, shared, child = what_it_has(owner)
    for name in os.listdir("/proc"):
        if name.isdecimal() and f"{folder}\0".encode() in _command(int(name)):
            os.kill(int(name), signal.SIGKILL)
    owner.kill()
    owner.wait()
    os.kill(child, signal.SIGKILL)
    sweep(this_process(), [folder.parent])
    assert not folder.exists()
    assert not shared.exists()
    assert named(folder.name) == []


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_two_at_a_time_leave_one_another_alone(owner: subprocess.Popen[str]) -> None:
    folder, shared, child = what_it_has(owner)
    sweep(this_process(), [folder.parent, SHARED_MEMORY])
    assert folder.exists()
    assert shared.exists()
    assert len(named(folder.name)) == 3
    assert is_alive(child)
