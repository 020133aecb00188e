"""Symbolic comparison of answers by math-verify, in a child process that can be killed.

math-verify guards itself with SIGALRM, which works in no thread but the main one and interrupts no
big-integer power. So it runs without its own guard in a plain child process, which the kernel ends at the
deadline.
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
GRACE_S = 1.0  # the child's own timer comes first; then the parent kills


class Verifier:
    """One child process, started at the first use and again after each timeout. Safe to call from threads.

    Args:
        timeout_s: time for one comparison, seconds, child start excluded.
        max_answer_chars: longer answers are "unparsable" without being looked at.
    """

    def __init__(self, timeout_s: float, max_answer_chars: int) -> None:
        self.timeout_s = timeout_s
        self.max_answer_chars = max_answer_chars
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[..., Verifier] | None = None

    def verify(self, gold: str, answer: str) -> Verdict:
        """Compare two LaTeX expressions. "timeout" also stands for a child that ran out of memory.

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
        # -P keeps this folder, whose modules have everyday names, off the child's import path.
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
    """One short line (written whole, so it arrives whole); empty at the limit or when the child is gone."""
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
            except BrokenPipeError:  # an unsent request of a child that is gone
                continue
    child.wait()
