"""`SandboxPool`: runs a fixed number of programs at a time and returns their outcomes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from echo_planes.errors import ConfigError
from echo_planes.sandbox import probe, wire
from echo_planes.sandbox.model import (
    Limits,
    Outcome,
    Program,
    Python,
    SandboxError,
    Tier,
    oversize,
)

ROOT = Path(__file__).resolve().parents[2]
# -I -S: the warden starts in milliseconds and imports only the standard library and this package.
BOOT = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from echo_planes.sandbox.warden import main; main(sys.argv[1:])"
)
TIERS: tuple[Tier, ...] = ("namespaces", "landlock")
START_LIMIT_S = 60.0  # an interpreter on a busy machine
GRACE_S = 30.0  # after a program's wall time, for the cleanup on a busy machine
CLOSE_LIMIT_S = 20.0
PROBES = 5  # most runs of each probe
LINGER_S = 1.0  # time for the second of two joined programs to end, after the end of the first
CURE = (
    "install bubblewrap and allow user namespaces (in Docker: --security-opt seccomp=unconfined "
    "--security-opt apparmor=unconfined), or use Linux 6.2 or newer with Landlock"
)


class Slot:
    """Warden and the pipe to it. Runs one program at a time."""

    def __init__(self, tier: Tier, limits: Limits, python: Python | None, name: str) -> None:
        self._tier = tier
        self._limits = limits
        self._python = python
        self._name = name
        self._process: asyncio.subprocess.Process | None = None
        self._handed: socket.socket | None = None  # pipe ends for joined programs go through it
        self.facts: dict[str, Any] = {}

    @property
    def pid(self) -> int:
        """Process id of the warden; 0 when there is none."""
        return self._process.pid if self._process else 0

    async def start(self) -> None:
        """Start the warden.

        Raises:
            SandboxError: this machine cannot provide this tier, or the warden did not answer.
        """
        bwrap = shutil.which("bwrap") or ""
        self._handed, handed = socket.socketpair()
        with handed:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-c", BOOT, str(ROOT)),
                *(self._tier, json.dumps(asdict(self._limits))),
                json.dumps(self._python and asdict(self._python)),
                *(bwrap, self._name, str(os.getpid()), str(handed.fileno())),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                pass_fds=(handed.fileno(),),
                # A signal to our process group must not kill the warden before it removes its control group.
                start_new_session=True,
            )
        self.facts = await self._reply(START_LIMIT_S)

    async def run(self, program: Program, joined: tuple[int, int] | None = None) -> Outcome:
        """Run a program; if the warden is gone, start another one first.

        Args:
            joined: pipe ends for its standard input and output; this method closes them.
        """
        try:
            if self._process is None:
                await self.start()
            if joined and self._handed is not None:
                socket.send_fds(self._handed, [b"\0"], joined)
        except OSError as error:
            await self.kill()
            raise SandboxError(
                f"the sandbox's warden {self._name} failed ({error}); it is replaced"
            ) from error
        finally:
            for descriptor in joined or ():
                os.close(descriptor)
        request = {"source": program.source, "stdin": program.stdin, "files": dict(program.files)}
        self._send(request | {"is_joined": joined is not None})
        return Outcome(**await self._reply(self._limits.wall_s + GRACE_S))

    def cancel(self) -> None:
        """End the running program; `run` still returns its outcome."""
        self._send({"cancel": True})

    def _send(self, message: dict[str, Any]) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(wire.encode(message))

    async def _reply(self, limit_s: float) -> dict[str, Any]:
        """Return the warden's next frame. After any failure of the warden, kill it."""
        try:
            async with asyncio.timeout(limit_s):
                reply = await self._frame()
        except (TimeoutError, asyncio.IncompleteReadError, SandboxError) as error:
            await self.kill()
            raise SandboxError(
                f"the sandbox's warden {self._name} failed ({type(error).__name__}: {error}); it is replaced"
            ) from error
        if "error" in reply:
            raise SandboxError(str(reply["error"]))
        return reply

    async def _frame(self) -> dict[str, Any]:
        if self._process is None or self._process.stdout is None:
            raise SandboxError("it was closed")
        (size,) = wire.LENGTH.unpack(await self._process.stdout.readexactly(wire.LENGTH.size))
        if size > wire.max_reply_bytes(self._limits):
            raise SandboxError(f"a reply of {size} bytes")
        reply: dict[str, Any] = json.loads(await self._process.stdout.readexactly(size))
        return reply

    async def close(self) -> None:
        """End the warden, which ends its program and cleans up."""
        if self._process is None or self._process.stdin is None:
            return
        self._process.stdin.close()
        try:
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await self._process.wait()
        except TimeoutError:
            await self.kill()
        await self._clear()

    async def kill(self) -> None:
        """Kill a warden that does not answer, and clean up in its place."""
        if self._process is None:
            return
        if self._process.returncode is None:
            # Not Process.kill(): it reaps a process that has just died, and asyncio would then wait for ever.
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        await self._clear()

    async def _clear(self) -> None:
        """Remove control groups and folders that a dead warden may have left."""
        self._process = None
        if self._handed is not None:
            self._handed.close()
            self._handed = None
        for folder in map(Path, self.facts.get("folders", [])):
            await _empty(folder)
        if self.facts.get("scratch"):
            shutil.rmtree(self.facts["scratch"], ignore_errors=True)


