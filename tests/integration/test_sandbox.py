"""Hostile programs in the real sandbox, behind both walls: contained, and nothing of them left."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from echo_planes.sandbox import jail, landlock, pool
from echo_planes.sandbox.model import Limits, Outcome, Program, SandboxError, Tier
from echo_planes.sandbox.pool import SandboxPool

ROOT = Path(__file__).resolve().parents[2]
LIMITS = Limits(
    wall_s=3.0,
    cpu_s=1.0,
    memory_bytes=96 << 20,
    output_bytes=1 << 16,
    max_processes=16,
    scratch_bytes=4 << 20,
)
GONE_S = 1.0  # nothing of a program is left so long after its outcome
WAIT_S = 30.0
SECRET_VARIABLE = "ECHO_PLANES_TEST_SECRET"
SYSTEM_PYTHON = "/usr/bin/python3"

pytestmark = pytest.mark.integration

PRELUDE = """
import ctypes, fcntl, os, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    words = (ctypes.c_long(a) if isinstance(a, int) else a for a in arguments)
    result = libc.syscall(ctypes.c_long(number), *words)
    if result < 0:
        raise OSError(ctypes.get_errno(), number)
def attempt(what):
    try:
        result = what()
    except OSError:
        print("blocked")
    else:
        print("OPEN", result)
