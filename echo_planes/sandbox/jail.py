"""Environment in which a program starts.

`bwrap_command` returns bubblewrap's command line. `enter` turns a forked child into the program: control
group, rlimits, uid, and either bubblewrap or Landlock with seccomp. It never returns; it may raise.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import stat
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from echo_planes.cluster.process import die_with_parent
from echo_planes.sandbox import landlock, seccomp
from echo_planes.sandbox.cgroups import Group
from echo_planes.sandbox.model import MAIN, Limits, Plan, Python, SandboxError, Tier

WORK = "/tmp"  # the scratch folder, as a program in `namespaces` sees it
SYSTEM = ("/usr", "/lib", "/lib64", "/bin")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
MAX_FILES_OPEN = 256
OWN_TASKS: dict[Tier, int] = {"namespaces": 1, "landlock": 0}  # bubblewrap runs beside the program
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 22, 38
SECCOMP_MODE_FILTER = 2
# No packages of a user, and no compiled files written. Without -I, which would ignore PYTHONHASHSEED.
OPTIONS = ("-s", "-B")
WITHOUT_PACKAGES = "-S"


@dataclass(frozen=True)
class Descriptors:
    """Open files handed to a child.

    Args:
        stdin, stdout, stderr: standard descriptors of the program.
        files: initial contents of its scratch folder, by name (namespaces only).
        filter: the seccomp program (namespaces only).
        status: pipe to which bubblewrap reports the program's start and end (namespaces only).
    """

    stdin: int
    stdout: int
    stderr: int
    files: Mapping[str, int]
    filter: int
    status: int


def environment(work: str) -> dict[str, str]:
    """Return all environment variables of a program. A fixed hash seed makes verdicts reproducible."""
    fixed = {"PATH": "/usr/bin", "LANG": "C.UTF-8", "HOME": work, "TMPDIR": work, "PYTHONHASHSEED": "0"}
    # Libraries such as numpy's would start a thread for each core.
    return fixed | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def command_of(python: Python) -> list[str]:
    """Return the interpreter with its options."""
    return [python.path, *OPTIONS, *([] if python.has_packages else [WITHOUT_PACKAGES])]


def bwrap_command(
    bwrap: str, plan: Plan, limits: Limits, links: Mapping[str, str], given: Descriptors
) -> list[str]:
    """Return bubblewrap's command line: all namespaces unshared, the system's programs mounted read only.

    There is no /proc and no /dev/shm. The scratch folder is a file system of `scratch_bytes` in memory, which
    ends with the namespace. The program is process 1 of its namespace: when it ends, all its children end.

    Args:
        links: result of `system_links`; paths of `SYSTEM` that it lacks are not mounted.
        given: descriptors for bubblewrap and the program.
    """
    command = [bwrap, "--unshare-all", "--unshare-user", "--disable-userns", "--as-pid-1"]
    command += ["--cap-drop", "ALL", "--die-with-parent", "--new-session", "--hostname", "sandbox"]
    for path in SYSTEM:
        if links.get(path):
            command += ["--symlink", links[path], path]
        elif path in links:
            command += ["--ro-bind", path, path]
    for device in DEVICES:
        command += ["--dev-bind", device, device]
    command += ["--size", str(limits.scratch_bytes), "--tmpfs", WORK]
    # After the scratch folder, which would hide an environment in /tmp.
    for folder in plan.python.folders:
        if not folder.startswith("/usr/"):
            command += ["--ro-bind", folder, folder]
    for name, descriptor in given.files.items():
        command += ["--file", str(descriptor), f"{WORK}/{name}"]
    command += ["--chdir", WORK, "--remount-ro", "/"]
    command += ["--seccomp", str(given.filter), "--json-status-fd", str(given.status)]
    return [*command, "--", *command_of(plan.python), f"{WORK}/{MAIN}"]


def system_links() -> dict[str, str]:
    """Return the paths of `SYSTEM` on this machine, each with its target if it is a link, "" if a folder."""
    found = {}
    for path in SYSTEM:
        if os.path.islink(path):
            found[path] = os.readlink(path)
        elif os.path.isdir(path):
            found[path] = ""
    return found


def readable_by_others(path: Path) -> bool:
    """Return whether any user may reach and read `path`."""
    if not all(parent.stat().st_mode & stat.S_IXOTH for parent in path.parents):
        return False
    return bool(path.stat().st_mode & stat.S_IROTH)


def interpreter(uid: int | None, chosen: Python | None = None) -> Python:
    """Return the Python for programs: the chosen one, else the running one, else the system's.

    Raises:
        SandboxError: the programs' user cannot read it.
    """
    if chosen is not None:
        for path in map(Path, (chosen.path, *chosen.folders)):
            if uid is not None and not readable_by_others(path):
                raise SandboxError(f"the sandbox's user cannot read {path}: make it readable for everybody")
        return chosen
    own = Path(os.path.realpath(sys.executable))
    for python, prefix in ((own, Path(sys.base_prefix).resolve()), (Path("/usr/bin/python3"), Path("/usr"))):
        if prefix == prefix.parent or not python.exists():  # prefix "/" would expose the whole disk
            continue
        if uid is None or (readable_by_others(python) and readable_by_others(prefix)):
            return Python(str(python), (f"{prefix}/",))
    raise SandboxError(
        f"the sandbox's user cannot read {own}, which lies in a private folder: install /usr/bin/python3"
    )


def rlimits(plan: Plan, limits: Limits) -> dict[int, int]:
    """Return the limits of each process, as resource -> value."""
    values = {
        # If core_pattern is a pipe, the kernel writes cores to it unless the limit is exactly 1.
        resource.RLIMIT_CORE: 1,
        # With a cgroup the warden counts exactly, for all processes, and this limit is only a reserve.
        resource.RLIMIT_CPU: math.ceil(limits.cpu_s) * (2 if plan.cgroup else 1),
        resource.RLIMIT_FSIZE: limits.scratch_bytes,
        resource.RLIMIT_NOFILE: MAX_FILES_OPEN,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    if plan.uid is not None:  # the kernel counts all processes of a user, so the uid must have no others
        values[resource.RLIMIT_NPROC] = limits.max_processes + OWN_TASKS[plan.tier]
    if not plan.cgroup:
        values[resource.RLIMIT_AS] = limits.memory_bytes
    return values


def enter(
    plan: Plan, limits: Limits, group: Group | None, scratch: str, command: list[str], given: Descriptors
) -> None:
    """Turn a forked child into the program. If a step fails, no program runs.

    Raises:
        OSError, SandboxError: a step failed. The caller must exit.
    """
    warden = os.getppid()
    os.setsid()
    for number in (signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    if group is not None:
        group.enter()
    Path("/proc/self/oom_score_adj").write_text("1000")  # if memory runs out, kill the program first
    for kind, value in rlimits(plan, limits).items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    if plan.uid is not None:
        os.setgroups([])
        os.setresgid(plan.uid, plan.uid, plan.uid)
        os.setresuid(plan.uid, plan.uid, plan.uid)
    if 0 in os.getresuid():
        raise SandboxError("programs would run as root: run as another user, or with the right to set uids")
    os.umask(0o077)
    for standard, descriptor in enumerate((given.stdin, given.stdout, given.stderr)):
        os.dup2(descriptor, standard)
    if plan.tier == "namespaces":
        for descriptor in (*given.files.values(), given.filter, given.status):
            os.set_inheritable(descriptor, True)
        os.execve(command[0], command, environment(WORK))
    die_with_parent()
    if os.getppid() != warden:
        raise SandboxError("the warden has died")
    os.chdir(scratch)
    _restrict(plan, scratch)
    command = command_of(plan.python)
    os.execve(command[0], [*command, MAIN], environment(scratch))


def _restrict(plan: Plan, scratch: str) -> None:
    """Restrict this process permanently by Landlock and seccomp."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
    rights = {path: landlock.READ for path in (*SYSTEM, *plan.python.folders) if os.path.isdir(path)}
    rights |= dict.fromkeys(DEVICES, landlock.DEVICE)
    landlock.restrict(rights | {scratch: landlock.SCRATCH})
    code = seccomp.program(plan.tier, plan.tasks, os.getpid())
    array = ctypes.create_string_buffer(code, len(code))
    count = len(code) // struct.calcsize("<HBBI")
    header = struct.pack("HxxxxxxP", count, ctypes.addressof(array))  # struct sock_fprog
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP)")
