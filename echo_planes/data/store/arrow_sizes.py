"""Sizes that the messages of an Arrow stream declare, read without unpacking anything.

pyarrow allocates memory for a compressed buffer by the size that the file declares before it. A hostile file
can declare any size, so callers check it first. The header of a message is a flatbuffer; this module reads
only the fields that lead to the buffers of a record batch (Message.fbs and Schema.fbs of Apache Arrow).
"""

from __future__ import annotations

import struct
from typing import Any

from echo_planes.errors import DataError

_HEADER_TYPE, _HEADER = 1, 2  # fields of Message, by their numbers
_DICTIONARY, _RECORDS = 2, 3  # header types
_DATA = 1  # field of DictionaryBatch: its record batch
_BUFFERS, _COMPRESSION = 2, 3  # fields of RecordBatch
_BUFFER_BYTES = 16  # offset and length, int64 each
_PREFIX_BYTES = 8  # size before a compressed buffer; -1: the buffer is not compressed


def unpacked_bytes(message: Any) -> int:
    """Return the bytes that the buffers of a message take in memory.

    Args:
        message: a `pyarrow.ipc.Message`.

    Raises:
        DataError: the message's header is damaged.
    """
    body = message.body
    try:
        return _sizes(memoryview(message.metadata), memoryview(body) if body is not None else memoryview(b""))
    except (struct.error, IndexError, ValueError) as error:
        raise DataError(f"an Arrow message has a damaged header ({error}); write the file anew") from error


def _sizes(head: memoryview, body: memoryview) -> int:
    table = _at(head, 0)
    kind, place = _field(head, table, _HEADER_TYPE), _field(head, table, _HEADER)
    if not kind or not place or head[kind] not in (_DICTIONARY, _RECORDS):
        return 0
    table = _at(head, place)
    if head[kind] == _DICTIONARY:
        place = _field(head, table, _DATA)
        if not place:
            return 0
        table = _at(head, place)
    place = _field(head, table, _BUFFERS)
    if not place or not _field(head, table, _COMPRESSION):
        return len(body)
    first = _at(head, place)
    total = 0
    for i in range(struct.unpack_from("<I", head, first)[0]):
        offset, length = struct.unpack_from("<qq", head, first + 4 + i * _BUFFER_BYTES)
        if length >= _PREFIX_BYTES:
            declared = struct.unpack_from("<q", body, offset)[0]
            total += length if declared == -1 else abs(declared)
    return total


def _at(head: memoryview, place: int) -> int:
    """Return the position that the offset at `place` points to."""
    return place + int(struct.unpack_from("<I", head, place)[0])


def _field(head: memoryview, table: int, number: int) -> int:
    """Return the position of field `number` of a table; 0: the table lacks it."""
    entries = table - int(struct.unpack_from("<i", head, table)[0])
    if 4 + 2 * number >= struct.unpack_from("<H", head, entries)[0]:
        return 0
    offset = int(struct.unpack_from("<H", head, entries + 4 + 2 * number)[0])
    return table + offset if offset else 0
