"""The replay store against everything that ends a process or harms a file: what was acknowledged is there."""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import signal
import traceback
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from echo_planes.data.store.files import Files, Piece
from echo_planes.data.store.index import Fate
from echo_planes.data.store.message import Kind, Place, decode
from echo_planes.data.store.retention import Retention
from echo_planes.data.store.segment import GROUP_ENTRY, scan
from echo_planes.data.store.store import ReplayStore
from tests.thorough import THOROUGH, examples
from tests.unit.test_replay_store import all_segments, batch_of, everything, rows_of

RECORDS = examples(200)
KILLS = 500 if THOROUGH else 40
WALK_EVERY = 1 if THOROUGH else 16  # bytes; each byte is flipped either way


class Log:
    """A store of one segment with `RECORDS` messages of one group each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        store = ReplayStore(folder, holder="test")
        for number in range(RECORDS):
            store.append(batch_of(number, rows=1, tokens=2), created_s=0.0)
        self.offsets: list[int] = store.index.messages["offset"].tolist()
        self.store_id = bytes.fromhex(json.loads((folder / "store.json").read_text())["store_id"])
        store.close()
        (self.path,) = all_segments(folder)
        self.data = self.path.read_bytes()
        self.offsets.append(len(self.data))

    def place(self, message: int) -> Place:
        return Place(self.store_id, Kind.ROWS, 0, 0, self.offsets[message])

    def message_at(self, byte: int) -> int:
        """Number of the message a byte belongs to; -1: the header."""
        return int(np.searchsorted(self.offsets, byte, side="right")) - 1

    def copy(self, folder: Path, data: bytes) -> Path:
        """The same store with other bytes in its segment."""
        shutil.copytree(self.folder, folder)
        (folder / "segments" / self.path.name).write_bytes(data)
        return folder


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Log:
    return Log(tmp_path_factory.mktemp("log") / "store")


def check_served(folder: Path, expected: list[int]) -> None:
    """Exactly these groups are served, bit for bit, and the store goes on."""
    store = ReplayStore(folder, holder="test")
    served = everything(store)
    wanted = pa.Table.from_batches([batch_of(*expected, rows=1, tokens=2)]) if expected else None
    assert [int(name[1:]) for name in store.ids(served)] == expected
    if wanted is not None:
        assert store.gather(served).combine_chunks().equals(wanted.combine_chunks())
    assert store.counts().missing == 0
    again = store.append(*(batch_of(n, rows=1, tokens=2) for n in range(RECORDS + 1)), created_s=0.0)
    assert len(again.duplicates) == len(expected)
    store.close()
    store = ReplayStore(folder, holder="test")
    assert sorted(store.ids(everything(store))) == sorted(f"g{n}" for n in range(RECORDS + 1))
    store.close()


# --- damaged files -------------------------------------------------------------------------------


def test_every_byte_flipped_is_noticed_and_costs_only_its_message(log: Log) -> None:
    """Every byte of every message, at the level of the walk: what follows the message is still found."""
    data = bytearray(log.data)
    path = Path("flipped")
    for message in range(RECORDS):
        start, stop = log.offsets[message], log.offsets[message + 1]
        # Only the next message is looked at: it does not depend on what lies behind it.
        seen = memoryview(bytearray(data[: log.offsets[min(message + 2, RECORDS)]]))
        for byte in range(start, stop):
            seen[byte] ^= 1 << byte % 8
            assert decode(seen, log.place(message), GROUP_ENTRY.itemsize) is None, byte
            if byte % WALK_EVERY == 0:
                found, damage = scan(seen, path, log.place(0), GROUP_ENTRY.itemsize, start)
                assert [m.offset for m in found] == log.offsets[message + 1 : min(message + 2, RECORDS)]
                assert [(d.offset, d.size_bytes) for d in damage] == [(start, stop - start)], byte
            seen[byte] ^= 1 << byte % 8


def test_a_log_cut_at_every_byte_keeps_every_message_before_the_cut(log: Log) -> None:
    whole = memoryview(log.data)
    for message in range(RECORDS):
        start, stop = log.offsets[message], log.offsets[message + 1]
        assert decode(whole[:stop], log.place(message), GROUP_ENTRY.itemsize) is not None
        for cut in range(start, stop):
            assert decode(whole[:cut], log.place(message), GROUP_ENTRY.itemsize) is None, cut


def test_stores_with_a_flipped_byte_serve_the_other_messages(log: Log, tmp_path: Path) -> None:
    rng = random.Random(1)
    for number in range(60):
        byte = number * 40 if number < 30 else rng.randrange(len(log.data))  # the header, then anywhere
        harmed = bytearray(log.data)
        harmed[byte] ^= 1 << rng.randrange(8)
        folder = log.copy(tmp_path / str(number), bytes(harmed))
        store = ReplayStore(folder, holder="test")
        hit = log.message_at(byte)
        assert len(store.recovery.damage) == 1, byte
        assert store.recovery.damage[0].offset == (log.offsets[hit] if hit >= 0 else 0), byte
        store.close()
        check_served(folder, [n for n in range(RECORDS) if n != hit])
        shutil.rmtree(folder)


def test_stores_that_were_cut_serve_what_lies_before(log: Log, tmp_path: Path) -> None:
    rng = random.Random(2)
    edges = [0, 1, log.offsets[0] - 1, log.offsets[0], log.offsets[0] + 1, log.offsets[7], log.offsets[8] - 1]
    for cut in [*edges, *(rng.randrange(len(log.data)) for _ in range(50))]:
        folder = log.copy(tmp_path / str(cut), log.data[:cut])
        check_served(folder, list(range(max(0, log.message_at(cut)))))
        shutil.rmtree(folder)


# --- killed processes ----------------------------------------------------------------------------


def _append_for_ever(folder: Path, start: int, acknowledge: int) -> None:
    """Accept and settle groups, saying each on a pipe once it is durable, until killed."""
    rng = random.Random(start)
    store = ReplayStore(folder, holder="child", segment_bytes=30_000)
    number = start
    while True:
        count = rng.randint(1, 4)
        numbers = range(number, number + count)
        store.append(batch_of(*numbers, rows=rng.randint(1, 3)), created_s=float(number))
        os.write(acknowledge, b"".join(b"a%08d" % n for n in numbers))
        number += count
        if rng.random() < 0.5:
            chosen = store.choose(1, selector="uniform", min_version=0, rng=np.random.default_rng(number))
            store.settle(chosen, Fate.TRAINED, step=number)
            os.write(acknowledge, b"t%08d" % int(store.ids(chosen)[0][1:]))
        if rng.random() < 0.1:
            store.retain(Retention(max_bytes=60_000), now_s=0.0)
            store.compact(0.9)


def _run_until_killed(folder: Path, start: int, rng: random.Random) -> list[str]:
    """Kill a process at a random moment; return what it had acknowledged."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            _append_for_ever(folder, start, writing)
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(writing)
    said = b""
    enough = 9 * rng.randint(0, 30)
    try:
        while len(said) < enough:
            assert select.select([reading], [], [], 60.0)[0], "the child does nothing"
            more = os.read(reading, 65536)
            assert more, "the child ended by itself"
            said += more
        select.select([], [], [], rng.random() * 0.005)  # anywhere between two acknowledgements
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while more := os.read(reading, 65536):
            said += more
        os.close(reading)
    return [said[at : at + 9].decode() for at in range(0, len(said) - 8, 9)]


