"""Output of an engine's processes: kept, passed on, and searched for the reason why the engine failed.

vLLM tells its caller no more than "See root cause above": the error itself is in what its processes print.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

from echo_planes.errors import one_line

KEPT_BYTES = 32 << 10  # of the begin of the output, and again of its end
_STANDARD = (1, 2)  # descriptors of stdout and stderr
_TRACEBACK = "Traceback (most recent call last)"
_DIRECT = "The above exception was the direct cause"
_CONTEXT = "During handling of the above exception"
NOT_STARTED, DIED = "failed to start", "encountered a fatal error"  # in vLLM's line above the traceback
_PREFIX = re.compile(r"(?:\([^()]* pid=\d+\) ?)?(?:[A-Z]+ [\d-]+ [\d:.]+ \[[^\]]*\] ?)?")  # of vLLM's lines
_MOST_LINES = 6  # of an exception's message
# Exceptions by which an engine refuses its settings, model or machine: another start would fail alike.
_REFUSALS = frozenset(
    (
        *("ValueError", "ValidationError", "TypeError", "AssertionError", "NotImplementedError", "KeyError"),
        *("IndexError", "AttributeError", "NameError", "ImportError", "ModuleNotFoundError"),
        *("ConfigError", "ModelError", "WeightsError"),
    )
)
# Words of such an exception about memory that others may still give back.
_PASSING = ("free memory",)


class EngineOutput:
    """Output of the processes that are started within `taken`, for as long as they live.

    A thread passes it on to this process's stderr, and keeps its begin and its end.
    """

    def __init__(self) -> None:
        self._begin = bytearray()
        self._end = bytearray()
        self._left_out_bytes = 0
        self._thread: threading.Thread | None = None

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Take the output of the processes that are started in the context. May be entered once."""
        resource_tracker.ensure_running()  # else the context would start it, and it outlives the engine
        _flush()
        reader, writer = os.pipe()
        usual = [os.dup(one) for one in _STANDARD]
        self._thread = threading.Thread(
            target=self._pass_on, args=(reader, os.dup(2)), name="engine output", daemon=True
        )
        self._thread.start()
        try:
            for one in _STANDARD:
                os.dup2(writer, one)
            yield
        finally:
            _flush()
            for one, before in zip(_STANDARD, usual, strict=True):
                os.dup2(before, one)
                os.close(before)
            os.close(writer)

    def text(self, wait_s: float = 0.0) -> str:
        """Return the output so far: once its processes have ended, or after `wait_s` seconds."""
        if self._thread is not None:
            self._thread.join(wait_s)
        left_out = f"\n[{self._left_out_bytes} bytes left out]\n" if self._left_out_bytes else ""
        return self._begin.decode(errors="replace") + left_out + self._end.decode(errors="replace")

    def _pass_on(self, reader: int, onward: int) -> None:
        with open(reader, "rb", buffering=0) as source, open(onward, "wb", buffering=0) as target:
            while piece := source.read(1 << 16):
                target.write(piece)
                room = KEPT_BYTES - len(self._begin)
                self._begin += piece[:room]
                self._end += piece[room:]
                if (over := len(self._end) - KEPT_BYTES) > 0:
                    self._left_out_bytes += over
                    del self._end[:over]


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def root_cause(text: str) -> str:
    """Return type and message of the exception that ended an engine, as one line; "": there is none.

    Of an exception raised from another one, that is the other. Where processes of an engine fail one after
    the other, it is that of the first.

    Args:
        text: output of the engine's processes.
    """
    lines = []
    for line in text.splitlines():
        prefix = _PREFIX.match(line)
        end = prefix.end() if prefix else 0
        lines.append((line[:end], line[end:]))
    tracebacks = [at for at, (_, line) in enumerate(lines) if line.startswith(_TRACEBACK)]
    fatal = [at for at, (_, line) in enumerate(lines) if NOT_STARTED in line or DIED in line]
    if not tracebacks:
        return ""
    begin = fatal[0] if fatal else tracebacks[-1]
    # vLLM repeats the prefix in each line of a record, and several processes may write at once.
    return _deepest([line for prefix, line in lines[begin:] if prefix == lines[begin][0]])


def _deepest(lines: list[str]) -> str:
    """Return the cause in the first chain of tracebacks among lines."""
    cause, from_another = "", False
    rest = iter(lines)
    for line in rest:
        if not line.startswith(_TRACEBACK):
            continue
        message: list[str] = []
        for found in rest:
            if message and (not found.strip() or found.startswith(_TRACEBACK)):
                break
            if message or not found.startswith((" ", "\t")):
                message.append(found)
        cause = cause if from_another else one_line("\n".join(message[:_MOST_LINES]))
        follows = next((line for line in rest if line.strip()), "")
        if not follows.startswith((_DIRECT, _CONTEXT)):
            break
        from_another = follows.startswith(_DIRECT)
    return cause


def would_fail_again(cause: str) -> bool:
    """Return whether another start of the engine would end by the same `root_cause`.

    An unknown cause counts as passing: the process may have been killed, or its machine may be gone.
    """
    kind, _, message = cause.partition(":")
    is_passing = any(words in message.lower() for words in _PASSING)
    return kind.rpartition(".")[2] in _REFUSALS and not is_passing
