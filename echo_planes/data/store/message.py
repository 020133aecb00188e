"""One message of a store file: a standard Arrow IPC message with its own index entries and hash.

A file is a pure Arrow IPC *stream*, so pyarrow, pandas, polars and DuckDB (through pyarrow) read it while it
grows. During an append they find the last message incomplete, and can read the batches before it. Arrow lets
a message's metadata be longer than its flatbuffer; the extra space holds our entries and the foot::

    continuation, metadata length     8 bytes, as Arrow wants them
    flatbuffer                        as Arrow made it            |
    entries                           fixed-size numpy records    | metadata
    texts                             UTF-8, padded to 8 bytes    |
    foot                              96 bytes, below             |
    body                              the columns, as Arrow laid them out

The foot names the store, file and offset that the message belongs to, so that bytes inside a row never pass
for a message. It ends with xxh3-128 over everything else. The hash detects damage but is no defence against a
deliberately forged store, so read only stores that you trust.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from echo_planes.data.store.files import Piece

FORMAT = 1  # format of segments, sidecars and the fate log; a higher one is refused
MAGIC = b"EPstore\n"
STORE_ID_BYTES = 16
HASH_BYTES = 16
_CONTINUATION = 0xFFFFFFFF
_HEAD = struct.Struct("<II")
_FOOT = struct.Struct("<8s16sHHIIIIIIQQQ")  # `_Foot`; the hash follows
FOOT_BYTES = _FOOT.size + HASH_BYTES
_START = struct.Struct("<8s16sH")  # first fields of a foot, at the same place in every format
_OFFSET_AT = struct.calcsize("<8s16sHHIIIIII")
_ALIGNMENT = 8

Entries = npt.NDArray[np.void]


class _Foot(NamedTuple):
    magic: bytes
    store_id: bytes
    format: int
    kind: int
    file: int
    generation: int
    num_entries: int
    text_bytes: int
    flatbuffer_bytes: int
    reserved: int
    offset: int
    sequence: int
    body_bytes: int


class Kind(IntEnum):
    """Kind of a message."""

    HEADER = 0  # the schema, at the beginning of a file
    ROWS = 1
    FATES = 2


@dataclass(frozen=True, slots=True)
class Place:
    """Place that a message belongs to. `generation`: how many times its file was rewritten."""

    store_id: bytes
    kind: Kind
    file: int
    generation: int
    offset: int


@dataclass(frozen=True, slots=True)
class Message:
    """Message that was found whole."""

    offset: int
    size_bytes: int
    sequence: int  # number of its first entry; the others follow without gaps
    generation: int
    entries: bytes
    texts: bytes
    num_entries: int
    flatbuffer: bytes


def encode(arrow: pa.Buffer, place: Place, *, sequence: int, entries: Entries, texts: bytes) -> list[Piece]:
    """Encode one message; return its pieces, to be written one after another at `place.offset`.

    Args:
        arrow: an encapsulated Arrow message (`RecordBatch.serialize()`, `Schema.serialize()`).
        place: place of the message.
        sequence: number of its first entry.
        entries: structured array, shape (n,), item size a multiple of 8.
        texts: texts that belong to the entries, concatenated.
    """
    whole = memoryview(arrow)
    _, flatbuffer_bytes = _HEAD.unpack_from(whole)
    flatbuffer_end = _HEAD.size + flatbuffer_bytes
    body = whole[flatbuffer_end:]
    text_bytes = len(texts)
    table = entries.tobytes()
    padding = bytes(-text_bytes % _ALIGNMENT)
    metadata_bytes = flatbuffer_bytes + len(table) + text_bytes + len(padding) + FOOT_BYTES
    foot = _Foot(
        magic=MAGIC,
        store_id=place.store_id,
        format=FORMAT,
        kind=place.kind,
        file=place.file,
        generation=place.generation,
        num_entries=len(entries),
        text_bytes=text_bytes,
        flatbuffer_bytes=flatbuffer_bytes,
        reserved=0,
        offset=place.offset,
        sequence=sequence,
        body_bytes=len(body),
    )
    head = b"".join(
        (
            _HEAD.pack(_CONTINUATION, metadata_bytes),
            whole[_HEAD.size : flatbuffer_end],
            table,
            texts,
            padding,
            _FOOT.pack(*foot),
        )
    )
    digest = xxhash.xxh3_128(head)
    digest.update(body)
    return [head + digest.digest(), body]


def size_of(pieces: list[Piece]) -> int:
    """Return the size of an encoded message in bytes."""
    return sum(map(len, pieces))


def decode(data: memoryview, place: Place, entry_bytes: int, base: int = 0) -> Message | None:
    """Return the message at `place.offset`, or None if no whole message with this place is there.

    Arrow reads none of these bytes, and every length is checked against the file's before it is used.

    Args:
        data: the file, or a part of it.
        place: place of the message; the generation is not compared.
        entry_bytes: item size of its entries.
        base: offset in the file at which `data` begins.
    """
    start = place.offset - base
    if start < 0 or start + _HEAD.size > len(data):
        return None
    continuation, metadata_bytes = _HEAD.unpack(data[start : start + _HEAD.size])
    foot_end = start + _HEAD.size + metadata_bytes
    if continuation != _CONTINUATION or metadata_bytes < FOOT_BYTES or foot_end > len(data):
        return None
    hash_at = foot_end - HASH_BYTES
    foot = _Foot._make(_FOOT.unpack(data[hash_at - _FOOT.size : hash_at]))
    if (foot.magic, foot.store_id, foot.format) != (MAGIC, place.store_id, FORMAT):
        return None
    if (foot.kind, foot.file, foot.offset) != (place.kind, place.file, place.offset):
        return None
    entries_bytes = foot.num_entries * entry_bytes
    padded_bytes = foot.text_bytes + -foot.text_bytes % _ALIGNMENT
    if foot.flatbuffer_bytes + entries_bytes + padded_bytes + FOOT_BYTES != metadata_bytes:
        return None
    end = foot_end + foot.body_bytes
    if end > len(data):
        return None
    digest = xxhash.xxh3_128(data[start:hash_at])
    digest.update(data[foot_end:end])
    if digest.digest() != data[hash_at:foot_end]:
        return None
    entries_at = start + _HEAD.size + foot.flatbuffer_bytes
    texts_at = entries_at + entries_bytes
    return Message(
        offset=place.offset,
        size_bytes=end - start,
        sequence=foot.sequence,
        generation=foot.generation,
        entries=bytes(data[entries_at:texts_at]),
        texts=bytes(data[texts_at : texts_at + foot.text_bytes]),
        num_entries=foot.num_entries,
        flatbuffer=bytes(data[start + _HEAD.size : entries_at]),
    )


def written_format(data: memoryview) -> int | None:
    """Return the format number in the foot of a file's first message; None if there is no such foot."""
    if len(data) < _HEAD.size:
        return None
    continuation, metadata_bytes = _HEAD.unpack(data[: _HEAD.size])
    foot_at = _HEAD.size + metadata_bytes - FOOT_BYTES
    if continuation != _CONTINUATION or foot_at < _HEAD.size or foot_at + FOOT_BYTES > len(data):
        return None
    magic, _, version = _START.unpack(data[foot_at : foot_at + _START.size])
    return int(version) if magic == MAGIC else None


def candidates(data: memoryview, start: int, store_id: bytes, base: int = 0) -> Iterator[int]:
    """Yield the offsets behind `start` that feet of this store name, in the order of the feet.

    `base`: offset in the file at which `data` begins.
    """
    searchable: Any = data.obj  # an mmap or bytes
    mark = MAGIC + store_id
    at = searchable.find(mark, start - base)
    while at >= 0:
        (offset,) = struct.unpack("<Q", bytes(data[at + _OFFSET_AT : at + _OFFSET_AT + 8]).ljust(8, b"\0"))
        if start < offset < base + at:
            yield offset
        at = searchable.find(mark, at + 1)
