"""Frames between the pool and its wardens: four bytes of length, then JSON. Both ends are trusted code."""

from __future__ import annotations

import json
import os
import struct
from typing import Any

from echo_planes.sandbox.model import Limits

LENGTH = struct.Struct("<I")
JSON_BYTES_PER_BYTE = 6  # a control character becomes \u0000
HEADER_BYTES = 1 << 16  # room for all parts of a frame but the texts


def encode(message: dict[str, Any]) -> bytes:
    """Return one frame. It is ASCII only, so that surrogates in a model's text survive."""
    body = json.dumps(message).encode()
    return LENGTH.pack(len(body)) + body


def max_reply_bytes(limits: Limits) -> int:
    """Return the length of the longest reply of a warden: both outputs, each byte escaped."""
    return 2 * JSON_BYTES_PER_BYTE * limits.output_bytes + HEADER_BYTES


def read_frame(descriptor: int) -> dict[str, Any] | None:
    """Return the next frame of a blocking pipe; None at its end."""
    header = _read(descriptor, LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(header)
    body = _read(descriptor, size)
    if len(body) < size:
        return None
    message: dict[str, Any] = json.loads(body)
    return message


def _read(descriptor: int, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = os.read(descriptor, min(size - len(parts), 1 << 20))
        if not part:
            break
        parts += part
    return bytes(parts)


def write_all(descriptor: int, data: bytes) -> None:
    """Write everything to a blocking descriptor."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