"""

# Each expression must fail with OSError. {file}, {folder}, {pid}, {port}, {unix}, {abstract} lie on the host.
FORBIDDEN = {
    "connect to a port of the host": "socket.create_connection(('127.0.0.1', {port}), 1)",
    "connect to another machine": "socket.create_connection(('192.0.2.1', 80), 1)",
    "connect to a unix socket": "socket.socket(socket.AF_UNIX).connect({unix!r})",
    "connect to an abstract socket": "socket.socket(socket.AF_UNIX).connect({abstract!r})",
    "datagram to an abstract socket": "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
    "resolve a name": "socket.getaddrinfo('example.com', 80)",
    "raw socket": "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "packet socket": "socket.socket(17, socket.SOCK_RAW, 3)",
    "netlink socket": "socket.socket(16, socket.SOCK_RAW, 0)",
    "vsock": "socket.socket(40, socket.SOCK_STREAM)",
    "kernel crypto socket": "socket.socket(38, socket.SOCK_SEQPACKET)",
    "read a file of the host": "open({file!r}).read()",
    "read the shadow file": "open('/etc/shadow').read()",
    "read the users": "open('/etc/passwd').read()",
    "read the repository": "os.listdir({root!r})",
    "read the home folder": "os.listdir({home!r})",
    "list the root of the host": "os.listdir('/etc')",
    "write a file of the host": "open({file!r}, 'r+').write('x')",
    "truncate a file of the host": "os.truncate({file!r}, 0)",
    "change the mode of a file": "os.chmod({file!r}, 0)",
    "set the times of a device": "os.utime('/dev/null')",
    "set the times of an open device": "os.utime(os.open('/dev/zero', os.O_RDWR))",
    "set the times of a device by the old call": "call(132, b'/dev/random', None)",
    "set the mode of a device": "os.chmod('/dev/null', 0o666)",
    "set the owner of a device": "os.chown('/dev/null', -1, os.getgid())",
    "set an attribute of a device": "os.setxattr('/dev/null', 'user.made', b'')",
    "link to a file of the host": "os.link({file!r}, 'link')",
    "make a file in a folder of the host": "open({folder!r} + '/made', 'w')",
    "write into /usr": "open('/usr/lib/made', 'w')",
    "write into /": "open('/made', 'w')",
    "write into /dev": "open('/dev/made', 'w')",
    "write into /dev/shm": "open('/dev/shm/made', 'w')",
    "read a process's environment": "open('/proc/{pid}/environ').read()",
    "write a process's memory": "open('/proc/{pid}/mem', 'r+b')",
    "list processes": "os.listdir('/proc')",
    "write /proc/sys": "open('/proc/sys/kernel/core_pattern', 'w')",
    "write /sys": "open('/sys/kernel/mm/ksm/run', 'w')",
    "leave the control group": "open('/sys/fs/cgroup/pids/cgroup.procs', 'w')",
    "open a disk": "os.open('/dev/vda', os.O_RDONLY)",
    "open memory": "os.open('/dev/mem', os.O_RDONLY)",
    "open the kernel log": "os.open('/dev/kmsg', os.O_WRONLY)",
    "open the terminal": "os.open('/dev/tty', os.O_RDWR)",
    "open fuse": "os.open('/dev/fuse', os.O_RDWR)",
    "open kvm": "os.open('/dev/kvm', os.O_RDWR)",
    "make a device": "os.mknod('disk', 0o60600, os.makedev(8, 0))",
    "type into the terminal": "fcntl.ioctl(0, 0x5412, b'x')",
    "see the parent": "os.kill({pid}, 0)",
    "signal the parent": "os.kill({pid}, signal.SIGTERM)",
    "signal through a descriptor": "(lambda r: fcntl.fcntl(r, fcntl.F_SETOWN, {pid}))(os.pipe()[0])",
    "trace a process": "call(101, 16, {pid}, 0, 0)",
    "read another's memory": "call(310, {pid}, 0, 0, 0, 0, 0)",
    "limit another process": "call(302, {pid}, 0, struct.pack('QQ', 1, 1), 0)",
    "survive the warden": "call(157, 1, 0, 0, 0, 0)",
    "new user namespace": "call(272, 0x10000000)",
    "new network namespace": "call(272, 0x40000000)",
    "new mount namespace": "call(272, 0x20000)",
    "clone into a namespace": "call(56, 0x10000000 | 17, 0, 0, 0, 0)",
    "clone3": "call(435, bytes(88), 88)",
    "enter a namespace": "call(308, 0, 0)",
    "mount": "call(165, b'none', b'/tmp', b'tmpfs', 0, 0)",
    "unmount": "call(166, b'/usr', 2)",
    "pivot_root": "call(155, b'/tmp', b'/tmp')",
    "chroot": "os.chroot('/usr')",
    "keyctl": "call(250, 0, -3, 0, 0, 0)",
    "add_key": "call(248, b'user', b'k', b'v', 1, -4)",
    "bpf": "call(321, 0, bytes(64), 64)",
    "perf": "call(298, bytes(128), 0, -1, -1, 0)",
    "io_uring": "call(425, 8, bytes(120))",
    "userfaultfd": "call(323, 1)",
    "open by handle": "call(304, -100, bytes(64), 0)",
    "become root": "os.setuid(0)",
    "become root's group": "os.setgid(0)",
    "take capabilities": "call(126, struct.pack('II', 0x20080522, 0), struct.pack('6I', *[0xFFFFFFFF] * 6))",
    "shared memory": "call(29, 7777, 4096, 0o1666)",
    "message queue": "call(68, 7777, 0o1666)",
    "semaphores": "call(64, 7777, 1, 0o1666)",
    "posix message queue": "call(240, b'made', 0o102, 0o600, 0)",
    "raise priority": "os.nice(-5)",
    "real-time scheduling": "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))",
    "set the clock": "call(164, bytes(16), 0)",
    "set the host's name": "socket.sethostname('made')",
    "load a module": "call(175, bytes(8), 8, b'')",
    "reboot": "call(169, 0, 0, 0, 0)",
}

# Programs that use too much, or will not end: (source, statuses with namespaces, statuses with Landlock).
GREEDY: dict[str, tuple[str, set[str], set[str]]] = {
    "fork bomb": (
        "while True:\n    try: os.fork()\n    except OSError: pass",
        {"timeout", "memory"},
        {"timeout"},
    ),
    "fork bomb in sessions": (
        "while True:\n    try:\n        if os.fork() == 0: os.setsid()\n    except OSError: pass",
        {"timeout", "memory"},
        {"timeout"},
    ),
    "thread bomb": (
        "threading.stack_size(1 << 15)\nn = 0\n"
        "try:\n    while True:\n"
        "        threading.Thread(target=time.sleep, args=(99,), daemon=True).start(); n += 1\n"
        "except RuntimeError:\n    sys.exit(0 if n < 16 else 1)",
        {"ok"},
        {"ok"},
    ),
    "memory bomb": ("x = []\nwhile True: x.append(bytes(b'x') * (1 << 20))", {"memory"}, {"memory"}),
    "memory of children": (
        "for _ in range(8):\n    if os.fork() == 0:\n        x = b'x' * (30 << 20); time.sleep(99)\n"
        "time.sleep(99)",
        {"memory", "timeout"},
        {"failed"},
    ),
    "anonymous files": (
        "while True: os.write(os.memfd_create('m'), b'x' * (1 << 20))",
        {"memory"},
        {"failed"},
    ),
    "full disk": (
        "for n in range(10**9): open(f'f{n}', 'wb').write(b'x' * (1 << 20))",
        {"failed", "memory"},
        {"disk", "failed"},
    ),
    "one large file": (
        "f = open('f', 'wb')\nwhile True: f.write(b'x' * (1 << 20))",
        {"failed"},
        {"failed", "disk"},
    ),
    "many empty files": (
        "for n in range(10**9): open(f'f{n}', 'w').close()",
        {"failed", "memory", "timeout"},
        {"disk", "timeout"},
    ),
    "deep folders": (
        "for n in range(10**9): os.mkdir('d'); os.chdir('d')",
        {"failed", "memory", "timeout"},
        {"failed"},
    ),
    "flood of output": ("while True: os.write(1, b'x' * 65536)", {"output"}, {"output"}),
    "flood of errors": ("while True: os.write(2, b'x' * 65536)", {"output"}, {"output"}),
    "flood from a child": (
        "os.fork() or [os.write(1, b'x' * 65536) for _ in iter(int, 1)]\ntime.sleep(99)",
        {"output"},
        {"failed"},
    ),
    "sleeps for ever": ("time.sleep(10**6)", {"timeout"}, {"timeout"}),
    "ignores signals": (
        "for n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\n"
        "time.sleep(10**6)",
        {"timeout"},
        {"timeout"},
    ),
    "busy": ("while True: pass", {"timeout"}, {"timeout"}),
    "busy in C": ("9 ** 9 ** 9", {"timeout", "memory"}, {"timeout", "memory"}),
    "busy children": ("for _ in range(4): os.fork()\nwhile True: pass", {"timeout"}, {"failed"}),
    "stops itself": (
        "os.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(10**6)",
        {"timeout"},
        {"timeout"},
    ),
    "closes its output and stays": ("os.closerange(0, 3)\ntime.sleep(10**6)", {"timeout"}, {"timeout"}),
    "leaves a daemon": (
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(10**6)\n    os._exit(0)",
        {"ok"},
        {"failed"},
    ),
    "leaves zombies": (
        "for _ in range(8):\n    child = os.fork()\n    if child == 0: os._exit(0)\n"
        "    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)",  # it has ended, and nobody collects it
        {"ok"},
        {"failed"},
    ),
    "descriptors without end": ("while True: os.dup(0)", {"failed"}, {"failed"}),
    "crashes": ("ctypes.string_at(0)", {"killed"}, {"killed"}),
    "aborts": ("os.abort()", {"killed"}, {"killed"}),
    "kills itself": ("os.kill(os.getpid(), 9)\ntime.sleep(10**6)", {"killed", "timeout"}, {"killed"}),
    "foreign system calls": ("call(0x40000000 | 39)", {"killed"}, {"killed"}),
    "swaps its source for a link": (
        "os.unlink('main.py')\ntry: os.symlink('/etc/passwd', 'main.py')\nexcept OSError: pass",
        {"ok"},
        {"ok"},
    ),
    "leaves files": ("open('left', 'w').write('x')\nopen('.hidden', 'w')", {"ok"}, {"ok"}),
}


@dataclass
class Host:
    """A pool behind one wall, and things on the host that programs aim at."""

    tier: Tier
    runner: asyncio.Runner
    pool: SandboxPool
    aims: dict[str, object]

    def run(self, source: str, stdin: str = "", *, again: bool = True, **files: str) -> Outcome:
        """Run one program, and see that nothing of it is left.

        `again`: a timeout says nothing, as the machine may have stalled for seconds.
        """
        program = Program(PRELUDE + source, stdin, files)
        outcome = self.runner.run(pool.in_time(self.pool.run, program) if again else self.pool.run(program))
        eventually(lambda: not self.inside(), GONE_S)
        assert not traces()
        assert not any(
            os.listdir(slot.facts["scratch"]) for slot in self.pool._slots if slot.facts["scratch"]
        )
        return outcome

    def inside(self) -> list[int]:
        """Processes in the slots' control groups or of their users."""
        found = []
        for slot in self.pool._slots:
            for folder in slot.facts["folders"]:
                found += [int(pid) for pid in Path(folder, "cgroup.procs").read_text().split()]
            uid = slot.facts["plan"]["uid"]
            if uid is not None:
                found += of_user(uid)
            else:
                found += [child.pid for child in psutil.Process(slot.pid).children(recursive=True)]
        return found


