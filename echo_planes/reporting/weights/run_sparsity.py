"""The sparsity table of a finished run, beside its other files."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from echo_planes.errors import WeightsError
from echo_planes.reporting.metrics import SPARSITY_FILE, number, read_metrics, write_atomic
from echo_planes.reporting.weights.sparsity import sparsity_table
from echo_planes.weights.store.objects import open_objects
from echo_planes.weights.store.reading import Store, read_public_key
from echo_planes.weights.wire.limits import relay_limits
from echo_planes.weights.wire.signing import Verifier

# Larger states would delay the end of a run; `python -m echo_planes.weights sparsity` handles them.
MAX_DENSE_BYTES = 512 * 1024**2


def write_sparsity(run_dir: Path, store_url: str | None) -> bool:
    """Write `run_dir`/sparsity.json from the run's store; return whether there was something to write.

    Args:
        store_url: as `weights.store`; None: the folder weights/ in `run_dir`.

    Raises:
        ClusterError: the disk is full.
    """
    if store_url is None and not (run_dir / "weights").is_dir():
        return False
    try:
        objects = open_objects(store_url or str(run_dir / "weights"))
        store = Store(objects, Verifier(read_public_key(objects)), relay_limits(2**42))
        entries = store.index()
        if not entries or max(entry.manifest.dense_bytes for entry in entries) > MAX_DENSE_BYTES:
            return False
        rows = sparsity_table(store, learning_rate_of(run_dir))
    except WeightsError:  # the run has reported a failing store already
        return False
    write_atomic(run_dir / SPARSITY_FILE, json.dumps([asdict(row) for row in rows]))
    return True


def learning_rate_of(run_dir: Path) -> float | None:
    """Return the highest learning rate in a run's metrics, that of most steps; None if there is none."""
    rates = [number(step.get("learning_rate")) for step in read_metrics(run_dir)]
    return max((rate for rate in rates if rate is not None), default=None)