async def _empty(group: Path) -> None:
    """Kill the processes that are left in a control group, and remove the group."""
    for _ in range(1000):
        try:
            for pid in (group / "cgroup.procs").read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            group.rmdir()
        except FileNotFoundError:
            return
        except OSError:  # the group is not empty yet
            await asyncio.sleep(0.01)
        else:
            return
    raise SandboxError(f"the control group {group} does not become empty: remove it by hand")


async def in_time(run: Callable[[Program], Awaitable[Outcome]], program: Program) -> Outcome:
    """Run a probe and return its outcome. A timeout proves nothing about the protection, because the machine
    may have stalled for seconds: the probe then runs again, at most `PROBES` times in all.
    """
    for _ in range(PROBES - 1):
        outcome = await run(program)
        if outcome.status != "timeout":
            return outcome
    return await run(program)


def installed(path: str) -> Python:
    """Ask a Python for its folders.

    Raises:
        ConfigError: it is none, or does not answer.
    """
    folder, name = os.path.split(os.path.abspath(os.path.expanduser(path)))
    full = os.path.join(os.path.realpath(folder), name)  # the link of an environment stays: it leads to it
    ask = "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix]))"
    try:
        answer = subprocess.run(
            [full, "-I", "-c", ask], capture_output=True, check=True, timeout=START_LIMIT_S
        ).stdout
        folders = tuple(dict.fromkeys(f"{os.path.realpath(folder)}/" for folder in json.loads(answer)))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise ConfigError(f"interpreter {path} does not answer as a Python: {error}; correct it") from error
    if "//" in folders:
        raise ConfigError(f"interpreter {path} is installed in /: programs would see the whole disk")
    return Python(full, folders, has_packages=True)