def of_user(uid: int) -> list[int]:
    """Processes of a user; not the dead that only wait for the machine's first process to collect them."""
    found = []
    for process in psutil.process_iter():
        try:
            collected_by_init = process.status() == psutil.STATUS_ZOMBIE and process.ppid() == 1
            if uid in process.uids() and not collected_by_init:
                found.append(process.pid)
        except psutil.NoSuchProcess:  # ended while we looked
            continue
    return found


def traces() -> list[str]:
    """Traces that the programs above would leave on the host: they call everything `made` or 7777."""
    folders = ("/", "/dev", "/dev/shm", "/dev/mqueue", "/usr/lib", tempfile.gettempdir())
    found = [
        f"{folder}/{name}" for folder in folders for name in ("made", "core") if Path(folder, name).exists()
    ]
    for kind in ("shm", "msg", "sem"):
        lines = Path(f"/proc/sysvipc/{kind}").read_text().splitlines()[1:]
        found += [f"{kind} {line}" for line in lines if line.split()[0] == "7777"]
    return found


def eventually(holds: Callable[[], bool], limit_s: float) -> None:
    deadline_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline_s, f"not within {limit_s} s"
        time.sleep(0.01)


def without_bwrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")


@functools.cache
def missing(tier: Tier) -> str:
    """Name what this machine lacks for a tier; "" when it must work."""
    if tier == "landlock":
        version = landlock.abi()
        return "" if version >= landlock.MIN_ABI else f"Landlock ABI {version}, {landlock.MIN_ABI} is needed"
    if not shutil.which("bwrap"):
        return "bwrap is not installed"
    user = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
    command = ["bwrap", "--unshare-all", "--disable-userns", "--unshare-user", "--ro-bind", "/", "/", "true"]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", **user)  # type: ignore[call-overload]
    return f"bwrap cannot make namespaces: {done.stderr.strip()}" if done.returncode else ""


