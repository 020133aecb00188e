"""Retention rule of a store: keep the newest patches and snapshots, and all that a kept patch needs. Pure.

PULSE appendix G.6 keeps 100 patches and 10 snapshots, and any snapshot that a kept patch refers to. A patch
also needs the patches between that snapshot and its own base, so the store keeps those as well.
"""

from __future__ import annotations

from collections.abc import Sequence

from echo_planes.weights.store.paths import Entry, cheapest_steps, way_to


def kept_entries(entries: Sequence[Entry], keep_patches: int, keep_snapshots: int) -> set[str]:
    """Return the names of the entries to keep.

    Every kept patch that was reachable from a snapshot stays reachable through kept entries. An unreachable
    patch is kept while it is among the newest, because its snapshot may still be on its way to the store.

    Args:
        entries: all entries of the store.
        keep_patches: newest patches to keep, at least 1.
        keep_snapshots: newest snapshots to keep, at least 1.
    """
    newest = sorted(entries, key=lambda entry: entry.sequence, reverse=True)
    patches = [entry for entry in newest if not entry.is_snapshot][:keep_patches]
    snapshots = [entry for entry in newest if entry.is_snapshot][:keep_snapshots]
    kept = {entry.name for entry in (*patches, *snapshots)}

    def extra_bytes(entry: Entry) -> float:
        return 0.0 if entry.name in kept else float(entry.manifest.payload_bytes)

    steps = cheapest_steps(entries, extra_bytes)
    needed = {step.name for patch in patches for step in way_to(steps, patch.base)}
    return kept | needed
