"""SVG charts as text. Colours come from the page's CSS classes; hover values travel in a data attribute."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

MAX_POINTS = 400  # per series: more than a chart has pixels to show
KIND_COLORS = {"lost": "fbad", "fail": "fbad", "drop": "f2", "restart": "f3", "eval": "f4", "publi": "f5"}
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 14, 36
PANEL_HEIGHT = 150  # of one of several in a card

Values = Sequence[float | None]
Format = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Series:
    """One line or area. `color` is 1 to 5; `pool` says how neighbours merge when there are too many."""

    name: str
    values: Values
    color: int
    style: Literal["line", "faint"] = "line"
    pool: Literal["mean", "max", "last"] = "mean"


@dataclass(frozen=True, slots=True)
class Chart:
    """Common part of all charts of steps: title, one-line explanation, axes."""

    title: str
    note: str
    x: Sequence[float]  # steps, ascending; or time since the start, in `x_unit`
    y_label: str  # with its unit
    show: Format  # a value for people
    width: int = 560
    height: int = 240
    y_max: float | None = None  # at least this much room
    x_unit: str = ""  # of time; none: x counts learner steps


def si(value: float) -> str:
    """1234567 -> '1.23M'; small numbers keep three significant digits."""
    size = abs(value)
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            unit = 1e3 if suffix == "k" else limit
            return f"{value / unit:.3g}{suffix}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def show_percent(share: float) -> str:
    return f"{share * 100:.3g} %"


def show_seconds(value: float) -> str:
    return f"{value:.3g} s"


def show_usd(value: float) -> str:
    if value == 0:
        return "$0"
    return f"${value:,.2f}" if abs(value) >= 1 else f"${value:.3g}"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers (1, 2, 2.5 or 5 times a power of ten apart) covering `[low, high]`."""
    span = high - low if high > low else abs(high) or 1.0
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    distance = next(m * power for m in (1.0, 2.0, 2.5, 5.0, 10.0) if m * power >= raw * 0.999)
    first = math.floor(low / distance + 1e-9)
    last = math.ceil((low + span) / distance - 1e-9)
    return [round(i * distance, 12) for i in range(first, last + 1)]


def moving_average(values: Values, window: int) -> list[float | None]:
    """Mean of the last `window` values, missing ones left out."""
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
    marks: Sequence[tuple[float, float, str]] = (),
    marks_name: str = "",
) -> str:
    """Lines over steps; `references` are labelled horizontal lines, `marks` single (x, y, tooltip) points."""
    legend, svg = _lines(chart, series, references, marks)
    if marks:
        legend += _legend([("kmark", marks_name)])
    return _card(chart, legend, svg)


@dataclass(frozen=True, slots=True)
class Panel:
    """One of the charts that answer one question together, over the same steps."""

    y_label: str  # with its unit
    show: Format
    series: Sequence[Series]
    references: Sequence[tuple[float, str]] = ()
    y_max: float | None = None


def panel_chart(title: str, note: str, x: Sequence[float], panels: Sequence[Panel]) -> str:
    """Line charts above one another in one card, for numbers that belong together and have no common unit."""
    body = []
    for panel in panels:
        chart = Chart(title, "", x, panel.y_label, panel.show, height=PANEL_HEIGHT, y_max=panel.y_max)
        legend, svg = _lines(chart, panel.series, panel.references, ())
        body.append(_legend_row(chart, legend) + svg)
    return _card(Chart(title, note, x, "", si), "", "".join(body))


