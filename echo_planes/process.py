"""What every process of a run does for itself."""

from __future__ import annotations

import ctypes
import gc
import os
import secrets
import signal
import socket
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies, so that a killed node leaves nothing behind.

    Without it an actor outlives its node's daemon by more than a minute, and keeps its GPU.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def keep_ray_private() -> None:
    """Before Ray is imported: a cluster that this process starts listens on loopback, behind a fresh token.

    Ray has no setting for the first; the variable is its switch for platforms where it stays local.
    """
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def settle() -> None:
    """After start-up: what was imported lives as long as the process, so the collector need not scan it.

    Each full collection over the modules of torch and transformers costs tens of milliseconds.
    """
    gc.collect()
    gc.freeze()


def free_port() -> int:
    """A port of loopback that nobody has now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
