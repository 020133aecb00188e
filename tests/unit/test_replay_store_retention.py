"""Letting rows go: what is chosen, that it is counted, and that compaction gives the space back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from echo_planes.data.store.fates import FateLog
from echo_planes.data.store.files import Files
from echo_planes.data.store.index import Fate
from echo_planes.data.store.recovery import STORE_NAME, read_store_id
from echo_planes.data.store.retention import Retention
from echo_planes.data.store.store import ReplayStore
from echo_planes.errors import ClusterError, DataError
from tests.unit.test_replay_store import FullDisk, all_segments, batch_of, everything, rows_of

GROUPS = 24


def open_store(folder: Path, files: Files | None = None) -> ReplayStore:
    return ReplayStore(folder, holder="test", segment_bytes=12_000, files=files)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store of 24 groups (versions 0 to 5, accepted at 0 s to 23 s), of which 0 to 7 were trained."""
    store = open_store(tmp_path / "store")
    for number in range(0, GROUPS, 2):
        store.append(batch_of(number), batch_of(number + 1), created_s=float(number))
    store.settle(np.arange(8), Fate.TRAINED, step=3)
    store.close()
    return tmp_path / "store"


def segment_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in all_segments(folder))


@pytest.mark.parametrize(
    ("retention", "gone"),
    [
        (Retention(), []),
        (Retention(max_age_s=10.0), list(range(10))),  # at 20 s
        (Retention(min_version=1), [0, 1, 2, 3]),
        (Retention(min_version=3), list(range(12))),
    ],
)
def test_age_and_version(folder: Path, retention: Retention, gone: list[int]) -> None:
    store = open_store(folder)
    assert store.retain(retention, now_s=20.0) == len(gone)
    assert store.retain(retention, now_s=20.0) == 0
    for _ in range(2):
        counts = store.counts()
        assert counts.trained == 8
        assert counts.removed == len([n for n in gone if n >= 8])  # never silently
        assert counts.buffered == 16 - counts.removed
        assert counts.missing == 0
        kept = [n for n in range(GROUPS) if n not in gone]
        assert everything(store).tolist() == kept
        assert rows_of(store.gather(np.array(kept))) == rows_of(batch_of(*kept))
        if gone:
            with pytest.raises(DataError, match=rf"group {gone[-1]} \(g{gone[-1]}\) are gone"):
                store.gather(np.array(gone[-1:]))
        store.close()
        store = open_store(folder)
    store.close()


def test_size_takes_what_was_trained_first_and_the_oldest_of_it(folder: Path) -> None:
    store = open_store(folder)
    sizes = store.index.groups["num_bytes"].astype(int)
    total = int(sizes.sum())
    assert store.retain(Retention(max_bytes=total - 1), now_s=0.0) == 1
    assert store.retain(Retention(max_bytes=total - int(sizes[:5].sum())), now_s=0.0) == 4
    assert everything(store).tolist() == list(range(5, GROUPS))
    assert store.retain(Retention(max_bytes=int(sizes[20:].sum())), now_s=0.0) == 15
    assert everything(store).tolist() == [20, 21, 22, 23]
    assert store.counts().removed == 12
    store.close()


def test_compaction_frees_space_and_changes_nothing_else(folder: Path) -> None:
    store = open_store(folder)
    going = np.array([*range(8), 9, 10, 13])
    store.settle(going[8:], Fate.DROPPED)
    store.retain(Retention(min_version=2), now_s=0.0)  # groups 0 to 7
    before, counts = segment_bytes(folder), store.counts()
    kept = list(range(8, GROUPS))
    table = store.gather(np.array(kept))  # from the old files, whose maps stay
    freed = store.compact()
    assert freed > 0
    assert segment_bytes(folder) < before
    assert store.compact() <= 0
    for _ in range(2):
        assert store.counts() == counts
        assert everything(store).tolist() == kept
        assert rows_of(store.gather(np.array(kept))) == rows_of(batch_of(*kept)) == rows_of(table)
        assert store.append(batch_of(0, 9, 23), created_s=0.0).duplicates == ("g0", "g9", "g23")
        assert not store.recovery.damage
        assert store.recovery.rebuilt_sidecars == 0
        store.close()
        store = open_store(folder)
    rows = sum(pa.ipc.open_stream(path.read_bytes()).read_all().num_rows for path in all_segments(folder))
    assert 2 * len(kept) <= rows < 2 * GROUPS
    store.close()
    # All that is known is in the segments themselves.
    for path in (folder / "segments").glob("*.index"):
        path.unlink()
    store = open_store(folder)
    assert store.counts() == counts
    assert rows_of(store.gather(np.array(kept))) == rows_of(batch_of(*kept))
    store.close()


