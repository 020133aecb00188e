"""The seccomp filter, run as the kernel would, and where control groups are looked for."""

from __future__ import annotations

import errno
import struct
from pathlib import Path

import pytest

from echo_planes.sandbox import seccomp
from echo_planes.sandbox.cgroups import Site, candidates, find, parse_mounts, parse_own
from echo_planes.sandbox.landlock import SCRATCH, handled
from echo_planes.sandbox.model import Tasks, Tier

PID = 4242
ALLOWED = "allowed"


def answer(code: bytes, number: int, *arguments: int, arch: int = seccomp.AUDIT_ARCH_X86_64) -> str | int:
    """Decision of the kernel: ALLOWED, "killed" or an errno. The part of BPF that filters use."""
    data = struct.pack("<IIQ6Q", number, arch, 0, *arguments, *[0] * (6 - len(arguments)))
    program = list(struct.iter_unpack("<HBBI", code))
    accumulator = at = 0
    while True:
        operation, if_true, if_false, k = program[at]
        at += 1
        if operation == seccomp.LOAD:
            (accumulator,) = struct.unpack_from("<I", data, k)
        elif operation == seccomp.AND:
            accumulator &= k
        elif operation == seccomp.IF_EQUAL:
            at += if_true if accumulator == k else if_false
        elif operation == seccomp.IF_AT_LEAST:
            at += if_true if accumulator >= k else if_false
        else:
            assert operation == seccomp.RETURN
            return {seccomp.ALLOW: ALLOWED, seccomp.KILL: "killed"}.get(k, k & 0xFFFF)


@pytest.fixture(
    params=[
        ("namespaces", "processes"),
        ("namespaces", "threads"),
        ("landlock", "threads"),
        ("landlock", "nothing"),
    ]
)
def mode(request: pytest.FixtureRequest) -> tuple[Tier, Tasks]:
    chosen: tuple[Tier, Tasks] = request.param
    return chosen


def test_every_filter_fits_and_ends_in_a_refusal(mode: tuple[Tier, Tasks]) -> None:
    code = seccomp.program(*mode, PID)
    assert len(code) // 8 <= seccomp.MAX_FILTER
    assert answer(code, seccomp.PLAIN["read"]) == ALLOWED
    # ptrace, mount, umount2, keyctl, unshare, perf_event_open, setns, process_vm_readv, bpf, userfaultfd ...
    for number in (101, 165, 166, 250, 272, 298, 308, 310, 321, 323, 425, 9999):
        assert answer(code, number) == errno.EPERM
    assert answer(code, seccomp.CLONE3) == errno.ENOSYS
    assert answer(code, seccomp.PLAIN["read"], arch=0x40000003) == "killed"  # 32-bit
    assert answer(code, seccomp.X32_BIT | 0) == "killed"
    assert answer(code, seccomp.IOCTL, 0, 0x5412) == errno.ENOTTY
    # The kernel drops the upper half.
    assert answer(code, seccomp.IOCTL, 0, 0xFFFFFFFF00005412) == errno.ENOTTY
    assert answer(code, seccomp.FCNTL, 0, 8, 1) == errno.EPERM
    assert answer(code, seccomp.PRCTL, 1, 0) == errno.EPERM
    assert answer(code, seccomp.PRLIMIT64, 7) == errno.EPERM
    assert answer(code, seccomp.SOCKETPAIR, 1, 0x80801) == ALLOWED  # close on exec, not blocking
    assert answer(code, seccomp.SOCKETPAIR, 1, 2) == errno.EPERM


