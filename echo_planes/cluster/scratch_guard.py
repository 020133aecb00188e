"""The process that clears up after a run, however that ends: see `scratch.py`, which starts it.

It hears of the end by its standard input and by the kernel, gives the run's processes a moment to end by
themselves, kills those that do not, and clears the run's folders. It is small and outlives its parent; what
it kills was started with the run's folder as its own, or writes into it.
"""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import suppress
from pathlib import Path

from echo_planes.cluster.scratch import FOLDER, clear

GRACE_S = 1.5  # sandboxes take down their control groups meanwhile, resource trackers their semaphores
LIMIT_S = 8.0  # of all; a process in the hands of a device may take longer than anybody waits
LOOK_S = 0.05


def main(arguments: list[str]) -> None:
    """Arguments: id of the owner, its folders. Returns at once; a child of this process goes on."""
    owner_pid, folders = int(arguments[0]), [Path(word) for word in arguments[1:]]
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    poll = select.poll()
    poll.register(0, select.POLLIN)
    with suppress(ProcessLookupError):  # it has ended: its line says so too
        poll.register(os.pidfd_open(owner_pid), select.POLLIN)
    if os.fork():
        return
    poll.poll()
    clear_up(owner_pid, folders)


def clear_up(owner_pid: int, folders: list[Path]) -> None:
    """Until neither processes nor folders are left, or `LIMIT_S` is over."""
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
    """Ids of the processes that were started as part of the run whose folder this is."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal() and _belongs(int(name), folder)]


def _belongs(pid: int, folder: str) -> bool:
    """By its environment, or, where a title lies over that, by a file of the run that it writes."""
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
    """Whether an open file lies in the folder, and not for reading alone, as for one who looks at logs."""
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
            if _belongs(pid, folder):  # still the same: its id cannot be another's now
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)
