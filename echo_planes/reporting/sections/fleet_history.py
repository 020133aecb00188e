"""History of a run's workers, read from its events: when each came, served and went, and the decisions.

Times are seconds since the start of the run. Each part of a run restarts the clock, so `read_history` puts
the parts one after another. A worker of a later part counts as another one, even under the same id.
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
    """Period that a worker spent in one state."""

    state: str
    begin_s: float
    end_s: float


@dataclass(slots=True)
class Life:
    """One incarnation of a worker, from when its machine came."""

    worker: str
    part: int  # number of the run's part, from 0
    instance_type: str
    stretches: list[Stretch]
    end: Literal["here", "left", "lost", "gone"] = "here"
    reasons: list[str] = field(default_factory=list)  # why the worker went

    @property
    def begin_s(self) -> float:
        return self.stretches[0].begin_s

    @property
    def end_s(self) -> float:
        return self.stretches[-1].end_s

    @property
    def served_from_s(self) -> float | None:
        """Time at which the worker first served; None: never."""
        return next((s.begin_s for s in self.stretches if s.state == SERVING), None)

    @property
    def served_s(self) -> float:
        """Seconds that the worker served in all, without the time in which it was leaving."""
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
    """Workers of a run, and the records of its fleet."""

    lives: Sequence[Life]  # in the order in which they came
    standings: Sequence[Standing]
    end_s: float

    @property
    def decisions(self) -> list[Standing]:
        """Records in which workers were launched or released."""
        return [one for one in self.standings if one.launched or one.released]


def read_history(events: Sequence[Record], seconds: float) -> History:
    """Return the history in a run's events; an empty one if they do not mention workers.

    Args:
        events: in the order in which they were written.
        seconds: duration of the last part of the run.
    """
    lives: list[Life] = []
    living: dict[str, Life] = {}
    newest: dict[str, Life] = {}  # newest life of each worker of this part, ended or not
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
            # "offer": the name of the key in folders of older runs.
            instance_type = str(event.get("instance_type", event.get("offer", "?")))
            life = Life(worker, part, instance_type, [Stretch(text, now_s, now_s)])
            living[worker] = newest[worker] = life
            lives.append(life)
        elif kind in _REASONS and worker in newest:
            _explain(newest[worker], kind, text, now_s, living=worker in living)
    end_s = max(now_s, begun_s + seconds)
    for life in living.values():
        _close(life, end_s)
    return History(lives, standings, end_s)


def _explain(life: Life, kind: str, text: str, now_s: float, *, living: bool) -> None:
    """Enter the reason why a worker goes. The event of a loss comes just before the end, or just after."""
    life.reasons.append(text)
    if kind == "worker leaves" and living:
        _enter(life, LEAVING, now_s)
    elif kind == "worker lost":
        life.end = "lost"


def _close(life: Life, now_s: float) -> None:
    life.stretches[-1].end_s = now_s


def _enter(life: Life, state: str, now_s: float) -> None:
    if life.stretches[-1].state not in (state, LEAVING):  # a leaving worker changes to no other state
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
    """Count over time how many spans of each name are open.

    Args:
        spans: begin, end (seconds), name.
        end_s: end of the time range, seconds.
        most_points: largest number of points. If that suffices, two points at the time of every change make
            it a step; otherwise the times are evenly spaced.

    Returns:
        Times, ascending, and for each name the counts at these times; names in the order of `spans`.
    """
    changes = Counter[tuple[float, str]]()
    for begin_s, stop_s, name in spans:
        changes[begin_s, name] += 1
        if stop_s < end_s:  # a span that lasts until the end does not drop to 0 there
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
