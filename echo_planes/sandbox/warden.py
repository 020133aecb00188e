"""Process of one slot: starts one program at a time, watches it, ends it and cleans up after it.

The process is small, so that forking it is cheap, and it runs outside the protection. It ends, and cleans up,
when its parent closes the pipe or dies. The warden is a subreaper: orphans of a program become its children.
When it has no children left, nothing of the program is left.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from echo_planes.sandbox import cgroups, jail, landlock, seccomp, users, wire
from echo_planes.sandbox.model import (
    MAIN,
    Limits,
    Outcome,
    Plan,
    Python,
    SandboxError,
    Tier,
    describe,
    tasks_allowed,
)
from echo_planes.sandbox.verdict import Cause, Observed, decide

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LOOK_S = 0.02  # interval between checks of processor time and scratch space
GONE_LIMIT_S = 10.0  # killed processes that exist for longer are an error
READ_BYTES = 1 << 16
CONTROL, REPLIES = 0, 1
MAX_SCRATCH_FILES = 4096
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class Stop(Exception):
    """Signal that the parent is gone, or asks the warden to end."""


@dataclass
class Run:
    """Running program."""

    pid: int
    pipes: dict[int, bytearray]
    status: int
    failure: int
    begun_s: float
    cause: Cause | None = None
    wait_status: int | None = None
    cpu_s: float = 0.0
    said: bytes = b""
    outputs: list[bytearray] = field(default_factory=list)


class Warden:
    """Slot with its uid, control group and scratch folder, which serve all its programs.

    Raises:
        SandboxError: this machine cannot provide this tier.
    """

    def __init__(self, tier: Tier, limits: Limits, python: Python | None, bwrap: str, name: str) -> None:
        self.limits = limits
        self._bwrap = bwrap
        self._group: cgroups.Group | None = None
        self._scratch = ""
        if sys.platform != "linux" or os.uname().machine != "x86_64":
            raise SandboxError(f"the sandbox knows Linux on x86-64 only, not {os.uname().machine}")
        if tier == "namespaces" and not bwrap:
            raise SandboxError("bwrap is not installed (apt install bubblewrap)")
        if tier == "landlock" and landlock.abi() < landlock.MIN_ABI:
            raise SandboxError(f"Landlock ABI {landlock.abi()}, {landlock.MIN_ABI} is needed (Linux 6.2)")
        uid = None
        if os.geteuid() == 0:
            uid, self._uid_claim = users.claim_uid()
        python = jail.interpreter(uid, python)
        self._links = jail.system_links()
        if tier == "landlock":
            self._scratch = tempfile.mkdtemp(prefix="echo-planes-sandbox-")
            if uid is not None:
                os.chown(self._scratch, uid, uid)
        self._group = cgroups.find(
            Path("/proc/self/mountinfo").read_text(),
            Path("/proc/self/cgroup").read_text(),
            name,
            limits.memory_bytes,
            limits.max_processes + jail.OWN_TASKS[tier],
        )
        version = self._group.version if self._group else ""
        tasks = tasks_allowed(tier, uid is not None, bool(version))
        self.plan = Plan(tier, tasks, python, uid, version)
        # In its own namespace the program is process 1. The filter for Landlock is made in the child.
        self._filter = _file("filter", seccomp.program(tier, tasks, own_pid=1))

    def facts(self) -> dict[str, Any]:
        """Return the facts that the pool shows to the user, and uses to clean up after a killed warden."""
        folders = list(self._group.folders.values()) if self._group else []
        return {
            "protection": describe(self.plan, self.limits),
            "plan": asdict(self.plan),
            "folders": [str(folder) for folder in folders],
            "scratch": self._scratch,
        }

    def run(
        self, source: str, stdin: str, files: dict[str, str], joined: tuple[int, int] | None = None
    ) -> Outcome:
        """Run one program to its end, and leave nothing of it.

        Args:
            joined: pipe ends that become its standard input and output. They replace `stdin`, and the
                outcome then has no `stdout`. This method closes them.

        Raises:
            SandboxError: the program did not start for lack of protection, or its processes do not end.
            Stop: the parent is gone; nothing of the program is left.
        """
        files = files | {MAIN: source}
        texts = {name: text.encode("utf-8", "surrogatepass") for name, text in files.items()}
        oom_kills = self._group.oom_kills() if self._group else 0
        cpu_s = self._cpu_s()
        run = self._start(texts, stdin.encode("utf-8", "surrogatepass"), joined)
        try:
            self._watch(run, cpu_s)
        finally:
            self._end(run)
            self._clear_scratch()
        wall_s = time.monotonic() - run.begun_s
        if self._group:
            oom_kills = self._group.oom_kills() - oom_kills
        run.cpu_s = max(run.cpu_s, self._cpu_s() - cpu_s)
        stdout, stderr = (bytes(data).decode(errors="replace") for data in run.outputs)
        self._check_started(run, stderr)
        lines = stderr.rstrip().rsplit("\n", 1)
        seen = Observed(run.cause, run.wait_status or 0, oom_kills, run.cpu_s, lines[-1])
        status, code = decide(seen, self.plan, self.limits)
        return Outcome(status, code, stdout, stderr, wall_s)

    def _start(self, texts: dict[str, bytes], stdin: bytes, joined: tuple[int, int] | None) -> Run:
        opened: list[int] = []

        def keep(*descriptors: int) -> tuple[int, ...]:
            opened.extend(descriptors)
            return descriptors

        inputs = keep(*joined) if joined else keep(_file("stdin", stdin))
        if self.plan.tier == "namespaces":
            files = {name: keep(_file(name, data))[0] for name, data in texts.items()}
        else:
            files = {}
            self._fill_scratch(texts)
        ends = [os.pipe() for _ in range(4)]  # stdout, stderr, bubblewrap's status, errors before exec
        writers = keep(*(writer for _, writer in ends))
        os.lseek(self._filter, 0, os.SEEK_SET)
        stdout = joined[1] if joined else writers[0]
        given = jail.Descriptors(inputs[0], stdout, writers[1], files, self._filter, writers[2])
        command = jail.bwrap_command(self._bwrap, self.plan, self.limits, self._links, given)
        begun_s = time.monotonic()
        pid = os.fork()
        if pid == 0:
            self._child(command, given, writers[3])
        for descriptor in opened:
            os.close(descriptor)
        readers = [reader for reader, _ in ends]
        for reader in readers:
            os.set_blocking(reader, False)
        pipes = {readers[0]: bytearray(), readers[1]: bytearray()}
        return Run(pid, pipes, readers[2], readers[3], begun_s, outputs=list(pipes.values()))

    def _child(self, command: list[str], given: jail.Descriptors, failure: int) -> NoReturn:
        try:
            jail.enter(self.plan, self.limits, self._group, self._scratch, command, given)
        except BaseException as error:  # noqa: BLE001  # a fork must never continue the parent's code
            os.write(failure, f"{type(error).__name__}: {error}".encode()[:READ_BYTES])
        finally:
            os._exit(1)

    def _watch(self, run: Run, cpu_before_s: float) -> None:
        """Read output, check limits and listen to the pool until the program ends, or has a cause to end."""
        ended = os.pidfd_open(run.pid)
        try:
            poll = select.poll()
            for descriptor in (CONTROL, ended, *run.pipes):
                poll.register(descriptor, select.POLLIN)
            while run.cause is None:
                left_s = run.begun_s + self.limits.wall_s - time.monotonic()
                ready = {descriptor for descriptor, _ in poll.poll(max(0.0, min(left_s, LOOK_S)) * 1000)}
                for descriptor in ready & run.pipes.keys():
                    if not self._read(run, descriptor):
                        poll.unregister(descriptor)
                if CONTROL in ready:
                    if wire.read_frame(CONTROL) is None:
                        raise Stop
                    run.cause = "cancelled"
                if ended in ready:
                    return
                run.cause = run.cause or self._exceeded(left_s, self._cpu_s() - cpu_before_s)
        finally:
            os.close(ended)

    def _exceeded(self, left_s: float, cpu_s: float) -> Cause | None:
        if left_s <= 0:
            return "wall"
        if cpu_s >= self.limits.cpu_s:
            return "cpu"
        if self._scratch and self._scratch_full():
            return "disk"
        return None

    def _read(self, run: Run, descriptor: int) -> bool:
        """Read available bytes of one output, up to the limit. Return False at its end."""
        data = run.pipes[descriptor]
        try:
            part = os.read(descriptor, READ_BYTES)
        except BlockingIOError:
            return True
        room = self.limits.output_bytes - len(data)
        data += part[:room]
        if len(part) > room:
            run.cause = run.cause or "output"
        return bool(part)

    def _end(self, run: Run) -> None:
        """Kill the program and its descendants, wait for their end, and read the rest of the output."""
        deadline_s = time.monotonic() + GONE_LIMIT_S
        while self._reap(run):
            self._kill(run)
            if time.monotonic() > deadline_s:
                raise SandboxError(f"a program's processes do not end {GONE_LIMIT_S:.0f} s after SIGKILL")
            time.sleep(0.001)
        for descriptor in run.pipes:
            while self._read(run, descriptor) and run.cause != "output":
                pass
        run.said, failed = _drain(run.status), _drain(run.failure)
        for descriptor in (*run.pipes, run.status, run.failure):
            os.close(descriptor)
        if failed:
            raise SandboxError(f"a program was not started: {failed.decode(errors='replace')}")

    def _reap(self, run: Run) -> bool:
        """Reap the processes that have ended, and return whether any process is left."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            run.cpu_s += usage.ru_utime + usage.ru_stime
            if pid == run.pid:
                run.wait_status = status

    def _kill(self, run: Run) -> None:
        if run.wait_status is None:
            os.kill(run.pid, signal.SIGKILL)  # not reaped yet, so no other process has this id
        if self._group is not None:
            self._group.kill()
        elif self.plan.uid is not None:
            users.kill_user(self.plan.uid)

    def _check_started(self, run: Run, stderr: str) -> None:
        """Raise SandboxError if bubblewrap did not report a start: then the program has not failed."""
        if self.plan.tier == "namespaces" and run.cause is None and b"child-pid" not in run.said:
            reason = stderr.strip().splitlines() or ["it was killed"]
            raise SandboxError(f"bubblewrap could not build a sandbox: {reason[0][:200]}")

    def _cpu_s(self) -> float:
        used_s = self._group.cpu_s() if self._group else None
        return 0.0 if used_s is None else used_s

    def _fill_scratch(self, texts: dict[str, bytes]) -> None:
        for name, data in texts.items():
            path = Path(self._scratch, name)
            path.write_bytes(data)
            if self.plan.uid is not None:
                os.chown(path, self.plan.uid, self.plan.uid)

    def _scratch_full(self) -> bool:
        used_bytes = 0
        with os.scandir(self._scratch) as entries:
            for count, entry in enumerate(entries):
                with suppress(FileNotFoundError):  # the program has just removed it
                    used_bytes += entry.stat(follow_symlinks=False).st_blocks * 512
                if count > MAX_SCRATCH_FILES or used_bytes > self.limits.scratch_bytes:
                    return True
        return False

    def _clear_scratch(self) -> None:
        """Remove all scratch files. Programs can make only plain files there (see `landlock.SCRATCH`)."""
        if self._scratch:
            with os.scandir(self._scratch) as entries:
                for entry in entries:
                    os.unlink(entry.path)

    def close(self) -> None:
        """Remove the slot's control group and scratch folder."""
        if self._group is not None:
            self._group.remove()
        if self._scratch:
            shutil.rmtree(self._scratch)


