"""Leftovers of a run on its machine: processes, files, shared memory, semaphores, control groups.

`Room` is a place of their own for the runs of a test: all in it is theirs, however busy the machine is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType

import psutil

SEMAPHORE = "sem."  # glibc's named semaphores, in shared memory
CONTROL_GROUP = "echo-planes-"
READY = "ready"
KILLED_S = 5.0  # after a kill -9, until nothing is left


@dataclass(frozen=True, slots=True)
class Left:
    """Names of what there is, or of what is left.

    Args:
        processes: "PID TITLE".
        files: entries of the temporary folder.
        shared_memory: entries of /dev/shm but for semaphores.
        semaphores: named ones.
        control_groups: folders of our sandbox's.
    """

    processes: frozenset[str] = frozenset()
    files: frozenset[str] = frozenset()
    shared_memory: frozenset[str] = frozenset()
    semaphores: frozenset[str] = frozenset()
    control_groups: frozenset[str] = frozenset()

    def __sub__(self, before: Left) -> Left:
        """Return what was not there before."""
        return Left(*(getattr(self, one.name) - getattr(before, one.name) for one in fields(self)))

    @property
    def count(self) -> int:
        return sum(len(getattr(self, one.name)) for one in fields(self))

    def __str__(self) -> str:
        kinds = {one.name: sorted(getattr(self, one.name)) for one in fields(self)}
        return "; ".join(f"{name}: {', '.join(names)}" for name, names in kinds.items() if names) or "nothing"


def found(
    processes: Sequence[psutil.Process],
    files: Sequence[str],
    shared_memory: Sequence[str],
    groups: Sequence[str],
) -> Left:
    """Sort what was listed into its kinds."""
    titles = []
    for process in processes:
        try:
            titles.append(f"{process.pid} {process.name()}")
        except psutil.NoSuchProcess:
            continue
    semaphores = frozenset(name for name in shared_memory if name.startswith(SEMAPHORE))
    ours = frozenset(name for name in groups if name.startswith(CONTROL_GROUP))
    return Left(frozenset(titles), frozenset(files), frozenset(shared_memory) - semaphores, semaphores, ours)


def control_groups() -> list[str]:
    """Names of all folders two levels beneath the control groups' file systems."""
    root = Path("/sys/fs/cgroup")
    return [path.name for pattern in ("*", "*/*") for path in root.glob(pattern) if path.is_dir()]


def look(
    processes: Sequence[psutil.Process], temporary: Path, shared_memory: Path = Path("/dev/shm")
) -> Left:
    """List what there is now. `processes`: those of the run, as its starter knows them."""
    return found(processes, os.listdir(temporary), os.listdir(shared_memory), control_groups())


def maker(control_group: str) -> int:
    """Id of the process whose sandbox a control group is; 0 where the name tells none."""
    number = control_group.removeprefix(f"{CONTROL_GROUP}sandbox-").partition("-")[0]
    return int(number) if number.isdecimal() else 0


def missing() -> str:
    """Why there can be no `Room` here; "" when there can."""
    if os.geteuid() != 0:
        return "a mount namespace needs root"
    lacking = [tool for tool in ("unshare", "nsenter") if shutil.which(tool) is None]
    return f"there is no {lacking[0]}" if lacking else ""


class Room:
    """A mount namespace with a /dev/shm and a temporary folder of its own. Use as a context manager.

    Start programs in it with `prefix` before their command and `environment` in their environment.
    """

    TEMPORARY = "/mnt"

    def __init__(self) -> None:
        self._keeper: subprocess.Popen[str] | None = None
        self._before = Left()
        self.environment = {"TMPDIR": self.TEMPORARY}

    def __enter__(self) -> Room:
        mounts = f"mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs {self.TEMPORARY}"
        script = f"{mounts} && chmod 1777 /dev/shm {self.TEMPORARY} && echo {READY} && read line"
        self._keeper = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._keeper.stdout is not None
        if self._keeper.stdout.readline() != f"{READY}\n":
            raise RuntimeError("a mount namespace with its own /dev/shm could not be made")
        # Also those whose maker's id a process has now: it may end before the run does.
        self._before = Left(control_groups=self._seen(()).control_groups)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        if self._keeper is not None:
            self._keeper.communicate()

    @property
    def _pid(self) -> int:
        if self._keeper is None:
            raise RuntimeError("the room is not open")
        return self._keeper.pid

    def prefix(self, work_dir: Path) -> list[str]:
        """Words before a command, which then runs in here and in `work_dir`."""
        enter = ["nsenter", f"--mount=/proc/{self._pid}/ns/mnt"]
        return [*enter, "sh", "-c", 'cd "$0" && exec "$@"', str(work_dir)]

    def processes(self) -> list[psutil.Process]:
        """Every living process in here but the keeper, whoever its parent is now and whatever its title."""
        here = os.readlink(f"/proc/{self._pid}/ns/mnt")
        inside = []
        for process in psutil.process_iter():
            try:
                is_here = os.readlink(f"/proc/{process.pid}/ns/mnt") == here
                if is_here and process.pid != self._pid and process.status() != psutil.STATUS_ZOMBIE:
                    inside.append(process)
            except (OSError, psutil.NoSuchProcess):
                continue  # gone meanwhile
        return inside

    def folder(self, path: str) -> Path:
        """A folder in here as this process sees it."""
        return Path(f"/proc/{self._pid}/root{path}")

    def _seen(self, inside: Sequence[psutil.Process]) -> Left:
        return look(inside, self.folder(self.TEMPORARY), self.folder("/dev/shm"))

    def look(self) -> Left:
        """List what there is now, but for control groups that were there before or are another process's."""
        inside = self.processes()
        seen = self._seen(inside)
        strangers = set(psutil.pids()) - {process.pid for process in inside}
        theirs = frozenset(name for name in seen.control_groups if maker(name) in strangers)
        return seen - self._before - Left(control_groups=theirs)


def left_within(look: Callable[[], Left], limit_s: float) -> Left:
    """Return what is still there `limit_s` later; nothing, as soon as nothing is."""
    until_s, tick = time.monotonic() + limit_s, threading.Event()
    while (left := look()).count and time.monotonic() < until_s:
        tick.wait(0.05)
    return left


def machine(processes: Sequence[psutil.Process]) -> Left:
    """List what there is on the whole machine, for a before and an after where nothing else runs."""
    return look(processes, Path(tempfile.gettempdir()))