@pytest.fixture(scope="module", params=["namespaces", "landlock"])
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    tier: Tier = request.param
    if missing(tier):
        pytest.skip(f"{tier}: not shown: {missing(tier)}")
    with (
        pytest.MonkeyPatch.context() as patch,
        asyncio.Runner() as runner,
        tempfile.TemporaryDirectory() as folder,
    ):
        os.chmod(folder, 0o777)
        file = Path(folder, "file")
        file.write_text("secret")
        file.chmod(0o666)
        patch.setenv(SECRET_VARIABLE, "secret")
        patch.setattr(pool, "TIERS", (tier,))
        sandbox = SandboxPool(2, LIMITS)
        runner.run(sandbox.start())
        abstract = f"\0echo-planes-test-{os.getpid()}-{tier}"
        with (
            socket.create_server(("127.0.0.1", 0)) as inet,
            socket.socket(socket.AF_UNIX) as unix,
            socket.socket(socket.AF_UNIX) as hidden,
        ):
            unix.bind(f"{folder}/unix")
            unix.listen()
            os.chmod(f"{folder}/unix", 0o777)
            hidden.bind(abstract)
            hidden.listen()
            aims = {
                "file": str(file),
                "folder": folder,
                "pid": os.getpid(),
                "port": inet.getsockname()[1],
                "unix": f"{folder}/unix",
                "abstract": abstract,
                "root": str(ROOT),
                "home": str(Path.home()),
            }
            yield Host(tier, runner, sandbox, aims)
        wardens = [slot.pid for slot in sandbox._slots]
        facts = [slot.facts for slot in sandbox._slots]
        runner.run(sandbox.close())
        assert file.read_text() == "secret"
        assert not any(psutil.pid_exists(pid) for pid in wardens)
        for slot in facts:
            assert not any(Path(path).exists() for path in [*slot["folders"], slot["scratch"]] if path)


