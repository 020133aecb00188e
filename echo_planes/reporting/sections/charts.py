"""SVG charts. Colours come from the style sheet's classes; a data attribute holds the hover values."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

from echo_planes.reporting.formats import Format, si, visible
from echo_planes.reporting.html import part

MAX_POINTS = 400  # per series; further ones would hardly be visible
KIND_COLORS = {"lost": "fbad", "fail": "fbad", "drop": "f2", "restart": "f3", "eval": "f4", "publi": "f5"}
LEFT, RIGHT, TOP, BOTTOM = 52, 24, 14, 36
CHARACTER = 6.6  # pixels, about, at the size of the style sheet
MAX_LABEL = 40  # characters beside a bar or a lane
PANEL_HEIGHT = 150  # of one of several charts in a card
WIDE = 1140  # a chart that takes the whole width of the page

Values = Sequence[float | None]
Point = tuple[float, float, str]  # x, y, hover text


@dataclass(frozen=True, slots=True)
class Series:
    """One line or area. `color` is 1 to 5; `pool`: how neighbours merge beyond MAX_POINTS values."""

    name: str
    values: Values
    color: int
    style: Literal["line", "faint"] = "line"
    pool: Literal["mean", "max", "last"] = "mean"


@dataclass(frozen=True, slots=True)
class Chart:
    """Common part of all charts: title, one-line explanation, axes."""

    title: str
    note: str
    x: Sequence[float] = ()  # steps, ascending; or time since the start, in `x_unit`
    y_label: str = ""  # with its unit
    show: Format = si  # formats a y value
    width: int = 560
    height: int = 240
    y_max: float | None = None  # least upper end of the y axis
    x_unit: str = ""  # unit of time; "": x counts learner steps
    x_label: str = ""  # name of x, if it is neither
    show_x: Format | None = None  # None: whole numbers only


@dataclass(frozen=True, slots=True)
class Lane:
    """One row of `lanes_chart`: stretches of time, and marks at moments."""

    name: str
    bars: Sequence[tuple[float, float, int, str]]  # from, to, color (1 to 5), hover text
    marks: Sequence[tuple[float, str]] = ()  # when, hover text
    marks_color: str = "fbad"


@dataclass(frozen=True, slots=True)
class Picture:
    """One drawing of a card, its unit, and the keys of its legend: (class, name)."""

    svg: Markup | None  # None: there is no data
    unit: str = ""
    keys: Sequence[tuple[str, str]] = ()


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round numbers (1, 2, 2.5 or 5 times a power of ten apart) covering `[low, high]`."""
    span = high - low if high > low else abs(high) or 1.0
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    distance = next(m * power for m in (1.0, 2.0, 2.5, 5.0, 10.0) if m * power >= raw * 0.999)
    first = math.floor(low / distance + 1e-9)
    last = math.ceil((low + span) / distance - 1e-9)
    return [round(i * distance, 12) for i in range(first, last + 1)]


def moving_average(values: Values, window: int) -> list[float | None]:
    """Return at each place the mean of the last `window` values, missing ones left out."""
    means: list[float | None] = []
    for i in range(len(values)):
        seen = [v for v in values[max(0, i + 1 - window) : i + 1] if v is not None]
        means.append(sum(seen) / len(seen) if seen else None)
    return means


def line_chart(
    chart: Chart,
    series: Sequence[Series],
    *,
    references: Sequence[tuple[float, str]] = (),
    marks: Sequence[Point] = (),
    marks_name: str = "",
) -> Markup:
    """Draw lines over steps; `references` are labelled horizontal lines."""
    return _card(chart, _lines(chart, series, references, marks, marks_name))


def panel_chart(title: str, note: str, panels: Sequence[tuple[Chart, Sequence[Series]]]) -> Markup:
    """Draw line charts above one another in one card, for related numbers without a common unit."""
    return _card(Chart(title, note), *(_lines(chart, series) for chart, series in panels))


