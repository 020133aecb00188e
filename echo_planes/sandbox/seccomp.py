"""System calls that a program may make, as a seccomp BPF program (seccomp(2)) for x86-64.

The filter is a list of allowed calls; other calls fail with EPERM. New calls of newer kernels are therefore
refused until a maintainer allows them.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Sequence

from echo_planes.sandbox.model import Tasks, Tier

LOAD, AND, RETURN = 0x20, 0x54, 0x06  # BPF_LD|W|ABS, BPF_ALU|AND|K, BPF_RET|K
IF_EQUAL, IF_AT_LEAST = 0x15, 0x35  # BPF_JMP|JEQ|K, BPF_JMP|JGE|K
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
AUDIT_ARCH_X86_64 = 0xC000003E
X32_BIT = 0x40000000
NUMBER_AT, ARCH_AT, ARGUMENTS_AT = 0, 4, 16  # offsets in struct seccomp_data
MAX_FILTER = 4096  # most instructions that the kernel accepts

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, k

# Calls that any Python program needs. They affect only the caller and files that are already open.
PLAIN = {
    "read": 0, "write": 1, "close": 3, "fstat": 5, "poll": 7, "lseek": 8, "mmap": 9, "mprotect": 10,
    "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "pread64": 17,
    "pwrite64": 18, "readv": 19, "writev": 20, "pipe": 22, "select": 23, "sched_yield": 24, "mremap": 25,
    "msync": 26, "mincore": 27, "madvise": 28, "dup": 32, "dup2": 33, "pause": 34, "nanosleep": 35,
    "getitimer": 36, "alarm": 37, "setitimer": 38, "getpid": 39, "sendfile": 40, "sendto": 44,
    "recvfrom": 45, "sendmsg": 46, "recvmsg": 47, "shutdown": 48, "getsockname": 51, "getpeername": 52,
    "setsockopt": 54, "getsockopt": 55, "execve": 59, "exit": 60, "wait4": 61, "uname": 63, "flock": 73,
    "fsync": 74, "fdatasync": 75, "ftruncate": 77, "getcwd": 79, "fchdir": 81, "umask": 95,
    "gettimeofday": 96, "getrlimit": 97, "getrusage": 98, "sysinfo": 99, "times": 100, "getuid": 102,
    "getgid": 104, "geteuid": 107, "getegid": 108, "setpgid": 109, "getppid": 110, "getpgrp": 111,
    "setsid": 112, "getgroups": 115, "getresuid": 118, "getresgid": 120, "getpgid": 121, "getsid": 124,
    "rt_sigpending": 127, "rt_sigtimedwait": 128, "rt_sigsuspend": 130, "sigaltstack": 131,
    "fstatfs": 138, "getpriority": 140, "arch_prctl": 158, "setrlimit": 160, "gettid": 186, "time": 201,
    "futex": 202, "sched_getaffinity": 204, "epoll_create": 213, "getdents64": 217, "set_tid_address": 218,
    "restart_syscall": 219, "fadvise64": 221, "timer_create": 222, "timer_settime": 223,
    "timer_gettime": 224, "timer_getoverrun": 225, "timer_delete": 226, "clock_gettime": 228,
    "clock_getres": 229, "clock_nanosleep": 230, "exit_group": 231, "epoll_wait": 232, "epoll_ctl": 233,
    "waitid": 247, "pselect6": 270, "ppoll": 271, "set_robust_list": 273, "get_robust_list": 274,
    "splice": 275, "epoll_pwait": 281, "timerfd_create": 283, "eventfd": 284, "fallocate": 285,
    "timerfd_settime": 286, "timerfd_gettime": 287, "eventfd2": 290, "epoll_create1": 291, "dup3": 292,
    "pipe2": 293, "preadv": 295, "pwritev": 296, "getcpu": 309, "getrandom": 318, "membarrier": 324,
    "copy_file_range": 326, "rseq": 334, "close_range": 436, "epoll_pwait2": 441,
}  # fmt: skip
# Calls with a path: Landlock decides on it, or the namespace has no such file.
PATHS = {
    "open": 2, "stat": 4, "lstat": 6, "access": 21, "chdir": 80, "rename": 82, "mkdir": 83, "rmdir": 84,
    "creat": 85, "link": 86, "unlink": 87, "symlink": 88, "readlink": 89, "statfs": 137, "openat": 257,
    "mkdirat": 258, "newfstatat": 262, "unlinkat": 263, "renameat": 264, "linkat": 265, "symlinkat": 266,
    "readlinkat": 267, "faccessat": 269, "renameat2": 316, "statx": 332, "openat2": 437, "faccessat2": 439,
}  # fmt: skip
# Landlock does not control these, so they are allowed only where a path reaches no host file that they could
# change. Paths do reach the host's devices. A user who may write to a device may also set its times, so no
# call that sets times is allowed.
ATTRIBUTES = {"truncate": 76, "chmod": 90, "fchmod": 91, "fchmodat": 268}
# Allowed only in an isolated network namespace.
NETWORK = {"connect": 42, "accept": 43, "bind": 49, "listen": 50, "accept4": 288}
# Allowed only where a cgroup counts processes, and no process outlives the program.
PROCESSES = {"fork": 57, "vfork": 58, "kill": 62, "tgkill": 234, "memfd_create": 319, "pidfd_open": 434}

CLONE, CLONE3, KILL_NUMBER, TGKILL = 56, 435, 62, 234
IOCTL, FCNTL, PRCTL, PRLIMIT64, SOCKET, SOCKETPAIR = 16, 72, 157, 302, 41, 53
CLONE_THREAD = 0x00010000
NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS, CGROUP, UTS, IPC, USER, PID, NET
# TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX; neither TIOCSTI nor FIOSETOWN.
IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# F_DUPFD to F_SETLKW, F_DUPFD_CLOEXEC, F_GETPIPE_SZ, F_GET_SEALS, F_OFD_*; not F_SETOWN, which sends signals.
FCNTLS = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032, 1034)
# Names and PR_GET_DUMPABLE. PR_SET_PDEATHSIG is refused: by it a program ends with its warden.
PRCTLS = (3, 15, 16, 0x53564D41)
FAMILIES = (1, 2, 10)  # unix, inet, inet6: vsock, netlink and packet sockets see more than the namespace
SOCK_STREAM = 1
SOCK_TYPE_MASK = 0xF


def program(tier: Tier, tasks: Tasks, own_pid: int) -> bytes:
    """Return the filter as an array of struct sock_filter, for `bwrap --seccomp` or prctl(2).

    Args:
        tier, tasks: see `model.Plan`.
        own_pid: id of the program's first process in its own namespace. Without the right to start
            processes, a program may signal only this one.
    """
    allowed = dict(PLAIN) | PATHS
    if tier == "namespaces":
        allowed |= ATTRIBUTES | NETWORK
    if tasks == "processes":
        allowed |= PROCESSES
    code: list[Instruction] = [
        (LOAD, 0, 0, ARCH_AT),
        (IF_EQUAL, 1, 0, AUDIT_ARCH_X86_64),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER_AT),
        (IF_AT_LEAST, 0, 1, X32_BIT),
        (RETURN, 0, 0, KILL),
    ]
    for number in sorted(allowed.values()):
        code += _rule(number, [(RETURN, 0, 0, ALLOW)])
    code += _rule(CLONE3, [(RETURN, 0, 0, ERRNO | errno.ENOSYS)])  # its flags lie in memory; libc falls back
    code += _rule(IOCTL, _one_of(1, IOCTLS, errno.ENOTTY))
    code += _rule(FCNTL, _one_of(1, FCNTLS))
    code += _rule(PRCTL, _one_of(0, PRCTLS))
    code += _rule(PRLIMIT64, _one_of(0, (0, own_pid)))
    code += _rule(CLONE, _clone(tasks))
    # One end of a datagram pair could send to other sockets.
    code += _rule(SOCKETPAIR, _one_of(1, (SOCK_STREAM,), mask=SOCK_TYPE_MASK))
    if tier == "namespaces":
        code += _rule(SOCKET, _one_of(0, FAMILIES))
    if tasks != "processes":
        code += _rule(KILL_NUMBER, _one_of(0, (own_pid,))) + _rule(TGKILL, _one_of(0, (own_pid,)))
    code.append((RETURN, 0, 0, ERRNO | errno.EPERM))
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)


def _rule(number: int, body: Sequence[Instruction]) -> list[Instruction]:
    """Return instructions that run `body`, which returns, for this call, and skip it for others."""
    return [(IF_EQUAL, 0, len(body), number), *body]


def _one_of(
    argument: int, values: Sequence[int], refusal: int = errno.EPERM, mask: int = 0xFFFFFFFF
) -> list[Instruction]:
    """Allow a call if the low half of an argument, a 32-bit integer to the kernel, is one of `values`."""
    body: list[Instruction] = [(LOAD, 0, 0, ARGUMENTS_AT + 8 * argument), (AND, 0, 0, mask)]
    for value in values:
        body += [(IF_EQUAL, 0, 1, value), (RETURN, 0, 0, ALLOW)]
    return [*body, (RETURN, 0, 0, ERRNO | refusal)]


def _clone(tasks: Tasks) -> list[Instruction]:
    if tasks == "processes":
        return _one_of(0, (0,), mask=NEW_NAMESPACES)
    if tasks == "threads":
        return _one_of(0, (CLONE_THREAD,), mask=NEW_NAMESPACES | CLONE_THREAD)
    return [(RETURN, 0, 0, ERRNO | errno.EAGAIN)]
