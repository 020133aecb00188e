"""Log of a watched run, and the check of its invariants."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from typing import Any

from echo_planes.errors import RunError

KEEP_EVENTS = 40  # last events kept for the report of a violation


class InvariantError(RunError):
    """Violation of an invariant by the decision code."""


def require(holds: bool, broken: str) -> None:
    """Raise an error if an invariant does not hold.

    Raises:
        InvariantError: with the text `broken`, which names the invariant and its values.
    """
    if not holds:
        raise InvariantError(broken)


class Log:
    """Log of events: the last ones as text, and a checksum of all.

    Args:
        now_s: the clock.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self.last: deque[tuple[Any, ...]] = deque(maxlen=KEEP_EVENTS)
        self.checksum = 0

    def add(self, *what: Any) -> None:
        """Add an event; its parts must print alike in equal runs."""
        line = (round(self._now_s(), 6), *what)
        self.last.append(line)
        self.checksum = zlib.crc32(repr(line).encode(), self.checksum)

    def lines(self) -> list[str]:
        """Return the last events as lines of text."""
        return [f"{line[0]:12.3f} s  {' '.join(str(word) for word in line[1:])}" for line in self.last]
