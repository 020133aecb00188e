"""Symbolic comparison of answers by math-verify, in a child process that can be killed.

math-verify limits its time by SIGALRM, which works only in the main thread and cannot interrupt a power of
big integers. Here it runs without that limit in a plain child process, which the kernel ends at the deadline.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Literal, get_args

from echo_planes.errors import UserError, WaitTimeoutError

Verdict = Literal["correct", "wrong", "timeout", "unparsable"]

CHILD = Path(__file__).with_name("verifier_child.py")
START_LIMIT_S = 60.0  # importing sympy on a busy machine
GRACE_S = 1.0  # from the child's own timer until the parent kills the child


class Verifier:
    """Verifier with one child process, started at the first use and again after each timeout. Thread-safe.

    Args:
        timeout_s: time for one comparison, seconds, without the start of the child.
        max_answer_chars: longer answers are "unparsable" without a comparison.
    """

    def __init__(self, timeout_s: float, max_answer_chars: int) -> None:
        self.timeout_s = timeout_s
        self.max_answer_chars = max_answer_chars
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[..., Verifier] | None = None

    def verify(self, gold: str, answer: str) -> Verdict:
        """Compare two LaTeX expressions. "timeout" also means that the child ran out of memory, or died.

        Raises:
            UserError: math-verify is not installed.
            WaitTimeoutError: the child did not start.
        """
        if not answer or len(answer) > self.max_answer_chars:
            return "unparsable"
        with self._lock:
            child = self._child or self._start()
            request: dict[str, str | float] = {"gold": gold, "answer": answer, "timeout_s": self.timeout_s}
            try:
                line = _ask(child, request, self.timeout_s + GRACE_S)
            except BrokenPipeError:
                line = b""
            verdict = line.decode().strip()
            if verdict not in get_args(Verdict):
                self._stop()
                return "timeout"
            return verdict  # type: ignore[return-value]  # checked against the literal above

    def close(self) -> None:
        """End the child process. The next `verify` starts another."""
        with self._lock:
            self._stop()

    def _start(self) -> subprocess.Popen[bytes]:
        # -P keeps this folder off the child's import path, because its modules have common names.
        command = [sys.executable, "-P", str(CHILD)]
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._child = child
        self._finalizer = weakref.finalize(self, _end, child)
        line = _read_line(child, START_LIMIT_S)
        if line == b"ready\n":
            return child
        self._stop()
        if line.startswith(b"missing"):
            raise UserError("the math task's verifier needs math-verify: pip install math-verify==0.9.0")
        raise WaitTimeoutError("math verifier start", START_LIMIT_S)

    def _stop(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._child = self._finalizer = None


def _ask(child: subprocess.Popen[bytes], request: dict[str, str | float], limit_s: float) -> bytes:
    if child.stdin is None:
        return b""
    child.stdin.write(json.dumps(request).encode() + b"\n")
    child.stdin.flush()
    return _read_line(child, limit_s)


def _read_line(child: subprocess.Popen[bytes], limit_s: float) -> bytes:
    """Read one short line, which the child writes at once; b"" at the limit or if the child is gone."""
    if child.stdout is None:
        return b""
    poll = select.poll()
    poll.register(child.stdout, select.POLLIN | select.POLLHUP)
    return os.read(child.stdout.fileno(), 4096) if poll.poll(limit_s * 1000) else b""


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except BrokenPipeError:  # the pipe still holds a request that the dead child never read
                continue
    child.wait()
