"""Messages between nodes, as binary frames on a stream, and as JSON in files.

A frame is 8 bytes, "EP", the format's version, the kind and the body's length (uint32, little-endian), then
the body. The length is checked against what the kind may need before a byte of the body is kept. A stream on
which anything is wrong is at its end: after damage it is unknown where the next frame begins.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from echo_planes.errors import WeightsError
from echo_planes.weights.wire.limits import TransferLimits
from echo_planes.weights.wire.manifest import (
    MAX_KEY_BYTES,
    MAX_MANIFEST_BYTES,
    SIGNATURE_BYTES,
    Buffer,
    PublicationKey,
    SegmentHeader,
    SignedManifest,
    SignedSegment,
    check_header,
    header_bytes,
    key_bytes,
    key_from_dict,
    key_to_dict,
    manifest_bytes,
    manifest_from_dict,
    manifest_to_dict,
    parse_header,
    parse_key,
    parse_manifest,
)

_MAGIC = b"EP"
_VERSION = 2  # to be raised with every change of what goes over the wire, the padding included
_HEAD = struct.Struct("<2sBBI")
_CHUNK = struct.Struct("<II")  # segment index, chunk index
# A ping is longer than a packet: it is acknowledged at once then, and BBR takes the round trip from it. BBR
# else does so amid the next publication, with no more than four packets on their way for a fifth of a second.
_PADDING = bytes(2048)
_SEGMENT_KIND, _CHUNK_KIND, _MANIFEST_KIND, _CANCEL_KIND, _PING_KIND = range(1, 6)


@dataclass(frozen=True, slots=True)
class SegmentFrame:
    """A segment's header: goes ahead of its chunks, on every stream that carries one of them."""

    signed: SignedSegment


@dataclass(frozen=True, slots=True)
class ChunkFrame:
    """One chunk. `data` may be a view of memory that the parser gave away: nobody else writes to it."""

    key: PublicationKey
    segment_index: int
    chunk_index: int
    data: Buffer


@dataclass(frozen=True, slots=True)
class ManifestFrame:
    """The commit: after all segments."""

    signed: SignedManifest


@dataclass(frozen=True, slots=True)
class CancelFrame:
    """The sender of the stream has nothing more of this publication to give."""

    key: PublicationKey


@dataclass(frozen=True, slots=True)
class PingFrame:
    """The stream lives."""


Frame = SegmentFrame | ChunkFrame | ManifestFrame | CancelFrame | PingFrame


# --- writing -------------------------------------------------------------------------------------


def encode_frame(frame: Frame) -> bytes:
    """The frame's bytes.

    Raises:
        WeightsError: a header or manifest that is not well formed.
    """
    match frame:
        case SegmentFrame(signed):
            return _framed(_SEGMENT_KIND, signed.signature + header_bytes(signed.header))
        case ChunkFrame(key, segment_index, chunk_index, data):
            return chunk_head(key, segment_index, chunk_index, len(data)) + bytes(data)
        case ManifestFrame(signed):
            return _framed(_MANIFEST_KIND, signed.signature + manifest_bytes(signed.manifest))
        case CancelFrame(key):
            return _framed(_CANCEL_KIND, key_bytes(key))
        case PingFrame():
            return _framed(_PING_KIND, _PADDING)


def chunk_head(key: PublicationKey, segment_index: int, chunk_index: int, num_bytes: int) -> bytes:
    """Bytes before the `num_bytes` of data in a chunk's frame, so that the data need not be copied."""
    body = key_bytes(key) + _CHUNK.pack(segment_index, chunk_index)
    return _HEAD.pack(_MAGIC, _VERSION, _CHUNK_KIND, len(body) + num_bytes) + body


def _framed(kind: int, body: bytes) -> bytes:
    return _HEAD.pack(_MAGIC, _VERSION, kind, len(body)) + body


# --- reading -------------------------------------------------------------------------------------


class FrameParser:
    """Takes a stream apart, in whatever pieces it comes. One parser for each stream.

    Args:
        limits: bounds every frame, and so what the parser keeps: at most one unfinished frame.
    """

    def __init__(self, limits: TransferLimits) -> None:
        self._most = {
            _SEGMENT_KIND: SIGNATURE_BYTES + limits.max_header_bytes,
            _CHUNK_KIND: MAX_KEY_BYTES + _CHUNK.size + limits.max_chunk_bytes,
            _MANIFEST_KIND: SIGNATURE_BYTES + MAX_MANIFEST_BYTES,
            _CANCEL_KIND: MAX_KEY_BYTES,
            _PING_KIND: len(_PADDING),
        }
        self._head = b""  # begun, not yet `_HEAD.size` bytes
        self._kind = 0
        self._body = bytearray()  # of the unfinished frame; grows as its bytes come
        self._left = 0  # bytes of it to come
        self._broken = False

    def feed(self, data: Buffer) -> list[Frame]:
        """The frames that these bytes complete, in order. Chunks may be views of `data`: do not change it.

        Raises:
            WeightsError: no frame of this format, or one that is too long or not well formed; the frames
                before it in `data` are lost with it. So is the stream: every later call raises too.
        """
        if self._broken:
            raise WeightsError("the stream was damaged before")
        try:
            return self._parse(memoryview(data))
        except WeightsError:
            self._broken = True
            self._body = bytearray()
            raise

    def _parse(self, data: memoryview) -> list[Frame]:
        frames: list[Frame] = []
        position = 0
        while position < len(data):
            if self._left:
                part = data[position : position + self._left]
                position += len(part)
                self._body += part
                self._left -= len(part)
                if self._left:
                    break
                body, self._body = self._body, bytearray()
                frames.append(_frame(self._kind, memoryview(body).toreadonly()))
                continue
            piece = data[position : position + _HEAD.size - len(self._head)]
            position += len(piece)
            self._head += piece
            if len(self._head) < _HEAD.size:
                break
            kind, length = self._opened()
            if position + length <= len(data):
                frames.append(_frame(kind, data[position : position + length]))
                position += length
            else:
                self._kind, self._left = kind, length
        return frames

    def _opened(self) -> tuple[int, int]:
        """Kind and length of the frame whose 8 bytes are complete, checked."""
        magic, version, kind, length = _HEAD.unpack(self._head)
        self._head = b""
        if magic != _MAGIC:
            raise WeightsError(f"{bytes(magic)!r} begins no frame")
        if version != _VERSION:
            raise WeightsError(
                f"frames of version {version}; this node speaks version {_VERSION}: "
                "run the same version of echo_planes on both"
            )
        if kind not in self._most:
            raise WeightsError(f"unknown kind of frame {kind}")
        if length > self._most[kind]:
            raise WeightsError(f"a frame of kind {kind} with {length} bytes; at most {self._most[kind]}")
        return kind, length


