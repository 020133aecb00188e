"""Dissemination of the weights, and the share of them that changed: a section of report.html."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from echo_planes.reporting.metrics import Record, number
from echo_planes.reporting.sections.charts import (
    Chart,
    Series,
    line_chart,
    show_percent,
    show_seconds,
    si,
    stacked_chart,
)

SPARSITY_SPANS = (1, 2, 4, 8)  # versions between the two states compared (weights/sparsity.py)
MAX_ROWS = 300  # newest publications in the table

_TABLE = (
    ("payload_bytes", "Bytes", si),
    ("changed_share", "Changed", show_percent),
    ("bytes_per_changed", "Bytes per changed weight", lambda v: f"{v:.3f}"),
    ("patch_ratio", "Dense / sent", lambda v: f"{v:.1f} x"),
    ("t_extract_s", "T_extract", show_seconds),
    ("t_bcast_s", "T_bcast", show_seconds),
    ("t_network_s", "Network", show_seconds),
    ("hop_mbit_min", "Slowest hop, Mbit/s", lambda v: f"{v:,.1f}"),
    ("repairs", "Repairs", lambda v: f"{v:.0f}"),
    ("pause_s", "Pause", show_seconds),
)


def dissemination(summary: Record, sparsity: Sequence[Record]) -> str:
    """Charts and a table of the publications, and the sparsity of the run's updates by layer."""
    rows = [row for row in summary.get("publications", []) if isinstance(row, dict)]
    if not rows:
        return ""
    x = [number(row.get("published_version")) or 0.0 for row in rows]

    def column(key: str) -> list[float | None]:
        return [number(row.get(key)) for row in rows]

    def later(key: str) -> list[float | None]:
        return column(key)[1:] or column(key)  # the first would hide all others

    pauses = Series("generation stands still", column("pause_s"), 2)
    cards = [
        line_chart(
            Chart("Bytes on the wire", "Of each publication, and the weights it stands for", x, "bytes", si),
            [Series("sent", column("payload_bytes"), 1), Series("all weights", _dense(rows), 5)],
        ),
        line_chart(
            Chart(
                "Changed weights",
                "Share of weights whose bits differ from the last",
                x,
                "share",
                show_percent,
            ),
            [Series("changed", column("changed_share"), 1)],
        ),
        stacked_chart(
            Chart(
                "From learner to workers",
                "Scan and encode, then until 1/1.1 of the workers serve it; the first also waits for engines",
                x[1:] or x,
                "seconds",
                show_seconds,
            ),
            [
                Series("T_extract", later("t_extract_s"), 3),
                Series("T_bcast", later("t_bcast_s"), 1),
            ],
        ),
        line_chart(
            Chart("Pause", "Generation stood still for an update, median", x, "seconds", show_seconds),
            [pauses],
        ),
        _publications(rows),
    ]
    if sparsity:
        cards.append(_sparsity(sparsity))
    return f'<section><h2>Weights</h2><div class="grid">{"".join(cards)}</div></section>'


def _dense(rows: Sequence[Record]) -> list[float | None]:
    sizes: list[float | None] = []
    for row in rows:
        ratio, sent = number(row.get("patch_ratio")), number(row.get("payload_bytes"))
        sizes.append(None if ratio is None or sent is None else ratio * sent)
    return sizes


def _publications(rows: Sequence[Record]) -> str:
    body = []
    for row in reversed(rows[-MAX_ROWS:]):
        cells = []
        for key, _, show in _TABLE:
            value = number(row.get(key))
            cells.append(f'<td class="num">{"-" if value is None else escape(show(value))}</td>')
        version = number(row.get("published_version")) or 0.0
        codec = escape(str(row.get("codec", "-")))
        body.append(f'<tr><td class="num">v{version:.0f}</td><td>{codec}</td>{"".join(cells)}</tr>')
    head = "<th>Version</th><th>Codec</th>" + "".join(f'<th class="num">{name}</th>' for _, name, _ in _TABLE)
    return _table(f"Publications ({len(rows):,})", head, body)


def _sparsity(rows: Sequence[Record]) -> str:
    """One row per layer: share changed over k versions, and the share its magnitudes predict for one step."""
    body = []
    for row in rows:
        shares = row.get("changed_shares", [])
        cells = [number(share) for share in shares] + [number(row.get("predicted_share"))]
        shown = "".join(f'<td class="num">{"-" if v is None else show_percent(v)}</td>' for v in cells)
        body.append(f"<tr><td>{escape(str(row.get('layer', '?')))}</td>{shown}</tr>")
    names = [f"{k} version{'s' if k > 1 else ''}" for k in SPARSITY_SPANS] + ["predicted, one step"]
    head = "<th>Layer</th>" + "".join(f'<th class="num">{name}</th>' for name in names)
    return _table("Share of weights changed, by layer", head, body)


def _table(title: str, head: str, body: Sequence[str]) -> str:
    return (
        f'<details class="card wide"><summary>{escape(title)}</summary><div class="scroll">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div></details>"
    )
