"""Set-up that is common to the processes of a run."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from echo_planes.cluster.scratch import join

PR_SET_PDEATHSIG = 1
REMEMBERED_CALLS = "2000"  # by Ray's control process, for its dashboard; 100,000 by default, 4 kB each


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies, so that whoever is killed leaves nothing behind.

    Without it an actor outlives its node's daemon by more than a minute, and an engine its actor for good,
    and keeps its GPU. It holds as long as the calling thread does, and goes with the *thread* that started
    this process: both must live as long as their processes.

    Raises:
        OSError: the kernel refuses.
    """
    if sys.platform != "linux":
        return
    parent_pid = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # A parent that died before is never told of. Others than multiprocessing's children read a pipe from
    # their parent next, or are looked after by Ray.
    known = multiprocessing.parent_process()
    if os.getppid() != parent_pid or (known is not None and not known.is_alive()):
        os.kill(os.getpid(), signal.SIGKILL)


def enter_actor() -> None:
    """First act in an actor's process: it ends with its node, and keeps its files where they are cleared.

    Raises:
        ClusterError: there is no room for temporary files.
    """
    die_with_parent()
    join()


def keep_ray_private() -> None:
    """Before Ray is imported: a cluster that this process starts listens on loopback, behind a fresh token.

    Ray has no setting for the first; the variable is its switch for platforms where it stays local. Such a
    cluster also remembers fewer calls than by default: those came to 400 MB within half an hour of a run.
    """
    os.environ.setdefault("RAY_task_events_max_num_task_in_gcs", REMEMBERED_CALLS)
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def settle() -> None:
    """After start-up: what was imported lives as long as the process, so the collector need not scan it.

    Each full collection over the modules of torch and transformers costs tens of milliseconds.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def within(limit_s: float, error: Exception) -> Iterator[None]:
    """Around Python code that may never end: `error` is raised in it after `limit_s` seconds.

    Only the main thread can be interrupted so, and only between two steps of Python: elsewhere nothing is
    limited. An alarm that was set before comes as much later as this took.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise error

    before = signal.signal(signal.SIGALRM, end)
    delay_s, interval_s = signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, delay_s, interval_s)


def free_port() -> int:
    """A port of loopback that nobody has now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