def _lines(
    chart: Chart,
    series: Sequence[Series],
    references: Sequence[tuple[float, str]],
    marks: Sequence[tuple[float, float, str]],
) -> tuple[str, str]:
    """Legend and picture of a line chart."""
    x, pooled = _pool(chart.x, series)
    measured = [v for s in pooled for v in s.values if v is not None]
    if not x or not (measured or marks):
        return "", '<p class="empty">No data.</p>'
    values = measured + [value for value, _ in references] + [y for _, y, _ in marks]
    frame = _Frame(chart, [*x, *(m[0] for m in marks)], min(0.0, *values), max(values))
    body = [frame.axes(chart)]
    for value, label in references:
        y = frame.y(value)
        body.append(f'<line class="ref" x1="{LEFT}" x2="{chart.width - RIGHT}" y1="{y}" y2="{y}"/>')
        body.append(
            f'<text class="reflabel" x="{chart.width - RIGHT - 4}" y="{y - 5:.1f}">{escape(label)}</text>'
        )
    for s in pooled:
        path = _path(frame, x, s.values)
        body.append(f'<path class="{s.style} s{s.color}" d="{path}"/>')
    for mark_x, mark_y, text in marks:
        body.append(
            f'<circle class="mark" cx="{frame.x(mark_x)}" cy="{frame.y(mark_y)}" r="4.5">'
            f"<title>{escape(text)}</title></circle>"
        )
    legend = _legend([(f"k{s.color} {s.style}", s.name) for s in pooled])
    return legend, frame.svg(chart, "".join(body), _hover(frame, chart, x, pooled))


def stacked_chart(chart: Chart, series: Sequence[Series], *, outline: Series | None = None) -> str:
    """Areas on top of one another, first at the bottom; `outline` is a line over them (their total)."""
    every = [*series, outline] if outline is not None else list(series)
    x, pooled = _pool(chart.x, every)
    areas = pooled[: len(series)]
    if not x or not any(v for s in pooled for v in s.values):
        return _card(chart, "", '<p class="empty">No data.</p>')
    totals = [sum(s.values[i] or 0.0 for s in areas) for i in range(len(x))]
    peak = max([*totals, *(v for s in pooled[len(series) :] for v in s.values if v is not None)])
    frame = _Frame(chart, x, 0.0, peak)
    body = [frame.axes(chart)]
    floor = [0.0] * len(x)
    for s in areas:
        top = [floor[i] + (s.values[i] or 0.0) for i in range(len(x))]
        up = [f"{frame.x(a)},{frame.y(b)}" for a, b in zip(x, top, strict=True)]
        down = [f"{frame.x(a)},{frame.y(b)}" for a, b in zip(reversed(x), reversed(floor), strict=True)]
        body.append(f'<polygon class="area f{s.color}" points="{" ".join(up + down)}"/>')
        floor = top
    for s in pooled[len(series) :]:
        body.append(f'<path class="line thin s{s.color}" d="{_path(frame, x, s.values)}"/>')
    legend = _legend([(f"k{s.color} box", s.name) for s in areas])
    legend += _legend([(f"k{s.color} line", s.name) for s in pooled[len(series) :]])
    return _card(chart, legend, frame.svg(chart, "".join(body), _hover(frame, chart, x, pooled)))


def bar_chart(title: str, note: str, bars: Sequence[tuple[str, float, str]]) -> str:
    """Horizontal bars: (label, value, what is written at the end)."""
    chart = Chart(title, note, (), "", si)
    if not bars:
        return _card(chart, "", '<p class="empty">No data.</p>')
    row, label_width, value_width = 27, 148, 108
    room = chart.width - label_width - value_width
    peak = max((value for _, value, _ in bars), default=0.0) or 1.0
    body = []
    for i, (label, value, text) in enumerate(bars):
        length = max(2.0, room * value / peak)
        y = i * row + 8
        short = label if len(label) <= 22 else label[:21] + "…"
        body.append(f'<text class="barlabel" x="{label_width - 10}" y="{y + 13}">{escape(short)}</text>')
        body.append(
            f'<rect class="bar" x="{label_width}" y="{y + 1}" width="{length:.1f}" height="17" rx="3">'
            f"<title>{escape(label)}: {escape(text)}</title></rect>"
        )
        body.append(
            f'<text class="barvalue" x="{label_width + length + 8:.1f}" y="{y + 13}">{escape(text)}</text>'
        )
    height = len(bars) * row + 12
    svg = f'<svg viewBox="0 0 {chart.width} {height}" role="img">{"".join(body)}</svg>'
    return _card(chart, "", svg)


