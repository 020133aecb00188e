"""Retention of a store, and what its sender writes next: nothing that a kept patch needs is ever removed."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_planes.errors import ConfigError
from echo_planes.weights.store.archivist import FIRST_RETRY_S, Archivist, SnapshotWork
from echo_planes.weights.store.paths import Entry, Position, cheapest_steps, payload_cost
from echo_planes.weights.store.retention import kept_entries
from echo_planes.weights.wire.manifest import PublicationKey
from tests.unit.store_publications import entry_of

PAYLOAD_BYTES, DENSE_BYTES = 10, 1000  # so small that bytes alone never make a publication wait too long


def chain(first: int, last: int) -> list[Entry]:
    return [entry_of(version, version - 1) for version in range(first, last + 1)]


def versions(kept: set[str]) -> list[str]:
    return sorted(kept)


def reached(entries: list[Entry]) -> set[Position]:
    """Brute force: positions that some order of applying leads to."""
    found = {entry.position for entry in entries if entry.is_snapshot}
    while True:
        more = {e.position for e in entries if not e.is_snapshot and e.base in found} - found
        if not more:
            return found
        found |= more


def test_a_kept_patch_keeps_its_snapshot_and_the_patches_between() -> None:
    entries = [entry_of(0), *chain(1, 9)]
    kept = kept_entries(entries, keep_patches=2, keep_snapshots=1)
    assert kept == {entry.name for entry in entries}


def test_what_no_kept_patch_needs_goes() -> None:
    entries = [entry_of(0), *chain(1, 5), entry_of(5, sequence=6), *chain(6, 9)]
    kept = kept_entries(entries, keep_patches=3, keep_snapshots=1)
    assert kept == {entry_of(5).name, *(entry.name for entry in chain(6, 9))}


def test_an_older_snapshot_stays_while_a_kept_patch_needs_it() -> None:
    entries = [entry_of(0), *chain(1, 5), entry_of(5, sequence=6), *chain(6, 7)]
    kept = kept_entries(entries, keep_patches=3, keep_snapshots=1)
    # The patch 4 -> 5 is among the newest three, and version 4 has no other way than from version 0.
    assert kept == {entry.name for entry in entries}


def test_defaults_bound_a_long_run() -> None:
    entries: list[Entry] = []
    most = 0
    for version in range(600):
        base = -1 if version == 0 else version - 1
        entries.append(entry_of(version, base, sequence=2 * version + 1))
        if version % 50 == 0 and version:
            entries.append(entry_of(version, sequence=2 * version + 2))
        kept = kept_entries(entries, keep_patches=100, keep_snapshots=10)
        entries = [entry for entry in entries if entry.name in kept]
        most = max(most, len(entries))
    assert most <= 100 + 49 + 10
    assert len(reached(entries)) >= 100


def test_a_patch_whose_snapshot_is_on_its_way_is_kept() -> None:
    entries = [entry_of(0), entry_of(2, 1), entry_of(3, 2)]
    assert kept_entries(entries, keep_patches=5, keep_snapshots=1) == {entry.name for entry in entries}


def test_lineages_do_not_mix() -> None:
    old = [entry_of(0), *chain(1, 3)]
    new = [
        entry_of(0, lineage="L1", sequence=10),
        *(entry_of(v, v - 1, lineage="L1", sequence=10 + v) for v in (1, 2)),
    ]
    assert kept_entries([*old, *new], keep_patches=2, keep_snapshots=1) == {entry.name for entry in new}


@st.composite
def stores(draw: st.DrawFn) -> list[Entry]:
    """Snapshots and patches over several versions, some failed to be stored, some twice."""
    rng = draw(st.randoms(use_true_random=False))
    entries, sequence = [], 0
    for version in range(draw(st.integers(1, 25))):
        for _ in range(rng.choice([0, 1, 1, 1, 2])):
            sequence += 1
            base = rng.choice([-1, version - 1, version - 1, version - 1, version - rng.randint(1, 4)])
            if base < -1 or (base >= 0 and base >= version):
                base = -1
            codec = "full" if base < 0 else rng.choice(["compact", "fast"])
            entries.append(entry_of(version, base, sequence, codec=codec, payload_bytes=rng.randint(1, 1000)))
    unique = {entry.name: entry for entry in entries}
    return list(unique.values())


@given(stores(), st.integers(1, 6), st.integers(1, 3))
@settings(deadline=None)
def test_every_kept_patch_keeps_its_way(entries: list[Entry], keep_patches: int, keep_snapshots: int) -> None:
    kept_names = kept_entries(entries, keep_patches, keep_snapshots)
    kept = [entry for entry in entries if entry.name in kept_names]
    before, after = reached(entries), reached(kept)
    for entry in kept:
        if not entry.is_snapshot and entry.base in before:
            assert entry.base in after, f"{entry.name} lost its way"
    if entries:
        newest = max(entries, key=lambda entry: entry.sequence)
        assert newest in kept
        assert newest.position in after or newest.position not in before
    # Pruning again removes nothing more.
    assert kept_entries(kept, keep_patches, keep_snapshots) == kept_names
    newest_first = sorted(entries, key=lambda entry: -entry.sequence)
    for wanted in (
        [entry for entry in newest_first if not entry.is_snapshot][:keep_patches],
        [entry for entry in newest_first if entry.is_snapshot][:keep_snapshots],
    ):
        assert {entry.name for entry in wanted} <= kept_names


@given(stores())
@settings(deadline=None)
def test_the_steps_reach_exactly_what_can_be_reached(entries: list[Entry]) -> None:
    assert set(cheapest_steps(entries, payload_cost)) == reached(entries)


# --- the archivist -------------------------------------------------------------------------------


def key(version: int, base: int = -2, lineage: str = "L0") -> PublicationKey:
    base = version - 1 if base == -2 else base
    return PublicationKey(lineage, version, "full" if base < 0 else "compact", base)


def stored(archivist: Archivist, *errors: str) -> list[int]:
    """Let it store what waits, with these errors first; the versions it tried."""
    tried, left = [], list(errors)
    while (work := archivist.next_publication()) is not None:
        tried.append(work.version)
        archivist.publication_done(work, left.pop(0) if left else "")
    return tried


def test_an_snapshot_every_so_many_publications_beside_the_patches() -> None:
    archivist = Archivist(snapshot_every=3)
    snapshots = []
    for version in range(10):
        archivist.published(key(version), PAYLOAD_BYTES, DENSE_BYTES)
        assert stored(archivist) == [version]
        work = archivist.next_snapshot(now_s=0.0)
        if work is not None:
            snapshots.append(work.version)
            archivist.snapshot_done(work.version, "", now_s=0.0)
    assert snapshots == [3, 6, 9]
    assert archivist.holds == frozenset()


def test_a_patch_that_cannot_be_stored_makes_an_snapshot_of_the_newest_version() -> None:
    archivist = Archivist()
    archivist.published(key(0), PAYLOAD_BYTES, DENSE_BYTES)
    stored(archivist)
    archivist.published(key(1), PAYLOAD_BYTES, DENSE_BYTES)
    assert stored(archivist, "No space left") == [1]
    archivist.published(key(2), PAYLOAD_BYTES, DENSE_BYTES)
    assert stored(archivist) == [2]
    assert archivist.next_snapshot(0.0) == SnapshotWork("L0", 2)
    assert archivist.next_snapshot(0.0) is None  # one at a time
    assert archivist.broken
    archivist.snapshot_done(2, "", 0.0)
    assert not archivist.broken
    assert (archivist.num_failed, archivist.last_error) == (1, "No space left")


def test_an_snapshot_that_fails_is_tried_again_later_and_later() -> None:
    archivist = Archivist()
    archivist.published(key(0), PAYLOAD_BYTES, DENSE_BYTES)
    stored(archivist, "gone")
    now_s, waits = 0.0, []
    for _ in range(10):
        while archivist.next_snapshot(now_s) is None:
            now_s += 1.0
        waits.append(now_s)
        archivist.snapshot_done(0, "gone", now_s)
    gaps = [b - a for a, b in itertools.pairwise(waits)]
    assert gaps[:3] == [FIRST_RETRY_S, 2 * FIRST_RETRY_S, 4 * FIRST_RETRY_S]
    assert gaps[-1] == gaps[-2] == 300.0
    while archivist.next_snapshot(now_s) is None:
        now_s += 1.0
    archivist.snapshot_done(0, "", now_s)
    assert archivist.next_snapshot(now_s) is None


def test_a_patch_that_fails_while_an_snapshot_is_on_its_way_asks_for_another() -> None:
    archivist = Archivist(snapshot_every=2)
    for version in range(3):
        archivist.published(key(version), PAYLOAD_BYTES, DENSE_BYTES)
    stored(archivist)
    assert archivist.next_snapshot(0.0) == SnapshotWork("L0", 2)
    archivist.published(key(3), PAYLOAD_BYTES, DENSE_BYTES)
    stored(archivist, "refused")
    archivist.snapshot_done(2, "", 0.0)
    assert archivist.next_snapshot(0.0) == SnapshotWork("L0", 3)


def test_a_store_slower_than_the_learner_holds_few_and_ends_with_an_snapshot() -> None:
    archivist = Archivist(snapshot_every=1000, max_waiting=4)
    archivist.published(key(0), PAYLOAD_BYTES, DENSE_BYTES)
    first = archivist.next_publication()
    for version in range(1, 50):
        archivist.published(key(version), PAYLOAD_BYTES, DENSE_BYTES)
        assert len(archivist.holds) <= 5
    assert first in archivist.holds
    assert archivist.num_skipped == 45
    archivist.publication_done(key(0), "")
    assert stored(archivist) == [46, 47, 48, 49]
    assert archivist.next_snapshot(0.0) == SnapshotWork("L0", 49)
    assert archivist.unstored == tuple(range(1, 46))


def test_a_version_is_not_stored_until_it_was_there_as_a_patch_or_in_full() -> None:
    archivist = Archivist()
    for version in range(4):
        archivist.published(key(version), PAYLOAD_BYTES, DENSE_BYTES)
    stored(archivist, "", "refused", "refused", "")
    assert archivist.unstored == (1, 2)
    archivist.published(key(3, base=-1), PAYLOAD_BYTES, DENSE_BYTES)  # again, for a worker that lacks it
    stored(archivist, "refused")
    assert archivist.unstored == (1, 2)
    archivist.published(key(4), PAYLOAD_BYTES, DENSE_BYTES)
    stored(archivist, "refused")
    assert archivist.next_snapshot(0.0) == SnapshotWork("L0", 4)
    archivist.snapshot_done(4, "gone", 0.0)
    assert archivist.unstored == (1, 2, 4)
    archivist.snapshot_done(4, "", FIRST_RETRY_S)
    assert archivist.unstored == (1, 2)
    archivist.published(key(5, base=-1, lineage="L1"), PAYLOAD_BYTES, DENSE_BYTES)
    assert archivist.unstored == (5,)


def test_a_full_publication_is_the_snapshot_that_was_due() -> None:
    archivist = Archivist()
    for version in range(3):
        archivist.published(key(version), PAYLOAD_BYTES, DENSE_BYTES)
    stored(archivist, "", "refused")
    assert archivist.broken
    archivist.published(key(2, base=-1), PAYLOAD_BYTES, DENSE_BYTES)
    stored(archivist)
    assert not archivist.broken


def test_a_new_lineage_begins_with_an_snapshot_and_forgets_the_old_one_s_troubles() -> None:
    archivist = Archivist()
    archivist.published(key(0), PAYLOAD_BYTES, DENSE_BYTES)
    archivist.published(key(1), PAYLOAD_BYTES, DENSE_BYTES)
    archivist.published(key(1, base=-1, lineage="L1"), PAYLOAD_BYTES, DENSE_BYTES)
    stored(archivist, "", "refused", "")
    assert archivist.next_snapshot(0.0) is None
    archivist.published(key(2, lineage="L2"), PAYLOAD_BYTES, DENSE_BYTES)
    assert archivist.next_snapshot(0.0) == SnapshotWork("L2", 2)


def test_intervals_below_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="snapshot_every=0"):
        Archivist(snapshot_every=0)
