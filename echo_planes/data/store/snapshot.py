"""Read-only view of a store, also while its owner writes to it.

The view takes no lock, and does not map segments or the fate log, which the owner may cut. It ignores a torn
end, which may be a message that is being written, and leaves out and counts damage. It holds the index entry
of every group in memory, and reads rows on demand.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa

from echo_planes.data.store.fates import FATE_ENTRY, FATES_NAME, FATES_SCHEMA
from echo_planes.data.store.files import cannot_read
from echo_planes.data.store.index import Fate, GroupIndex, MessageState
from echo_planes.data.store.message import Kind, Message, Place
from echo_planes.data.store.reader import RowReader
from echo_planes.data.store.recovery import (
    OLDER,
    SEGMENTS_NAME,
    STORE_NAME,
    enter,
    older_schema,
    read_sidecar,
    read_store_id,
)
from echo_planes.data.store.schema import SCHEMA, OlderSchema
from echo_planes.data.store.segment import (
    GROUP_ENTRY,
    Damage,
    check_header,
    scan,
    segment_numbers,
    segment_path,
    walk,
)
from echo_planes.data.store.sidecar import SegmentIndex
from echo_planes.errors import DataError
from echo_planes.types import IntArray

_HEADER_BYTES = 64 * 2**10  # more than any header needs
_ATTEMPTS = 5  # to read a store whose files are replaced meanwhile


def is_store(folder: Path) -> bool:
    """Return whether `folder` holds a store."""
    return (folder / STORE_NAME).exists()


class StoreSnapshot:
    """Contents of a store as of the last `refresh`.

    Args:
        folder: folder of the store.

    Raises:
        DataError: there is no store, or it is of a newer format, or of another schema.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._segments = folder / SEGMENTS_NAME
        self._store_id = read_store_id(folder / STORE_NAME)
        self._start_over()
        self.refresh()

    def refresh(self) -> bool:
        """Read new messages; return whether there are any. Sequence numbers stay valid; `index` may change.

        Raises:
            DataError: a file cannot be read, or is of a newer format or another schema.
        """
        for attempt in range(_ATTEMPTS):
            try:
                return self._read_new() or attempt > 0
            except _ReplacedError:  # the offsets in the index are of the old files
                self._start_over()
            except DataError:
                self._start_over()  # messages already read may be missing in the index
                raise
        raise DataError(f"the files of {self._folder} were replaced {_ATTEMPTS} times meanwhile; try again")

    def gather(self, sequences: IntArray) -> pa.Table:
        """Return the rows of groups, in order, with the groups' present fate and step.

        Groups whose rows were removed or are damaged are left out.

        Args:
            sequences: shape (n,).
        """
        for _ in range(_ATTEMPTS):
            try:
                return self._gather(sequences)
            except _ReplacedError:
                self.refresh()
        raise DataError(f"the files of {self._folder} were replaced {_ATTEMPTS} times meanwhile; try again")

    def table(self) -> pa.Table:
        """Return all rows that are neither removed nor damaged, in order of acceptance; see `gather`."""
        return self.gather(np.arange(self.index.groups.length))

    @property
    def num_damaged(self) -> int:
        """Number of damaged places found so far; a message of rows is checked when its rows are read."""
        torn = sum(file.torn for file in list(self._files.values())[:-1])
        between = sum(file.num_damaged for file in (self._fates, *self._files.values()))
        return torn + between + int((self.index.messages["state"] == MessageState.DAMAGED).sum())

    # --- inside ----------------------------------------------------------------------------------

    def _start_over(self) -> None:
        self.index = GroupIndex()
        self._files: dict[int, _Followed] = {}
        self._older: dict[int, OlderSchema] = {}
        self._fates = self._followed(self._folder / FATES_NAME, Kind.FATES, 0)

    def _followed(self, path: Path, kind: Kind, number: int) -> _Followed:
        return _Followed(path, Place(self._store_id, kind, number, 0, 0))

    def _read_new(self) -> bool:
        # Fates first: the rows of every group that they name are then on disk already.
        try:
            fates = self._fates.read_new()
        except FileNotFoundError:
            fates = []  # the owner is still making the store
        is_new = bool(fates)
        for number in segment_numbers(self._segments):
            is_new |= self._read_segment(number)
        entries = np.frombuffer(b"".join(message.entries for message in fates), FATE_ENTRY)
        self.index.load_fates(entries["sequence"], entries["fate"], entries["step"])
        return is_new

    def _read_segment(self, number: int) -> bool:
        path = segment_path(self._segments, number)
        file = self._files.get(number)
        is_first = file is None
        file = file or self._followed(path, Kind.ROWS, number)
        try:
            sidecar = read_sidecar(path, self._store_id, number) if is_first else None
            if sidecar is not None and file.take_sealed(sidecar):
                found = sidecar
            else:
                messages = file.read_new()
                found = SegmentIndex.of(messages, 0, file.size_bytes)
        except FileNotFoundError as error:
            raise _ReplacedError from error
        if is_first:
            self._files[number] = file
            if file.header is not None:
                self.index.grow_to(file.header.sequence)
            if older := older_schema(file.header):
                self._older[number] = older
        if len(found.messages):
            enter(self.index, number, found)
        return bool(len(found.messages))

    def _gather(self, sequences: IntArray) -> pa.Table:
        index = self.index
        reader = RowReader(self._segments, self._store_id, index, 0, self._older)
        batches: dict[int, pa.RecordBatch | None] = {}
        slices, steps, fates = [], [], []
        for sequence in sequences.tolist():
            message, start, count, fate = (
                int(index.groups[name][sequence]) for name in ("message", "row_start", "num_rows", "fate")
            )
            if message < 0 or start < 0 or index.groups["erased"][sequence]:
                continue
            if message not in batches:
                batches[message] = self._batch(reader, message)
            batch = batches[message]
            if batch is None:
                continue
            slices.append(batch.slice(start, count))
            steps += [int(index.groups["step"][sequence])] * count
            fates += [Fate(fate).name.lower()] * count
        table = pa.Table.from_batches(slices, SCHEMA)
        for name, values in (("step", steps), ("fate", fates)):
            place = SCHEMA.get_field_index(name)
            table = table.set_column(place, SCHEMA.field(place), pa.array(values, SCHEMA.field(place).type))
        return table

    def _batch(self, reader: RowReader, message: int) -> pa.RecordBatch | None:
        """Return a message's rows; None if they are damaged, which the reader has marked in the index."""
        try:
            return reader.batch(message)
        except DataError:
            self._files[int(self.index.messages["segment"][message])].check()
            return None


