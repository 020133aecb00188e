"""A user id for each slot that no other process has, so that the kernel counts and kills by slot."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

from echo_planes.sandbox.model import SandboxError

# Ranges that systemd's "Users, Groups, UIDs and GIDs" leaves unused; the second for 16-bit id maps.
UIDS = (range(1_900_000_000, 1_900_001_000), range(60_600, 61_100))


def is_mapped(uid: int, uid_map: str) -> bool:
    """Return whether a user namespace has this id, by its /proc/self/uid_map (user_namespaces(7))."""
    for line in uid_map.splitlines():
        first, _, count = (int(number) for number in line.split())
        if first <= uid < first + count:
            return True
    return False


def claim_uid() -> tuple[int, socket.socket]:
    """Claim a user id that no other slot on this machine has, until the returned socket is closed.

    Raises:
        SandboxError: all ids are taken, or this user namespace maps none of them.
    """
    uid_map = Path("/proc/self/uid_map").read_text()
    for uid in (uid for ids in UIDS for uid in ids if is_mapped(uid, uid_map)):
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0echo-planes-sandbox-uid-{uid}")
        except OSError:  # another slot has it
            claim.close()
            continue
        return uid, claim
    raise SandboxError("no user id is free for the sandbox: map more ids into this container")


def kill_user(uid: int) -> None:
    """Kill every process of a user, from a forked child that becomes that user."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setresuid(uid, uid, uid)
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
