"""Recorded spot markets: the number of machines on offer over time.

The first row decides the format:

- `t_ms,add|remove,node`: a machine came or went;
- `t_s,count`: corners of a step curve, so that a time may have two rows, of which the later one counts;
- `date, time, count`: records of a watcher, some of them forecasts. A row replaces the rows before it whose
  time is not earlier than its own.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from echo_planes.config.files import read_text
from echo_planes.config.plain_yaml import plain_number
from echo_planes.errors import DataError

AtEnd = Literal["repeat", "hold", "error"]
MAX_BYTES = 64 * 2**20
_Point = tuple[float, int]


@dataclass(frozen=True, slots=True)
class SpotTrace:
    """Step function of time: `counts[i]` machines are available from `times_s[i]` on. It begins at time 0."""

    name: str
    times_s: tuple[float, ...]  # ascending, the first is 0
    counts: tuple[int, ...]
    end_s: float  # time of its last row
    at_end: AtEnd = "error"  # after the end: begin again, keep the last count, or raise an error

    def count(self, now_s: float) -> int:
        """Return the machines available at a time.

        Raises:
            DataError: the trace has ended and `at_end` is "error".
        """
        return self.counts[bisect_right(self.times_s, self._within(now_s)) - 1]

    def next_change_s(self, now_s: float) -> float:
        """Return the first later time at which the count may differ; infinite if there is none.

        The end of a trace counts as such a time unless `at_end` is "hold", so that no caller misses the end.
        """
        within = self._within(now_s)
        place = bisect_right(self.times_s, within)
        later = self.times_s[place] if place < len(self.times_s) else math.inf
        if self.at_end != "hold":
            later = min(later, self.end_s)
        # The start of the period is computed from the time itself: a sum of differences would drift.
        base = (now_s // self.end_s) * self.end_s if self.at_end == "repeat" else 0.0
        found = base + later
        return found if found > now_s else math.nextafter(now_s, math.inf)

    def _within(self, now_s: float) -> float:
        if now_s < self.end_s:
            return now_s
        if self.at_end == "error":
            raise DataError(
                f"spot trace {self.name} ends after {self.end_s:,.0f} s, and the simulation asks for "
                f"{now_s:,.0f} s: shorten it, or set the trace's at_end to repeat or hold"
            )
        return now_s % self.end_s if self.at_end == "repeat" else self.end_s


def read_trace(path: Path, at_end: AtEnd = "error") -> SpotTrace:
    """Read a recorded trace of one of the formats above.

    Raises:
        DataError: the file cannot be read or has none of these formats; names the line.
    """
    text = read_text(path, MAX_BYTES, advice="give a CSV file of a spot trace")
    rows = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not rows:
        raise DataError(f"spot trace {path} has no rows: give one of the formats of echo_planes.sim.spot")
    read = _format(path, rows[0][1])
    points = read(path, rows)
    if points[-1][0] <= 0:
        raise DataError(f"spot trace {path} is of one moment only: it says nothing about a time")
    return _trace(path.name, points, at_end)


def _format(path: Path, first: str) -> Callable[[Path, Sequence[tuple[int, str]]], list[_Point]]:
    for pattern, read in (
        (r"[\d.]+\s*,\s*(add|remove)\s*,", _machines),
        (r"[\d.]+\s*,\s*\d+\s*$", _corners),
        (r"\d{4}-\d\d-\d\d\s*,", _watched),
    ):
        if re.match(pattern, first):
            return read
    raise DataError(
        f"spot trace {path} line 1: {first!r:.60} is of no known format; known: t_ms,add|remove,node; "
        "t_s,count; date, time, count"
    )


def _trace(name: str, points: Sequence[_Point], at_end: AtEnd) -> SpotTrace:
    """Build a trace from points in order of time. Of equal times the later point counts; before all, 0."""
    steps: list[_Point] = [(0.0, 0)]
    for at_s, count in points:
        if steps[-1][0] == at_s:
            steps.pop()
        if not steps or steps[-1][1] != count:
            steps.append((at_s, count))
    times, counts = zip(*steps, strict=True)
    return SpotTrace(name, times, counts, points[-1][0], at_end)


def _machines(path: Path, rows: Sequence[tuple[int, str]]) -> list[_Point]:
    there: set[str] = set()
    points: list[_Point] = []
    for number, line in rows:
        at_ms, what, node = _cells(path, number, line, 3)
        at_s = _number(path, number, at_ms) / 1000
        if points and at_s < points[-1][0]:
            raise DataError(f"spot trace {path} line {number}: {line!r:.60} goes back in time: sort the rows")
        if what not in ("add", "remove") or (what == "add") == (node in there):
            raise DataError(
                f"spot trace {path} line {number}: {line!r:.60} cannot be: a machine is added once, and then "
                "removed once; correct the row"
            )
        there.symmetric_difference_update([node])
        points.append((at_s, len(there)))
    return points


def _corners(path: Path, rows: Sequence[tuple[int, str]]) -> list[_Point]:
    points: list[_Point] = []
    for number, line in rows:
        at, count = _cells(path, number, line, 2)
        at_s = _number(path, number, at)
        if points and at_s < points[-1][0]:
            raise DataError(f"spot trace {path} line {number}: {line!r:.60} goes back in time: sort the rows")
        points.append((at_s, _count(path, number, count)))
    return points


def _watched(path: Path, rows: Sequence[tuple[int, str]]) -> list[_Point]:
    points: list[_Point] = []
    first: datetime | None = None
    for number, line in rows:
        day, clock, count = _cells(path, number, line, 3)
        try:
            at = datetime.fromisoformat(f"{day} {clock}")
        except ValueError as error:
            raise DataError(
                f"spot trace {path} line {number}: {day} {clock} is no moment: write YYYY-MM-DD, HH:MM:SS"
            ) from error
        first = first or at
        at_s = (at - first).total_seconds()
        while points and points[-1][0] >= at_s:
            points.pop()
        points.append((at_s, _count(path, number, count)))
    if points[0][0] < 0:
        raise DataError(f"spot trace {path}: a row is earlier than the first one: sort the rows by day")
    return points


def _cells(path: Path, number: int, line: str, width: int) -> list[str]:
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != width:
        raise DataError(
            f"spot trace {path} line {number}: {line!r:.60} has {len(cells)} columns, not the {width} of the "
            "first row's format: correct the row"
        )
    return cells


def _number(path: Path, number: int, text: str) -> float:
    value = plain_number(text)
    if not 0 <= value < math.inf:
        raise DataError(f"spot trace {path} line {number}: {text!r:.40} is no time of 0 or more")
    return value


def _count(path: Path, number: int, text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text):
        raise DataError(f"spot trace {path} line {number}: {text!r:.40} is no number of machines")
    return int(text)
