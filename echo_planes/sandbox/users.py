"""A user for each slot, that nobody else is: so that its processes can be counted and ended together."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

from echo_planes.sandbox.model import SandboxError

# Ranges that systemd's "Users, Groups, UIDs and GIDs" leaves to nobody; the second for 16-bit id maps.
UIDS = (range(1_900_000_000, 1_900_001_000), range(60_600, 61_100))


def is_mapped(uid: int, uid_map: str) -> bool:
    """Whether a user namespace has this id, from its /proc/self/uid_map (user_namespaces(7))."""
    for line in uid_map.splitlines():
        first, _, count = (int(number) for number in line.split())
        if first <= uid < first + count:
            return True
    return False


def claim_uid() -> tuple[int, socket.socket]:
    """A user id that no other slot on this machine has, free again when the socket is closed.

    Raises:
        SandboxError: all are taken, or none is known here.
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
    """Kill every process of a user, by becoming that user."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setresuid(uid, uid, uid)
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