def test_who_may_be_started_and_signalled(mode: tuple[Tier, Tasks]) -> None:
    code = seccomp.program(*mode, PID)
    many = mode[1] == "processes"
    thread = seccomp.CLONE_THREAD | 0x3D0F00 & ~seccomp.CLONE_THREAD
    assert answer(code, seccomp.CLONE, thread) == (errno.EAGAIN if mode[1] == "nothing" else ALLOWED)
    assert (answer(code, seccomp.CLONE, 17) == ALLOWED) == many
    assert (answer(code, 57) == ALLOWED) == many
    assert answer(code, seccomp.CLONE, 0x10000000 | 17) != ALLOWED
    assert answer(code, seccomp.CLONE, 0x10000000 | seccomp.CLONE_THREAD) != ALLOWED
    assert answer(code, seccomp.KILL_NUMBER, PID, 9) == ALLOWED
    assert (answer(code, seccomp.KILL_NUMBER, 1, 9) == ALLOWED) == many
    assert (answer(code, seccomp.KILL_NUMBER, (1 << 32) - 1, 9) == ALLOWED) == many
    assert answer(code, 200, PID, 9) == errno.EPERM  # tkill


def test_sockets_and_attributes_only_inside_namespaces(mode: tuple[Tier, Tasks]) -> None:
    code = seccomp.program(*mode, PID)
    inside = mode[0] == "namespaces"
    for number, arguments in ((seccomp.SOCKET, (2, 1)), (42, ()), (49, ()), (90, ()), (76, ())):
        assert (answer(code, number, *arguments) == ALLOWED) == inside
    for family in (16, 17, 38, 40):  # netlink, packet, crypto, vsock
        assert answer(code, seccomp.SOCKET, family, 1) == errno.EPERM


def test_no_call_sets_a_files_times_where_a_device_of_the_host_can_be_named(mode: tuple[Tier, Tasks]) -> None:
    code = seccomp.program(*mode, PID)
    for number in (132, 235, 261, 280):  # utime, utimes, futimesat, utimensat
        assert answer(code, number) == errno.EPERM
    for number in (92, 93, 94, 260, 188, 189, 190):  # chown and its kin, setxattr and its kin
        assert answer(code, number) == errno.EPERM


def test_landlock_takes_away_all_that_a_version_knows() -> None:
    assert handled(3) == struct.pack("=Q", (1 << 15) - 1)
    assert handled(4) == struct.pack("=2Q", (1 << 15) - 1, 3)
    assert handled(7) == struct.pack("=3Q", (1 << 16) - 1, 3, 3)
    for bit in (0, 4, 6, 7, 9, 10, 11, 12, 13):  # execute, folders, devices, sockets, pipes, links
        assert not SCRATCH & 1 << bit


V1 = """\
30 25 0:26 / /sys/fs/cgroup ro,nosuid - tmpfs tmpfs ro,mode=755
31 30 0:27 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory
32 30 0:28 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
33 30 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
34 30 0:30 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
V2 = "31 30 0:27 / /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"


def test_v1_groups_are_made_beside_ours_or_at_the_top() -> None:
    own = parse_own("4:memory:/a/b\n8:pids:/\n2:cpu,cpuacct:/c\n0::/\n")
    first, second, third = candidates(parse_mounts(V1), own)
    root = Path("/sys/fs/cgroup")
    assert dict(first.folders) == {
        "memory": root / "memory/a/b",
        "pids": root / "pids",
        "cpuacct": root / "cpu,cpuacct/c",
    }
    assert dict(second.folders)["memory"] == root / "memory"
    assert third == Site("v2", (("", root / "unified"),))


def test_v1_without_a_controller_for_processes_is_none() -> None:
    lines = "".join(line for line in V1.splitlines(True) if "pids" not in line and "cgroup2" not in line)
    assert candidates(parse_mounts(lines), parse_own("4:memory:/\n0::/\n")) == []


def test_v2_groups_are_made_in_the_nearest_ancestor_that_lets_us() -> None:
    sites = candidates(parse_mounts(V2), parse_own("0::/user.slice/user-0.slice/s.scope\n"))
    root = Path("/sys/fs/cgroup")
    assert [dict(site.folders)[""] for site in sites] == [
        root / "user.slice/user-0.slice/s.scope",
        root / "user.slice/user-0.slice",
        root / "user.slice",
        root,
    ]


def test_a_place_that_cannot_be_written_gives_no_group(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    mountinfo = V2.replace("/sys/fs/cgroup", f"{tmp_path}/file")
    assert find(mountinfo, "0::/\n", "slot", 1 << 20, 4) is None
