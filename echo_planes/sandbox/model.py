"""Types of the sandbox: programs and limits (input), outcomes (output), and the protection plan."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from echo_planes.errors import ClusterError, TaskError

# ok: exit status 0. failed: another exit status, or too large to start. timeout: wall or CPU time.
# memory, output, disk: a limit was reached. killed: ended by a signal. cancelled: the pool ended it.
Status = Literal["ok", "failed", "timeout", "memory", "output", "disk", "killed", "cancelled"]
Tier = Literal["namespaces", "landlock"]
# Tasks that a program may start: processes, which a cgroup counts together; threads of one process, which a
# cgroup or the uid counts; or nothing, where the kernel would count neither.
Tasks = Literal["processes", "threads", "nothing"]

MAIN = "main.py"
MAX_FILES = 64
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,63}")


class SandboxError(ClusterError):
    """Missing or broken protection on this machine. No program ran unprotected."""


@dataclass(frozen=True)
class Limits:
    """Resources that one program may use.

    Args:
        wall_s: time from start to end, seconds.
        cpu_s: processor time of all its processes, seconds. Without a cgroup rounded up to whole seconds.
        memory_bytes: memory of all its processes, files in its scratch folder included.
        output_bytes: standard output, and standard error, each.
        max_processes: processes and threads at one time.
        scratch_bytes: all files in its working directory; also its source and given files together.
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
    """Python program, as text.

    Args:
        source: text of `main.py` in the working directory, the file that runs.
        stdin: its standard input.
        files: further files in the working directory, by name.

    Raises:
        TaskError: a file name does not match `FILE_NAME`, is `main.py`, or there are more than `MAX_FILES`.
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
        exit_code: its exit status, 128 + n after signal n; None if a limit or the pool ended it.
        stdout, stderr: at most `output_bytes` each, with U+FFFD for invalid UTF-8.
        wall_s: time from start to end, seconds.
    """

    status: Status
    exit_code: int | None
    stdout: str
    stderr: str
    wall_s: float


@dataclass(frozen=True)
class Python:
    """Interpreter of programs.

    Args:
        path: the executable.
        folders: folders of its installation, and of its environment if it has one; each ends with "/".
        has_packages: whether programs may import its installed packages.
    """

    path: str
    folders: tuple[str, ...]
    has_packages: bool = False


@dataclass(frozen=True)
class Plan:
    """Protection that a slot sets up around its programs.

    Args:
        tier: kind of protection.
        tasks: tasks that a program may start.
        python: Python that runs programs.
        uid: user that programs run as; None: the warden is not root, and programs run as its user.
        cgroup: version of the cgroup that limits processes and memory, "v1" or "v2"; "": there is none.
    """

    tier: Tier
    tasks: Tasks
    python: Python
    uid: int | None
    cgroup: str


def oversize(program: Program, limits: Limits) -> str:
    """Describe why a program is too large to start; "" if it is not."""
    texts = (program.source, *program.files.values())
    written = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
    if written > limits.scratch_bytes:
        return f"source and files are {written} bytes, more than scratch_bytes={limits.scratch_bytes}"
    given = len(program.stdin.encode("utf-8", "surrogatepass"))
    if given > limits.memory_bytes:
        return f"standard input is {given} bytes, more than memory_bytes={limits.memory_bytes}"
    return ""


def tasks_allowed(tier: Tier, has_uid: bool, has_cgroup: bool) -> Tasks:
    """Return the tasks that a program may start, so that the kernel counts all of them.

    Without a cgroup each process has its own memory limit, so there must be only one. Without namespaces a
    process could outlive its parent, so there must be only one. Only a cgroup or a separate uid counts
    threads.
    """
    if tier == "namespaces" and has_cgroup:
        return "processes"
    return "threads" if has_uid or has_cgroup else "nothing"


def describe(plan: Plan, limits: Limits) -> str:
    """Describe the protection of this machine for the user."""
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
    return f"{plan.tier}: " + "; ".join(parts) + f"; {plan.python.path}"
