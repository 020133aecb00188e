"""Dissemination of the weights, and the share of them that changed."""

from __future__ import annotations

from collections.abc import Sequence

from echo_planes.reporting.formats import count, known, show_percent, show_seconds, si
from echo_planes.reporting.metrics import Record, number
from echo_planes.reporting.sections.cards import StepCharts
from echo_planes.reporting.sections.charts import Series

SPARSITY_SPANS = (1, 2, 4, 8)  # versions between the two states compared (weights/sparsity.py)
MAX_ROWS = 300  # newest publications in the table

_FIGURES = (
    ("payload_bytes", "Bytes", si),
    ("changed_share", "Changed", show_percent),
    ("bytes_per_changed", "Bytes per changed weight", ".3f"),
    ("patch_ratio", "Dense / sent", lambda v: f"{v:.1f} x"),
    ("t_extract_s", "T_extract", show_seconds),
    ("t_bcast_s", "T_bcast", show_seconds),
    ("t_network_s", "Network", show_seconds),
    ("hop_mbit_min", "Slowest hop, Mbit/s", ",.1f"),
    ("repairs", "Repairs", ",.0f"),
    ("pause_s", "Pause", show_seconds),
)


_PREDICTED = ">predicted, one step"


def weights_values(summary: Record, sparsity: Sequence[Record]) -> Record:
    """Return values for the report: charts of the publications, and tables."""
    rows = [row for row in summary.get("publications", []) if isinstance(row, dict)]
    found = [(number(row.get("patch_ratio")), number(row.get("payload_bytes"))) for row in rows]
    dense = [None if ratio is None or sent is None else ratio * sent for ratio, sent in found]
    return {
        "publications": StepCharts(rows, "published_version"),
        "later_publications": StepCharts(rows[1:] or rows, "published_version"),
        "all_weights": Series("all weights", dense, 5),
        "publication_columns": "|".join([">Version", "Codec", *(f">{name}" for _, name, _ in _FIGURES)]),
        "publication_rows": [_publication(row) for row in reversed(rows[-MAX_ROWS:])],
        "sparsity_columns": "|".join(
            ["Layer", *(f">{count(k, 'version')}" for k in SPARSITY_SPANS), _PREDICTED]
        ),
        "sparsity_rows": [_layer(row) for row in sparsity],
    }


def _publication(row: Record) -> list[str]:
    figures = [known(number(row.get(key)), show) for key, _, show in _FIGURES]
    return [f"v{number(row.get('published_version')) or 0.0:.0f}", str(row.get("codec", "-")), *figures]


def _layer(row: Record) -> list[str]:
    """Return the shares changed over k versions, and the share that magnitudes predict for one step."""
    shares = [*row.get("changed_shares", [])[: len(SPARSITY_SPANS)], row.get("predicted_share")]
    return [str(row.get("layer", "?")), *(known(number(share), show_percent) for share in shares)]
