"""Rebuild of states from a store: of every version in turn, or of one, each proven by its digest."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from echo_planes.errors import WeightsError
from echo_planes.types import TensorSpec
from echo_planes.weights.codec.entry import Patcher
from echo_planes.weights.digest import BIT_DTYPES, BitTensor, StateHasher
from echo_planes.weights.receiver import algorithm_of
from echo_planes.weights.store.catch_up import plan_path
from echo_planes.weights.store.objects import StoreUnreachableError
from echo_planes.weights.store.paths import Entry, Position
from echo_planes.weights.store.reading import Store, StoredPublication
from echo_planes.weights.tensor_files import specs_in

State = dict[str, BitTensor]


@dataclass(frozen=True, slots=True)
class Replayed:
    """Result of applying one entry. `state` is None if there is a `problem`. The next entry may change it."""

    entry: Entry
    state: State | None
    problem: str = ""


def apply_stored(stored: StoredPublication, state: State | None) -> State:
    """Return the state after a stored publication. A patch changes `state` in place.

    Args:
        state: the base of a patch; a snapshot does not use it.

    Raises:
        WeightsError: the publication is damaged, does not fit the state, or gives another digest than the
            manifest's. A patch may then have changed `state`, so discard it.
    """
    manifest = stored.signed_manifest.manifest
    algorithm = algorithm_of(manifest.digest)
    patcher: Patcher | None = None
    for _, data in stored.payload():
        if patcher is None:
            if manifest.codec == "full":
                state = _blank(specs_in(data, manifest.payload_bytes))
            if state is None:
                raise WeightsError(f"version {manifest.version} is a patch; its base is needed")
            patcher = Patcher(manifest.codec, state, StateHasher(algorithm))
        patcher.apply(data)
        patcher.applied.clear()  # `undo` is not needed, so free the old bits
    if state is None or patcher is None:
        raise WeightsError(f"version {manifest.version} has no segments")
    digest = patcher.digest(algorithm)
    if digest != manifest.digest:
        raise WeightsError(f"version {manifest.version} must have digest {manifest.digest}, not {digest}")
    return state


def replay(store: Store, entries: Iterable[Entry]) -> Iterator[Replayed]:
    """Apply every entry to its base, in order of versions, within each lineage.

    Memory: one state, and one more while several entries share a base or a version.
    """
    ordered = sorted(entries, key=lambda e: (e.manifest.lineage, e.manifest.version, not e.is_snapshot))
    waiting = Counter(entry.base for entry in ordered if not entry.is_snapshot)
    states: dict[Position, State] = {}
    for entry in ordered:
        base: State | None = None
        if not entry.is_snapshot:
            waiting[entry.base] -= 1
            base = states.get(entry.base) if waiting[entry.base] else states.pop(entry.base, None)
            if base is None:
                yield Replayed(entry, None, f"version {entry.base.version}, its base, cannot be rebuilt")
                continue
            if waiting[entry.base]:
                base = copied(base)
        try:
            state = apply_stored(store.open(entry), base)
        except WeightsError as error:
            yield Replayed(entry, None, str(error))
            continue
        if waiting[entry.position]:
            states.setdefault(entry.position, state)
        yield Replayed(entry, state)


def rebuild(store: Store, lineage: str, version: int) -> State:
    """Return the state of one version, by the cheapest entries, or the next best if some are damaged.

    Raises:
        WeightsError: the usable entries do not lead to that version.
        StoreUnreachableError: the store cannot be read now.
    """
    while True:
        path = plan_path(None, lineage, version, store.index())
        state: State | None = None
        try:
            for entry in path:
                state = apply_stored(store.open(entry), state)
        except StoreUnreachableError:
            raise  # says nothing about the entry
        except WeightsError as error:
            store.bad.setdefault(entry.name, str(error))
            continue
        if state is not None:
            return state


def copied(state: State) -> State:
    """Return a copy of the state in new memory."""
    return {name: BitTensor(t.bits.copy(), t.dtype, t.shape) for name, t in state.items()}


def _blank(specs: dict[str, TensorSpec]) -> State:
    return {
        name: BitTensor(np.zeros(math.prod(spec.shape), BIT_DTYPES[spec.dtype]), spec.dtype, spec.shape)
        for name, spec in specs.items()
    }
