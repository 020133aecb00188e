"""Seeding: the window of each step and its waits, and the timeline of the last step."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from echo_planes.reporting.metrics import Record, number
from echo_planes.reporting.sections.charts import WIDE, Chart, Lane, lanes_chart

# Kinds of intervals in a row of metrics.jsonl -> name of the lane, color
LANES = {
    "seed": ("seeders sample", 3),
    "remote": ("remote workers sample", 1),
    "train": ("learner trains", 2),
}


def step_timeline(rows: Sequence[Record]) -> Markup:
    """Draw who samples and who trains in the last step; nothing without seeding."""
    row = next((row for row in reversed(rows) if row.get("timeline")), None)
    if row is None:
        return Markup()
    bars: dict[str, list[tuple[float, float, int, str]]] = {kind: [] for kind in LANES}
    for kind, start_s, stop_s in row["timeline"]:
        if kind in bars and number(start_s) is not None and number(stop_s) is not None:
            name, color = LANES[kind]
            text = f"{name} from {start_s:.2f} to {stop_s:.2f} s"
            bars[kind].append((start_s, stop_s, color, text))
    lanes = [Lane(LANES[kind][0], found) for kind, found in bars.items() if found]
    end_s = max((stop_s for found in bars.values() for _, stop_s, _, _ in found), default=0.0)
    note = "Seeders share the learner's devices: the learner trains only after they have stopped"
    chart = Chart(f"Step {row.get('step')}, from its begin", note, width=WIDE, x_unit="seconds")
    return lanes_chart(chart, lanes, end_s)
