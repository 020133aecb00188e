"""Section on the workers of a run and why they came and went, for reports of real and simulated runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from statistics import median

from markupsafe import Markup

from echo_planes.reporting.formats import cut, known, show_usd, si
from echo_planes.reporting.metrics import Record
from echo_planes.reporting.sections.cards import section, table
from echo_planes.reporting.sections.charts import (
    WIDE,
    Chart,
    Lane,
    Series,
    lanes_chart,
    line_chart,
    stacked_chart,
)
from echo_planes.reporting.sections.fleet_history import (
    LEAVING,
    SERVING,
    History,
    Life,
    over_time,
    read_history,
)

MAX_LANES = 40  # workers; more are a table
MAX_BARS = 1000  # in all lanes; more are a table, too
MAX_ROWS = 300  # newest, in a table
MAX_OPEN = 8  # longer tables are folded
MAX_WHY = 600  # characters of a reason
NUM_POINTS = 390  # of a chart over time
NUM_COLORS = 5
OTHERS = "others"
STATE_COLORS = {SERVING: 1, "booting": 5, LEAVING: 2, "parked": 4}
OTHER_COLOR = 3
ENDS = {"here": "was there at the end", "left": "left", "lost": "lost", "gone": "ended"}
_UNITS = ((300.0, 1.0, "seconds"), (5 * 3600.0, 60.0, "minutes"))

INSTANCE_TYPES = (
    "Instance type|>Came|>At once, at most|>Hours served|>Served after, median|>Lost|>Left|>At the end"
)
WORKERS = "Worker|Instance type|>Came|>Served from|>Went|How"
DECISIONS = ">When|Launched|Released|Why|>Target, trajectories/s|>Provided|>$/hour|Workers then"


def fleet(events: Sequence[Record], seconds: float) -> Markup:
    """Return the section; nothing if the run's events do not mention its workers.

    Args:
        events: of the run.
        seconds: duration of its last part.
    """
    return section("Fleet", fleet_cards(read_history(events, seconds)))


def fleet_cards(history: History) -> list[Markup]:
    """Return charts and tables of a fleet, of bounded size for any number of workers."""
    cards = []
    if history.lives:
        cards += [_by_instance_type(history), _by_state(history)]
    if history.standings:
        cards.append(_capacity(history))
    if history.lives:
        lanes = {(life.part, life.worker) for life in history.lives}
        num_bars = sum(len(life.stretches) for life in history.lives)
        if len(lanes) <= MAX_LANES and num_bars <= MAX_BARS:
            cards.append(_lanes(history))
        cards += [_instance_types(history), _workers(history)]
    if history.decisions:
        cards.append(_decisions(history))
    return cards


# --- over time -----------------------------------------------------------------------------------


def _unit(end_s: float) -> tuple[float, str]:
    """Return the seconds per unit of a time axis, and the unit's name."""
    return next(((size, name) for least, size, name in _UNITS if end_s < least), (3600.0, "hours"))


def _chart(history: History, title: str, note: str, x: Sequence[float], unit: str, width: int = 560) -> Chart:
    size, name = _unit(history.end_s)
    show = _whole if unit == "workers" else si
    return Chart(title, note, [s / size for s in x], unit, show, width, x_unit=name)


def _whole(value: float) -> str:
    """Return a number of workers as text; "" for the fractions on an axis."""
    return f"{value:,.0f}" if value.is_integer() else ""


def _by_instance_type(history: History) -> Markup:
    """Draw serving workers as stacked areas, the instance types that served longest first."""
    served: dict[str, float] = {}
    for life in history.lives:
        served[life.instance_type] = served.get(life.instance_type, 0.0) + life.served_s
    shown = sorted(served, key=lambda instance_type: -served[instance_type])
    if len(shown) > NUM_COLORS:
        shown = [*shown[: NUM_COLORS - 1], OTHERS]
    spans = [
        (s.begin_s, s.end_s, life.instance_type if life.instance_type in shown else OTHERS)
        for life in history.lives
        for s in life.stretches
        if s.state == SERVING
    ]
    x, counts = over_time(spans, history.end_s, NUM_POINTS)
    chart = _chart(history, "Workers by instance type", "That serve", x, "workers")
    zeros = [0.0] * len(x)
    series = [
        Series(instance_type, counts.get(instance_type, zeros), color, pool="last")
        for color, instance_type in enumerate(shown, 1)
    ]
    return stacked_chart(chart, series)


def _by_state(history: History) -> Markup:
    spans = [(s.begin_s, s.end_s, s.state) for life in history.lives for s in life.stretches]
    x, counts = over_time(spans, history.end_s, NUM_POINTS)
    chart = _chart(history, "Workers by state", "Machines that are there", x, "workers")
    ordered = sorted(counts, key=lambda state: (_place(state), state))
    return stacked_chart(
        chart,
        [Series(s, counts[s], STATE_COLORS.get(s, OTHER_COLOR), pool="last") for s in ordered],
    )


def _place(state: str) -> int:
    known = list(STATE_COLORS)
    return known.index(state) if state in known else len(known)