@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_reaches_outside_is_blocked(host: Host, name: str) -> None:
    devices = [os.stat(path) for path in jail.DEVICES]
    before = [(found.st_mode, found.st_uid, found.st_mtime_ns) for found in devices]
    outcome = host.run(f"attempt(lambda: {FORBIDDEN[name].format(**host.aims)})")
    devices = [os.stat(path) for path in jail.DEVICES]
    assert [(found.st_mode, found.st_uid, found.st_mtime_ns) for found in devices] == before
    assert (outcome.stdout, outcome.status) == ("blocked\n", "ok"), outcome
    assert Path(str(host.aims["file"])).read_text() == "secret"
    assert Path(str(host.aims["file"])).stat().st_mode & 0o777 == 0o666


@pytest.mark.parametrize("name", GREEDY)
def test_what_takes_too_much_or_stays_is_ended(host: Host, name: str) -> None:
    source, with_namespaces, with_landlock = GREEDY[name]
    outcome = host.run(source, again=False)
    assert outcome.status in (with_namespaces if host.tier == "namespaces" else with_landlock), outcome
    assert max(len(outcome.stdout), len(outcome.stderr)) <= LIMITS.output_bytes
    # The slot is as good as new: the same folder, empty but for what was given.
    after = host.run("print(sorted(os.listdir('.')), open('data.txt').read())", **{"data.txt": "given"})
    assert after.stdout == "['data.txt', 'main.py'] given\n", after


def test_a_program_sees_none_of_our_environment_or_files(host: Host) -> None:
    seen = host.run(
        "def is_open(n):\n    try: os.fstat(n)\n    except OSError: return False\n    return True\n"
        "print([n for n in range(3, 256) if is_open(n)], sorted(os.environ))"
    )
    assert seen.stdout.startswith("[] ")
    assert SECRET_VARIABLE not in seen.stdout


def test_a_program_gets_its_input_and_gives_its_output(host: Host) -> None:
    echo = host.run("sys.stderr.write('e'); print(input()); sys.exit(3)", "h\u00e4\n")
    assert (echo.status, echo.exit_code, echo.stdout, echo.stderr) == ("failed", 3, "h\u00e4\n", "e")
    assert host.run("pass", "x" * (8 << 20)).status == "ok"
    assert host.run("print(len(sys.stdin.read()))", "x" * (8 << 20)).stdout == f"{8 << 20}\n"
    assert host.run("print('\ud800')").status == "failed"
    assert host.run("#" * LIMITS.scratch_bytes).status == "failed"


def test_nobody_can_connect_to_a_program(host: Host) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    listens = f"s = socket.create_server(('0.0.0.0', {port}))\nprint('listening', flush=True)\ntime.sleep(1)"

    async def connect() -> tuple[Outcome, bool]:
        running = asyncio.create_task(host.pool.run(Program(PRELUDE + listens)))
        reached = False
        while not running.done() and not reached:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.01)
            else:
                reached = True
                writer.close()
        return await running, reached

    outcome, reached = host.runner.run(connect())
    assert not reached
    assert (outcome.stdout == "listening\n") == (host.tier == "namespaces")


def test_a_cancelled_program_is_ended_and_its_slot_used_again(host: Host) -> None:
    async def cancel_some() -> list[Outcome]:
        tasks = [asyncio.create_task(host.pool.run(Program("while True: pass"))) for _ in range(4)]
        while len(host.inside()) < 2:
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(error, asyncio.CancelledError) for error in ended)
        return await asyncio.gather(*(host.pool.run(Program("print(1)")) for _ in range(4)))

    assert [outcome.stdout for outcome in host.runner.run(cancel_some())] == ["1\n"] * 4
    eventually(lambda: not host.inside(), GONE_S)


ASKS = "for n in range(3):\n    print(n, flush=True); print(input(), file=sys.stderr, flush=True)"
TELLS = "for line in sys.stdin: print(int(line) + 40, flush=True)"


