"""The part of report.html about publications and sparsity."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from echo_planes.errors import DataError
from echo_planes.reporting.metrics import SPARSITY_FILE, MetricsWriter
from echo_planes.reporting.report import render
from tests.unit.test_report import EVIL, outline


def publication(version: int, **values: Any) -> dict[str, Any]:
    row = {"published_version": version, "codec": "compact", "payload_bytes": 1234, "changed_share": 0.011}
    row |= {"bytes_per_changed": 0.913, "patch_ratio": 198.5, "t_extract_s": 0.25, "t_bcast_s": 1.5}
    return row | {"t_network_s": None, "hop_mbit_min": 93.0, "repairs": 1, "pause_s": 0.031} | values


def test_publications_are_charted_and_listed(tmp_path: Path) -> None:
    rows = [publication(0, codec="full", t_bcast_s=None), publication(2), publication(4, codec=EVIL)]
    MetricsWriter(tmp_path).write_summary({"status": "done", "publications": rows})
    page = render(tmp_path)
    outline(page)
    for part in ("Bytes on the wire", "Publications (3)", "0.913", "198.5 x", "v4"):
        assert part in page
    assert EVIL not in page


def test_sparsity_is_shown_by_layer_beside_the_prediction(tmp_path: Path) -> None:
    MetricsWriter(tmp_path).write_summary({"status": "done", "publications": [publication(2)]})
    rows = [{"layer": "model.norm", "changed_shares": [0.25, None, None, 0.5], "predicted_share": 0.2}]
    (tmp_path / SPARSITY_FILE).write_text(json.dumps(rows))
    page = render(tmp_path)
    outline(page)
    for part in ("model.norm<", "1 version<", "8 versions<", "25 %", "50 %", "20 %"):
        assert part in page


def test_a_run_that_published_nothing_has_no_such_part(tmp_path: Path) -> None:
    MetricsWriter(tmp_path).write_summary({"status": "failed", "publications": []})
    assert "<h2>Weights</h2>" not in render(tmp_path)


def test_a_damaged_sparsity_file_is_named(tmp_path: Path) -> None:
    MetricsWriter(tmp_path).write_summary({"status": "done", "publications": [publication(2)]})
    (tmp_path / SPARSITY_FILE).write_text('{"rows": 1}')
    with pytest.raises(DataError, match=SPARSITY_FILE):
        render(tmp_path)