def _lines(
    chart: Chart,
    series: Sequence[Series],
    references: Sequence[tuple[float, str]] = (),
    marks: Sequence[Point] = (),
    marks_name: str = "",
) -> Picture:
    x, pooled = _pool(chart.x, series)
    measured = [v for s in pooled for v in s.values if v is not None]
    if not x or not (measured or marks):
        return Picture(None, chart.y_label)
    values = measured + [value for value, _ in references] + [y for _, y, _ in marks]
    frame = _Frame(chart, [*x, *(m[0] for m in marks)], min(0.0, *values), max(values))
    for value, label in references:
        frame.line("ref", value)
        frame.add(_text("reflabel", chart.width - RIGHT - 4, frame.y(value) - 5, label))
    for s in pooled:
        frame.path(f"{s.style} s{s.color}", x, s.values)
    for mark in marks:
        frame.dot("mark", mark)
    keys = [(f"k{s.color} {s.style}", s.name) for s in pooled]
    return frame.picture(_hover(frame, x, pooled), keys + ([("kmark", marks_name)] if marks else []))


def stacked_chart(chart: Chart, series: Sequence[Series], *, outline: Series | None = None) -> Markup:
    """Draw areas on top of one another, first at the bottom; `outline` is a line over them (their total)."""
    x, pooled = _pool(chart.x, [*series, *([outline] if outline else [])])
    areas, outlines = pooled[: len(series)], pooled[len(series) :]
    if not x or not any(v for s in pooled for v in s.values):
        return _card(chart, Picture(None, chart.y_label))
    totals = [sum(s.values[i] or 0.0 for s in areas) for i in range(len(x))]
    frame = _Frame(chart, x, 0.0, max([*totals, *(v for s in outlines for v in s.values if v is not None)]))
    floor = [0.0] * len(x)
    for s in areas:
        top = [low + (value or 0.0) for low, value in zip(floor, s.values, strict=True)]
        edge = [*zip(x, top, strict=True), *zip(reversed(x), reversed(floor), strict=True)]
        points = " ".join(f"{frame.x(a)},{frame.y(b)}" for a, b in edge)
        frame.add(_shape('<polygon class="area f{}" points="{}"/>', s.color, points))
        floor = top
    for s in outlines:
        frame.path(f"line thin s{s.color}", x, s.values)
    keys = [(f"k{s.color} box", s.name) for s in areas] + [(f"k{s.color} line", s.name) for s in outlines]
    return _card(chart, frame.picture(_hover(frame, x, pooled), keys))


def points_chart(
    chart: Chart, lines: Sequence[tuple[str, int, Sequence[Point]]], marks: Sequence[Point], marks_name: str
) -> Markup:
    """Draw points and marks in the plane. A line joins the points of each (name, color). Axes begin at 0."""
    every = [*marks, *(point for _, _, points in lines for point in points)]
    if not every:
        return _card(chart, Picture(None, chart.y_label))
    x, y = max(0.01, *(point[0] for point in every)), max(point[1] for point in every)
    frame = _Frame(chart, [0.0, ticks(0.0, x)[-1]], 0.0, y)
    for _, color, points in lines:
        frame.path(f"line thin s{color}", [point[0] for point in points], [point[1] for point in points])
        for point in points:
            frame.dot(f"dot f{color}", point, 3.0)
    for mark in marks:
        frame.dot("mark", mark, 5.0)
    keys = [(f"k{color} line", name) for name, color, _ in lines]
    return _card(chart, frame.picture("", [*keys, ("kmark", marks_name)]))


def bar_chart(title: str, note: str, bars: Sequence[tuple[str, float]], show: Format) -> Markup:
    """Draw horizontal bars: (label, value)."""
    chart = Chart(title, note)
    if not bars:
        return _card(chart, Picture(None))
    row, left = 27, _margin((label for label, _ in bars), least=148)
    room = chart.width - left - 108
    peak = max(value for _, value in bars) or 1.0
    shapes = []
    for i, (label, value) in enumerate(bars):
        text, length, y = show(value), max(2.0, room * value / peak), i * row + 8
        shapes += [
            _text("barlabel", left - 10, y + 13, _short(label)),
            _bar("bar", left, y + 1, length, 17, f"{label}: {text}"),
            _text("barvalue", left + length + 8, y + 13, text),
        ]
    return _card(chart, Picture(_svg(chart, shapes, len(bars) * row + 12)))


