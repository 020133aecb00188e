"""Log of dissemination: size, transfer times and generation pause of each publication."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from echo_planes.types import BroadcastStats, InstallReport, Manifest

GAMMA = 1.1  # ECHO-2, section 4: T_bcast ends when the fraction 1/gamma of the active workers has installed
MBIT = 1e6 / 8
NEWEST = 256  # publications that still take reports
MAX_OLDER = 2048  # rows of older ones


@dataclass
class _Publication:
    manifest: Manifest
    t_extract_s: float
    published_s: float
    installed: set[str] = field(default_factory=set)
    t_bcast_s: float | None = None
    pauses_s: list[float] = field(default_factory=list)
    stats: BroadcastStats | None = None


class BroadcastLog:
    """Figures of the publications of one run, by version.

    In a long run the log thins out older ones: then a row stands for those after it as well, and has the sum
    of their repairs.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Publication] = {}  # the newest ones, in order
        self._older: list[dict[str, Any]] = []
        self._newest_done = -1

    def on_published(self, manifest: Manifest, t_extract_s: float, now_s: float) -> None:
        """Record a version that its publisher has committed. Ignore the repeated publication of a version."""
        newest = max(self._known, default=-1)
        if manifest.version <= newest:
            return
        self._known[manifest.version] = _Publication(manifest, t_extract_s, now_s)
        if len(self._known) > NEWEST:
            oldest = next(iter(self._known))
            self._older.append(self._row(oldest))
            del self._known[oldest]
        if len(self._older) > MAX_OLDER:
            repairs = [row["repairs"] for row in self._older[1::2]] + [0]
            self._older = [
                {**row, "repairs": row["repairs"] + more}
                for row, more in zip(self._older[::2], repairs, strict=False)
            ]

    def on_installed(self, report: InstallReport, num_active: int, now_s: float) -> None:
        """Record that a worker serves a version; `num_active`: workers that T_bcast counts now."""
        known = self._known.get(report.version)
        if known is None or not report.ok or report.worker_id in known.installed:
            return
        known.installed.add(report.worker_id)
        known.pauses_s.append(report.pause_s)
        if known.t_bcast_s is None and len(known.installed) >= math.ceil(num_active / GAMMA):
            known.t_bcast_s = now_s - known.published_s
            self._newest_done = max(self._newest_done, report.version)

    def on_broadcasts(self, stats: Sequence[BroadcastStats]) -> list[tuple[int, str]]:
        """Record the statistics of the tracker in the sender's node.

        Returns:
            (version, peer with the reason) for each that was at fault and is not in earlier statistics.
        """
        news = []
        for one in stats:
            known = self._known.get(one.version)
            if known is not None:
                before = known.stats.at_fault if known.stats else ()
                news += [(one.version, peer) for peer in one.at_fault if peer not in before]
                known.stats = one
        return news

    def newest(self) -> dict[str, Any]:
        """Return the figures of the newest publication that reached 1/gamma of its workers; {} before."""
        return self._row(self._newest_done) if self._newest_done in self._known else {}

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per publication that the log keeps, oldest first."""
        return [*self._older, *map(self._row, self._known)]

    def _row(self, version: int) -> dict[str, Any]:
        known = self._known[version]
        manifest, stats = known.manifest, known.stats
        hops = stats.hop_bytes_per_s if stats else ()
        return {
            "published_version": version,
            "codec": manifest.codec,
            "payload_bytes": manifest.payload_bytes,
            "changed_share": manifest.changed_elements / max(1, manifest.total_elements),
            "bytes_per_changed": (
                manifest.payload_bytes / manifest.changed_elements if manifest.changed_elements else None
            ),
            "patch_ratio": manifest.dense_bytes / max(1, manifest.payload_bytes),
            "t_extract_s": known.t_extract_s,
            "t_bcast_s": known.t_bcast_s,
            "t_network_s": stats.seconds if stats else None,
            "hop_mbit_min": min(hops) / MBIT if hops else None,
            "repairs": stats.repairs if stats else 0,
            "pause_s": _median(known.pauses_s),
        }


def summary_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return publication figures for summary.json from `BroadcastLog.rows`; patch figures omit snapshots."""
    patches = [row for row in rows if row["codec"] != "full"]
    return {
        "t_bcast_s_median": _median([row["t_bcast_s"] for row in rows]),
        "t_extract_s_median": _median([row["t_extract_s"] for row in rows]),
        "install_pause_s_median": _median([row["pause_s"] for row in rows]),
        "patch_ratio_median": _median([row["patch_ratio"] for row in patches]),
        "bytes_per_changed_median": _median([row["bytes_per_changed"] for row in patches]),
        "broadcast_repairs": sum(row["repairs"] for row in rows),
    }


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
