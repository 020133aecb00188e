"""Tables of `python -m echo_planes.weights`: plain columns, one line per publication, tensor or layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from echo_planes.reporting.weights.differences import TensorDifference
from echo_planes.reporting.weights.sparsity import STEPS, SparsityRow
from echo_planes.weights.digest import BitTensor
from echo_planes.weights.store.paths import Entry


def of_publications(entries: Sequence[Entry]) -> str:
    """Return one line per publication, and their totals."""
    rows = [["stored", "lineage", "version", "codec", "base", "bytes", "B/changed", "dense/bytes", "changed"]]
    for entry in entries:
        manifest = entry.manifest
        rows.append(
            [
                str(entry.sequence),
                manifest.lineage,
                str(manifest.version),
                manifest.codec,
                "-" if entry.is_snapshot else str(manifest.base_version),
                f"{manifest.payload_bytes:,}",
                _ratio(manifest.payload_bytes, manifest.changed_elements),
                _ratio(manifest.dense_bytes, manifest.payload_bytes, 1),
                _percent(manifest.changed_elements / max(1, manifest.total_elements)),
            ]
        )
    snapshots = sum(entry.is_snapshot for entry in entries)
    total = sum(entry.manifest.payload_bytes for entry in entries)
    return (
        columns(rows)
        + f"\n{snapshots} snapshots, {len(entries) - snapshots} patches, {total / 1e6:,.1f} MB of payload"
    )


def of_tensors(tensors: Mapping[str, BitTensor]) -> str:
    """Return one line per tensor, and their sum."""
    rows = [["tensor", "dtype", "shape", "elements", "bytes"]]
    for name in sorted(tensors):
        tensor = tensors[name]
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        rows.append([name, tensor.dtype, shape, f"{tensor.bits.size:,}", f"{tensor.nbytes:,}"])
    elements = sum(tensor.bits.size for tensor in tensors.values())
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    return columns(rows) + f"\n{len(tensors)} tensors, {elements:,} elements, {num_bytes / 1e6:,.1f} MB"


def of_differences(differences: Sequence[TensorDifference]) -> str:
    """Return one line per tensor that differs, and their sum."""
    rows = [["tensor", "elements", "changed", "share", "max ulp step"]]
    for row in differences:
        if row.num_changed:
            share = _percent(row.num_changed / row.num_elements)
            rows.append(
                [row.name, f"{row.num_elements:,}", f"{row.num_changed:,}", share, f"{row.max_ulp_step:,}"]
            )
    elements = sum(row.num_elements for row in differences)
    changed = sum(row.num_changed for row in differences)
    largest = max((row.max_ulp_step for row in differences), default=0)
    if not changed:
        return f"the two states are the same, all {len(differences)} tensors bit for bit"
    return (
        columns(rows)
        + f"\n{len(rows) - 1} of {len(differences)} tensors differ; {changed:,} of {elements:,} "
        f"elements ({_percent(changed / elements)}), by at most {largest:,} ulp"
    )


def of_sparsity(table: Sequence[SparsityRow], learning_rate: float | None) -> str:
    """Return one line per layer: the expected share, and the shares that changed."""
    rows = [["layer", "elements", "expected", *(f"k={k}" for k in STEPS)]]
    for row in table:
        shares = [_percent(share) for share in (row.predicted_share, *row.changed_shares)]
        rows.append([row.layer, f"{row.num_elements:,}", *shares])
    if learning_rate is None:
        told = "expected share: not known without the learning rate (--lr)"
    else:
        told = f"expected share: |w| < 256 lr in bf16, at learning rate {learning_rate:g}"
    return columns(rows) + f"\nshare of weights that differ after k versions; {told}"


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Align rows of text in columns: the first one left, the others right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = (
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def _ratio(over: int, under: int, digits: int = 2) -> str:
    return f"{over / under:.{digits}f}" if under else "-"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f} %"