def timeline(title: str, note: str, events: Sequence[tuple[float, str, str]], end_s: float) -> Markup:
    """Draw one lane per kind of event: (seconds, kind, text)."""
    marks: dict[str, list[tuple[float, str]]] = {}
    for time_s, kind, text in events:
        marks.setdefault(kind, []).append((time_s, f"{time_s:,.1f} s  {text}"))
    lanes = [
        Lane(kind, (), dots, next((color for word, color in KIND_COLORS.items() if word in kind), "f1"))
        for kind, dots in marks.items()
    ]
    end_s = max([end_s, *(time_s for time_s, _, _ in events)])
    return lanes_chart(Chart(title, note, width=WIDE, x_unit="seconds"), lanes, end_s)


def lanes_chart(
    chart: Chart, lanes: Sequence[Lane], end: float, keys: Sequence[tuple[str, str]] = ()
) -> Markup:
    """Draw one row per lane; `chart.x_unit` is the unit of all times, `keys` name the colors."""
    row, left, right = 22, _margin((lane.name for lane in lanes), least=190), chart.width - 24
    marks_x = ticks(0.0, max(end, 1e-3), 8)
    scale = (right - left) / marks_x[-1]
    height = len(lanes) * row + 46
    shapes = []
    for value in marks_x:
        x = left + value * scale
        shapes += [_line("grid", x, x, 6, height - 38), _text("tick mid", x, height - 22, si(value))]
    shapes.append(_text("axis mid", (left + chart.width) / 2, height - 4, f"{chart.x_unit} since start"))
    for i, lane in enumerate(lanes):
        y = 6 + row * i
        shapes.append(_text("barlabel", left - 12, y + 15, _short(lane.name)))
        if not lane.bars:
            shapes.append(_line("grid", left, right, y + 11, y + 11))
        for begin, stop, color, text in lane.bars:
            width = max(1.0, (stop - begin) * scale)
            shapes.append(_bar(f"area f{color}", left + begin * scale, y + 4, width, 14, text))
        shapes += [
            _dot(f"dot {lane.marks_color}", left + x * scale, y + 11, 4.5, text) for x, text in lane.marks
        ]
    return _card(chart, Picture(_svg(chart, shapes, height), keys=keys))


class _Frame:
    """Chart with axes under construction: scales from data to pixels, and the shapes so far."""

    def __init__(self, chart: Chart, x: Sequence[float], low: float, high: float) -> None:
        if chart.y_max is not None:
            high = max(high, chart.y_max)
        y_ticks = ticks(low, high if high > low else low + 1.0, 4)
        self.chart = chart
        self._low, self._high = y_ticks[0], y_ticks[-1]
        self._x_low, self._x_high = min(x), max(x)
        # Whole dollars are shown as such.
        names = {value: chart.show(value).removesuffix(".00") for value in y_ticks}
        self.left = _margin(names.values(), LEFT)
        self._width = chart.width - self.left - RIGHT
        self._height = chart.height - TOP - BOTTOM
        self._shapes: list[Markup] = []
        for value in y_ticks:
            self.line("grid" if value else "zero", value)
            self.add(_text("tick end", self.left - 8, self.y(value) + 3.5, names[value]))
        for value in ticks(self._x_low, self._x_high, 6 if chart.width < WIDE else 12):
            if self._x_low <= value <= self._x_high and (chart.show_x or value.is_integer()):
                label = chart.show_x(value) if chart.show_x else f"{value:,.0f}"
                self.add(_text("tick mid", self.x(value), chart.height - BOTTOM + 16, label))
        name = chart.x_label or (f"{chart.x_unit} since start" if chart.x_unit else "learner step")
        self.add(_text("axis mid", self.left + self._width / 2, chart.height - 4, name))

    def x(self, value: float) -> float:
        span = self._x_high - self._x_low
        share = (value - self._x_low) / span if span else 0.5
        return round(self.left + share * self._width, 1)

    def y(self, value: float) -> float:
        return round(TOP + (1 - (value - self._low) / (self._high - self._low)) * self._height, 1)

    def add(self, shape: Markup) -> None:
        self._shapes.append(shape)

    def line(self, kind: str, value: float) -> None:
        """Add a horizontal line."""
        self.add(_line(kind, self.left, self.chart.width - RIGHT, self.y(value), self.y(value)))

    def path(self, kind: str, x: Sequence[float], values: Values) -> None:
        """Add a line with gaps where nothing was measured. A lone point is a small ring."""
        parts = []
        pen_down = False
        for i, (a, b) in enumerate(zip(x, values, strict=True)):
            if b is not None:
                parts.append(f"{'L' if pen_down else 'M'}{self.x(a)},{self.y(b)}")
                if not pen_down and (i + 1 == len(values) or values[i + 1] is None):
                    parts.append("m-2,0a2,2 0 1,0 4,0a2,2 0 1,0 -4,0")
            pen_down = b is not None
        self.add(_shape('<path class="{}" d="{}"/>', kind, "".join(parts)))

    def dot(self, kind: str, point: Point, radius: float = 4.5) -> None:
        self.add(_dot(kind, self.x(point[0]), self.y(point[1]), radius, point[2]))

    def picture(self, hover: str, keys: Sequence[tuple[str, str]]) -> Picture:
        rule = _line("rule", 0, 0, TOP, self.chart.height - BOTTOM)
        return Picture(_svg(self.chart, [*self._shapes, rule], hover=hover), self.chart.y_label, keys)