class SandboxPool:
    """Pool that runs model-written Python programs under a protection that it has tested first.

    Starts at the first use, or by `start()`, or as an async context manager. Belongs to one event loop.

    Args:
        num_slots: programs that run at the same time; others wait for a slot.
        limits: resources that each program may use; None: the defaults.
        interpreter: Python whose installed packages programs may import, such as a virtual environment's;
            None: the running one, with the standard library only.

    Raises (at start):
        SandboxError: this machine offers no protection; the message gives the reason and the remedy.
        ConfigError: the interpreter does not answer.
    """

    def __init__(self, num_slots: int, limits: Limits | None = None, interpreter: str | None = None) -> None:
        if num_slots < 1:
            raise SandboxError(f"num_slots={num_slots}: a sandbox needs at least one slot")
        self.limits = limits or Limits()
        self._interpreter = interpreter
        self._num_slots = num_slots
        self._slots: list[Slot] = []
        self._free: asyncio.Queue[Slot] = asyncio.Queue()
        self._starting = asyncio.Lock()
        self._pairing = asyncio.Lock()  # two calls that each hold one slot and wait for a second deadlock
        self._ending: set[asyncio.Task[Outcome]] = set()
        self._protection = ""
        self._closed = False

    @property
    def protection(self) -> str:
        """Protection of this machine, in words; "" before the start."""
        return self._protection

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Find a tier that passes the probes, and open all slots in it. Does nothing the second time."""
        async with self._starting:
            if self._closed:
                raise SandboxError("this sandbox pool was closed: make another")
            if self._slots:
                return
            reasons = []
            python = (
                None if self._interpreter is None else await asyncio.to_thread(installed, self._interpreter)
            )
            for tier in TIERS:
                try:
                    await self._open(tier, python)
                except SandboxError as error:
                    reasons.append(f"{tier}: {error}")
                else:
                    return
            raise SandboxError(f"no sandbox for model-written programs here: {'; '.join(reasons)}. {CURE}")

    async def _open(self, tier: Tier, python: Python | None) -> None:
        name = f"echo-planes-sandbox-{os.getpid()}-{id(self):x}"
        slots = [Slot(tier, self.limits, python, f"{name}-{number}") for number in range(self._num_slots)]
        try:
            await slots[0].start()
            await self._probe(slots[0])
            # All starts are awaited, also after one failed: a slot that starts later would stay open.
            starts = await asyncio.gather(*(slot.start() for slot in slots[1:]), return_exceptions=True)
            for failed in filter(None, starts):
                raise failed
        except BaseException:
            await asyncio.gather(*(slot.close() for slot in slots))
            raise
        for slot in slots:
            self._free.put_nowait(slot)
        self._protection = str(slots[0].facts["protection"])
        self._slots = slots

    async def _probe(self, slot: Slot) -> None:
        """Run the probes in this slot. Raises SandboxError if the protection fails."""
        with probe.Canary() as canary:
            report = await in_time(slot.run, canary.program(self.limits, slot.pid))
            found = probe.holes(report, canary.nonce)
            if found or not canary.untouched():
                raise SandboxError(found or "a program changed a file outside")
        found = probe.memory_hole(await in_time(slot.run, Program(probe.MEMORY_HOG)))
        if found:
            raise SandboxError(found)

    async def run(self, program: Program) -> Outcome:
        """Run one program when a slot is free. Cancelling ends the program.

        Raises:
            SandboxError: there is no protection, or it broke. The program is not the cause.
        """
        await self.start()
        if reason := oversize(program, self.limits):
            return Outcome("failed", None, "", reason, 0.0)
        slot = await self._take()
        task = self._begin(slot, program)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            _abandon(slot, task)
            raise

    async def run_joined(self, first: Program, second: Program) -> tuple[Outcome, Outcome]:
        """Run two programs side by side, each one's standard output the other's standard input.

        They share nothing else. The pool ignores their `stdin`, and their outcomes have no `stdout`. The
        pool ends the second program `LINGER_S` seconds after the first has ended. Cancelling ends both.

        Raises:
            SandboxError: as `run`; or the pool has only one slot.
        """
        await self.start()
        if self._num_slots < 2:
            raise SandboxError("num_slots=1: two programs side by side need two slots")
        if reason := oversize(first, self.limits) or oversize(second, self.limits):
            refused = Outcome("failed", None, "", reason, 0.0)
            return refused, refused
        async with self._pairing:
            slot = await self._take()
            try:
                other = await self._take()
            except BaseException:
                self._free.put_nowait(slot)
                raise
        forth, back = os.pipe(), os.pipe()
        task = self._begin(slot, first, (back[0], forth[1]))
        later = self._begin(other, second, (forth[0], back[1]))
        try:
            outcome = await asyncio.shield(task)
            await asyncio.wait([later], timeout=LINGER_S)
            if not later.done():
                other.cancel()
            return outcome, await asyncio.shield(later)
        except BaseException:
            _abandon(slot, task)
            _abandon(other, later)
            raise

    async def _take(self) -> Slot:
        """Wait for a free slot and return it."""
        slot = await self._free.get()
        if self._closed:
            self._free.put_nowait(slot)  # wakes the next waiting call
            raise SandboxError("this sandbox pool was closed while programs waited for a slot")
        return slot

    def _begin(
        self, slot: Slot, program: Program, joined: tuple[int, int] | None = None
    ) -> asyncio.Task[Outcome]:
        # A separate task: the slot becomes free when nothing of the program is left, not when its caller
        # stops waiting.
        task = asyncio.create_task(slot.run(program, joined))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        task.add_done_callback(lambda _: self._free.put_nowait(slot))
        return task

    async def close(self) -> None:
        """End the running programs, wait until nothing of them is left, and free uids, groups and folders."""
        async with self._starting:
            self._closed = True
            for slot in self._slots:
                slot.cancel()
            await asyncio.gather(*self._ending, return_exceptions=True)
            await asyncio.gather(*(slot.close() for slot in self._slots))
            self._slots = []


def _abandon(slot: Slot, task: asyncio.Task[Outcome]) -> None:
    """End a program whose caller has stopped waiting."""
    if not task.done():
        slot.cancel()
    task.add_done_callback(_retrieve)


def _retrieve(task: asyncio.Task[Outcome]) -> None:
    """Mark the task's exception as retrieved, since no caller is left to receive it."""
    if not task.cancelled():
        task.exception()
