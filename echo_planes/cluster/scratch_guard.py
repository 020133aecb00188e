"""Guard process that clears up after any end of a run; `scratch.py` starts it.

The guard notices the owner's end by its standard input and by a pidfd. It gives the run's processes `GRACE_S`
seconds to end by themselves, kills the others, and clears the run's folders. It kills only processes that
have the run's folder in their environment, or a file of the folder open for writing.
"""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import suppress
from pathlib import Path

from echo_planes.cluster.scratch import FOLDER, clear

GRACE_S = 1.5  # for sandboxes to remove their control groups, and resource trackers their semaphores
LIMIT_S = 8.0  # for all; a process that waits for a device may take longer to end
LOOK_S = 0.05  # between two attempts


def main(arguments: list[str]) -> None:
    """Fork a child that waits for the owner's end and clears up, and return.

    Args:
        arguments: process id of the owner, then its folders.
    """
    owner_pid, folders = int(arguments[0]), [Path(word) for word in arguments[1:]]
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    poll = select.poll()
    poll.register(0, select.POLLIN)
    with suppress(ProcessLookupError):  # the owner has ended, which closes standard input, too
        poll.register(os.pidfd_open(owner_pid), select.POLLIN)
    if os.fork():
        return
    poll.poll()
    clear_up(owner_pid, folders)


def clear_up(owner_pid: int, folders: list[Path]) -> None:
    """Kill processes and remove folders until none is left, or for `LIMIT_S` seconds."""
    begun_s = time.monotonic()
    done = False
    while not done and time.monotonic() - begun_s < LIMIT_S:
        alive = [pid for pid in processes_of(str(folders[0])) if pid not in (owner_pid, os.getpid())]
        if time.monotonic() - begun_s > GRACE_S:
            for pid in alive:
                _kill(pid, str(folders[0]))
        done = not alive and clear(folders)
        if not done:
            time.sleep(LOOK_S)


def processes_of(folder: str) -> list[int]:
    """Return the ids of the processes that belong to the run with this folder."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal() and _belongs(int(name), folder)]


def _belongs(pid: int, folder: str) -> bool:
    """Return whether a process belongs to the run, by its environment or a file of the run that it writes.

    A process that has set its title may have overwritten its environment.
    """
    with suppress(OSError):  # gone, or another user's
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        if f"\0{FOLDER}={folder}\0".encode() in b"\0" + environment:
            return True
    return any(_writes(pid, number, folder) for number in _descriptors(pid))


def _descriptors(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return []


def _writes(pid: int, descriptor: str, folder: str) -> bool:
    """Return whether an open file lies in the folder and is open for writing; a reader of logs is no part."""
    try:
        if not os.readlink(f"/proc/{pid}/fd/{descriptor}").startswith(f"{folder}/"):
            return False
        lines = Path(f"/proc/{pid}/fdinfo/{descriptor}").read_text().splitlines()
    except OSError:  # closed meanwhile
        return False
    flags = next(line.split()[1] for line in lines if line.startswith("flags:"))
    return bool(int(flags, 8) & (os.O_WRONLY | os.O_RDWR))


def _kill(pid: int, folder: str) -> None:
    with suppress(ProcessLookupError):  # it has just ended
        descriptor = os.pidfd_open(pid)
        try:
            if _belongs(pid, folder):  # checked again: the id may have been reused before the pidfd was open
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)