def _frame(kind: int, body: memoryview) -> Frame:
    if kind == _CHUNK_KIND:
        key, start = parse_key(body)
        end = start + _CHUNK.size
        if len(body) < end:
            raise WeightsError("a chunk's frame is cut short")
        segment_index, chunk_index = _CHUNK.unpack_from(body, start)
        return ChunkFrame(key, segment_index, chunk_index, body[end:])
    if kind == _SEGMENT_KIND:
        return SegmentFrame(SignedSegment(parse_header(body[SIGNATURE_BYTES:]), _signature(body)))
    if kind == _MANIFEST_KIND:
        return ManifestFrame(SignedManifest(parse_manifest(body[SIGNATURE_BYTES:]), _signature(body)))
    if kind == _CANCEL_KIND:
        key, end = parse_key(body)
        if end != len(body):
            raise WeightsError("bytes after the key of a cancelled publication")
        return CancelFrame(key)
    if body != _PADDING:
        raise WeightsError("a ping is padded with zeros, no more and no less")
    return PingFrame()


def _signature(body: memoryview) -> bytes:
    if len(body) < SIGNATURE_BYTES:
        raise WeightsError("a signature is cut short")
    return bytes(body[:SIGNATURE_BYTES])


# --- files ---------------------------------------------------------------------------------------

_SEGMENT_FIELDS = {
    "key",
    "base_digest",
    "index",
    "offset_bytes",
    "size_bytes",
    "chunk_bytes",
    "chunk_hashes",
    "signature",
}


def segment_to_json(signed: SignedSegment) -> dict[str, Any]:
    """The signed header as a JSON object; hashes and signature in hexadecimal."""
    header = signed.header
    return {
        "key": key_to_dict(header.key),
        "base_digest": header.base_digest,
        "index": header.index,
        "offset_bytes": header.offset_bytes,
        "size_bytes": header.size_bytes,
        "chunk_bytes": header.chunk_bytes,
        "chunk_hashes": header.chunk_hashes.hex(),
        "signature": signed.signature.hex(),
    }


def segment_from_json(fields: object) -> SignedSegment:
    """The inverse of `segment_to_json`. The signature is not verified here.

    Raises:
        WeightsError: not exactly the fields of a well-formed segment header.
    """
    if not isinstance(fields, Mapping) or set(fields) != _SEGMENT_FIELDS:
        raise WeightsError(f"a signed segment has the fields {', '.join(sorted(_SEGMENT_FIELDS))}")
    header = SegmentHeader(
        key=key_from_dict(fields["key"]),
        base_digest=fields["base_digest"],
        index=fields["index"],
        offset_bytes=fields["offset_bytes"],
        size_bytes=fields["size_bytes"],
        chunk_bytes=fields["chunk_bytes"],
        chunk_hashes=_from_hex(fields["chunk_hashes"]),
    )
    check_header(header)
    return SignedSegment(header, _signature_from_hex(fields["signature"]))


def manifest_to_json(signed: SignedManifest) -> dict[str, Any]:
    """The signed manifest as a JSON object, {"manifest": its fields, "signature": hexadecimal}."""
    return {"manifest": manifest_to_dict(signed.manifest), "signature": signed.signature.hex()}


def manifest_from_json(fields: object) -> SignedManifest:
    """The inverse of `manifest_to_json`. The signature is not verified here.

    Raises:
        WeightsError: not exactly the fields of a well-formed manifest.
    """
    if not isinstance(fields, Mapping) or set(fields) != {"manifest", "signature"}:
        raise WeightsError("a signed manifest has the fields manifest and signature")
    return SignedManifest(manifest_from_dict(fields["manifest"]), _signature_from_hex(fields["signature"]))


def _signature_from_hex(text: object) -> bytes:
    signature = _from_hex(text)
    if len(signature) != SIGNATURE_BYTES:
        raise WeightsError(f"a signature has {SIGNATURE_BYTES} bytes, this one {len(signature)}")
    return signature


def _from_hex(text: object) -> bytes:
    try:
        data = bytes.fromhex(text) if isinstance(text, str) else None
    except ValueError:
        data = None
    if data is None or data.hex() != text:  # one text for each value: no spaces, no capitals
        raise WeightsError("hashes and signatures are lower-case hexadecimal")
    return data
