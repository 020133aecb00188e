"""Verdict on a program, from the warden's observations."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import Literal

from echo_planes.sandbox.model import Limits, Plan, Status

Cause = Literal["wall", "cpu", "output", "disk", "cancelled"]
CAUSES: dict[Cause, Status] = {
    "wall": "timeout",
    "cpu": "timeout",
    "output": "output",
    "disk": "disk",
    "cancelled": "cancelled",
}
SIGNAL_BASE = 128
CPU_SLACK = 0.5  # for RLIMIT_CPU the kernel counts ticks, which on a busy machine differ from the time used


@dataclass(frozen=True)
class Observed:
    """Observations of the warden on a program.

    Args:
        cause: why the warden ended it; None if it ended by itself.
        wait_status: status from waitpid(2).
        oom_kills: processes that the kernel killed for lack of memory.
        cpu_s: processor seconds of all its processes.
        last_line: last line of its standard error.
    """

    cause: Cause | None
    wait_status: int
    oom_kills: int
    cpu_s: float
    last_line: str


def decide(observed: Observed, plan: Plan, limits: Limits) -> tuple[Status, int | None]:
    """Return status and exit code. A limit that was reached takes precedence over the exit status."""
    if observed.cause is not None:
        return CAUSES[observed.cause], None
    code = os.waitstatus_to_exitcode(observed.wait_status)
    code = SIGNAL_BASE - code if code < 0 else code  # bubblewrap reports signals this way too
    if observed.oom_kills:
        return "memory", code
    if code == SIGNAL_BASE + signal.SIGKILL and observed.cpu_s >= CPU_SLACK * limits.cpu_s:
        return "timeout", None
    # Without a cgroup RLIMIT_AS bounds memory, and allocations fail.
    if not plan.cgroup and code == 1 and observed.last_line.startswith("MemoryError"):
        return "memory", code
    if code > SIGNAL_BASE:
        return "killed", code
    return ("failed" if code else "ok"), code