def test_two_programs_side_by_side_read_what_the_other_prints(host: Host) -> None:
    asks, tells = Program(PRELUDE + ASKS), Program(PRELUDE + TELLS)

    async def many() -> tuple[list[tuple[Outcome, Outcome]], list[Outcome]]:
        pairs = [asyncio.create_task(host.pool.run_joined(asks, tells)) for _ in range(3)]
        alone = [asyncio.create_task(host.pool.run(Program("print(1)"))) for _ in range(3)]
        return await asyncio.gather(*pairs), await asyncio.gather(*alone)

    pairs, alone = host.runner.run(many())
    for one, other in pairs:
        assert (one.status, one.stdout, one.stderr) == ("ok", "", "40\n41\n42\n")
        assert (other.status, other.stdout, other.stderr) == ("ok", "", "")
    assert [outcome.stdout for outcome in alone] == ["1\n"] * 3
    eventually(lambda: not host.inside(), GONE_S)


def test_neither_of_two_programs_side_by_side_outlives_the_other_for_long(host: Host) -> None:
    joined = host.pool.run_joined
    ends, stays = Program("print('end')"), Program("import time\nwhile True: time.sleep(1)")
    one, other = host.runner.run(joined(ends, stays))
    assert (one.status, other.status) == ("ok", "cancelled")
    one, other = host.runner.run(
        joined(Program("import sys; sys.stderr.write(repr(sys.stdin.read()))"), ends)
    )
    assert (one.status, one.stderr, other.status) == ("ok", "'end\\n'", "ok")
    see = "try: open('data.txt')\nexcept OSError: sys.stderr.write('none')"
    one, other = host.runner.run(joined(Program(PRELUDE + see), Program("pass", files={"data.txt": "mine"})))
    assert one.stderr == "none"
    eventually(lambda: not host.inside(), GONE_S)


def test_two_programs_side_by_side_end_when_nobody_waits(host: Host) -> None:
    waits = Program("import sys; sys.stdin.read()")

    async def cancel() -> list[Outcome]:
        task = asyncio.create_task(host.pool.run_joined(waits, waits))
        while len(host.inside()) < 2:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await asyncio.gather(*(host.pool.run(Program("print(1)")) for _ in range(4)))

    assert [outcome.stdout for outcome in host.runner.run(cancel())] == ["1\n"] * 4

    async def alone() -> None:
        async with SandboxPool(1, LIMITS) as single:
            await single.run_joined(waits, waits)

    with pytest.raises(SandboxError, match="num_slots=1: two programs side by side need two slots"):
        host.runner.run(alone())


def test_a_warden_that_dies_is_replaced_and_its_program_ends(host: Host) -> None:
    async def lose() -> Outcome:
        task = asyncio.create_task(host.pool.run(Program("import time; time.sleep(10**6)")))
        while not host.inside():
            await asyncio.sleep(0.01)
        busy = [slot.pid for slot in host.pool._slots if psutil.Process(slot.pid).children()]
        os.kill(busy[0], signal.SIGKILL)
        with pytest.raises(SandboxError, match="warden"):
            await task
        ended = await asyncio.gather(*(host.pool.run(Program("print(1)")) for _ in range(4)))
        return ended[-1]

    assert host.runner.run(lose()).stdout == "1\n"
    eventually(lambda: not host.inside(), GONE_S)


def test_closing_ends_what_runs_and_what_waits(host: Host) -> None:
    async def close_early() -> list[Outcome | BaseException]:
        sandbox = SandboxPool(1, LIMITS)
        await sandbox.start()
        tasks = [
            asyncio.create_task(sandbox.run(Program("import time; time.sleep(10**6)"))) for _ in range(3)
        ]
        while not psutil.Process(sandbox._slots[0].pid).children():
            await asyncio.sleep(0.01)
        await sandbox.close()
        return await asyncio.gather(*tasks, return_exceptions=True)

    first, *others = host.runner.run(close_early())
    assert isinstance(first, Outcome)
    assert first.status == "cancelled"
    assert [type(error) for error in others] == [SandboxError, SandboxError]