def kill_often(folder: Path, times: int, seed: int) -> tuple[int, int]:
    """Kill a process that appends `times` over; returns how many acks there were, and torn ends."""
    rng = random.Random(seed)
    accepted: set[str] = set()
    trained: set[str] = set()
    torn = 0
    for turn in range(times):
        for ack in _run_until_killed(folder, 1000 * turn, rng):
            (accepted if ack[0] == "a" else trained).add(f"g{int(ack[1:])}")
        store = ReplayStore(folder, holder="parent")
        torn += len(store.recovery.damage)
        assert all(damage.torn for damage in store.recovery.damage)
        names = store.ids(np.arange(store.index.groups.length))
        assert len(names) == len(set(names)), "a group is there twice"
        assert accepted <= set(names)
        fates = store.index.groups["fate"]
        assert trained <= {name for name, fate in zip(names, fates, strict=True) if fate == Fate.TRAINED}
        assert store.counts().missing == store.counts().lost == 0
        there = everything(store).tolist()
        sample = np.array(rng.sample(there, min(20, len(there))), np.int64)
        for row in rows_of(store.gather(sample)):
            number = row["prompt_index"]
            assert isinstance(number, int)
            assert row["group_id"] == f"g{number}"
            assert row["response_ids"] == [number + i for i in range(4)]
        store.close()
    return len(accepted) + len(trained), torn


def test_a_killed_process_loses_nothing_it_acknowledged(tmp_path: Path) -> None:
    acknowledged, _ = kill_often(tmp_path / "store", KILLS, seed=3)
    assert acknowledged > 100


# --- a disk that loses what was not synced -------------------------------------------------------


class PowerCutError(Exception):
    """The machine stops here."""


