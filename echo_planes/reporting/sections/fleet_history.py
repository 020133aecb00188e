"""The history of a run's workers, read from its events: who came, served and went, and what was decided.

Times are seconds since the start. Where a run was resumed, its clock began anew: its parts are put one after
another, and a worker of a later part is another one, whatever its name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from echo_planes.reporting.metrics import FLEET_STATE, WORKER_STATE, Record, number

GONE = "gone"
LEAVING = "leaving"
SERVING = "serving"
RESUMED = "the run was resumed"
_REASONS = ("worker leaves", "worker left", "worker lost")


@dataclass(slots=True)
class Stretch:
    """A state that lasted."""

    state: str
    begin_s: float
    end_s: float


@dataclass(slots=True)
class Life:
    """One incarnation of a worker, from when its machine came."""

    worker: str
    part: int  # of a run that was resumed, from 0
    offer: str
    stretches: list[Stretch]
    end: Literal["here", "left", "lost", "gone"] = "here"
    reasons: list[str] = field(default_factory=list)  # why it went

    @property
    def begin_s(self) -> float:
        return self.stretches[0].begin_s

    @property
    def end_s(self) -> float:
        return self.stretches[-1].end_s

    @property
    def served_from_s(self) -> float | None:
        """Time at which it first served; None: never."""
        return next((s.begin_s for s in self.stretches if s.state == SERVING), None)

    @property
    def served_s(self) -> float:
        """Seconds that it served in all, not counting the time in which it left."""
        return sum(s.end_s - s.begin_s for s in self.stretches if s.state == SERVING)


@dataclass(frozen=True, slots=True)
class Standing:
    """One record of a fleet that follows price and need (`fleet.record`)."""

    time_s: float
    reason: str
    mu_min: float | None
    mu_target: float | None
    mu: float | None
    usd_per_hour: float | None
    workers: Mapping[str, int]
    launched: Mapping[str, int]
    released: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class History:
    """All of it."""

    lives: Sequence[Life]  # in the order in which they came
    standings: Sequence[Standing]
    end_s: float

    @property
    def decisions(self) -> list[Standing]:
        """Those in which something was done."""
        return [one for one in self.standings if one.launched or one.released]


def read_history(events: Sequence[Record], seconds: float) -> History:
    """The history in a run's events; of a run that said nothing of its workers it is empty.

    Args:
        events: in the order in which they were written.
        seconds: how long the run, or the last part of it, took.
    """
    lives: list[Life] = []
    living: dict[str, Life] = {}
    newest: dict[str, Life] = {}  # of each worker of this part, living or not
    standings = []
    part, begun_s, now_s = 0, 0.0, 0.0
    for event in events:
        time_s = begun_s + max(0.0, number(event.get("time_s")) or 0.0)
        if time_s < now_s:
            for life in living.values():
                _close(life, now_s)
                life.end, life.reasons = "gone", [*life.reasons, RESUMED]
            living, newest, part = {}, {}, part + 1
            begun_s, time_s = now_s, now_s + time_s - begun_s
        now_s = time_s
        kind, worker, text = event.get("kind"), str(event.get("worker", "?")), str(event.get("text", ""))
        if kind == FLEET_STATE:
            standings.append(_standing(event, now_s))
        elif kind == WORKER_STATE and text == GONE:
            if worker in living:
                life = living.pop(worker)
                _close(life, now_s)
                if life.end == "here":
                    life.end = "left" if life.stretches[-1].state == LEAVING else "gone"
        elif kind == WORKER_STATE and worker in living:
            _enter(living[worker], text, now_s)
        elif kind == WORKER_STATE:
            life = Life(worker, part, str(event.get("offer", "?")), [Stretch(text, now_s, now_s)])
            living[worker] = newest[worker] = life
            lives.append(life)
        elif kind in _REASONS and worker in newest:
            _explain(newest[worker], kind, text, now_s, living=worker in living)
    end_s = max(now_s, begun_s + seconds)
    for life in living.values():
        _close(life, end_s)
    return History(lives, standings, end_s)


def _explain(life: Life, kind: str, text: str, now_s: float, *, living: bool) -> None:
    """Enter the reason for which a worker goes; a loss is told just before its end or just after."""
    life.reasons.append(text)
    if kind == "worker leaves" and living:
        _enter(life, LEAVING, now_s)
    elif kind == "worker lost":
        life.end = "lost"


def _close(life: Life, now_s: float) -> None:
    life.stretches[-1].end_s = now_s


def _enter(life: Life, state: str, now_s: float) -> None:
    if life.stretches[-1].state not in (state, LEAVING):  # what leaves does not come back
        _close(life, now_s)
        life.stretches.append(Stretch(state, now_s, now_s))


def _standing(event: Record, time_s: float) -> Standing:
    def value(key: str) -> float | None:
        return number(event.get(key))

    return Standing(
        time_s,
        str(event.get("text", "")),
        value("mu_min"),
        value("mu_target"),
        value("mu"),
        value("usd_per_hour"),
        _counts(event.get("workers")),
        _counts(event.get("launched")),
        _counts(event.get("released")),
    )


def _counts(found: object) -> dict[str, int]:
    if not isinstance(found, Mapping):
        return {}
    return {str(name): int(count) for name, value in found.items() if (count := number(value))}


def over_time(
    spans: Sequence[tuple[float, float, str]], end_s: float, most_points: int
) -> tuple[list[float], dict[str, list[float]]]:
    """Count the spans of each name that there are at once, over time.

    Args:
        spans: from, to (seconds), name.
        end_s: of the time.
        most_points: of the answer. Within it every change is a step, told by two points at its time; beyond,
            the times are evenly spread and each says what is so then.

    Returns:
        Times, ascending, and by name the number at each; names in the order of `spans`.
    """
    changes = Counter[tuple[float, str]]()
    for begin_s, stop_s, name in spans:
        changes[begin_s, name] += 1
        if stop_s < end_s:  # what lasts until the end does not fall to nothing there
            changes[stop_s, name] -= 1
    moments = sorted({at_s for at_s, _ in changes})
    is_exact = 2 * len(moments) + 2 <= most_points
    if is_exact:
        grid = sorted([0.0, end_s, *moments, *moments])
    else:
        grid = [end_s * i / (most_points - 1) for i in range(most_points)]
    ordered, now, position = sorted(changes.items()), Counter[str](), 0
    series: dict[str, list[float]] = {name: [] for _, _, name in spans}
    for i, at_s in enumerate(grid):
        before = is_exact and i + 1 < len(grid) and grid[i + 1] == at_s
        while position < len(ordered):
            (changed_s, name), change = ordered[position]
            if changed_s > at_s or (before and changed_s == at_s):
                break
            now[name] += change
            position += 1
        for name, values in series.items():
            values.append(float(now[name]))
    return grid, series
