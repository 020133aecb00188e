"""Opening of a store: it builds the index from the files, and cuts off what a crash left incomplete."""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from echo_planes.data.store.files import Files, cannot_write, map_file, write_whole
from echo_planes.data.store.index import GroupIndex
from echo_planes.data.store.message import FORMAT, STORE_ID_BYTES, Kind, Message, Place
from echo_planes.data.store.schema import OLDER_SCHEMAS, SCHEMA, OlderSchema
from echo_planes.data.store.segment import (
    GROUP_ENTRY,
    Damage,
    check_header,
    has_schema,
    segment_numbers,
    segment_path,
    walk,
)
from echo_planes.data.store.sidecar import SegmentIndex, decode_sidecar, encode_sidecar
from echo_planes.errors import DataError

STORE_NAME = "store.json"
SEGMENTS_NAME = "segments"
_MAX_STORE_JSON_BYTES = 4096
OLDER = tuple(older.schema for older in OLDER_SCHEMAS)


@dataclass(slots=True)
class Segment:
    """State of a segment in an open store."""

    number: int
    generation: int
    size_bytes: int
    sealed: bool
    damaged: bool = False  # compaction skips it, so that a person can still save data from it
    older: OlderSchema | None = None  # schema of its rows, if it is not SCHEMA


@dataclass(frozen=True, slots=True)
class Recovery:
    """Findings from opening a store. Damage is reported, never repaired: only torn ends are cut off."""

    damage: tuple[Damage, ...] = ()
    lost_fates: int = 0  # damaged entries of the fate log; their groups count as buffered again
    rebuilt_sidecars: int = 0


def open_store_id(folder: Path, files: Files) -> bytes:
    """Return the store's id; make a new store if there is none.

    Raises:
        DataError: `store.json` is missing beside segments, is invalid, or is of a newer format.
        ClusterError: the disk is full or cannot be written.
    """
    path = folder / STORE_NAME
    try:
        (folder / SEGMENTS_NAME).mkdir(parents=True, exist_ok=True)
        if not path.exists() and any(folder.glob(f"{SEGMENTS_NAME}/*.arrows")):
            raise DataError(f"{path} is missing but there are segments; restore it or move the folder away")
        if not path.exists():
            # Segments are made only after this file is durable, so without the file no group can exist.
            store_id = secrets.token_bytes(STORE_ID_BYTES)
            text = json.dumps({"format": FORMAT, "store_id": store_id.hex()})
            write_whole(path, files, [[text.encode()]])
    except OSError as error:
        raise cannot_write(path, error) from error
    return read_store_id(path)


