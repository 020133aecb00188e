"""Sidecar: the index file beside a sealed segment, which opening a store reads instead of the rows.

`<number>.index` is a head of fixed size, a table of messages, the entries of all groups, their ids, and
xxh3-128 over all of it. A missing, damaged or outdated sidecar is rebuilt from its segment.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from echo_planes.data.store.files import Piece
from echo_planes.data.store.message import FORMAT, HASH_BYTES, STORE_ID_BYTES, Entries, Message
from echo_planes.data.store.segment import GROUP_ENTRY

_MAGIC = b"EPindex\n"
_HEAD = struct.Struct(f"<8s{STORE_ID_BYTES}sIIIQIIQ")
MESSAGE_ENTRY = np.dtype(
    [("offset", "<i8"), ("size_bytes", "<i8"), ("sequence", "<i8"), ("num_groups", "<i8")],
)


@dataclass(frozen=True, slots=True)
class SegmentIndex:
    """Everything but the rows of one segment. M messages, G groups in the order of their sequence."""

    generation: int
    size_bytes: int  # of the segment
    messages: Entries  # (M,) MESSAGE_ENTRY
    groups: Entries  # (G,) GROUP_ENTRY
    ids: bytes  # of all groups, one after another

    @staticmethod
    def of(messages: Sequence[Message], generation: int, size_bytes: int) -> SegmentIndex:
        """Make the index of a walked segment."""
        table = np.array(
            [(m.offset, m.size_bytes, m.sequence, m.num_entries) for m in messages], MESSAGE_ENTRY
        )
        entries = np.frombuffer(b"".join(m.entries for m in messages), GROUP_ENTRY)
        return SegmentIndex(generation, size_bytes, table, entries, b"".join(m.texts for m in messages))


def encode_sidecar(index: SegmentIndex, store_id: bytes, number: int) -> list[Piece]:
    """Encode the sidecar of segment `number`."""
    head = _HEAD.pack(
        _MAGIC,
        store_id,
        FORMAT,
        number,
        index.generation,
        index.size_bytes,
        len(index.messages),
        len(index.groups),
        len(index.ids),
    )
    whole = b"".join((head, index.messages.tobytes(), index.groups.tobytes(), index.ids))
    return [whole, xxhash.xxh3_128_digest(whole)]


def decode_sidecar(data: memoryview, store_id: bytes, number: int) -> SegmentIndex | None:
    """Decode a sidecar; return None if it is not whole, or not of this segment of this store."""
    if len(data) < _HEAD.size + HASH_BYTES:
        return None
    head = _HEAD.unpack(data[: _HEAD.size])
    generation, size_bytes, num_messages, num_groups, id_bytes = head[4:]
    if head[:4] != (_MAGIC, store_id, FORMAT, number):
        return None
    groups_at = _HEAD.size + num_messages * MESSAGE_ENTRY.itemsize
    ids_at = groups_at + num_groups * GROUP_ENTRY.itemsize
    hash_at = ids_at + id_bytes
    if hash_at + HASH_BYTES != len(data):
        return None
    if xxhash.xxh3_128_digest(data[:hash_at]) != data[hash_at:]:
        return None
    return SegmentIndex(
        generation=generation,
        size_bytes=size_bytes,
        messages=np.frombuffer(bytes(data[_HEAD.size : groups_at]), MESSAGE_ENTRY),
        groups=np.frombuffer(bytes(data[groups_at:ids_at]), GROUP_ENTRY),
        ids=bytes(data[ids_at:hash_at]),
    )
