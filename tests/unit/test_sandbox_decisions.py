"""The sandbox's decisions: verdicts, plans, limits, what the probe's report means."""

from __future__ import annotations

import asyncio
import json
import resource
import signal
from dataclasses import replace

import pytest

from echo_planes.errors import TaskError
from echo_planes.sandbox import jail, pool, probe, wire
from echo_planes.sandbox.model import (
    Limits,
    Outcome,
    Plan,
    Program,
    Python,
    SandboxError,
    describe,
    oversize,
    tasks_allowed,
)
from echo_planes.sandbox.users import is_mapped
from echo_planes.sandbox.verdict import Cause, Observed, decide

LIMITS = Limits(cpu_s=1.5, memory_bytes=1 << 20, scratch_bytes=100)
PLAN = Plan("namespaces", "processes", Python("/usr/bin/python3", ("/usr/",)), 1000, "v2")
BARE = replace(PLAN, tasks="nothing", uid=None, cgroup="")
ENDED = Observed(None, 0, 0, 0.1, "")


@pytest.mark.parametrize(
    ("seen", "plan", "expected"),
    [
        (ENDED, PLAN, ("ok", 0)),
        (replace(ENDED, wait_status=3 << 8), PLAN, ("failed", 3)),
        (replace(ENDED, wait_status=139 << 8), PLAN, ("killed", 139)),  # as bubblewrap reports a signal
        (replace(ENDED, wait_status=signal.SIGSEGV), PLAN, ("killed", 139)),
        (replace(ENDED, wait_status=signal.SIGKILL, oom_kills=1), PLAN, ("memory", 137)),
        (replace(ENDED, oom_kills=1), PLAN, ("memory", 0)),
        (replace(ENDED, wait_status=signal.SIGKILL, cpu_s=1.5), PLAN, ("timeout", None)),
        (replace(ENDED, wait_status=signal.SIGKILL, cpu_s=0.5), PLAN, ("killed", 137)),
        (replace(ENDED, wait_status=1 << 8, last_line="MemoryError: x"), BARE, ("memory", 1)),
        (replace(ENDED, wait_status=1 << 8, last_line="MemoryError: x"), PLAN, ("failed", 1)),
        (replace(ENDED, wait_status=1 << 8, last_line="ValueError"), BARE, ("failed", 1)),
    ],
)
def test_verdict(seen: Observed, plan: Plan, expected: tuple[str, int | None]) -> None:
    assert decide(seen, plan, LIMITS) == expected


@pytest.mark.parametrize(
    ("cause", "status"),
    [
        ("wall", "timeout"),
        ("cpu", "timeout"),
        ("output", "output"),
        ("disk", "disk"),
        ("cancelled", "cancelled"),
    ],
)
def test_what_the_warden_ended_has_no_exit_code(cause: Cause, status: str) -> None:
    # Even where the program reached its own end at the last moment.
    assert decide(replace(ENDED, cause=cause), PLAN, LIMITS) == (status, None)


def test_a_program_may_start_only_what_is_counted() -> None:
    assert tasks_allowed("namespaces", has_uid=True, has_cgroup=True) == "processes"
    assert tasks_allowed("namespaces", has_uid=True, has_cgroup=False) == "threads"
    assert tasks_allowed("landlock", has_uid=True, has_cgroup=True) == "threads"
    for tier in ("namespaces", "landlock"):
        assert tasks_allowed(tier, has_uid=False, has_cgroup=False) == "nothing"  # type: ignore[arg-type]


def test_without_a_cgroup_rlimits_bound_memory_and_a_uid_bounds_tasks() -> None:
    assert resource.RLIMIT_AS not in jail.rlimits(PLAN, LIMITS)
    assert jail.rlimits(BARE, LIMITS)[resource.RLIMIT_AS] == LIMITS.memory_bytes
    assert resource.RLIMIT_NPROC not in jail.rlimits(BARE, LIMITS)  # it would count the user's own
    assert jail.rlimits(PLAN, LIMITS)[resource.RLIMIT_NPROC] == LIMITS.max_processes + 1
    assert jail.rlimits(BARE, LIMITS)[resource.RLIMIT_CPU] == 2
    assert jail.rlimits(PLAN, LIMITS)[resource.RLIMIT_CPU] > LIMITS.cpu_s + 1  # the warden comes first


def test_bwrap_shares_nothing_and_mounts_only_what_is_named() -> None:
    given = jail.Descriptors(0, 1, 2, {"main.py": 7, "a.txt": 8}, 9, 10)
    plan = replace(PLAN, python=Python("/opt/py/bin/python", ("/opt/py/",)))
    command = jail.bwrap_command("/bin/bwrap", plan, LIMITS, {"/usr": "", "/lib": "usr/lib"}, given)
    binds = ("--bind", "--ro-bind", "--dev-bind")
    bound = [command[n + 1] for n, word in enumerate(command) if word in binds]
    assert bound == ["/usr", *jail.DEVICES, "/opt/py/"]
    assert "--bind" not in command
    assert {"--unshare-all", "--disable-userns", "--as-pid-1", "--die-with-parent"} <= {*command}
    assert command.index("--remount-ro") > command.index("/tmp/a.txt")
    assert command[command.index("--size") + 1 : command.index("--size") + 4] == ["100", "--tmpfs", "/tmp"]
    assert command[-1] == "/tmp/main.py"