class _ReplacedError(Exception):
    """A file was replaced, or bytes already read were cut off."""


class _Followed:
    """Reader of one file of messages that another process appends to.

    Args:
        path: the file.
        place: place of its messages; its kind is rows or fates.
    """

    def __init__(self, path: Path, place: Place) -> None:
        self._path = path
        self._place = place
        self._is_rows = place.kind == Kind.ROWS
        self._entry_bytes = (GROUP_ENTRY if self._is_rows else FATE_ENTRY).itemsize
        self._state: tuple[int, ...] = ()  # device, inode, size and time of change, when last read
        self._last: Message | None = None
        self.header: Message | None = None
        self.size_bytes = 0  # up to the end of the last whole message
        self.num_damaged = 0  # damaged places between whole messages
        self.torn = False  # whether there were bytes behind the last whole message

    def check(self) -> None:
        """Raise _ReplacedError if the file was replaced since it was read."""
        try:
            self._look(self._path.stat())
        except OSError as error:
            raise _ReplacedError from error

    def take_sealed(self, sidecar: SegmentIndex) -> bool:
        """Follow a sealed segment from its sidecar on; return False if the sidecar is of another generation.

        Raises:
            FileNotFoundError: the file is gone.
            DataError: it cannot be read, or is of a newer format or another schema.
        """
        with self._open() as source:
            state = self._look(os.fstat(source.fileno()))
            head = memoryview(source.read(_HEADER_BYTES))
        header = check_header(head, self._path, self._place, SCHEMA, GROUP_ENTRY.itemsize, OLDER)
        if header is not None and header.generation != sidecar.generation:
            return False
        self.header = header
        self.num_damaged += header is None
        self.size_bytes = sidecar.size_bytes
        self._state = state
        return True

    def read_new(self) -> list[Message]:
        """Return the whole messages that were appended since the last call.

        Raises:
            _ReplacedError: the file was replaced, or bytes already read were cut off.
            FileNotFoundError: the file is gone.
            DataError: it cannot be read, or is of a newer format or another schema.
        """
        # Read from the last message on: if that one differs now, it was cut off and others were appended.
        base = self._last.offset if self._last else self.size_bytes
        with self._open() as source:
            state = self._look(os.fstat(source.fileno()))
            if state == self._state:
                return []
            source.seek(base)
            data = memoryview(source.read())
        messages, damage = self._parse_first(data) if not self._state else self._parse(data, base)
        self._state = state
        self.torn = bool(damage) and damage[-1].torn
        self.num_damaged += len(damage) - self.torn
        if messages:
            self._last = messages[-1]
            self.size_bytes = self._last.offset + self._last.size_bytes
        return messages

    def _parse_first(self, data: memoryview) -> tuple[list[Message], list[Damage]]:
        schema, older = (SCHEMA, OLDER) if self._is_rows else (FATES_SCHEMA, ())
        found = walk(data, self._path, self._place, schema, self._entry_bytes, older)
        self.header = found.header
        self.size_bytes = found.header.size_bytes if found.header else 0
        return list(found.messages), list(found.damage)

    def _parse(self, data: memoryview, base: int) -> tuple[list[Message], list[Damage]]:
        messages, damage = scan(data, self._path, self._place, self._entry_bytes, base, base)
        if self._last is not None:
            if messages[:1] != [self._last]:
                raise _ReplacedError
            del messages[0]
        return messages, damage

    def _open(self) -> BinaryIO:
        try:
            return self._path.open("rb")
        except FileNotFoundError:
            raise
        except OSError as error:
            raise cannot_read(self._path, error) from error

    def _look(self, found: os.stat_result) -> tuple[int, ...]:
        """Return the file's state.

        Raises:
            _ReplacedError: it is another file, or is shorter than the part already read.
        """
        state = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
        if self._state and (
            state[:2] != self._state[:2] or found.st_size < min(self.size_bytes, self._state[2])
        ):
            raise _ReplacedError
        return state
