"""Ways through a store: sequences of entries that, applied in order, lead to a version. Pure.

A state of the weights is a `Position`. A snapshot (codec `full`) leads to its position from any state. A
patch leads to its position only from its base, whose digest must be the one in the patch's manifest.
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
    """One publication in a store, described by its manifest. `reading.Store.open` reads its bytes."""

    name: str  # its folder in the store
    sequence: int  # order of storing, across lineages
    signed: SignedManifest

    @property
    def manifest(self) -> Manifest:
        return self.signed.manifest

    @property
    def key(self) -> PublicationKey:
        return key_of(self.signed.manifest)

    @property
    def is_snapshot(self) -> bool:
        return self.signed.manifest.codec == "full"

    @property
    def position(self) -> Position:
        """State after applying the entry."""
        manifest = self.signed.manifest
        return Position(manifest.lineage, manifest.version, manifest.digest)

    @property
    def base(self) -> Position:
        """State to which a patch applies."""
        manifest = self.signed.manifest
        return Position(manifest.lineage, manifest.base_version, manifest.base_digest)


Cost = Callable[[Entry], float]
Steps = Mapping[Position, Entry]  # last entry of the cheapest way to each reachable position


def payload_cost(entry: Entry) -> float:
    """Return an entry's bytes, its default cost."""
    return float(entry.manifest.payload_bytes)


def cheapest_steps(entries: Iterable[Entry], cost: Cost, have: Position | None = None) -> Steps:
    """Return the cheapest way to every position that `entries` reach, from a snapshot or from `have`.

    Of ways with equal cost, it takes the one with fewer entries. Patches lead only to higher versions, so one
    pass in order of versions is enough.
    """
    best: dict[Position, tuple[float, int]] = {} if have is None else {have: (0.0, 0)}
    steps: dict[Position, Entry] = {}
    for entry in sorted(entries, key=lambda e: (e.manifest.version, not e.is_snapshot, e.sequence)):
        if entry.is_snapshot:
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
    """Return the entries that lead to `goal`, in the order to apply them; [] if none do."""
    way: list[Entry] = []
    step = steps.get(goal)
    while step is not None:
        way.append(step)
        step = None if step.is_snapshot else steps.get(step.base)
    return way[::-1]
