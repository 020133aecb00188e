"""Cards of the reports: tables, events, and charts of step records, for templates to call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from markupsafe import Markup

from echo_planes.reporting.formats import Format
from echo_planes.reporting.html import part
from echo_planes.reporting.metrics import FLEET_STATE, WORKER_STATE, Record, number
from echo_planes.reporting.sections.charts import (
    PANEL_HEIGHT,
    Chart,
    Series,
    bar_chart,
    line_chart,
    panel_chart,
    stacked_chart,
    timeline,
)

MAX_EVENTS = 500  # newest, in the table

Pool = Literal["mean", "max", "last"]
Line = Series | tuple[str, str, int] | tuple[str, str, int, Pool]  # or: key, name, color, `Series.pool`


class StepCharts:
    """Charts of a run's records over the x values in their column `key`, such as steps or versions."""

    def __init__(self, rows: Sequence[Record], key: str = "step") -> None:
        self._rows = rows
        self.x = [value or 0.0 for value in self.column(key)]

    def __len__(self) -> int:
        return len(self._rows)

    def column(self, key: str) -> list[float | None]:
        return [number(row.get(key)) for row in self._rows]

    def records(self, key: str) -> list[Record]:
        """Return the object that each record holds under a key; {} where it has none."""
        return [row.get(key) or {} for row in self._rows]

    def lines(
        self,
        title: str,
        note: str,
        unit: str,
        show: Format,
        *lines: Line,
        references: Sequence[tuple[float, str]] = (),
        is_measured: bool = False,
        **chart: Any,
    ) -> Markup:
        """Draw a line chart; `is_measured`: leave out lines without any value."""
        series = [s for s in self._series(lines) if not is_measured or any(v is not None for v in s.values)]
        return line_chart(Chart(title, note, self.x, unit, show, **chart), series, references=references)

    def stacked(
        self,
        title: str,
        note: str,
        unit: str,
        show: Format,
        *lines: Line,
        outline: Line | None = None,
        **chart: Any,
    ) -> Markup:
        """Draw areas on top of one another, and `outline` as a line over them."""
        [total] = self._series([outline]) if outline else [None]
        drawn = Chart(title, note, self.x, unit, show, **chart)
        return stacked_chart(drawn, self._series(lines), outline=total)

    def panels(
        self, title: str, note: str, *panels: tuple[str, Format, Sequence[Line], float | None]
    ) -> Markup:
        """Draw line charts in one card; of each: unit, format, lines, least upper end of the y axis."""
        drawn = [
            (Chart(title, "", self.x, unit, show, height=PANEL_HEIGHT, y_max=y_max), self._series(lines))
            for unit, show, lines, y_max in panels
        ]
        return panel_chart(title, note, drawn)

    def _series(self, lines: Sequence[Line]) -> list[Series]:
        return [
            line
            if isinstance(line, Series)
            else Series(line[1], self.column(line[0]), line[2], pool=[*line, "mean"][3])
            for line in lines
        ]


def section(title: str, cards: Sequence[Markup]) -> Markup:
    """Return cards below a heading; nothing without cards."""
    return part("section", title=title, cards=cards) if cards else Markup()


def table(title: str, columns: str, rows: Sequence[Sequence[str]], *, folded: bool = False) -> Markup:
    """Return a table as a card; `columns`: names separated by "|", a leading ">" marks numbers."""
    return part("table", title=title, columns=columns, rows=rows, folded=folded)


def told_events(events: Sequence[Record], worker: str = "") -> list[tuple[float, str, str]]:
    """Return time, kind and text of the events that the fleet section omits; `worker`: prefix of its id."""
    told = []
    for event in events:
        if event.get("kind") not in (FLEET_STATE, WORKER_STATE):
            names = (("worker", worker), ("version", "v"))
            where = [f"{name}{event[key]}" for key, name in names if key in event]
            text = str(event.get("text", "")) + (f" ({', '.join(where)})" if where else "")
            told.append((number(event.get("time_s")) or 0.0, str(event.get("kind", "event")), text))
    return told


def event_rows(told: Sequence[tuple[float, str, str]]) -> list[tuple[str, str, str]]:
    """Return the newest events as rows of a table."""
    return [(f"{time_s:,.1f} s", kind, text) for time_s, kind, text in told[-MAX_EVENTS:]]


CHARTS = {"bar_chart": bar_chart, "event_rows": event_rows, "timeline": timeline}  # that templates call
