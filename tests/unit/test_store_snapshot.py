"""A store seen from outside: while its owner writes, after a crash, and damaged."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_planes.data.store.index import Fate
from echo_planes.data.store.message import MAGIC
from echo_planes.data.store.retention import Retention
from echo_planes.data.store.snapshot import StoreSnapshot
from echo_planes.data.store.store import ReplayStore
from echo_planes.errors import DataError
from echo_planes.types import IntArray
from tests.unit.stored_rollouts import a_batch, a_group, store_rows


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[ReplayStore]:
    store = ReplayStore(tmp_path / "replay", holder="test")
    yield store
    store.close()


def add(store: ReplayStore, *names: str, **values: Any) -> None:
    for name in names:
        store.append(a_batch(a_group(name, **values)), created_s=5.0)


def seqs(*numbers: int) -> IntArray:
    return np.array(numbers, np.int64)


def ids(snapshot: StoreSnapshot, *numbers: int) -> list[str]:
    wanted = seqs(*numbers) if numbers else np.arange(snapshot.index.groups.length)
    found: list[str] = snapshot.gather(wanted).column("trajectory_id").to_pylist()
    return found


def tail(folder: Path) -> Path:
    return max((folder / "segments").glob("*.arrows"))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    with path.open("r+b") as file:  # in place: the file stays the same one
        file.write(data)


# --- beside the owner ----------------------------------------------------------------------------


def test_it_follows_a_store_that_is_written(owner: ReplayStore, tmp_path: Path) -> None:
    snapshot = StoreSnapshot(tmp_path / "replay")
    assert snapshot.index.groups.length == 0
    add(owner, "g0", "g1")
    assert snapshot.refresh()
    assert not snapshot.refresh()
    assert ids(snapshot) == ["g0/0", "g0/1", "g1/0", "g1/1"]
    add(owner, "g2")
    owner.settle(seqs(0), Fate.TRAINED, step=7)
    owner.settle(seqs(2), Fate.DROPPED)
    assert snapshot.refresh()
    table = snapshot.gather(seqs(2, 0, 1))
    assert table.column("group_id").to_pylist() == ["g2", "g2", "g0", "g0", "g1", "g1"]
    assert table.column("fate").to_pylist() == ["dropped"] * 2 + ["trained"] * 2 + ["buffered"] * 2
    assert table.column("step").to_pylist() == [-1, -1, 7, 7, -1, -1]
    assert snapshot.index.counts() == owner.counts()
    assert snapshot.index.groups["reward_mean"].tolist() == [0.5, 0.5, 0.5]


def test_a_refresh_reads_only_what_is_new(owner: ReplayStore, tmp_path: Path) -> None:
    add(owner, "g0", "g1")
    snapshot = StoreSnapshot(tmp_path / "replay")
    flip(tail(tmp_path / "replay"), 5000)  # in g0: seen only by who reads it again
    add(owner, "g2")
    assert snapshot.refresh()
    assert snapshot.num_damaged == 0
    assert list(snapshot.index.ids) == ["g0", "g1", "g2"]
    assert ids(snapshot) == ["g1/0", "g1/1", "g2/0", "g2/1"]
    assert snapshot.num_damaged == 1


def test_it_changes_nothing(tmp_path: Path) -> None:
    folder = store_rows(tmp_path, [a_group("g0")]) / "replay"
    with tail(folder).open("ab") as file:
        file.write(b"\xff\xff\xff\xff torn")
    before = {p: (p.stat().st_mtime_ns, p.is_file() and p.read_bytes()) for p in folder.rglob("*")}
    folder.chmod(0o500)
    snapshot = StoreSnapshot(folder)
    assert ids(snapshot) == ["g0/0", "g0/1"]
    snapshot.refresh()
    assert snapshot.num_damaged == 0
    assert {p: (p.stat().st_mtime_ns, p.is_file() and p.read_bytes()) for p in folder.rglob("*")} == before
    folder.chmod(0o700)


def test_a_message_counts_once_it_is_whole(tmp_path: Path) -> None:
    folder = store_rows(tmp_path, [a_group("g0"), a_group("g1")]) / "replay"
    whole = tail(folder).read_bytes()
    start = whole.rindex(MAGIC) - 200  # somewhere in the metadata of g1
    with tail(folder).open("r+b") as file:
        file.truncate(start)
    snapshot = StoreSnapshot(folder)
    for end in (start + 100, start + 250, len(whole) - 1):
        with tail(folder).open("ab") as file:
            file.write(whole[tail(folder).stat().st_size : end])
        assert not snapshot.refresh()
        assert ids(snapshot) == ["g0/0", "g0/1"]
    with tail(folder).open("ab") as file:
        file.write(whole[-1:])
    assert snapshot.refresh()
    assert ids(snapshot) == ["g0/0", "g0/1", "g1/0", "g1/1"]


def test_what_was_cut_off_and_written_anew_is_read_anew(tmp_path: Path) -> None:
    """An append whose sync failed is cut off; the next one lies where it lay, and may be as long."""
    folder = store_rows(tmp_path, [a_group("g0"), a_group("old")]) / "replay"
    other = store_rows(tmp_path / "other", [a_group("g0")]) / "replay"
    shutil.copy(folder / "store.json", other / "store.json")
    for path in (other / "segments").iterdir():
        path.unlink()
    (other / "fates.arrows").unlink()
    store_rows(tmp_path / "other", [a_group("g0"), a_group("new")])
    snapshot = StoreSnapshot(folder)
    assert list(snapshot.index.ids) == ["g0", "old"]
    with tail(folder).open("r+b") as file:
        file.write(tail(other).read_bytes())
    assert snapshot.refresh()
    assert list(snapshot.index.ids) == ["g0", "new"]
    assert ids(snapshot) == ["g0/0", "g0/1", "new/0", "new/1"]


def test_a_compaction_between_two_looks(tmp_path: Path) -> None:
    store = ReplayStore(tmp_path / "replay", holder="test", segment_bytes=1)
    add(store, *(f"g{i}" for i in range(4)), version=1)
    add(store, "late", version=9)
    snapshot = StoreSnapshot(tmp_path / "replay")
    assert len(ids(snapshot)) == 10
    assert store.retain(Retention(min_version=5), now_s=0.0) == 4
    assert store.compact() > 0
    assert ids(snapshot, 0, 4) == ["late/0", "late/1"]  # found out while reading
    assert snapshot.num_damaged == 0
    assert snapshot.index.counts() == store.counts()
    assert not snapshot.refresh()
    store.close()


def test_an_old_sidecar_beside_a_compacted_segment_is_not_believed(tmp_path: Path) -> None:
    """As a crash between the two leaves them."""
    store = ReplayStore(tmp_path / "replay", holder="test", segment_bytes=1)
    store.append(a_batch([*a_group("g0", version=1), *a_group("g1", version=9)]), created_s=5.0)
    add(store, "g2", version=9)
    sidecar = tmp_path / "replay" / "segments" / "00000000.index"
    old = sidecar.read_bytes()
    store.retain(Retention(min_version=5), now_s=0.0)
    assert store.compact() > 0
    store.close()
    sidecar.write_bytes(old)
    assert ids(StoreSnapshot(tmp_path / "replay")) == ["g1/0", "g1/1", "g2/0", "g2/1"]


# --- damage --------------------------------------------------------------------------------------


def test_damaged_messages_are_left_out_and_counted(tmp_path: Path) -> None:
    folder = store_rows(tmp_path, [a_group(f"g{i}") for i in range(3)]) / "replay"
    feet = [i for i in range(tail(folder).stat().st_size) if tail(folder).read_bytes()[i : i + 8] == MAGIC]
    flip(tail(folder), feet[2] + 90)  # the hash of g1; feet[0] is the header's
    snapshot = StoreSnapshot(folder)
    assert snapshot.num_damaged == 1
    assert ids(snapshot) == ["g0/0", "g0/1", "g2/0", "g2/1"]
    assert snapshot.index.groups["fate"].tolist() == [Fate.BUFFERED, Fate.LOST, Fate.BUFFERED]


def test_damage_in_a_sealed_segment_is_found_by_reading(tmp_path: Path) -> None:
    store = ReplayStore(tmp_path / "replay", holder="test", segment_bytes=1)
    add(store, "g0", "g1")
    store.close()
    sealed = tmp_path / "replay" / "segments" / "00000000.arrows"
    flip(sealed, sealed.stat().st_size - 100)
    snapshot = StoreSnapshot(tmp_path / "replay")
    assert list(snapshot.index.ids) == ["g0", "g1"]
    assert ids(snapshot) == ["g1/0", "g1/1"]
    assert snapshot.num_damaged == 1


def test_a_sealed_segment_that_was_cut_short(tmp_path: Path) -> None:
    store = ReplayStore(tmp_path / "replay", holder="test", segment_bytes=1)
    add(store, "g0", "g1")
    store.close()
    with (tmp_path / "replay" / "segments" / "00000000.arrows").open("r+b") as file:
        file.truncate(file.seek(0, 2) - 100)
    snapshot = StoreSnapshot(tmp_path / "replay")
    assert ids(snapshot) == ["g1/0", "g1/1"]
    assert snapshot.num_damaged == 1


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"store\.json does not describe a replay store"):
        StoreSnapshot(tmp_path)
    folder = store_rows(tmp_path, [a_group("g0")]) / "replay"
    text = (folder / "store.json").read_text()
    (folder / "store.json").write_text(text.replace('"format": 1', '"format": 2'))
    with pytest.raises(DataError, match="was written in format 2, this program knows up to 1"):
        StoreSnapshot(folder)


def test_a_segment_that_is_not_ours_does_not_hide_fates_for_ever(owner: ReplayStore, tmp_path: Path) -> None:
    add(owner, "g0")
    snapshot = StoreSnapshot(tmp_path / "replay")
    owner.settle(seqs(0), Fate.TRAINED, step=3)
    strange = tmp_path / "replay" / "segments" / "00000009.arrows"
    strange.write_bytes(b"x" * 9000)
    with pytest.raises(DataError, match="no file of this store"):
        snapshot.refresh()
    strange.unlink()
    assert snapshot.refresh()
    assert snapshot.gather(seqs(0)).column("step").to_pylist() == [3, 3]


# --- as the owner sees it ------------------------------------------------------------------------

OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["add", "train", "drop", "retain", "compact", "reopen", "roll back", "look"])),
    max_size=24,
)


@settings(max_examples=40, deadline=None)
@given(OPERATIONS, st.integers(0, 2**32 - 1))
def test_it_sees_what_its_owner_sees(
    tmp_path_factory: pytest.TempPathFactory, operations: list[tuple[str]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    folder = tmp_path_factory.mktemp("store") / "replay"
    store = ReplayStore(folder, holder="test", segment_bytes=12_000)
    snapshot = StoreSnapshot(folder)
    for step, (operation,) in enumerate([*operations, ("look",)]):
        buffered = np.flatnonzero(store.index.groups["fate"] == Fate.BUFFERED)
        if operation == "add":
            add(store, f"s{step}a", f"s{step}b", version=step, span_versions=[step, step])
        elif operation in ("train", "drop") and len(buffered):
            chosen = rng.choice(buffered, 1)
            store.settle(chosen, Fate.TRAINED if operation == "train" else Fate.DROPPED, step=step)
        elif operation == "retain":
            store.retain(Retention(min_version=step // 2), now_s=0.0)
        elif operation == "compact":
            store.compact()
        elif operation == "reopen":
            store.close()
            store = ReplayStore(folder, holder="test", segment_bytes=12_000)
        elif operation == "roll back":
            store.roll_back(step // 2)
        elif operation == "look":
            snapshot.refresh()
            assert list(snapshot.index.ids) == list(store.index.ids)
            for name in ("fate", "step", "erased", "version", "num_rows"):
                assert snapshot.index.groups[name].tolist() == store.index.groups[name].tolist()
            there = np.flatnonzero(~store.index.groups["erased"])
            expected = store.gather(there).column("trajectory_id").to_pylist() if len(there) else []
            assert ids(snapshot) == expected
            assert snapshot.num_damaged == 0
    store.close()
