"""Program that tries to break out of the sandbox from inside, and reports each success.

Standard input: one JSON object, see `probe.Canary.task`. Standard output: one JSON object with `nonce` and
`holes`, a list of descriptions.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

CLONE_NEWUSER, CLONE_NEWNS = 0x10000000, 0x00020000
PTRACE_TRACEME = 0


def possible(attempt: Callable[[], object]) -> bool:
    """Return whether the attempt succeeds."""
    try:
        attempt()
    except OSError:
        return False
    return True


def read(path: str) -> None:
    """Read a file's first byte, or a folder's names."""
    if os.path.isdir(path):
        os.listdir(path)
    else:
        with open(path, "rb") as file:
            file.read(1)


def connect(family: int, address: Any) -> None:
    with socket.socket(family) as stream:
        stream.settimeout(1.0)
        stream.connect(address)


def call(name: str, *arguments: int) -> None:
    """Call a libc function. Raises OSError if it fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) == -1:
        raise OSError(ctypes.get_errno(), name)


def changes(path: str) -> list[tuple[str, Callable[[], object]]]:
    """Return attempts to change a device of the host; most would set the value that it already has."""
    found = os.stat(path)
    return [
        ("set the times of", partial(os.utime, path)),
        ("set the mode of", partial(os.chmod, path, found.st_mode & 0o7777)),
        ("set the owner of", partial(os.chown, path, os.getuid(), os.getgid())),
        ("set an attribute of", partial(os.setxattr, path, "user.canary", b"")),
    ]


def count_processes(limit: int) -> int:
    """Return how many child processes can be started at once, up to `limit`."""
    for number in range(limit):
        try:
            pid = os.fork()
        except OSError:
            return number
        if pid == 0:
            signal.pause()
    return limit


def count_threads(limit: int) -> int:
    """Return how many threads can be started at once, up to `limit`."""
    forever = threading.Event()
    for number in range(limit):
        try:
            threading.Thread(target=forever.wait, daemon=True).start()
        except RuntimeError:
            return number
    return limit


def main() -> None:
    """Make all attempts, report them, and end without cleaning up."""
    task = json.loads(sys.stdin.read())
    # Open descriptors come first, because the later attempts open files of their own.
    holes = [f"use open file {number}" for number in range(3, 256) if possible(partial(os.fstat, number))]
    holes += [f"read {path}" for path in task["secrets"] if possible(partial(read, path))]
    for kind, flags in (("changed", os.O_WRONLY), ("created", os.O_WRONLY | os.O_CREAT)):
        holes += [f"write {path}" for path in task[kind] if possible(partial(os.open, path, flags))]
    for path in task["devices"]:
        holes += [f"{what} {path}" for what, change in changes(path) if possible(change)]
    if possible(partial(connect, socket.AF_INET, ("127.0.0.1", task["port"]))):
        holes.append("connect to loopback")
    if possible(partial(connect, socket.AF_UNIX, task["abstract"])):
        holes.append("connect to an abstract socket")
    holes += [f"signal process {pid}" for pid in task["processes"] if possible(partial(os.kill, pid, 0))]
    holes += [f"environment variable {name}" for name in os.environ if name in task["variables"]]
    if 0 in os.getresuid():
        holes.append("be root")
    for name, arguments in (
        ("unshare", (CLONE_NEWUSER,)),
        ("unshare", (CLONE_NEWNS,)),
        ("ptrace", (PTRACE_TRACEME, 0, 0, 0)),
        ("setuid", (0,)),
    ):
        if possible(partial(call, name, *arguments)):
            holes.append(f"{name}{arguments}")
    for what, started in (
        ("processes", count_processes(task["max_processes"])),
        ("threads", count_threads(task["max_processes"])),
    ):
        if started >= task["max_processes"]:  # the payload itself counts as one, so one must be refused
            holes.append(f"start {started} {what}")
    print(json.dumps({"nonce": task["nonce"], "holes": holes}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
