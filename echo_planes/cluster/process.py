"""Set-up common to the processes of a run."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import secrets
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from echo_planes.cluster.scratch import join

PR_SET_PDEATHSIG = 1
LOOPBACK = "127.0.0.1"
REMEMBERED_CALLS = "2000"  # calls that Ray's control process keeps, 4 kB each; Ray's default is 100,000
TOLD_BY_THE_RUN = "A worker died or was killed while executing a task"  # a regular expression
FORGOTTEN_CALLS = "1000"  # ids of older calls that it keeps, some 50 bytes each; Ray's default is 1,000,000


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies, so that a killed process leaves no children.

    Without it, an actor outlives its node's daemon by more than a minute, and an engine outlives its actor
    for good and keeps its GPU. The request ends with the calling thread, and the kernel acts on it when the
    *thread* that started this process ends. So both threads must live as long as their processes.

    Raises:
        OSError: the kernel refuses.
    """
    if sys.platform != "linux":
        return
    parent_pid = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # The kernel sends nothing for a parent that died before the call. multiprocessing's children check for
    # that here. Other children read a pipe from their parent next, or Ray supervises them.
    known = multiprocessing.parent_process()
    if os.getppid() != parent_pid or (known is not None and not known.is_alive()):
        os.kill(os.getpid(), signal.SIGKILL)


def enter_actor() -> None:
    """Set up an actor's process, as its first call: it ends with its node, and its scratch is cleared.

    Raises:
        ClusterError: the folder for temporary files cannot be made.
    """
    die_with_parent()
    join()


def keep_ray_private() -> None:
    """Make a cluster that this process starts listen on loopback only, with a new token.

    The caller must call it before Ray is imported. Ray has no setting for loopback, so this sets Ray's switch
    for platforms where it stays local. Such a cluster also keeps fewer calls than Ray's default, which took
    400 MB within half an hour of a run, and fewer ids of those it forgot, which took another 5 MB for every
    100,000 calls.
    """
    os.environ.setdefault("RAY_task_events_max_num_task_in_gcs", REMEMBERED_CALLS)
    os.environ.setdefault("RAY_task_events_max_dropped_task_attempts_tracked_per_job_in_gcs", FORGOTTEN_CALLS)
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def quieten_ray() -> None:
    """Leave out what Ray prints about a process that died, a paragraph each: the run says it in one line.

    The caller must call it before Ray is imported.
    """
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", TOLD_BY_THE_RUN)


def settle() -> None:
    """Exclude all present objects from garbage collection. The caller calls it after start-up.

    Imported modules live as long as the process, and a full collection over those of torch and transformers
    costs tens of milliseconds.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def within(limit_s: float, error: Exception) -> Iterator[None]:
    """Raise `error` in the enclosed Python code after `limit_s` seconds.

    It has no effect outside the main thread, and interrupts only between two bytecode instructions. An
    earlier alarm is postponed by the time spent here.
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


def release_freed() -> None:
    """Give freed memory back to the system. C's allocator may keep freed blocks below 32 MB for good."""
    if sys.platform == "linux":
        with suppress(AttributeError):  # another C library than GNU's
            ctypes.CDLL(None).malloc_trim(0)


def io_mib(apart: int | None) -> int:
    """Return the MiB that this process and its children have read from disks and written to them.

    What a process logs while it stands still is far less. `apart`: a child that is left out, by its pid: a
    weight node goes on while the process that it belongs to stands still.
    """
    import psutil  # not above: the sandbox's warden imports this module on a Python without packages

    own = psutil.Process()
    total_bytes = 0
    for process in [own, *(child for child in own.children(recursive=True) if child.pid != apart)]:
        with suppress(psutil.Error):  # a child that has just ended
            counters = process.io_counters()
            total_bytes += counters.read_bytes + counters.write_bytes
    return int(total_bytes) >> 20