def test_a_message_of_which_a_part_went_keeps_the_others(tmp_path: Path) -> None:
    store = ReplayStore(tmp_path, holder="test", segment_bytes=1)
    store.append(batch_of(0, 1, 2, 3), created_s=0.0)
    store.append(batch_of(4), created_s=0.0)  # seals the first segment
    store.settle(np.array([0, 2, 3]), Fate.TRAINED, step=0)
    sizes = store.index.groups["num_bytes"].astype(int)
    store.retain(Retention(max_bytes=int(sizes.sum() - sizes[0] - sizes[2] - sizes[3])), now_s=0.0)
    assert store.compact() > 0
    for _ in range(2):
        assert rows_of(store.gather(np.array([1, 4]))) == rows_of(batch_of(1, 4))
        store.close()
        store = ReplayStore(tmp_path, holder="test")
    store.close()


def test_what_stays_of_groups_whose_rows_went_is_small(tmp_path: Path) -> None:
    """A store that keeps few versions would else come to consist of messages without rows."""
    folder, many = tmp_path / "store", 600
    store = ReplayStore(folder, holder="test", segment_bytes=200_000)
    for number in range(many):
        store.append(batch_of(number), created_s=float(number))
    store.settle(np.arange(many), Fate.TRAINED, step=3)
    before = segment_bytes(folder)
    assert store.retain(Retention(max_age_s=float(GROUPS)), now_s=float(many)) == many - GROUPS
    store.compact()
    sealed = [path for path in all_segments(folder) if path != all_segments(folder)[-1]]
    erased = sum(path.stat().st_size for path in sealed)
    assert before > 1000 * many
    assert erased < 250 * many
    for _ in range(2):
        assert everything(store).tolist() == list(range(many - GROUPS, many))
        kept = np.arange(many - GROUPS, many)
        assert rows_of(store.gather(kept)) == rows_of(batch_of(*kept.tolist()))
        assert store.append(batch_of(0, 5, many - 1), created_s=0.0).duplicates == (
            "g0",
            "g5",
            f"g{many - 1}",
        )
        store.close()
        store = ReplayStore(folder, holder="test", segment_bytes=200_000)
    store.close()


def test_the_log_of_fates_is_shortened_where_rows_go_soon_after_their_training(tmp_path: Path) -> None:
    store = ReplayStore(tmp_path / "store", holder="test", segment_bytes=50_000)
    steps = 200
    for step in range(steps):
        added = store.append(batch_of(2 * step, 2 * step + 1), created_s=float(step))
        store.settle(added.sequences, Fate.TRAINED, step=step)
        store.retain(Retention(max_age_s=2.0), now_s=float(step))
        store.compact()
    store_id = read_store_id(tmp_path / "store" / STORE_NAME)
    log = FateLog(tmp_path / "store", Files(), store_id)
    # A fate each, and that its rows went where their segment is not sealed.
    assert log.num_entries < 1.6 * 2 * steps
    assert store.counts().trained == 2 * steps
    log.close()
    store.close()


def test_a_full_disk_during_compaction_loses_nothing(folder: Path) -> None:
    disk = FullDisk()
    store = open_store(folder, disk)
    store.retain(Retention(min_version=3), now_s=0.0)
    kept = list(range(12, GROUPS))
    failures = 0
    for room_bytes in (*range(0, 30_000, 1000), 1 << 40):
        disk.room_bytes = room_bytes
        try:
            store.compact()
        except ClusterError:
            failures += 1
        assert rows_of(store.gather(np.array(kept))) == rows_of(batch_of(*kept))
    assert 5 < failures < 30
    store.close()
    store = open_store(folder)
    assert not store.recovery.damage
    assert rows_of(store.gather(np.array(kept))) == rows_of(batch_of(*kept))
    assert store.counts().missing == store.counts().lost == 0
    store.close()


def test_a_damaged_segment_is_not_rewritten(folder: Path) -> None:
    path = all_segments(folder)[1]
    store = open_store(folder)
    row = int(np.flatnonzero(store.index.messages["segment"] == 1)[-1])
    offset, group = (int(store.index.messages[name][row]) for name in ("offset", "sequence"))
    store.close()
    data = bytearray(path.read_bytes())
    data[offset + 20] ^= 1
    path.write_bytes(data)
    store = open_store(folder)
    groups = store.index.groups
    store.settle(np.arange(8, group), Fate.DROPPED)
    sizes = groups["num_bytes"][group:].astype(int)
    store.retain(Retention(max_bytes=int(sizes.sum())), now_s=0.0)
    store.compact(max_live_share=0.9)
    assert path.read_bytes() == bytes(data)
    assert store.num_damaged == 1
    store.close()
