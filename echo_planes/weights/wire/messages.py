"""Decoding of JSON from nodes and stores into typed messages; a refusal has a reason of one line."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

from echo_planes.errors import WeightsError

MAX_SHOWN = 300  # characters of a reason: it may quote the sender
T = TypeVar("T")

_lock = threading.Lock()
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of messages. Decoding refuses a field of another name, type or range than declared."""


def decode(data: bytes | bytearray | memoryview | str, kind: type[T], what: str) -> T:
    """Return the message of type `kind` whose JSON `data` is. The caller limits the length.

    Args:
        what: names the message in the error.

    Raises:
        WeightsError: it is not JSON, has a field too many or too few, or a value of a wrong type or range.
    """
    try:
        return _decoder(kind).decode(data)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{what} is not well formed: {_reason(error)}") from error


def check(message: object, kind: type[Message], what: str) -> None:
    """Check that the fields of an object have the types and ranges that `kind` declares, without their parts.

    Raises:
        WeightsError: a field has another type or range.
    """
    _decoder(kind)
    fields = msgspec.structs.asdict(message) if isinstance(message, msgspec.Struct) else message
    try:
        msgspec.convert(fields, type=kind, from_attributes=True)
    except ValueError as error:
        raise WeightsError(f"{what} is not well formed: {_reason(error)}") from error


def _decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """Return the decoder of a type, made once, by one thread at a time.

    msgspec enters what it learns about a class into the class before it is complete: a second thread that
    decodes the same type meanwhile follows a null pointer, and the process dies (seen with 0.22.0).
    """
    with _lock:
        if kind not in _decoders:
            _decoders[kind] = msgspec.json.Decoder(kind)
        return _decoders[kind]


def _reason(error: Exception) -> str:
    """Return the decoder's message as one printable line."""
    return "".join(c if c.isprintable() else "?" for c in str(error)[:MAX_SHOWN])