def _file(name: str, data: bytes) -> int:
    """Make a sealed anonymous file with these bytes, and return its descriptor at the first byte."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    wire.write_all(descriptor, data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    return descriptor


def _drain(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, READ_BYTES)
    except BlockingIOError:
        return b""


def _hang_up(number: int, frame: object) -> None:
    """Handle SIGTERM: replace the pool's pipe by an empty file, so that it appears closed."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, CONTROL)
    os.close(null)


def serve(warden: Warden, handed: socket.socket) -> None:
    """Answer requests until the parent closes the pipe.

    Args:
        handed: socket on which the pipe ends of a joined program arrive, before its request.
    """
    wire.write_all(REPLIES, wire.encode(warden.facts()))
    while (message := wire.read_frame(CONTROL)) is not None:
        if "source" not in message:  # a cancellation that came after the program's end
            continue
        if message.pop("is_joined"):
            _, (source, sink), _, _ = socket.recv_fds(handed, 1, 2, socket.MSG_CMSG_CLOEXEC)
            message["joined"] = source, sink
        try:
            reply = asdict(warden.run(**message))
        except SandboxError as error:
            reply = {"error": str(error)}
        wire.write_all(REPLIES, wire.encode(reply))


def main(arguments: list[str]) -> None:
    """Run a warden until its parent closes the pipe or dies.

    Args:
        arguments: tier, limits as JSON, the chosen Python as JSON, path of bwrap or "", name of the control
            group, id of the parent process, and descriptor of the socket on which pipe ends arrive.
    """
    tier, limits, python, bwrap, name, parent, handed = arguments
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGTERM, _hang_up)
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    warden = None
    try:
        if os.getppid() != int(parent):
            raise Stop
        kind: Tier = "namespaces" if tier == "namespaces" else "landlock"
        chosen = json.loads(python)
        found = Python(chosen["path"], tuple(chosen["folders"]), chosen["has_packages"]) if chosen else None
        warden = Warden(kind, Limits(**json.loads(limits)), found, bwrap, name)
        with socket.socket(fileno=int(handed)) as descriptors:
            descriptors.set_inheritable(False)
            serve(warden, descriptors)
    except SandboxError as error:
        wire.write_all(REPLIES, wire.encode({"error": str(error)}))
    except (Stop, BrokenPipeError):
        pass
    finally:
        if warden is not None:
            warden.close()


if __name__ == "__main__":
    main(sys.argv[1:])