PARENT = """
import asyncio, json, sys
sys.path.insert(0, sys.argv[1])
from echo_planes.sandbox import pool
from echo_planes.sandbox.model import *
pool.TIERS = (sys.argv[2],)
async def main():
    sandbox = pool.SandboxPool(1, Limits(wall_s=1000))
    await sandbox.start()
    task = asyncio.create_task(sandbox.run(Program(sys.argv[3])))
    await asyncio.sleep(0)
    print(json.dumps(sandbox._slots[0].facts), flush=True)
    await sandbox._slots[0]._process.wait() if sys.argv[4] == "stay" else print(await task)
    await sandbox.close()
asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_parent_that_is_killed_leaves_nothing(host: Host, number: signal.Signals) -> None:
    program = "import os, time\ntry: os.fork()\nexcept OSError: pass\ntime.sleep(10**6)"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(ROOT), host.tier, program, "stay"], stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    facts = json.loads(parent.stdout.readline())
    uid = facts["plan"]["uid"]
    children = psutil.Process(parent.pid).children
    eventually(lambda: len(children(recursive=True)) >= 2, WAIT_S)
    tree = children(recursive=True)
    parent.send_signal(number)
    parent.wait()
    parent.stdout.close()
    eventually(lambda: not any(process.is_running() for process in tree), WAIT_S)
    assert uid is None or not of_user(uid)
    assert not any(Path(path).exists() for path in [*facts["folders"], facts["scratch"]] if path)


def test_the_second_tier_is_taken_where_the_first_is_not_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    if missing("landlock"):
        pytest.skip(f"not shown: {missing('landlock')}")
    without_bwrap(monkeypatch)

    async def start() -> str:
        async with SandboxPool(1, LIMITS) as sandbox:
            assert (await sandbox.run(Program("print(1)"))).stdout == "1\n"
            return sandbox.protection

    assert asyncio.run(start()).startswith("landlock: Landlock and seccomp")


def test_without_protection_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    without_bwrap(monkeypatch)
    monkeypatch.setattr(pool, "TIERS", ("namespaces",))
    with pytest.raises(SandboxError, match=r"bwrap is not installed .*apt install bubblewrap.*Landlock"):
        asyncio.run(SandboxPool(1, LIMITS).run(Program("print(1)")))


def test_a_bwrap_that_does_not_isolate_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path(SYSTEM_PYTHON).exists():
        pytest.skip(f"not shown: there is no {SYSTEM_PYTHON}")
    liar = Path(tempfile.mkdtemp(prefix="echo-planes-liar-"))  # where any user may read it
    liar.chmod(0o755)
    fake = liar / "bwrap"
    fake.write_text(
        textwrap.dedent(
            f"""\
            #!{SYSTEM_PYTHON} -IS
            import os, sys
            given = dict(zip(sys.argv, sys.argv[1:]))
            os.write(int(given["--json-status-fd"]), b'{{"child-pid": 1}}')
            os.chdir("/")
            os.execv("{SYSTEM_PYTHON}", ["python3", "-S", f"/proc/self/fd/{{given['--file']}}"])
            """
        )
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(liar))
    monkeypatch.setattr(pool, "TIERS", ("namespaces",))
    try:
        with pytest.raises(SandboxError, match=r"a program could .*read /etc/passwd.*connect to loopback"):
            asyncio.run(SandboxPool(1, LIMITS).run(Program("print(1)")))
    finally:
        shutil.rmtree(liar)


@pytest.mark.skipif(os.geteuid() != 0, reason="not shown: all of this runs as an ordinary user already")
@pytest.mark.parametrize("tier", ["namespaces", "landlock"])
def test_an_ordinary_user_gets_one_process_without_threads(tier: Tier) -> None:
    if missing(tier) or not Path(SYSTEM_PYTHON).exists():
        pytest.skip(f"not shown: {missing(tier) or f'there is no {SYSTEM_PYTHON}'}")
    thread = "try: threading.Thread(target=print).start()\nexcept RuntimeError: print('none')"
    source = f"{PRELUDE}attempt(os.fork)\n{thread}"
    done = subprocess.run(
        [SYSTEM_PYTHON, "-c", PARENT, str(ROOT), tier, source, "end"],
        user=65534,
        group=65534,
        extra_groups=[],
        cwd="/",
        capture_output=True,
        text=True,
    )
    assert r"stdout='blocked\nnone\n'" in done.stdout, done
    assert '"uid": null' in done.stdout