def timeline(title: str, note: str, events: Sequence[tuple[float, str, str]], end_s: float) -> str:
    """One lane per kind of event: (seconds, kind, text)."""
    width, lane, left = 1140, 26, 130
    chart = Chart(title, note, (), "", si, width=width)
    if not events:
        return _card(chart, "", '<p class="empty">No events.</p>')
    kinds = list(dict.fromkeys(kind for _, kind, _ in events))
    marks_s = ticks(0.0, max(end_s, *(t for t, _, _ in events), 1e-3), 8)
    scale = (width - left - 24) / marks_s[-1]
    height = len(kinds) * lane + 46
    body = []
    for second in marks_s:
        at = f"{left + second * scale:.1f}"
        body.append(f'<line class="grid" x1="{at}" x2="{at}" y1="6" y2="{height - 38}"/>')
        body.append(f'<text class="tick mid" x="{at}" y="{height - 22}">{si(second)}</text>')
    body.append(
        f'<text class="axis mid" x="{(left + width) / 2}" y="{height - 4}">seconds since start</text>'
    )
    for i, kind in enumerate(kinds):
        y = 6 + lane * i + lane / 2
        body.append(f'<text class="barlabel" x="{left - 14}" y="{y + 4}">{escape(kind[:20])}</text>')
        body.append(f'<line class="grid" x1="{left}" x2="{width - 24}" y1="{y}" y2="{y}"/>')
        color = next((c for word, c in KIND_COLORS.items() if word in kind), "f1")
        for second, event_kind, text in events:
            if event_kind == kind:
                body.append(
                    f'<circle class="dot {color}" cx="{left + second * scale:.1f}" cy="{y}" r="4.5">'
                    f"<title>{second:,.1f} s  {escape(text)}</title></circle>"
                )
    return _card(chart, "", f'<svg viewBox="0 0 {width} {height}" role="img">{"".join(body)}</svg>')


@dataclass(frozen=True, slots=True)
class Lane:
    """One row of `lanes_chart`: stretches of time, and a mark where it ends badly."""

    name: str
    bars: Sequence[tuple[float, float, int, str]]  # from, to, color (1 to 5), hover text
    marks: Sequence[tuple[float, str]] = ()  # when, hover text


def lanes_chart(
    chart: Chart, lanes: Sequence[Lane], end: float, keys: Sequence[tuple[int, str]], marks_name: str
) -> str:
    """A lane for each of several; `chart.x_unit` is the unit of all times, `keys` name the colors."""
    row, left, right = 22, 190, 24
    scale_ticks = ticks(0.0, max(end, 1e-3), 8)
    scale = (chart.width - left - right) / scale_ticks[-1]
    height = len(lanes) * row + 46
    body = []
    for tick in scale_ticks:
        at = f"{left + tick * scale:.1f}"
        body.append(f'<line class="grid" x1="{at}" x2="{at}" y1="6" y2="{height - 38}"/>')
        body.append(f'<text class="tick mid" x="{at}" y="{height - 22}">{si(tick)}</text>')
    middle = (left + chart.width) / 2
    axis = f"{chart.x_unit} since start"
    body.append(f'<text class="axis mid" x="{middle}" y="{height - 4}">{axis}</text>')
    for i, lane in enumerate(lanes):
        y = 6 + row * i
        short = lane.name if len(lane.name) <= 28 else lane.name[:27] + "…"
        body.append(f'<text class="barlabel" x="{left - 12}" y="{y + 15}">{escape(short)}</text>')
        for begin, stop, color, text in lane.bars:
            x, length = left + begin * scale, max(1.0, (stop - begin) * scale)
            body.append(
                f'<rect class="area f{color}" x="{x:.1f}" y="{y + 4}" width="{length:.1f}" height="14" '
                f'rx="2"><title>{escape(text)}</title></rect>'
            )
        for when, text in lane.marks:
            body.append(
                f'<circle class="dot fbad" cx="{left + when * scale:.1f}" cy="{y + 11}" r="4.5">'
                f"<title>{escape(text)}</title></circle>"
            )
    legend = _legend([(f"k{color} box", name) for color, name in keys])
    if any(lane.marks for lane in lanes):
        legend += f'<span class="key"><i class="kbad"></i>{escape(marks_name)}</span>'
    svg = f'<svg viewBox="0 0 {chart.width} {height}" role="img">{"".join(body)}</svg>'
    return _card(chart, legend, svg)


