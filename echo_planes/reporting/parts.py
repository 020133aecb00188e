"""Parts of a run, each from a start, resume or rollback to the next, and their figures together.

`parts.json` of a run folder holds a record of each part. The journal updates it at every publication and
evaluation, so that the record of a killed part has the figures of that time. Times in metrics.jsonl and
events.jsonl count from the start of their part.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from echo_planes.errors import DataError
from echo_planes.reporting.metrics import Record, finite, number, write_atomic

PARTS_FILE = "parts.json"
_OF_A_WORKER = ("trajectories", "tokens", "usd", "restarts")  # columns that add up over the parts
_LISTS = ("evals", "mismatches", "publications", "workers")
_COUNTS = ("versions_published", "digest_mismatches", "duplicates", "installs")
_NUMBERS = ("step", "seconds", *_COUNTS, "install_s")


class RunParts:
    """Record of the current part, after those of earlier ones.

    Args:
        folder: the run folder.
        step: step at which the current part begins.

    Raises:
        DataError: the folder's parts.json is damaged.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self._path = folder / PARTS_FILE
        self._earlier = read_parts(folder)
        self._step = step

    def write(self, figures: Mapping[str, Any]) -> list[Record]:
        """Replace the record of the current part; return the records of all parts.

        Raises:
            ClusterError: the disk is full.
        """
        parts: list[Record] = [*self._earlier, finite({"step": self._step, **figures})]
        write_atomic(self._path, json.dumps(parts, allow_nan=False) + "\n")
        return parts


def read_parts(folder: Path) -> list[Record]:
    """Return the records of a run's parts, oldest first; [] if there are none.

    Raises:
        DataError: parts.json is damaged.
    """
    path = folder / PARTS_FILE
    if not path.exists():
        return []
    try:
        parts = json.loads(path.read_text(encoding="utf-8"))
        good = isinstance(parts, list) and all(_is_part(part) for part in parts)
    except (OSError, ValueError):
        good = False
    if not good:
        raise DataError(
            f"{path} does not say what the earlier parts of the run came to: put the original back, or "
            "remove it to count the last part alone"
        )
    return list(parts)


def _is_part(part: object) -> bool:
    return (
        isinstance(part, dict)
        and all(number(part.get(key)) is not None for key in _NUMBERS)
        and all(isinstance(part.get(key), list) for key in _LISTS)
        and isinstance(part.get("startup"), dict)
        and all(isinstance(row, dict) for key in _LISTS if key != "mismatches" for row in part[key])
    )


def whole_run(parts: Sequence[Record]) -> Record:
    """Return the figures of summary.json that follow from all parts.

    Sums include the work beyond the step at which the next part began. The lists of evaluations and
    publications leave it out, because the run has given up that policy.
    """
    evals = {row.get("step"): row for part in _kept(parts, "evals", "step") for row in part}
    installs = sum(part["installs"] for part in parts)
    mismatches = [value for part in parts for value in part["mismatches"]]
    accuracies = [row.get("accuracy") for row in evals.values()]
    startup: dict[str, float] = {}
    for part in parts:
        for phase, seconds in part["startup"].items():
            startup[phase] = round(startup.get(phase, 0.0) + (number(seconds) or 0.0), 3)
    return {
        "parts": len(parts),
        "seconds": round(sum(part["seconds"] for part in parts), 3),
        "seconds_last_part": parts[-1]["seconds"],
        "seconds_startup": startup,
        "eval_first": accuracies[0] if accuracies else None,
        "eval_last": accuracies[-1] if accuracies else None,
        "evals": list(evals.values()),
        "versions_published": sum(part["versions_published"] for part in parts),
        "digest_mismatches": sum(part["digest_mismatches"] for part in parts),
        "duplicate_trajectories": sum(part["duplicates"] for part in parts),
        "mismatch_same_version_mean": sum(mismatches) / len(mismatches) if mismatches else None,
        "install_seconds_mean": sum(part["install_s"] for part in parts) / installs if installs else None,
        "publications": [row for rows in _kept(parts, "publications", "published_version") for row in rows],
        "workers": _workers(parts),
    }


def _kept(parts: Sequence[Record], key: str, place: str) -> Iterator[list[Record]]:
    """Yield the rows of each part up to the earliest step at which a later one began."""
    for i, part in enumerate(parts, 1):
        last = min((later["step"] for later in parts[i:]), default=float("inf"))
        yield [row for row in part[key] if (number(row.get(place)) or 0) <= last]


def _workers(parts: Sequence[Record]) -> list[Record]:
    """Return one row per worker id: its newest machine, with work and dollars of all parts."""
    rows: dict[str, Record] = {}
    for part in parts:
        for row in part["workers"]:
            name = str(row.get("id"))
            before = rows.get(name, {})
            sums = {key: (number(before.get(key)) or 0) + (number(row.get(key)) or 0) for key in _OF_A_WORKER}
            whole = {key: int(value) if key != "usd" else value for key, value in sums.items()}
            rows[name] = {**row, **whole}
    return [rows[name] for name in sorted(rows)]
