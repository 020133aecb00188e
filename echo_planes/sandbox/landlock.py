"""Landlock (landlock(7)): the calling thread gives up access to every file that it does not name.

Needs Linux 6.2 (ABI 3), because earlier versions do not control truncation. Three system calls, no library.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Mapping

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # system call numbers, the same on every architecture
VERSION_FLAG = 1
RULE_PATH_BENEATH = 1
MIN_ABI = 3

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, REMOVE_FILE, MAKE_REG, TRUNCATE = (
    1 << bit for bit in (0, 1, 2, 3, 5, 8, 14)
)
READ = READ_FILE | READ_DIR | EXECUTE
# No folders, links, sockets or pipes: a flat scratch folder is quick to count and to clear.
SCRATCH = READ_FILE | READ_DIR | WRITE_FILE | REMOVE_FILE | MAKE_REG | TRUNCATE
DEVICE = READ_FILE | WRITE_FILE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def abi() -> int:
    """Return the kernel's Landlock version; 0 where it is absent or switched off."""
    version = int(_libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(VERSION_FLAG)))
    return max(version, 0)


def handled(version: int) -> bytes:
    """Return struct landlock_ruleset_attr with every right that this version can restrict."""
    files = (1 << (16 if version >= 5 else 15)) - 1  # ABI 5: ioctl on devices
    fields = [files]
    if version >= 4:
        fields.append(0b11)  # TCP bind and connect
    if version >= 6:
        fields.append(0b11)  # abstract unix sockets and signals outside
    return struct.pack(f"={len(fields)}Q", *fields)


def restrict(rights: Mapping[str, int]) -> None:
    """Give up all rights but these beneath these paths, for this thread and the programs it executes.

    Raises:
        OSError: the kernel refused, or a path does not exist. The caller must not continue.
    """
    attributes = handled(abi())
    ruleset = _checked(
        _libc.syscall(CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0)),
        "landlock_create_ruleset",
    )
    for path, allowed in rights.items():
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", allowed, descriptor)
        result = _libc.syscall(ADD_RULE, ctypes.c_int(ruleset), RULE_PATH_BENEATH, rule, ctypes.c_uint(0))
        _checked(result, f"landlock_add_rule {path}")
        os.close(descriptor)
    _checked(_libc.syscall(RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint(0)), "landlock_restrict_self")
    os.close(ruleset)


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
