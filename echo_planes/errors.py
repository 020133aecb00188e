"""Tree of all errors that this library raises on purpose.

::

    EchoPlanesError
    |-- UserError                 a person's mistake: one line, no traceback, exit status 2
    |   |-- ConfigError           unknown key, group, value or type; inconsistent settings
    |   |-- DataError             a data file that is missing, unreadable or malformed
    |   |-- ModelError            a model folder that is missing or cannot be used
    |   `-- ClusterError          the fleet does not fit, a port is taken, a disk is full
    |-- RunError                  the run cannot go on: one line, a checkpoint where possible, exit status 1
    |   |-- DivergedError         a non-finite loss or gradient; the batch was saved
    |   |-- CollapsedError        the policy lost what it had learned; names signal, value and limit
    |   |-- WaitTimeoutError      a wait reached its limit; names worker, version and phase
    |   |-- WorkerGoneError       a rollout worker's process or engine died; the run replaces it
    |   |-- EngineStartError      an engine did not start; holds its output, and if another try is of use
    |   |-- LearnerLostError      a learner rank died; names the checkpoint to resume from
    |   `-- StoppedError          the run was asked to stop (Ctrl-C, SIGTERM)
    |-- RefusedError              a message that is not trusted; counted, never applied
    |   |-- LeaseError            unknown, expired or fenced lease
    |   `-- WeightsError          wrong base, wrong digest, wrong name, wrong size
    `-- TaskError                 a task adapter broke its contract; names the task and the prompt
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable

MAX_LINE = 2000  # characters of a message, at most
_TAIL = 400  # characters kept of its end, which says what to do
_NAME = 100  # characters of a name that are compared
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = _SHOWN.maxlong = 100


class EchoPlanesError(Exception):
    """Root of the tree above."""


class UserError(EchoPlanesError):
    """A person's mistake. The message says what is wrong, the value, why, and what to do.

    It is one line of bounded length, whatever values it quotes.
    """

    exit_status = 2

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class ConfigError(UserError):
    """Unknown key, group, value or type, or settings that contradict one another."""


class DataError(UserError):
    """A data file that is missing, unreadable or malformed."""


class ModelError(UserError):
    """A model folder that is missing or cannot be used."""


class ClusterError(UserError):
    """The machine or cluster lacks what the configuration asks for."""


class RunError(EchoPlanesError):
    """The run cannot go on."""

    exit_status = 1


class DivergedError(RunError):
    """A non-finite loss or gradient norm. The message names the folder the batch was saved in."""


class CollapsedError(RunError):
    """The policy lost what it had learned. The message names signal, value and limit, and what to change."""


class WaitTimeoutError(RunError):
    """A wait reached its limit, or nothing moved for that long in it.

    Args:
        phase: the phase that was waited for, in a few words ("engine start", "weight install").
        limit_s: the limit that was reached, seconds.
        worker: the worker or rank waited for, if any.
        version: the policy version concerned, if any.
        seen: where the work stood all that time, if it was watched.
    """

    def __init__(
        self, phase: str, limit_s: float, *, worker: str = "-", version: int | None = None, seen: str = ""
    ) -> None:
        shown = "-" if version is None else str(version)
        still = f" without progress ({seen})" if seen else ""
        super().__init__(
            f"timed out after {limit_s:.0f} s{still} in phase '{phase}' (worker {worker}, version {shown})"
        )
        self.seen = seen
        self.phase = phase
        self.limit_s = limit_s
        self.worker = worker
        self.version = version

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_timeout, (self.phase, self.limit_s, self.worker, self.version, self.seen))


def _rebuild_timeout(
    phase: str, limit_s: float, worker: str, version: int | None, seen: str
) -> WaitTimeoutError:
    return WaitTimeoutError(phase, limit_s, worker=worker, version=version, seen=seen)


class WorkerGoneError(RunError):
    """A rollout worker's process or engine died."""


class EngineStartError(RunError):
    """A rollout worker's engine did not start.

    Args:
        message: why, with the error of the engine's process.
        output: what its processes wrote, of bounded length.
        is_final: another start would fail alike.
    """

    def __init__(self, message: str, output: str = "", *, is_final: bool = False) -> None:
        super().__init__(message)
        self.output = output
        self.is_final = is_final

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_engine_start, (str(self), self.output, self.is_final))


def _rebuild_engine_start(message: str, output: str, is_final: bool) -> EngineStartError:
    return EngineStartError(message, output, is_final=is_final)


class LearnerLostError(RunError):
    """A learner rank died. The message names the checkpoint to resume from."""


class StoppedError(RunError):
    """The run was asked to stop."""

    exit_status = 130


class RefusedError(EchoPlanesError):
    """A message that is not trusted."""


class LeaseError(RefusedError):
    """Unknown, expired or fenced lease."""


class WeightsError(RefusedError):
    """Weights that do not fit: wrong base, digest, name, shape or size."""


class TaskError(EchoPlanesError):
    """A task adapter broke its contract."""


def one_line(text: str) -> str:
    """Return a text with runs of whitespace as one space and invisible characters as escapes.

    A text longer than `MAX_LINE` loses its middle.
    """
    if len(text) > MAX_LINE:
        text = f"{text[: MAX_LINE - _TAIL]} ... {text[-_TAIL:]}"
    words = " ".join(text.split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in words)


def shown(value: object) -> str:
    """Return a value as text for a message, cut where it is long, deep, or contains itself."""
    return _SHOWN.repr(value)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name, with the most similar known name; "" without one."""
    name = name[:_NAME]  # the search takes time quadratic in the length
    folded = {one.lower(): one for one in known}
    match = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.5)
    return f"; did you mean '{folded[match[0]]}'?" if match else ""
