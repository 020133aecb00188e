"""Log of a watched run, and the check of its invariants."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from typing import Any

from echo_planes.errors import RunError

KEEP_EVENTS = 40  # of the log, for the report of a violation


class InvariantError(RunError):
    """The code that decides broke one of its invariants."""


def require(holds: bool, broken: str) -> None:
    """Stop where an invariant does not hold.

    Raises:
        InvariantError: `broken` says which, and with what values.
    """
    if not holds:
        raise InvariantError(broken)


class Log:
    """Log of events: the last of them to read, and a checksum of all.

    Args:
        now_s: the clock.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self.last: deque[tuple[Any, ...]] = deque(maxlen=KEEP_EVENTS)
        self.checksum = 0

    def add(self, *what: Any) -> None:
        """Something happened; what is told must print alike in equal runs."""
        line = (round(self._now_s(), 6), *what)
        self.last.append(line)
        self.checksum = zlib.crc32(repr(line).encode(), self.checksum)

    def lines(self) -> list[str]:
        """Lines of the last events."""
        return [f"{line[0]:12.3f} s  {' '.join(str(word) for word in line[1:])}" for line in self.last]