class LossyDisk(Files):
    """Real files, of which a power cut keeps what was synced and any part of the rest.

    Contents count as kept once `sync` returned, names once `sync_folder` returned. Of everything newer,
    each block of `BLOCK` bytes and each name is kept or lost on its own.
    """

    BLOCK = 64

    def __init__(self, folder: Path, operations: int, rng: random.Random) -> None:
        self._left = operations  # until the power cut
        self._rng = rng
        self._synced: dict[int, bytes] = {}  # inode -> content
        self._gone: dict[int, bytes] = {}  # inode -> last content, once it has no name
        self._names: dict[Path, int] = {}  # durable ones
        self._held: list[int] = []
        for path in folder.rglob("*"):  # what the last power cut left is durable
            if path.is_file():
                self._names[path] = path.stat().st_ino
                self._synced[path.stat().st_ino] = path.read_bytes()

    def write(self, fd: int, pieces: Sequence[Piece], offset: int) -> int:
        data = b"".join(pieces)
        if self._left <= 1:
            data = data[: self._rng.randint(0, len(data))]
        written = os.pwrite(fd, data, offset)
        self._tick()
        return written

    def sync(self, fd: int) -> None:
        self._tick()
        self._synced[os.fstat(fd).st_ino] = os.pread(fd, os.fstat(fd).st_size, 0)
        self._tick()

    def truncate(self, fd: int, size_bytes: int) -> None:
        self._tick()
        super().truncate(fd, size_bytes)

    def replace(self, source: Path, target: Path) -> None:
        self._tick()
        if target.exists():
            # Held open, so that its inode is not given to another file.
            self._held.append(os.open(target, os.O_RDONLY))
            self._gone[target.stat().st_ino] = target.read_bytes()
        super().replace(source, target)
        self._tick()

    def sync_folder(self, folder: Path) -> None:
        self._tick()
        self._names = {path: ino for path, ino in self._names.items() if path.parent != folder}
        self._names |= {path: path.stat().st_ino for path in folder.iterdir() if path.is_file()}
        self._tick()

    def cut(self, folder: Path, target: Path) -> None:
        """Write what is left of `folder` into `target`."""
        alive = {path: path.stat().st_ino for path in folder.rglob("*") if path.is_file()}
        (target / "segments").mkdir(parents=True)
        for path in alive.keys() | self._names.keys():
            choices = {alive.get(path), self._names.get(path)}
            ino = self._rng.choice(sorted(choices, key=str))
            if ino is not None:
                (target / path.relative_to(folder)).write_bytes(self._content(ino, alive))
        for fd in self._held:
            os.close(fd)

    def _content(self, ino: int, alive: dict[Path, int]) -> bytes:
        old = self._synced.get(ino, b"")
        new = next((path.read_bytes() for path, i in alive.items() if i == ino), self._gone.get(ino, old))
        size = self._rng.choice([len(old), len(new), self._rng.randint(*sorted((len(old), len(new))))])
        keep = self._rng.random()
        mixed = bytearray(size)
        for at in range(0, size, self.BLOCK):
            kept = (new if self._rng.random() < keep else old)[at : min(at + self.BLOCK, size)]
            mixed[at : at + len(kept)] = kept
        return bytes(mixed)

    def _tick(self) -> None:
        self._left -= 1
        if self._left <= 0:
            raise PowerCutError


def _work(store: ReplayStore, number: int, rng: random.Random, acked: dict[str, Fate]) -> None:
    """One thing after another, until the power cut."""
    while True:
        numbers = range(number, number + rng.randint(1, 3))
        number += len(numbers)
        store.append(*(batch_of(n) for n in numbers), created_s=float(number))
        acked.update({f"g{n}": Fate.BUFFERED for n in numbers})
        if rng.random() < 0.5:
            chosen = store.choose(1, selector="fifo", min_version=0, rng=np.random.default_rng(0))
            fate = rng.choice([Fate.TRAINED, Fate.DROPPED])
            store.settle(chosen, fate, step=number)
            acked[store.ids(chosen)[0]] = fate
        if rng.random() < 0.15:
            store.retain(Retention(min_version=number // 4 - 2), now_s=0.0)
            store.compact(0.9)


@pytest.mark.parametrize("seed", range(examples(12)))
def test_a_power_cut_loses_nothing_that_was_acknowledged(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    acked: dict[str, Fate] = {}
    folder = tmp_path / "0"
    for turn in range(1, 16):
        folder.mkdir(exist_ok=True)
        disk = LossyDisk(folder, rng.randint(1, 200), rng)
        store = None
        try:
            store = ReplayStore(folder, holder="test", segment_bytes=12_000, files=disk)
            _work(store, 1000 * turn, rng, acked)
        except PowerCutError:
            pass
        after = tmp_path / str(turn)
        disk.cut(folder, after)
        if store is not None:
            store.close()
        _check_nothing_lost(after, acked)
        folder = after


def _check_nothing_lost(folder: Path, acked: dict[str, Fate]) -> None:
    """On a copy: opening also mends, and the next turn shall find the folder as the cut left it."""
    copy = folder.with_suffix(".copy")
    shutil.copytree(folder, copy)
    store = ReplayStore(copy, holder="test")
    names = store.ids(np.arange(store.index.groups.length))
    real = [name for name in names if name]
    newest = max((int(name[1:]) for name in real), default=0)
    assert len(real) == len(set(real)), "a group is there twice"
    for name, fate in acked.items():
        sequence = store.index.ids.sequence(name)
        found = Fate(int(store.index.groups["fate"][sequence]))
        # A fate not acknowledged may be there all the same; an acknowledged one must be.
        assert found == fate or fate == Fate.BUFFERED, name
        assert found != Fate.LOST
        if store.index.groups["erased"][sequence]:
            assert int(name[1:]) // 4 < (newest + 1) // 4 - 2, name
            continue
        (row, _) = rows_of(store.gather(np.array([sequence])))
        assert row["group_id"] == name
    assert store.counts().missing == 0
    store.close()
    shutil.rmtree(copy)
