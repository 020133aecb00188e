"""Ways through a store: which entries, applied in order, lead from an anchor to a version. Pure.

A state of the weights is a `Position`. An anchor (codec full) leads to its position from anywhere; a patch
leads to its position from its base's, and only if the base's digest is the very one it was made against.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from echo_planes.types import Manifest
from echo_planes.weights.wire.manifest import PublicationKey, SignedManifest, key_of


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """One state of the weights: a version of a lineage, with the digest that proves it."""

    lineage: str
    version: int
    digest: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One publication in a store, known by its manifest; its bytes are read by `store.Store.open`."""

    name: str  # its folder in the store
    sequence: int  # rises with every publication stored, across lineages
    signed: SignedManifest

    @property
    def manifest(self) -> Manifest:
        return self.signed.manifest

    @property
    def key(self) -> PublicationKey:
        return key_of(self.signed.manifest)

    @property
    def is_anchor(self) -> bool:
        return self.signed.manifest.codec == "full"

    @property
    def position(self) -> Position:
        """The state after applying it."""
        manifest = self.signed.manifest
        return Position(manifest.lineage, manifest.version, manifest.digest)

    @property
    def base(self) -> Position:
        """The state a patch needs."""
        manifest = self.signed.manifest
        return Position(manifest.lineage, manifest.base_version, manifest.base_digest)


Cost = Callable[[Entry], float]
Steps = Mapping[Position, Entry]  # the last step of the cheapest way to each position that can be reached


def payload_cost(entry: Entry) -> float:
    """Bytes to fetch: the default cost of an entry."""
    return float(entry.manifest.payload_bytes)


def cheapest_steps(entries: Iterable[Entry], cost: Cost, have: Position | None = None) -> Steps:
    """The cheapest way to every position that `entries` reach, from an anchor or from `have`.

    Of ways that cost the same, the one with fewer entries. Patches only lead to higher versions, so one pass
    in order of versions is enough.
    """
    best: dict[Position, tuple[float, int]] = {} if have is None else {have: (0.0, 0)}
    steps: dict[Position, Entry] = {}
    for entry in sorted(entries, key=lambda e: (e.manifest.version, not e.is_anchor, e.sequence)):
        if entry.is_anchor:
            start = (0.0, 0)
        elif entry.base in best and entry.base.version < entry.position.version:
            start = best[entry.base]
        else:
            continue
        found = (start[0] + cost(entry), start[1] + 1)
        if entry.position not in best or found < best[entry.position]:
            best[entry.position], steps[entry.position] = found, entry
    return steps


def way_to(steps: Steps, goal: Position) -> list[Entry]:
    """The entries that lead to `goal`, in the order to apply them; none where it is not reached."""
    way: list[Entry] = []
    step = steps.get(goal)
    while step is not None:
        way.append(step)
        step = None if step.is_anchor else steps.get(step.base)
    return way[::-1]
