"""Test of the protection at start by two programs: one tries to break out, one takes too much memory."""

from __future__ import annotations

import json
import os
import secrets
import socket
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from echo_planes.sandbox.jail import DEVICES, environment
from echo_planes.sandbox.model import Limits, Outcome, Program

PAYLOAD = Path(__file__).with_name("payload.py")
ALLOWED_VARIABLES = {*environment(""), "LC_CTYPE", "PWD"}  # bubblewrap and Python set the last two
SECRETS = ("/etc/passwd", "/etc/shadow", "/proc/1/status", "/proc/self/environ", "/sys")
# Files of the home folder, not the folder itself: if Python is installed in it, the sandbox has that folder.
PRIVATE = (".ssh", ".netrc", ".bashrc", ".bash_history", ".gitconfig")
MEMORY_HOG = "data = bytearray()\nwhile True:\n    data += b'x' * (1 << 20)\n"


class Canary:
    """Objects on the host that a program must not reach: a file, a port, a socket, processes, variables.

    The port is on loopback. File and sockets exist as long as the context.
    """

    def __init__(self) -> None:
        self.nonce = secrets.token_hex(16)
        descriptor, self._file = tempfile.mkstemp(prefix="echo-planes-canary-")
        os.write(descriptor, self.nonce.encode())
        os.fchmod(descriptor, 0o666)
        os.close(descriptor)
        self._inet = socket.create_server(("127.0.0.1", 0))
        self._unix = socket.socket(socket.AF_UNIX)
        self._abstract = f"\0echo-planes-canary-{self.nonce}"
        self._unix.bind(self._abstract)
        self._unix.listen()

    def __enter__(self) -> Canary:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inet.close()
        self._unix.close()
        Path(self._file).unlink()

    def task(self, limits: Limits, warden: int) -> dict[str, Any]:
        """Return the payload's task: everything that it tries."""
        return {
            "nonce": self.nonce,
            "secrets": [self._file, *SECRETS, *(str(Path.home() / name) for name in PRIVATE)],
            "changed": [self._file, "/dev/kmsg", "/proc/self/mem"],
            "created": [f"{folder}/echo-planes-canary" for folder in ("/usr", "/dev", "/dev/shm", "/")],
            "devices": DEVICES,
            "port": self._inet.getsockname()[1],
            "abstract": self._abstract,
            # Small ids may exist in the sandbox's own pid namespace too, so they prove nothing.
            "processes": [pid for pid in (os.getpid(), warden) if pid > limits.max_processes],
            "variables": sorted(os.environ.keys() - ALLOWED_VARIABLES),
            "max_processes": limits.max_processes,
        }

    def program(self, limits: Limits, warden: int) -> Program:
        """Return the payload as a program."""
        return Program(PAYLOAD.read_text(), json.dumps(self.task(limits, warden)))

    def untouched(self) -> bool:
        """Return whether the file is unchanged."""
        return Path(self._file).read_text() == self.nonce


def holes(outcome: Outcome, nonce: str) -> str:
    """Describe the holes that the payload found, or why it did not report; "" if the protection holds."""
    lines = outcome.stdout.strip().splitlines()
    try:
        report = json.loads(lines[-1]) if lines else {}
    except ValueError:
        report = {}
    if outcome.status != "ok" or report.get("nonce") != nonce:
        told = (outcome.stderr.strip().splitlines() or ["no word"])[-1]
        return f"the probe did not run to its end ({outcome.status}: {told[:200]})"
    found = report["holes"]
    return "" if not found else f"a program could {', '.join(found)}"


def memory_hole(outcome: Outcome) -> str:
    """Describe why memory is not limited; "" if it is."""
    if outcome.status == "memory":
        return ""
    return f"a program that takes all memory ended as {outcome.status}, not at its memory limit"
