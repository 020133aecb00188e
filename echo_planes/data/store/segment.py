"""Segments: the files that hold the rows, and the search for their whole messages after a crash.

`<number>.arrows` begins with the schema message, which is compared byte for byte with ours before Arrow reads
anything else. One message per batch follows. Groups are numbered without gaps over the whole store, so a gap
in the numbers shows how many groups a damaged message held.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from echo_planes.data.store.files import Piece
from echo_planes.data.store.message import (
    FORMAT,
    Entries,
    Kind,
    Message,
    Place,
    candidates,
    decode,
    encode,
    size_of,
    written_format,
)
from echo_planes.errors import DataError

# One group of a rows message, in the order of its rows.
GROUP_ENTRY = np.dtype(
    [
        ("version", "<i8"),  # oldest version of any of its tokens
        ("reward_mean", "<f8"),
        ("created_s", "<f8"),
        ("num_rows", "<u4"),  # as accepted
        ("row_start", "<i4"),  # its first row within the batch; -1: the rows were removed
        ("id_bytes", "<u4"),  # length of its group id among the texts
        ("num_bytes", "<u4"),  # its share of the message's size
    ]
)
NO_ENTRIES: Entries = np.empty(0, GROUP_ENTRY)


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes of a file that belong to no whole message, or are missing."""

    path: Path
    offset: int
    size_bytes: int
    torn: bool = False  # no whole message follows: never acknowledged, or cut off or altered since

    def __str__(self) -> str:
        what = "a torn end" if self.torn else "damage"
        return f"{what} of {self.size_bytes} bytes in {self.path} at offset {self.offset}"


@dataclass(frozen=True, slots=True)
class Walk:
    """Whole messages of a file, and its damage."""

    messages: tuple[Message, ...]
    damage: tuple[Damage, ...]
    size_bytes: int  # up to the end of the last whole message
    header: Message | None  # None: damaged

    @property
    def is_unused(self) -> bool:
        """Whether a crash interrupted the file's creation, so that nothing was ever appended to it."""
        return self.header is None and not self.messages


def encode_header(schema: pa.Schema, place: Place, sequence: int) -> list[Piece]:
    """Encode the schema message that a file begins with. `sequence`: number of the file's first entry."""
    return encode(schema.serialize(), place, sequence=sequence, entries=NO_ENTRIES, texts=b"")


def walk(
    data: memoryview,
    path: Path,
    place: Place,
    schema: pa.Schema,
    entry_bytes: int,
    older: Sequence[pa.Schema] = (),
) -> Walk:
    """Find every whole message of a file; `place` gives the store, kind and file of its messages.

    After a damaged message, the walk searches the next whole one by its foot. If there is none, the rest of
    the file is its torn end.

    Raises:
        DataError: the file is of a newer format, its schema is neither `schema` nor one of `older`, or it
            holds no whole message of this store.
    """
    header = check_header(data, path, place, schema, entry_bytes, older)
    messages, damage = scan(data, path, place, entry_bytes, header.size_bytes if header else 0)
    size_bytes = damage[-1].offset if damage and damage[-1].torn else len(data)
    if header is None and not messages and len(data) > size_of(encode_header(schema, place, 0)):
        raise DataError(f"{path} is no file of this store, or all of it is damaged; move it away")
    return Walk(tuple(messages), tuple(damage), size_bytes, header)


def scan(
    data: memoryview, path: Path, place: Place, entry_bytes: int, start: int, base: int = 0
) -> tuple[list[Message], list[Damage]]:
    """Return the whole messages from `start` on, and the damage between and behind them; see `walk`.

    `base`: offset in the file at which `data` begins.
    """
    messages: list[Message] = []
    damage: list[Damage] = []
    at, file_end = start, base + len(data)
    while at < file_end:
        message = decode(data, _at(place, at), entry_bytes, base)
        if message is None:
            message = _next_whole(data, at, place, entry_bytes, base)
            end = message.offset if message else file_end
            damage.append(Damage(path, at, end - at, torn=message is None))
            if message is None:
                break
        messages.append(message)
        at = message.offset + message.size_bytes
    return messages, damage


def check_header(
    data: memoryview,
    path: Path,
    place: Place,
    schema: pa.Schema,
    entry_bytes: int,
    older: Sequence[pa.Schema] = (),
) -> Message | None:
    """Return the header of a file, or None if it is damaged.

    Raises:
        DataError: the file is of a newer format, or its schema is neither `schema` nor one of `older`.
    """
    version = written_format(data)
    header = decode(data, Place(place.store_id, Kind.HEADER, place.file, 0, 0), GROUP_ENTRY.itemsize)
    # The number counts without a valid hash, which a newer format may compute differently, unless whole
    # messages of this format follow.
    newer = header is None and version is not None and version > FORMAT
    if newer and _next_whole(data, 0, place, entry_bytes) is None:
        raise DataError(
            f"{path} was written in format {version}, this program knows up to {FORMAT}; update echo_planes"
        )
    if header is not None and not any(has_schema(header, known) for known in (schema, *older)):
        raise DataError(f"{path} has another schema than this program writes; not read, move the file away")
    return header


def has_schema(header: Message, schema: pa.Schema) -> bool:
    """Return whether a header holds exactly the bytes of `schema`."""
    return bool(header.flatbuffer == schema.serialize().to_pybytes()[8:])


def _next_whole(
    data: memoryview, start: int, place: Place, entry_bytes: int, base: int = 0
) -> Message | None:
    for offset in candidates(data, start, place.store_id, base):
        message = decode(data, _at(place, offset), entry_bytes, base)
        if message is not None:
            return message
    return None


def _at(place: Place, offset: int) -> Place:
    return Place(place.store_id, place.kind, place.file, place.generation, offset)


def segment_numbers(folder: Path) -> Iterator[int]:
    """Return the numbers of the segments in a folder, ascending."""
    return iter(sorted(int(path.stem) for path in folder.glob("*.arrows") if path.stem.isdecimal()))


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}.arrows"