def _capacity(history: History) -> Markup:
    rows = history.standings
    chart = _chart(
        history,
        "Needed and provided",
        "What keeps the learner busy (mu_min), the target, and what the workers that serve provide",
        [one.time_s for one in rows],
        "trajectories/s",
        WIDE,
    )
    lines = [
        Series("provided", [one.mu for one in rows], 1),
        Series("target", [one.mu_target for one in rows], 2),
        Series("mu_min", [one.mu_min for one in rows], 5),
    ]
    return line_chart(chart, [line for line in lines if any(v is not None for v in line.values)])


def _lanes(history: History) -> Markup:
    size, name = _unit(history.end_s)
    lanes: dict[tuple[int, str], tuple[str, list[Life]]] = {}
    for life in history.lives:
        _, lives = lanes.setdefault((life.part, life.worker), (_name(life), []))
        lives.append(life)
    states = sorted({s.state for life in history.lives for s in life.stretches}, key=_place)
    rows = []
    for title, lives in lanes.values():
        bars, marks = [], []
        for life in lives:
            for s in life.stretches:
                text = f"{_name(life)} {life.instance_type}: {s.state} {_time(s.begin_s)} to {_time(s.end_s)}"
                last = s is life.stretches[-1]
                text += f"; {ENDS[life.end]}{_why(life)}" if last and life.end != "here" else ""
                color = STATE_COLORS.get(s.state, OTHER_COLOR)
                bars.append((s.begin_s / size, s.end_s / size, color, text))
            if life.end == "lost":
                marks.append((life.end_s / size, f"{_name(life)} lost at {_time(life.end_s)}{_why(life)}"))
        rows.append(Lane(f"{title} {lives[-1].instance_type}", bars, marks))
    chart = Chart("Worker by worker", "Point at a bar to read it", width=WIDE, x_unit=name)
    keys = [(f"k{STATE_COLORS.get(state, OTHER_COLOR)} box", state) for state in states]
    if any(row.marks for row in rows):
        keys.append(("kbad", "lost"))
    return lanes_chart(chart, rows, history.end_s / size, keys)


def _name(life: Life) -> str:
    return life.worker + (f" (part {life.part + 1})" if life.part else "")


def _why(life: Life) -> str:
    text = "; ".join(dict.fromkeys(life.reasons))
    return f": {cut(text, MAX_WHY)}" if text else ""


def _time(seconds: float) -> str:
    """Return a time as 1:02:03, or as 12.3 s within a run's first minutes."""
    if seconds < _UNITS[0][0]:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


# --- tables --------------------------------------------------------------------------------------


def _instance_types(history: History) -> Markup:
    by_instance_type: dict[str, list[Life]] = {}
    for life in history.lives:
        by_instance_type.setdefault(life.instance_type, []).append(life)
    rows = []
    for instance_type, lives in by_instance_type.items():
        boots = [life.served_from_s - life.begin_s for life in lives if life.served_from_s is not None]
        ends = Counter(life.end for life in lives)
        hours = sum(life.served_s for life in lives) / 3600.0
        cells = [f"{len(lives):,}", f"{_most(lives):,}", f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}"]
        cells += [_time(median(boots)) if boots else "-", f"{ends['lost']:,}"]
        cells += [f"{ends['left'] + ends['gone']:,}", f"{ends['here']:,}"]
        rows.append([instance_type, *cells])
    return table("Instance types", INSTANCE_TYPES, rows)


def _most(lives: Sequence[Life]) -> int:
    """Return the largest number that served at once; one that ends when another begins does not overlap."""
    changes = Counter[float]()
    for life in lives:
        for s in life.stretches:
            if s.state == SERVING:
                changes[s.begin_s] += 1
                changes[s.end_s] -= 1
    counts = accumulate(change for _, change in sorted(changes.items()))
    return max(counts, default=0)


def _workers(history: History) -> Markup:
    rows = []
    for life in history.lives[-MAX_ROWS:]:
        served = life.served_from_s
        rows.append(
            [
                _name(life),
                life.instance_type,
                _time(life.begin_s),
                "never" if served is None else _time(served),
                "-" if life.end == "here" else _time(life.end_s),
                ENDS[life.end] + _why(life),
            ]
        )
    return table(_last("Every worker", len(history.lives)), WORKERS, rows, folded=True)


def _decisions(history: History) -> Markup:
    rows = [
        [
            _time(one.time_s),
            _counted("+", one.launched),
            _counted("-", one.released),
            cut(one.reason, MAX_WHY),
            known(one.mu_target, si),
            known(one.mu, si),
            known(one.usd_per_hour, show_usd),
            ", ".join(f"{n:,} {state}" for state, n in one.workers.items()) or "-",
        ]
        for one in history.decisions[-MAX_ROWS:]
    ]
    return table(_last("Decisions", len(history.decisions)), DECISIONS, rows, folded=len(rows) > MAX_OPEN)


def _counted(sign: str, counts: Mapping[str, int]) -> str:
    return ", ".join(f"{sign}{count:,} {instance_type}" for instance_type, count in counts.items()) or "-"


def _last(title: str, total: int) -> str:
    return f"{title}, the last {MAX_ROWS:,} of {total:,}" if total > MAX_ROWS else f"{title} ({total:,})"