@pytest.mark.parametrize("name", ["../x", "/x", "a/b", ".hidden", "main.py", "", "x\0", "x" * 65])
def test_file_names_stay_in_the_scratch_folder(name: str) -> None:
    with pytest.raises(TaskError, match="file name"):
        Program("pass", files={name: ""})


def test_what_is_too_large_is_said() -> None:
    assert oversize(Program("x" * 60, files={"a": "y" * 40}), LIMITS) == ""
    assert "scratch_bytes=100" in oversize(Program("x" * 60, files={"a": "y" * 41}), LIMITS)
    assert "memory_bytes" in oversize(Program("", stdin="\u00e4" * (1 << 20)), LIMITS)


def test_limits_must_limit() -> None:
    with pytest.raises(SandboxError, match="wall_s=0"):
        Limits(wall_s=0)
    with pytest.raises(SandboxError, match="cpu_s=nan"):
        Limits(cpu_s=float("nan"))


def report(status: str = "ok", **fields: object) -> Outcome:
    return Outcome(status, 0, "noise\n" + json.dumps(fields) + "\n", "bwrap: no\n", 0.1)  # type: ignore[arg-type]


def test_the_probe_must_have_run_and_found_nothing() -> None:
    assert probe.holes(report(nonce="n", holes=[]), "n") == ""
    assert probe.holes(report(nonce="n", holes=["be root"]), "n") == "a program could be root"
    assert "did not run to its end (ok: bwrap: no)" in probe.holes(report(nonce="m", holes=[]), "n")
    assert "did not run" in probe.holes(report("killed", nonce="n", holes=[]), "n")
    assert "did not run" in probe.holes(Outcome("ok", 0, "no JSON", "", 0.1), "n")
    assert "did not run" in probe.holes(Outcome("ok", 0, "", "", 0.1), "n")


def test_memory_is_limited_only_if_the_limit_was_what_ended_the_hog() -> None:
    assert probe.memory_hole(report("memory")) == ""
    assert "timeout" in probe.memory_hole(report("timeout"))


@pytest.mark.parametrize("stalls", [0, 1, pool.PROBES - 1, pool.PROBES])
def test_a_probe_that_ran_out_of_time_says_nothing_until_it_does_so_every_time(stalls: int) -> None:
    outcomes = iter([report("timeout")] * stalls + [report("memory"), report("ok")])

    async def run(program: Program) -> Outcome:
        assert program.source == probe.MEMORY_HOG
        return next(outcomes)

    found = probe.memory_hole(asyncio.run(pool.in_time(run, Program(probe.MEMORY_HOG))))
    assert ("timeout" in found) == (stalls == pool.PROBES)
    assert next(outcomes).status == ("memory" if stalls == pool.PROBES else "ok")  # no more was run than that


def test_protection_is_said_in_words() -> None:
    assert "a uid for each slot" in describe(PLAN, LIMITS)
    assert "no threads" in describe(BARE, LIMITS)
    assert "one process" in describe(BARE, LIMITS)
    assert "Landlock" in describe(replace(BARE, tier="landlock"), LIMITS)


def test_a_reply_of_escapes_only_still_fits() -> None:
    outcome = {"stdout": "\0" * LIMITS.output_bytes, "stderr": "\ufffd" * LIMITS.output_bytes}
    assert len(wire.encode(outcome)) <= wire.max_reply_bytes(LIMITS)


def test_ids_of_a_user_namespace() -> None:
    assert is_mapped(1_900_000_000, "         0          0 4294967295\n")
    assert not is_mapped(1_900_000_000, "0 100000 65536\n")
    assert is_mapped(60_600, "0 100000 65536\n")
    assert not is_mapped(65536, "0 100000 65536\n")


def test_when_one_slot_does_not_start_none_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: set[str] = set()

    class Slot(pool.Slot):
        async def start(self) -> None:
            number = self._name[-1]
            if number == "1":
                raise SandboxError("no user id is free")
            for _ in range(10):
                await asyncio.sleep(0)
            opened.add(self._name)

        async def close(self) -> None:
            opened.discard(self._name)

    class Pool(pool.SandboxPool):
        async def _probe(self, slot: pool.Slot) -> None:
            """Find no hole."""

    monkeypatch.setattr(pool, "Slot", Slot)

    async def main() -> None:
        with pytest.raises(SandboxError, match="no user id is free"):
            await Pool(3).start()
        for _ in range(20):
            await asyncio.sleep(0)
        assert not opened

    asyncio.run(main())
