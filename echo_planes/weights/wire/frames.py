"""Messages between nodes, as binary frames on a stream, and as JSON in files.

A frame is a head of 8 bytes, then the body. The head is "EP", the format's version, the kind and the body's
length (uint32, little-endian). The parser checks the length against the kind's limit before it keeps a byte
of the body. An error ends the stream, since the start of the next frame is then unknown.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from echo_planes.errors import WeightsError
from echo_planes.weights.wire.limits import TransferLimits
from echo_planes.weights.wire.manifest import (
    MAX_KEY_BYTES,
    MAX_MANIFEST_BYTES,
    SIGNATURE_BYTES,
    Buffer,
    ManifestFields,
    PublicationKey,
    SegmentHeader,
    SegmentPlace,
    SignedManifest,
    SignedSegment,
    check_header,
    header_bytes,
    key_bytes,
    manifest_bytes,
    parse_header,
    parse_key,
    parse_manifest,
)
from echo_planes.weights.wire.messages import Message, decode

_MAGIC = b"EP"
_VERSION = 2  # raise it with every change of the wire format, the padding included
_HEAD = struct.Struct("<2sBBI")
_CHUNK = struct.Struct("<II")  # segment index, chunk index
# A ping is longer than a packet, so that the receiver acknowledges it at once, and BBR measures the round
# trip with it. Otherwise BBR does so during the next publication, with four packets in flight for 0.2 s.
_PADDING = bytes(2048)
_SEGMENT_KIND, _CHUNK_KIND, _MANIFEST_KIND, _CANCEL_KIND, _PING_KIND = range(1, 6)


@dataclass(frozen=True, slots=True)
class SegmentFrame:
    """Header of a segment. It precedes the segment's chunks on every stream that carries one of them."""

    signed: SignedSegment


@dataclass(frozen=True, slots=True)
class ChunkFrame:
    """One chunk. `data` may be a view of the parser's input, or of a buffer that the parser uses no
    longer."""

    key: PublicationKey
    segment_index: int
    chunk_index: int
    data: Buffer


@dataclass(frozen=True, slots=True)
class ManifestFrame:
    """Commit of a publication, after all its segments."""

    signed: SignedManifest


@dataclass(frozen=True, slots=True)
class CancelFrame:
    """Notice that the stream's sender sends no more of this publication."""

    key: PublicationKey


@dataclass(frozen=True, slots=True)
class PingFrame:
    """Sign of life of a stream with nothing to send."""


Frame = SegmentFrame | ChunkFrame | ManifestFrame | CancelFrame | PingFrame


# --- writing -------------------------------------------------------------------------------------


def encode_frame(frame: Frame) -> bytes:
    """Return the frame's bytes.

    Raises:
        WeightsError: a header or manifest is not well formed.
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
    """Return the bytes before the `num_bytes` of data in a chunk's frame, which need no copy then."""
    body = key_bytes(key) + _CHUNK.pack(segment_index, chunk_index)
    return _HEAD.pack(_MAGIC, _VERSION, _CHUNK_KIND, len(body) + num_bytes) + body


def _framed(kind: int, body: bytes) -> bytes:
    return _HEAD.pack(_MAGIC, _VERSION, kind, len(body)) + body


# --- reading -------------------------------------------------------------------------------------


class FrameParser:
    """Parser of one stream of frames, fed with pieces of any size.

    Args:
        limits: limits of every frame, and so of the parser's memory: it keeps at most one unfinished frame.
    """

    def __init__(self, limits: TransferLimits) -> None:
        self._most = {
            _SEGMENT_KIND: SIGNATURE_BYTES + limits.max_header_bytes,
            _CHUNK_KIND: MAX_KEY_BYTES + _CHUNK.size + limits.max_chunk_bytes,
            _MANIFEST_KIND: SIGNATURE_BYTES + MAX_MANIFEST_BYTES,
            _CANCEL_KIND: MAX_KEY_BYTES,
            _PING_KIND: len(_PADDING),
        }
        self._head = b""  # unfinished head, less than `_HEAD.size` bytes
        self._kind = 0
        self._body = bytearray()  # of the unfinished frame, as far as received
        self._left = 0  # bytes of the body still to come
        self._broken = False

    def feed(self, data: Buffer) -> list[Frame]:
        """Return the frames that these bytes complete, in order.

        Chunks may be views of `data`, so the caller must not change it.

        Raises:
            WeightsError: a frame of another format, too long or not well formed. The frames before it in
                `data` are lost, and every later call raises, too.
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
        """Return kind and length of the frame whose head is complete, checked."""
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

Hex = Annotated[str, Meta(pattern=r"\A(?:[0-9a-f]{2})*\Z")]  # one text per value: no spaces, no capitals
SignatureHex = Annotated[str, Meta(pattern=rf"\A[0-9a-f]{{{2 * SIGNATURE_BYTES}}}\Z")]


class _StoredSegment(SegmentPlace, frozen=True):
    chunk_hashes: Hex
    signature: SignatureHex


class _StoredManifest(Message, frozen=True):
    manifest: ManifestFields
    signature: SignatureHex


def segments_to_json(segments: Iterable[SignedSegment]) -> bytes:
    """Return the signed headers as a JSON list; hashes and signatures are hexadecimal."""
    return msgspec.json.encode(
        [
            {
                **msgspec.structs.asdict(signed.header),
                "chunk_hashes": signed.header.chunk_hashes.hex(),
                "signature": signed.signature.hex(),
            }
            for signed in segments
        ]
    )


def segments_from_json(data: bytes, name: str) -> tuple[SignedSegment, ...]:
    """Parse the JSON of `segments_to_json`, without verifying the signatures.

    Args:
        name: of the file, for the error.

    Raises:
        WeightsError: it is not a list of exactly the fields of well-formed segment headers.
    """
    return tuple(_signed(stored) for stored in decode(data, tuple[_StoredSegment, ...], name))


def _signed(stored: _StoredSegment) -> SignedSegment:
    fields = msgspec.structs.asdict(stored)
    signature = bytes.fromhex(fields.pop("signature"))
    header = SegmentHeader(**{**fields, "chunk_hashes": bytes.fromhex(stored.chunk_hashes)})
    check_header(header)
    return SignedSegment(header, signature)


def manifest_to_json(signed: SignedManifest) -> bytes:
    """Return the signed manifest as a JSON object, {"manifest": its fields, "signature": hexadecimal}."""
    return msgspec.json.encode({"manifest": signed.manifest, "signature": signed.signature.hex()})


def manifest_from_json(data: bytes, name: str) -> SignedManifest:
    """Parse the JSON of `manifest_to_json`, without verifying the signature.

    Args:
        name: of the file, for the error.

    Raises:
        WeightsError: it is not exactly the fields of a well-formed manifest.
    """
    stored = decode(data, _StoredManifest, name)
    return SignedManifest(stored.manifest.manifest(), bytes.fromhex(stored.signature))
