"""Types of the sandbox: programs and limits that go in, outcomes that come out, the walls around it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from echo_planes.errors import ClusterError, TaskError

# ok: exit status 0. failed: another exit status, or too large to be started. timeout: wall or CPU time.
# memory, output, disk: a limit was reached. killed: ended by a signal. cancelled: nobody waits for it.
Status = Literal["ok", "failed", "timeout", "memory", "output", "disk", "killed", "cancelled"]
Tier = Literal["namespaces", "landlock"]
# What a program may start: processes, counted together by a cgroup; threads of one process, counted by the
# uid; or nothing, where nothing would count it.
Tasks = Literal["processes", "threads", "nothing"]

MAIN = "main.py"
MAX_FILES = 64
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,63}")


class SandboxError(ClusterError):
    """This machine offers no protection, or what protects programs broke. Nothing ran unprotected."""


@dataclass(frozen=True)
class Limits:
    """Resources that one program may use.

    Args:
        wall_s: time from start to end, seconds.
        cpu_s: processor time of all its processes, seconds. Without a cgroup it is rounded up.
        memory_bytes: memory of all its processes, files in its scratch folder included.
        output_bytes: standard output, and standard error, each.
        max_processes: processes and threads at one time.
        scratch_bytes: files it may write, and its source with the files given to it.
    """

    wall_s: float = 10.0
    cpu_s: float = 10.0
    memory_bytes: int = 512 << 20
    output_bytes: int = 1 << 20
    max_processes: int = 32
    scratch_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise SandboxError(f"sandbox limit {name}={value} must be more than 0")


@dataclass(frozen=True)
class Program:
    """A Python program, as text.

    Args:
        source: becomes `main.py` in the working directory, and is run.
        stdin: its standard input.
        files: further files in the working directory, by name.

    Raises:
        TaskError: a file's name is not a plain one, or there are too many.
    """

    source: str
    stdin: str = ""
    files: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.files) > MAX_FILES:
            raise TaskError(f"a program with {len(self.files)} files: at most {MAX_FILES} are allowed")
        for name in self.files:
            if not FILE_NAME.fullmatch(name) or name == MAIN:
                raise TaskError(f"file name {name!r} of a program: use letters, digits, _ . -; not {MAIN}")


@dataclass(frozen=True)
class Outcome:
    """Outcome of a program.

    Args:
        status: see `Status`.
        exit_code: its exit status, 128 + n after signal n; None where the sandbox ended it.
        stdout, stderr: at most `output_bytes` each, with U+FFFD for what is not UTF-8.
        wall_s: time from start to end, seconds.
    """

    status: Status
    exit_code: int | None
    stdout: str
    stderr: str
    wall_s: float


@dataclass(frozen=True)
class Plan:
    """Walls that a slot builds around its programs.

    Args:
        tier: the kind of wall.
        tasks: what a program may start.
        interpreter: the Python that runs programs.
        prefix: the folder that Python lives in.
        uid: user the programs run as; None where we are not root and they run as we do.
        cgroup: "v1", "v2", or "" where nothing could be made. Counts processes and memory.
    """

    tier: Tier
    tasks: Tasks
    interpreter: str
    prefix: str
    uid: int | None
    cgroup: str


def oversize(program: Program, limits: Limits) -> str:
    """Why a program is too large to be started; "" if it is not."""
    texts = (program.source, *program.files.values())
    written = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
    if written > limits.scratch_bytes:
        return f"source and files are {written} bytes, more than scratch_bytes={limits.scratch_bytes}"
    given = len(program.stdin.encode("utf-8", "surrogatepass"))
    if given > limits.memory_bytes:
        return f"standard input is {given} bytes, more than memory_bytes={limits.memory_bytes}"
    return ""


def tasks_allowed(tier: Tier, has_uid: bool, has_cgroup: bool) -> Tasks:
    """Tasks that a program may start, so that all of them are counted.

    Without a cgroup each process has its own memory limit, so there must be only one. Without namespaces a
    process could outlive its parent, so there must be only one. Threads need a cgroup or a uid of their own
    to be counted by.
    """
    if tier == "namespaces" and has_cgroup:
        return "processes"
    return "threads" if has_uid or has_cgroup else "nothing"


def describe(plan: Plan, limits: Limits) -> str:
    """Describe the protection of this machine, in words for the user."""
    if plan.tier == "namespaces":
        parts = ["bubblewrap (no network, no host files but the interpreter's, no other processes), seccomp"]
    else:
        parts = ["Landlock and seccomp (no sockets, no writing outside the scratch folder, no new processes)"]
    memory = f"{limits.memory_bytes / (1 << 20):.0f} MiB"
    if plan.cgroup:
        parts.append(f"cgroup {plan.cgroup} (memory {memory}, {limits.max_processes} processes and threads)")
    else:
        parts.append(f"rlimits (memory {memory}, one process)")
    if plan.tasks == "nothing":
        parts.append("no threads, since nothing here would count them")
    parts.append("a uid for each slot" if plan.uid is not None else "our own uid (not root)")
    return f"{plan.tier}: " + "; ".join(parts) + f"; {plan.interpreter}"