class _Frame:
    """Scales of one chart, from data to pixels."""

    def __init__(self, chart: Chart, x: Sequence[float], low: float, high: float) -> None:
        if chart.y_max is not None:
            high = max(high, chart.y_max)
        self.y_ticks = ticks(low, high if high > low else low + 1.0, 4)
        self._low, self._high = self.y_ticks[0], self.y_ticks[-1]
        self._x_low, self._x_high = min(x), max(x)
        self.x_ticks = [
            t
            for t in ticks(self._x_low, self._x_high, 6 if chart.width < 800 else 12)
            if self._x_low <= t <= self._x_high and float(t).is_integer()
        ]
        self._width = chart.width - LEFT - RIGHT
        self._height = chart.height - TOP - BOTTOM

    def x(self, value: float) -> float:
        span = self._x_high - self._x_low
        share = (value - self._x_low) / span if span else 0.5
        return round(LEFT + share * self._width, 1)

    def y(self, value: float) -> float:
        return round(TOP + (1 - (value - self._low) / (self._high - self._low)) * self._height, 1)

    def axes(self, chart: Chart) -> str:
        parts = []
        for value in self.y_ticks:
            y = self.y(value)
            kind = "zero" if value == 0 else "grid"
            parts.append(f'<line class="{kind}" x1="{LEFT}" x2="{chart.width - RIGHT}" y1="{y}" y2="{y}"/>')
            label = escape(chart.show(value).removesuffix(".00"))  # of dollars, to fit
            parts.append(f'<text class="tick end" x="{LEFT - 8}" y="{y + 3.5:.1f}">{label}</text>')
        bottom = chart.height - BOTTOM
        for value in self.x_ticks:
            parts.append(f'<text class="tick mid" x="{self.x(value)}" y="{bottom + 16}">{value:,.0f}</text>')
        name = f"{chart.x_unit} since start" if chart.x_unit else "learner step"
        middle = LEFT + self._width / 2
        parts.append(f'<text class="axis mid" x="{middle}" y="{chart.height - 4}">{name}</text>')
        return "".join(parts)

    def svg(self, chart: Chart, body: str, hover: str) -> str:
        bottom = chart.height - BOTTOM
        return (
            f'<svg viewBox="0 0 {chart.width} {chart.height}" role="img" aria-label="{escape(chart.title)}" '
            f'data-hover="{escape(hover)}">{body}'
            f'<line class="rule" x1="0" x2="0" y1="{TOP}" y2="{bottom}"/></svg>'
        )


def _pool(x: Sequence[float], series: Sequence[Series]) -> tuple[list[float], list[Series]]:
    """At most MAX_POINTS per series, neighbours merged as each series asks."""
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


def _path(frame: _Frame, x: Sequence[float], values: Values) -> str:
    parts = []
    pen_down = False
    for a, b in zip(x, values, strict=True):
        if b is not None:
            parts.append(f"{'L' if pen_down else 'M'}{frame.x(a)},{frame.y(b)}")
            if not pen_down:
                parts.append("h0.01")  # a lone point still shows, through the round line cap
        pen_down = b is not None
    return "".join(parts)


def _hover(frame: _Frame, chart: Chart, x: Sequence[float], series: Sequence[Series]) -> str:
    rows = [
        {"n": s.name, "c": s.color, "v": ["-" if v is None else chart.show(v) for v in s.values]}
        for s in series
        if s.style != "faint"
    ]
    at = [f"{v:,.4g} {chart.x_unit}" if chart.x_unit else f"step {v:,.0f}" for v in x]
    return json.dumps({"px": [frame.x(v) for v in x], "x": at, "rows": rows})


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    return "".join(
        f'<span class="key"><i class="{kind}"></i>{escape(name)}</span>' for kind, name in entries if name
    )


def _card(chart: Chart, legend: str, body: str) -> str:
    wide = " wide" if chart.width > 800 else ""
    return (
        f'<figure class="card{wide}"><figcaption><h3>{escape(chart.title)}</h3>'
        f"<p>{escape(chart.note)}</p></figcaption>{_legend_row(chart, legend)}"
        f'<div class="plot">{body}</div></figure>'
    )


def _legend_row(chart: Chart, legend: str) -> str:
    unit = f'<span class="unit">{escape(chart.y_label)}</span>' if chart.y_label else ""
    return f'<div class="legend">{unit}{legend}</div>' if unit or legend else ""
