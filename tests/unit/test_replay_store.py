"""The replay store as its owner uses it: accept, choose, gather, settle, and open again."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from echo_planes.data.store.files import Files, Piece
from echo_planes.data.store.index import Fate
from echo_planes.data.store.message import FOOT_BYTES, Kind, Place, encode
from echo_planes.data.store.retention import Retention
from echo_planes.data.store.schema import OLDER_SCHEMAS, SCHEMA, from_row
from echo_planes.data.store.segment import GROUP_ENTRY, encode_header
from echo_planes.data.store.store import ReplayStore
from echo_planes.errors import ClusterError, DataError, RefusedError
from echo_planes.types import Episode, Group, IntArray, Prompt, Reward, Span, Trajectory

Open = Callable[..., ReplayStore]


def batch_of(*numbers: int, rows: int = 2, tokens: int = 4) -> pa.RecordBatch:
    """Groups `g<number>` whose every column follows from the number."""
    records = [
        {
            "trajectory_id": f"g{number}/{row}",
            "group_id": f"g{number}",
            "step": -1,
            "fate": "buffered",
            "prompt_index": number,
            "prompt_ids": [number],
            "prompt_text": "p",
            "answer": "a",
            "response_ids": [number + i for i in range(tokens)],
            "response_mask": [True] * tokens,
            "response_text": f"text {number}",
            "logprobs": [-number / 3 - i for i in range(tokens)],
            "top_ids": [],
            "top_logprobs": [],
            "span_stops": [tokens],
            "span_versions": [number // 4],
            "span_digests": ["d"],
            "finish_reason": "stop",
            "num_turns": 1,
            "reward": float(number % 5 + row),
            "correct": bool(row),
            "reward_parts": "{}",
            "version": number // 4 + row,
            "worker_id": "w",
            "lineage": "l",
        }
        for number in numbers
        for row in range(rows)
    ]
    return pa.RecordBatch.from_pylist(records, schema=SCHEMA)


def group_of(name: str) -> Group:
    """A group as a worker hands it in."""
    prompt = Prompt(3, (1, 2), "7", "3+4")
    episode = Episode((5, 6), (True, False), (-0.1, 0.0), (Span(0, 2, 9, "d"),), "stop", "ab", (), 1)
    reward = Reward(0.1, True, {"exact": 0.1})
    return Group(
        name, tuple(Trajectory(f"{name}/{i}", name, prompt, episode, reward, "w", "l") for i in range(2))
    )


def rows_of(table: pa.Table) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = table.to_pylist()
    return rows


def everything(store: ReplayStore) -> IntArray:
    """Groups whose rows are there."""
    groups = store.index.groups
    return np.flatnonzero((groups["fate"] != Fate.LOST) & ~groups["erased"])


def all_segments(folder: Path) -> list[Path]:
    return sorted((folder / "segments").glob("*.arrows"))


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Open]:
    """Opens the store in tmp_path / "store"; whatever is still open at the end is closed."""
    opened: list[ReplayStore] = []

    def open_(**options: object) -> ReplayStore:
        while opened:
            opened.pop().close()
        opened.append(ReplayStore(tmp_path / "store", holder="test", **options))  # type: ignore[arg-type]
        return opened[-1]

    yield open_
    for store in opened:
        store.close()


def test_rows_come_back_as_they_were_over_many_segments_and_another_opening(open_store: Open) -> None:
    store = open_store(segment_bytes=10_000)
    for number in range(0, 24, 3):
        receipt = store.append(batch_of(number, number + 1, number + 2), created_s=float(number))
        assert receipt.sequences.tolist() == [number, number + 1, number + 2]
    wanted = np.array([17, 2, 23, 3])
    for _ in range(2):
        assert (
            store.gather(wanted)
            .combine_chunks()
            .equals(pa.Table.from_batches([batch_of(17, 2, 23, 3)]).combine_chunks())
        )
        assert store.index.groups["version"].tolist() == [n // 4 for n in range(24)]
        assert store.index.groups["created_s"].tolist() == [n // 3 * 3 for n in range(24)]
        assert store.counts().accepted == store.counts().buffered == 24
        assert store.trajectory_counts().accepted == 48
        store = open_store(segment_bytes=10_000)
        assert not store.recovery.damage
    assert store.recovery.rebuilt_sidecars == 0
    assert len(store.index.messages["segment"]) == 8
    assert len(set(store.index.messages["segment"].tolist())) > 2


def test_groups_survive_exactly(open_store: Open) -> None:
    store = open_store()
    groups = [group_of("a.1"), group_of("a.2")]
    store.append_groups(groups, created_s=0.0)
    rows = rows_of(open_store().gather(np.array([1, 0])))
    assert [from_row(row) for row in rows] == [*groups[1].trajectories, *groups[0].trajectories]


def test_gathered_rows_are_not_copied(open_store: Open) -> None:
    store = open_store()
    store.append(batch_of(1, rows=16, tokens=512), created_s=0.0)
    before = pa.total_allocated_bytes()
    table = store.gather(np.array([0]))
    assert table.num_rows == 16
    assert pa.total_allocated_bytes() - before < 4096


def test_stock_arrow_reads_segments_and_fates_while_the_store_is_open(
    open_store: Open, tmp_path: Path
) -> None:
    store = open_store()
    store.append(batch_of(0, 1), batch_of(2), created_s=0.0)
    store.settle(np.array([1]), Fate.TRAINED, step=7)
    (path,) = all_segments(tmp_path / "store")
    rows = pa.ipc.open_stream(path.read_bytes()).read_all()
    assert rows.combine_chunks().equals(pa.Table.from_batches([batch_of(0, 1, 2)]).combine_chunks())
    fates = pa.ipc.open_stream((tmp_path / "store" / "fates.arrows").read_bytes()).read_all()
    assert rows_of(fates) == [{"sequence": 1, "group_id": "g1", "fate": "trained", "step": 7}]


def test_a_group_is_accepted_once_also_after_another_opening(open_store: Open) -> None:
    store = open_store()
    store.append(batch_of(1, 2), created_s=0.0)
    store.settle(np.array([0]), Fate.TRAINED, step=0)
    for _ in range(2):
        again = store.append(batch_of(1), created_s=1.0)
        assert (again.sequences.tolist(), again.duplicates) == ([], ("g1",))
        store = open_store()
    mixed = store.append(batch_of(2, 3, 1, 4), created_s=1.0)
    assert (mixed.sequences.tolist(), mixed.duplicates) == ([2, 3], ("g2", "g1"))
    assert rows_of(open_store().gather(np.arange(4))) == rows_of(batch_of(1, 2, 3, 4))


def test_a_batch_that_is_not_what_it_should_be_is_refused_whole(open_store: Open) -> None:
    store = open_store()
    other = batch_of(1).drop_columns(["lineage"])
    nulls = pa.RecordBatch.from_pylist([{"group_id": "x", "version": 1}], schema=SCHEMA)
    for bad in (other, nulls, batch_of(1, 2, 1)):
        with pytest.raises(DataError):
            store.append(batch_of(0), bad, created_s=0.0)
    assert store.counts().accepted == 0
    assert store.append(batch_of(0), created_s=0.0).sequences.tolist() == [0]


def test_fates_add_up_and_outlive_the_process(open_store: Open) -> None:
    store = open_store()
    store.append(batch_of(*range(10)), created_s=0.0)
    store.settle(np.array([1, 2]), Fate.TRAINED, step=5)
    store.settle(np.array([3]), Fate.DROPPED)
    for _ in range(2):
        counts = store.counts()
        assert (counts.accepted, counts.trained, counts.dropped, counts.buffered) == (10, 2, 1, 7)
        assert counts.missing == 0
        assert store.index.groups["step"][[1, 2, 3]].tolist() == [5, 5, -1]
        rng = np.random.default_rng(0)
        left = store.choose(7, selector="fifo", min_version=0, rng=rng).tolist()
        assert left == [0, 4, 5, 6, 7, 8, 9]
        store = open_store()


def test_a_group_has_one_fate(open_store: Open, tmp_path: Path) -> None:
    store = open_store()
    store.append(batch_of(*range(4)), created_s=0.0)
    store.settle(np.array([0]), Fate.TRAINED, step=5)
    size_bytes = (tmp_path / "store" / "fates.arrows").stat().st_size
    store.settle(np.array([0]), Fate.TRAINED, step=5)  # said again, as after a lost answer
    assert (tmp_path / "store" / "fates.arrows").stat().st_size == size_bytes
    with pytest.raises(RefusedError, match="g0 cannot become trained: it is trained already"):
        store.settle(np.array([1, 0]), Fate.TRAINED, step=6)
    with pytest.raises(RefusedError, match="not all in the store"):
        store.settle(np.array([4]), Fate.DROPPED)
    with pytest.raises(ValueError, match="BUFFERED"):
        store.settle(np.array([1]), Fate.BUFFERED)
    assert store.counts().buffered == 3


def test_a_resume_sets_later_work_aside(open_store: Open) -> None:
    store = open_store()
    store.append(batch_of(*range(16)), created_s=0.0)  # versions 0 to 3, four groups each
    store.settle(np.array([0, 1]), Fate.TRAINED, step=1)
    store.settle(np.array([2]), Fate.TRAINED, step=2)
    store.settle(np.array([3]), Fate.DROPPED)
    assert store.roll_back(2).tolist() == [2, *range(4, 12)]  # the third was trained too late: trained again
    assert store.roll_back(2).tolist() == [2, *range(4, 12)]
    counts = open_store().counts()
    assert (counts.trained, counts.dropped, counts.quarantined, counts.buffered) == (2, 1, 4, 9)
    assert counts.missing == 0


def test_a_resume_keeps_uninformative_groups_but_those_of_versions_that_are_gone(open_store: Open) -> None:
    store = open_store()
    store.append(batch_of(*range(16)), created_s=0.0)  # versions 0 to 3, four groups each
    store.settle(np.array([0, 1]), Fate.UNINFORMATIVE, step=0)
    store.settle(np.array([8, 9]), Fate.UNINFORMATIVE, step=2)
    store.settle(np.array([10, 12]), Fate.UNINFORMATIVE, step=3)  # the last is of version 3
    assert store.roll_back(2).tolist() == [2, 3, 4, 5, 6, 7, 11]
    counts = open_store().counts()
    assert (counts.uninformative, counts.quarantined, counts.buffered, counts.missing) == (5, 4, 7, 0)


def test_a_group_with_one_token_of_a_later_version_is_set_aside(open_store: Open) -> None:
    store = open_store()
    rows = batch_of(0, 1).to_pylist()
    rows[1] |= {"span_stops": [2, 4], "span_versions": [0, 3], "span_digests": ["d", "e"]}
    store.append(pa.RecordBatch.from_pylist(rows, schema=SCHEMA), created_s=0.0)
    assert store.roll_back(2).tolist() == [1]
    assert store.counts().quarantined == 1


def test_what_a_resume_gave_back_is_chosen_in_order_of_arrival(open_store: Open) -> None:
    store = open_store()
    store.append(batch_of(*range(8)), created_s=0.0)
    store.settle(np.array([1, 2]), Fate.TRAINED, step=3)
    store.roll_back(3)
    for opened in (store, open_store()):
        chosen = opened.choose(4, selector="fifo", min_version=0, rng=np.random.default_rng(0))
        assert chosen.tolist() == [0, 1, 2, 3]
    store = open_store()
    store.settle(np.array([1]), Fate.TRAINED, step=4)
    store.compact()  # shortens the log of fates
    assert open_store().counts().trained == 1


def test_a_group_whose_rows_and_fate_are_gone_does_not_stop_a_resume(open_store: Open) -> None:
    store = open_store()
    store.append(batch_of(0), created_s=0.0)
    store.append(batch_of(1), created_s=9.0)
    store.settle(np.array([0]), Fate.TRAINED, step=1)
    store.retain(Retention(max_age_s=5.0), now_s=10.0)
    store.index.groups["fate"][0] = Fate.BUFFERED  # as a damaged log of fates leaves it
    buffered = store.roll_back(5)
    assert buffered.tolist() == [1]
    assert store.gather(buffered).num_rows == 2
    assert store.counts().quarantined == 1


def test_a_damaged_group_is_not_given_back(open_store: Open, tmp_path: Path) -> None:
    store = open_store()
    store.append(batch_of(0), created_s=0.0)
    store.append(batch_of(1), batch_of(2), created_s=0.0)
    store.settle(np.array([0, 1]), Fate.TRAINED, step=3)
    (path,) = all_segments(tmp_path / "store")
    content = bytearray(path.read_bytes())
    for group in (b"text 1", b"text 2"):
        content[content.index(group)] ^= 1
    store.close()
    path.write_bytes(content)
    store = open_store()
    buffered = store.roll_back(2).tolist()
    assert buffered == [0]
    assert (store.counts().buffered, store.counts().missing) == (1, 0)


def test_segments_of_an_older_schema_are_read_and_new_rows_go_to_new_ones(
    open_store: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = OLDER_SCHEMAS[0].schema
    names = [
        f"echo_planes.data.store.{module}.SCHEMA" for module in ("store", "write_batch", "recovery", "reader")
    ]
    with monkeypatch.context() as patch:  # the program as it was then
        for name in names:
            patch.setattr(name, older)
        store = open_store()
        store.append(batch_of(*range(4)).select(older.names).cast(older), created_s=1.0)
        store.settle(np.array([0]), Fate.TRAINED, step=1)
        store.close()
    store = open_store()
    assert store.counts().buffered == 3
    old = store.gather(np.arange(4))
    assert old.schema.equals(SCHEMA, check_metadata=True)
    assert old.column("status").to_pylist() == ["ok"] * 8
    assert old.column("response_text").to_pylist()[::2] == [f"text {i}" for i in range(4)]
    store.append(batch_of(4), created_s=2.0)
    assert len(all_segments(tmp_path / "store")) == 2
    store.retain(Retention(min_version=1), now_s=3.0)
    assert store.compact() > 0  # what is rewritten is written in the schema of today
    store = open_store()
    assert rows_of(store.gather(np.array([4])))[0]["response_text"] == "text 4"
    assert store.counts().missing == 0


def test_two_runs_cannot_share_a_store(open_store: Open, tmp_path: Path) -> None:
    open_store()
    with pytest.raises(ClusterError, match=rf'in use by run "test", process {os.getpid()} on '):
        ReplayStore(tmp_path / "store", holder="other")
    open_store().append(batch_of(1), created_s=0.0)  # closed in between: free again


def test_a_folder_that_cannot_be_made_or_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ClusterError, match="file"):
        ReplayStore(tmp_path / "file", holder="test")
    ReplayStore(tmp_path / "store", holder="test").close()
    (tmp_path / "store" / "segments" / "00000000.arrows").mkdir()
    with pytest.raises(DataError, match=r"cannot read .*00000000\.arrows"):
        ReplayStore(tmp_path / "store", holder="test")


def test_a_store_of_a_newer_format_is_refused_by_name(open_store: Open, tmp_path: Path) -> None:
    open_store().close()
    path = tmp_path / "store" / "store.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "format": 2}))
    with pytest.raises(DataError, match=r"store\.json was written in format 2, this program knows up to 1"):
        ReplayStore(tmp_path / "store", holder="test")
    path.write_text("[]" + " " * 5000)
    with pytest.raises(DataError, match="more than 4096 bytes"):
        ReplayStore(tmp_path / "store", holder="test")
    path.unlink()
    segment = tmp_path / "store" / "segments" / "00000000.arrows"
    segment.write_bytes(b"x")
    with pytest.raises(DataError, match=r"store\.json is missing"):
        ReplayStore(tmp_path / "store", holder="test")


class _Evil(pa.ExtensionType):  # type: ignore[misc]
    """Runs code when a reader meets it."""

    met = 0

    def __init__(self) -> None:
        super().__init__(pa.int64(), "evil")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: pa.DataType, data: bytes) -> _Evil:
        cls.met += 1
        return cls()


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain stream", "forged foot"])
def test_another_schema_is_refused_before_arrow_reads_it(
    open_store: Open, tmp_path: Path, wrapped: bool
) -> None:
    open_store().close()
    store_id = bytes.fromhex(json.loads((tmp_path / "store" / "store.json").read_text())["store_id"])
    schema = pa.schema([("x", _Evil())])
    array = pa.ExtensionArray.from_storage(_Evil(), pa.array([1], pa.int64()))
    batch = pa.record_batch([array], schema=schema)
    if wrapped:
        header = b"".join(encode_header(schema, Place(store_id, Kind.HEADER, 0, 0, 0), 0))
        data = header + bytes(batch.serialize())
    else:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, schema) as writer:
            for _ in range(20):
                writer.write_batch(batch)
        data = sink.getvalue().to_pybytes()
    (tmp_path / "store" / "segments" / "00000000.arrows").write_bytes(data)
    pa.register_extension_type(_Evil())
    _Evil.met = 0
    try:
        with pytest.raises(DataError, match="another schema" if wrapped else "no file of this store"):
            ReplayStore(tmp_path / "store", holder="test")
    finally:
        pa.unregister_extension_type("evil")
    assert _Evil.met == 0


def test_a_row_that_holds_a_message_is_not_taken_for_one(open_store: Open, tmp_path: Path) -> None:
    """A worker's tokens may hold anything, even what a message would look like, except this store's id."""
    store = open_store()
    store.append(batch_of(0), created_s=0.0)
    (path,) = all_segments(tmp_path / "store")
    start = path.stat().st_size

    def row_holding(offset: int) -> tuple[bytes, pa.RecordBatch]:
        place = Place(bytes(16), Kind.ROWS, 0, 0, offset)
        forged = b"".join(
            bytes(piece)
            for piece in encode(
                batch_of(66).serialize(), place, sequence=1, entries=np.zeros(1, GROUP_ENTRY), texts=b"g66"
            )
        )
        row = batch_of(1).to_pylist()[0]
        row["prompt_ids"] = np.frombuffer(forged, np.int32).tolist()
        return forged, pa.RecordBatch.from_pylist([row], schema=SCHEMA)

    forged, batch = row_holding(0)
    offset = (
        start + bytes(batch.serialize()).index(forged) + GROUP_ENTRY.itemsize + len("g1") + 6 + FOOT_BYTES
    )
    forged, batch = row_holding(offset)
    store.append(batch, created_s=0.0)
    assert path.read_bytes().index(forged) == offset
    store.close()
    os.truncate(path, path.stat().st_size - 1)
    store = open_store()
    assert store.counts().accepted == 1
    # The torn end is gone, so that other readers can read the file to its end.
    assert pa.ipc.open_stream(path.read_bytes()).read_all().num_rows == 2


class FullDisk(Files):
    """Takes `room_bytes` more, then says that the disk is full; syncs may fail too."""

    def __init__(self) -> None:
        self.room_bytes = 1 << 40
        self.sync_fails = False
        self.truncate_fails = False

    def write(self, fd: int, pieces: Sequence[Piece], offset: int) -> int:
        if self.room_bytes == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part = b"".join(pieces)[: self.room_bytes]
        self.room_bytes -= len(part)
        return os.pwrite(fd, part, offset)

    def sync(self, fd: int) -> None:
        if self.sync_fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().sync(fd)

    def truncate(self, fd: int, size_bytes: int) -> None:
        if self.truncate_fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().truncate(fd, size_bytes)


@pytest.mark.parametrize("room_bytes", [0, 1, 100, 2500, 4000])
@pytest.mark.parametrize("fails", ["write", "sync", "write and truncate"])
def test_a_full_disk_loses_nothing_and_the_store_goes_on(
    open_store: Open, room_bytes: int, fails: str
) -> None:
    disk = FullDisk()
    store = open_store(files=disk, segment_bytes=20_000)
    for number in range(4):
        store.append(batch_of(number), created_s=0.0)
    store.settle(np.array([0]), Fate.TRAINED, step=0)
    disk.room_bytes = room_bytes if "write" in fails else 1 << 40
    disk.sync_fails, disk.truncate_fails = fails == "sync", "truncate" in fails
    for _ in range(2):
        with pytest.raises(ClusterError, match="free some space"):
            store.append(batch_of(4), batch_of(5), created_s=0.0)
        if room_bytes < 100:
            with pytest.raises(ClusterError, match="free some space"):
                store.settle(np.array([1]), Fate.DROPPED)
    assert store.counts().accepted == 4
    assert rows_of(store.gather(np.arange(4))) == rows_of(batch_of(0, 1, 2, 3))
    disk.room_bytes, disk.sync_fails, disk.truncate_fails = 1 << 40, False, False
    for number in range(4, 30):
        assert store.append(batch_of(number), created_s=0.0).sequences.tolist() == [number]
    store = open_store()
    assert not store.recovery.damage
    assert rows_of(store.gather(np.arange(30))) == rows_of(batch_of(*range(30)))
    assert (store.counts().trained, store.counts().buffered) == (1, 29)


class NoDescriptors(Files):
    """Opens no more files that exist already once `is_out` is set."""

    is_out = False

    def open(self, path: Path, *, create: bool) -> int:
        if self.is_out and not create:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().open(path, create=create)


def test_a_log_of_fates_that_cannot_be_replaced_goes_on(open_store: Open) -> None:
    disk = NoDescriptors()
    store = open_store(files=disk, segment_bytes=8_000)
    for number in range(30):
        store.append(batch_of(number), created_s=0.0)
    store.settle(np.arange(28), Fate.TRAINED, step=0)
    store.retain(Retention(max_age_s=1.0), now_s=9.0)  # a second entry for each of them
    disk.is_out = True
    with pytest.raises(ClusterError, match="Too many open files"):
        store.compact()
    disk.is_out = False
    store.append(batch_of(30), created_s=9.0)
    store.settle(np.array([30]), Fate.DROPPED)
    counts = store.counts()
    store.close()
    assert open_store().counts() == counts


@pytest.mark.parametrize("harm", ["missing", "altered", "outdated"])
def test_a_sidecar_that_is_not_right_is_made_again(open_store: Open, tmp_path: Path, harm: str) -> None:
    store = open_store(segment_bytes=8_000)
    for number in range(12):
        store.append(batch_of(number), created_s=0.0)
    store.close()
    sidecars = sorted((tmp_path / "store" / "segments").glob("*.index"))
    good = sidecars[1].read_bytes()
    if harm == "missing":
        sidecars[1].unlink()
    elif harm == "altered":
        sidecars[1].write_bytes(good[:200] + bytes([good[200] ^ 1]) + good[201:])
    else:
        sidecars[1].write_bytes(sidecars[0].read_bytes())
    store = open_store()
    assert store.recovery.rebuilt_sidecars == 1
    assert rows_of(store.gather(np.arange(12))) == rows_of(batch_of(*range(12)))
    assert sidecars[1].read_bytes() == good


def test_damage_in_a_sealed_segment_is_named_and_not_served(open_store: Open, tmp_path: Path) -> None:
    store = open_store(segment_bytes=8_000)
    for number in range(12):
        store.append(batch_of(number), created_s=0.0)
    offset, size_bytes = (int(store.index.messages[name][1]) for name in ("offset", "size_bytes"))
    store.close()
    path = all_segments(tmp_path / "store")[0]
    data = bytearray(path.read_bytes())
    data[offset + size_bytes - 50] ^= 4
    path.write_bytes(data)
    store = open_store()
    for _ in range(2):
        with pytest.raises(DataError, match=rf"{path.name} is damaged at offset {offset} .*groups g1\)"):
            store.gather(np.array([0, 1]))
    assert (store.num_damaged, store.counts().lost, store.counts().buffered) == (1, 1, 11)
    assert sum(batch.num_rows for batch in store.batches()) == 22
    chosen = store.choose(11, selector="uniform", min_version=0, rng=np.random.default_rng(1))
    assert 1 not in chosen.tolist()
    # What is lost may be made again.
    assert store.append(batch_of(1), created_s=0.0).sequences.tolist() == [12]
    assert rows_of(store.gather(np.array([12]))) == rows_of(batch_of(1))


class Reserving(Files):
    """A disk that sets blocks aside, or cannot."""

    def __init__(self, can: bool) -> None:
        self._can = can
        self.asked = 0

    def reserve(self, fd: int, start: int, size_bytes: int) -> None:
        self.asked += 1
        if not self._can:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        super().reserve(fd, start, size_bytes)


@pytest.mark.parametrize("can", [True, False])
def test_blocks_set_aside_do_not_show_and_are_given_back(open_store: Open, tmp_path: Path, can: bool) -> None:
    files = Reserving(can)
    store = open_store(files=files)
    batches = [batch_of(number, tokens=4096) for number in range(3)]
    for batch in batches:
        store.append(batch, created_s=0.0)
        (path,) = all_segments(tmp_path / "store")
        last = store.index.messages["entry"][-1]
        assert path.stat().st_size == last["offset"] + last["size_bytes"]
    assert files.asked == (2 if can else 1)  # the second batch fits into what is there
    assert (path.stat().st_blocks * 512 > path.stat().st_size + 100_000) == can
    store.close()
    assert path.stat().st_blocks * 512 < path.stat().st_size + 30_000
    store = open_store()
    assert store.gather(everything(store)).to_pylist() == pa.Table.from_batches(batches).to_pylist()


def test_many_appends_that_nobody_looked_at(open_store: Open) -> None:
    store = open_store()
    for number in range(150):
        receipt = store.append(batch_of(number, rows=1), created_s=0.0)
        assert receipt.sequences.tolist() == [number]
    assert store.append(batch_of(149, rows=1), created_s=0.0).duplicates == ("g149",)
    store.append(batch_of(150, rows=1), created_s=0.0)
    chosen = store.choose(2, selector="freshest", min_version=0, rng=np.random.default_rng(0))
    assert chosen.tolist() == [150, 149]
    store.append(batch_of(151, rows=1), created_s=0.0)
    store.settle(np.array([151]), Fate.TRAINED, step=1)
    assert (store.counts().buffered, store.counts().trained) == (151, 1)
    assert rows_of(store.gather(np.array([150]))) == rows_of(batch_of(150, rows=1))


def test_a_sealed_segment_that_was_cut_or_is_gone_loses_only_its_own_rows(
    open_store: Open, tmp_path: Path
) -> None:
    store = open_store(segment_bytes=8_000)
    for number in range(12):
        store.append(batch_of(number), created_s=0.0)
    segments = store.index.messages["segment"].tolist()
    store.close()
    paths = all_segments(tmp_path / "store")
    os.truncate(paths[0], paths[0].stat().st_size - 10)
    paths[1].unlink()
    paths[1].with_suffix(".index").unlink()
    last_of_first = segments.count(0) - 1
    lost = {last_of_first, *[n for n, segment in enumerate(segments) if segment == 1]}
    store = open_store()
    assert [str(d.path) for d in store.recovery.damage] == [str(paths[0])]
    assert store.counts().lost == len(lost)
    kept = [n for n in range(12) if n not in lost]
    assert everything(store).tolist() == kept
    assert rows_of(store.gather(np.array(kept))) == rows_of(batch_of(*kept))


def test_damage_in_the_fate_log_is_said(open_store: Open, tmp_path: Path) -> None:
    store = open_store()
    store.append(batch_of(0, 1, 2), created_s=0.0)
    path = tmp_path / "store" / "fates.arrows"
    sizes = [path.stat().st_size]
    for number in range(3):
        store.settle(np.array([number]), Fate.TRAINED, step=number)
        sizes.append(path.stat().st_size)
    store.close()
    data = bytearray(path.read_bytes())
    data[sizes[1] + 40] ^= 1
    path.write_bytes(data)
    store = open_store()
    assert store.recovery.lost_fates == 1
    assert [(d.path, d.offset) for d in store.recovery.damage] == [(path, sizes[1])]
    assert store.index.groups["fate"].tolist() == [Fate.TRAINED, Fate.BUFFERED, Fate.TRAINED]


def test_a_large_message_is_measured_right(open_store: Open) -> None:
    store = open_store()
    rows = batch_of(*range(2), rows=3000, tokens=64)
    store.append(rows, created_s=0.0)
    size_bytes = int(store.index.messages["size_bytes"][0])
    assert rows.nbytes * 3000 > 2**32  # the product in between
    assert store.index.groups["num_bytes"].tolist() == pytest.approx([size_bytes / 2] * 2, rel=0.01)