def _pool(x: Sequence[float], series: Sequence[Series]) -> tuple[list[float], list[Series]]:
    """Return at most MAX_POINTS per series; neighbours merge by the `pool` of each series."""
    size = math.ceil(len(x) / MAX_POINTS) or 1
    starts = range(0, len(x), size)
    merged = []
    for s in series:
        values: list[float | None] = []
        for i in starts:
            seen = [v for v in s.values[i : i + size] if v is not None]
            if not seen:
                values.append(None)
            elif s.pool == "mean":
                values.append(sum(seen) / len(seen))
            else:
                values.append(max(seen) if s.pool == "max" else seen[-1])
        merged.append(Series(s.name, values, s.color, s.style, s.pool))
    return [x[min(i + size, len(x)) - 1] for i in starts], merged


def _hover(frame: _Frame, x: Sequence[float], series: Sequence[Series]) -> str:
    chart = frame.chart
    rows = [
        {"n": s.name, "c": s.color, "v": ["-" if v is None else chart.show(v) for v in s.values]}
        for s in series
        if s.style != "faint"
    ]
    at = [f"{v:,.4g} {chart.x_unit}" if chart.x_unit else f"step {v:,.0f}" for v in x]
    return json.dumps({"px": [frame.x(v) for v in x], "x": at, "rows": rows})


# --- shapes --------------------------------------------------------------------------------------


def _shape(markup: str, *values: object) -> Markup:
    """Return an element with escaped values, floats rounded to a tenth of a pixel."""
    shown = [round(v, 1) if isinstance(v, float) else visible(str(v)) for v in values]
    return Markup(markup).format(*shown)


def _line(kind: str, x1: float, x2: float, y1: float, y2: float) -> Markup:
    return _shape('<line class="{}" x1="{}" x2="{}" y1="{}" y2="{}"/>', kind, x1, x2, y1, y2)


def _text(kind: str, x: float, y: float, text: str) -> Markup:
    return _shape('<text class="{}" x="{}" y="{}">{}</text>', kind, x, y, text)


def _dot(kind: str, x: float, y: float, radius: float, text: str) -> Markup:
    shape = '<circle class="{}" cx="{}" cy="{}" r="{}"><title>{}</title></circle>'
    return _shape(shape, kind, x, y, radius, text)


def _bar(kind: str, x: float, y: float, width: float, height: float, text: str) -> Markup:
    shape = '<rect class="{}" x="{}" y="{}" width="{}" height="{}" rx="2"><title>{}</title></rect>'
    return _shape(shape, kind, x, y, width, height, text)


def _svg(chart: Chart, shapes: Iterable[Markup], height: int = 0, hover: str = "") -> Markup:
    data = _shape(' data-hover="{}"', hover) if hover else ""
    head = '<svg viewBox="0 0 {} {}" role="img" aria-label="{}"'
    frame = _shape(head, chart.width, height or chart.height, chart.title)
    return Markup("{}{}>{}</svg>").format(frame, data, Markup("").join(shapes))


def _short(text: str) -> str:
    return text if len(text) <= MAX_LABEL else f"{text[: MAX_LABEL - 1]}…"


def _margin(labels: Iterable[str], least: float) -> float:
    """Return the pixels that the longest label takes at the left, with a gap."""
    longest = max((min(len(label), MAX_LABEL) for label in labels), default=0)
    return max(least, longest * CHARACTER + 16)


def _card(chart: Chart, *pictures: Picture) -> Markup:
    return part("figure", title=chart.title, note=chart.note, wide=chart.width >= WIDE, pictures=pictures)
