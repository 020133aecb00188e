"""Rule by which a store keeps entries: the newest patches and anchors, and whatever a kept patch needs. Pure.

PULSE appendix G.6 keeps 100 patches and 10 anchors, and any anchor that a kept patch refers to. A patch also
needs the patches between that anchor and its own base, so those stay as well.
"""

from __future__ import annotations

from collections.abc import Sequence

from echo_planes.weights.store.paths import Entry, cheapest_steps, way_to


def kept_entries(entries: Sequence[Entry], keep_patches: int, keep_anchors: int) -> set[str]:
    """Names of the entries to keep.

    Every kept patch that had a way from an anchor still has one through kept entries, and so has the newest
    entry. A patch without any way is kept while it is among the newest: its anchor may be on its way.

    Args:
        entries: all that the store has.
        keep_patches: newest patches to keep, at least 1.
        keep_anchors: newest anchors to keep, at least 1.
    """
    newest = sorted(entries, key=lambda entry: entry.sequence, reverse=True)
    patches = [entry for entry in newest if not entry.is_anchor][:keep_patches]
    anchors = [entry for entry in newest if entry.is_anchor][:keep_anchors]
    kept = {entry.name for entry in (*patches, *anchors)}

    def extra_bytes(entry: Entry) -> float:
        return 0.0 if entry.name in kept else float(entry.manifest.payload_bytes)

    steps = cheapest_steps(entries, extra_bytes)
    needed = {step.name for patch in patches for step in way_to(steps, patch.base)}
    return kept | needed