def read_store_id(path: Path) -> bytes:
    """Return the store's id, read from its `store.json`.

    Raises:
        DataError: the file is missing, invalid, or of a newer format.
    """
    try:
        if path.stat().st_size > _MAX_STORE_JSON_BYTES:
            raise ValueError(f"more than {_MAX_STORE_JSON_BYTES} bytes")
        record = json.loads(path.read_bytes())
        version, store_id = int(record["format"]), bytes.fromhex(record["store_id"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} does not describe a replay store ({error}); restore it") from error
    if version > FORMAT:
        raise DataError(
            f"{path} was written in format {version}, this program knows up to {FORMAT}; update echo_planes"
        )
    if version < 1 or len(store_id) != STORE_ID_BYTES:
        raise DataError(f"{path} names format {version} and a store id of {len(store_id)} bytes; restore it")
    return store_id


class Loader:
    """Loader that fills an index from the segments of a store.

    Args:
        folder: folder of the segments.
        files: the disk.
        store_id: id of the store.
        index: index to fill; the loader does not open its buckets.
    """

    def __init__(self, folder: Path, files: Files, store_id: bytes, index: GroupIndex) -> None:
        self._folder = folder
        self._files = files
        self._store_id = store_id
        self._index = index
        self.segments: dict[int, Segment] = {}
        self.damage: list[Damage] = []
        self.rebuilt_sidecars = 0

    def load(self) -> None:
        """Read all sidecars, walk segments without a valid one, and cut a torn end off the last segment.

        Raises:
            DataError: a segment is of a newer format, of an unknown schema, or not of this store.
            ClusterError: the disk is full or cannot be written.
        """
        numbers = list(segment_numbers(self._folder))
        for number in numbers:
            segment = self._load(number, is_last=number == numbers[-1])
            if segment is not None:
                self.segments[number] = segment

    def _load(self, number: int, *, is_last: bool) -> Segment | None:
        path = segment_path(self._folder, number)
        data = map_file(path)
        place = Place(self._store_id, Kind.ROWS, number, 0, 0)
        header = check_header(data, path, place, SCHEMA, GROUP_ENTRY.itemsize, OLDER)
        sidecar = read_sidecar(path, self._store_id, number)
        if header is not None:
            self._index.grow_to(header.sequence)
        if sidecar is not None and (header is None or header.generation == sidecar.generation):
            segment = self._take_sidecar(number, sidecar, header is None, len(data))
            segment.older = older_schema(header)
            return segment
        found = walk(data, path, place, SCHEMA, GROUP_ENTRY.itemsize, OLDER)
        if found.is_unused:
            path.unlink()
            return None
        generation = header.generation if header else found.messages[0].generation
        index = SegmentIndex.of(found.messages, generation, found.size_bytes)
        enter(self._index, number, index)
        self.damage.extend(found.damage)
        torn = bool(found.damage) and found.damage[-1].torn
        if is_last and torn:
            del data  # reading a map behind the end of its file would crash the process
            self._cut(path, found.size_bytes)
        sealed = not is_last or header is None
        if sealed:
            write_whole(sidecar_path(path), self._files, [encode_sidecar(index, self._store_id, number)])
            self.rebuilt_sidecars += 1
        damaged = bool(found.damage) or header is None
        return Segment(number, generation, found.size_bytes, sealed, damaged, older_schema(header))

    def _take_sidecar(self, number: int, sidecar: SegmentIndex, headless: bool, size_bytes: int) -> Segment:
        path = segment_path(self._folder, number)
        enter(self._index, number, sidecar)
        if headless:
            first = int(sidecar.messages["offset"][0]) if len(sidecar.messages) else size_bytes
            self.damage.append(Damage(path, 0, first))
        missing = sidecar.size_bytes - size_bytes
        if missing > 0:
            self.damage.append(Damage(path, size_bytes, missing))
            self._mark_beyond(number, size_bytes)
        return Segment(number, sidecar.generation, sidecar.size_bytes, True, headless or missing > 0)

    def _mark_beyond(self, number: int, size_bytes: int) -> None:
        """Mark the messages damaged that lay in the missing end of a sealed segment; their ids stay known."""
        table = self._index.messages
        ends = table["offset"] + table["size_bytes"]
        for message in np.flatnonzero((table["segment"] == number) & (ends > size_bytes)).tolist():
            self._index.mark_damaged(message)

    def _cut(self, path: Path, size_bytes: int) -> None:
        try:
            fd = self._files.open(path, create=False)
            try:
                self._files.truncate(fd, size_bytes)
                self._files.sync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise cannot_write(path, error) from error


def read_sidecar(path: Path, store_id: bytes, number: int) -> SegmentIndex | None:
    """Return the sidecar of the segment at `path`, or None if it is missing or not whole."""
    try:
        return decode_sidecar(map_file(sidecar_path(path)), store_id, number)
    except FileNotFoundError:
        return None


def older_schema(header: Message | None) -> OlderSchema | None:
    """Return the older schema of a file, if it has one. A damaged header (None) is taken for SCHEMA."""
    found = (older for older in OLDER_SCHEMAS if header is not None and has_schema(header, older.schema))
    return next(found, None)


def enter(index: GroupIndex, number: int, segment: SegmentIndex) -> None:
    """Enter the messages and groups of segment `number`, from its sidecar or a walk, into the index."""
    stops = np.cumsum(segment.groups["id_bytes"]).tolist()
    starts = [0, *stops]
    ids = [segment.ids[start:stop].decode() for start, stop in zip(starts, stops, strict=False)]
    index.add(number, segment.messages, segment.groups, ids)


def segment_index(index: GroupIndex, segment: Segment) -> SegmentIndex:
    """Return the contents of a segment's sidecar from the index; the inverse of `enter`."""
    rows = np.flatnonzero(index.messages["segment"] == segment.number)
    messages = index.messages["entry"][rows]
    counts = messages["num_groups"]
    starts = np.cumsum(counts) - counts
    sequences = np.repeat(messages["sequence"] - starts, counts) + np.arange(int(counts.sum()))
    ids = "".join([index.ids[sequence] for sequence in sequences.tolist()]).encode()
    groups = index.groups["entry"][sequences]
    return SegmentIndex(segment.generation, segment.size_bytes, messages, groups, ids)


def sidecar_path(path: Path) -> Path:
    """Return the path of the sidecar of the segment at `path`."""
    return path.with_suffix(".index")
