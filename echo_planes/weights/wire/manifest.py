"""Messages that go with a publication's bytes: signed segment headers first, the signed manifest last.

A publication's payload is a sequence of segments, each the encoding of at most `SEGMENT_BYTES` of dense
weights, cut into chunks of `chunk_bytes`. A segment's header carries the hash of every chunk and is signed
by itself, so that nodes may forward the segment before the rest is encoded. The manifest comes last; a
worker installs nothing without it.

This module defines the messages and their canonical bytes: exactly one byte string for each value. The
learner signs these bytes, and nodes send them. Parsing refuses any other byte string, and values out of
range.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from echo_planes.errors import WeightsError
from echo_planes.types import Codec, Manifest
from echo_planes.weights.wire.messages import Message, check, decode

SEGMENT_BYTES = 32 * 1024**2  # dense bytes per segment, at most
HASH_BYTES = 32  # BLAKE3
SIGNATURE_BYTES = 64  # Ed25519
MAX_LINEAGE = 64  # characters
MAX_DIGEST = 160  # characters
MAX_KEY_BYTES = 18 + MAX_LINEAGE  # canonical bytes of a key, at most
MAX_MANIFEST_BYTES = 4096  # canonical bytes of a manifest, at most

_OWN_CODEC = 5  # the run's own codec; its name is in manifests and in keys as text
_CODES: dict[Codec, int] = {"compact": 1, "fast": 2, "overwrite": 3, "full": 4}
_CODECS = {code: codec for codec, code in _CODES.items()}
_KEY = struct.Struct("<qqBB")  # version, base version, codec, length of lineage
_PLACE = struct.Struct("<IQQI")  # index, offset, size, chunk size
_MAX_INDEX = 2**32 - 1
_MAX_SIZE = 2**63 - 1

Buffer = bytes | bytearray | memoryview  # with items of one byte
# Lineages become parts of file names and URLs; digests are compared and printed.
Lineage = Annotated[str, Meta(pattern=rf"\A[0-9A-Za-z][0-9A-Za-z._-]{{0,{MAX_LINEAGE - 1}}}\Z")]
Digest = Annotated[str, Meta(pattern=rf"\A[0-9A-Za-z:._-]{{0,{MAX_DIGEST}}}\Z")]
Size = Annotated[int, Meta(ge=0, le=_MAX_SIZE)]
Index = Annotated[int, Meta(ge=0, le=_MAX_INDEX)]
BaseVersion = Annotated[int, Meta(ge=-1, le=_MAX_SIZE)]  # -1 for full


class PublicationKey(Message, frozen=True, order=True):
    """Key of one encoding of one version, by which peers request it."""

    lineage: Lineage
    version: Size
    codec: Codec
    base_version: BaseVersion

    def __post_init__(self) -> None:
        """Refuse a key of a codec that this process does not know."""
        check_codec(self.codec)


class SegmentPlace(Message, frozen=True):
    """Place of a segment in the payload."""

    key: PublicationKey
    base_digest: Digest  # "" for full
    index: Index
    offset_bytes: Size  # of its first byte in the payload
    size_bytes: Size
    chunk_bytes: Annotated[int, Meta(ge=1, le=_MAX_INDEX)]  # of each chunk; the segment's last may be shorter


class SegmentHeader(SegmentPlace, frozen=True):
    """Place of a segment, with the hash of each of its chunks."""

    chunk_hashes: bytes  # BLAKE3, HASH_BYTES each, in order

    @property
    def num_chunks(self) -> int:
        return -(-self.size_bytes // self.chunk_bytes)


class ManifestFields(Message, frozen=True):
    """Fields of a `Manifest`, with the range of each."""

    lineage: Lineage
    version: Size
    num_updates: Size
    codec: Codec
    base_version: BaseVersion
    base_digest: Digest
    digest: Digest
    payload_digest: Digest
    payload_bytes: Size
    dense_bytes: Size
    changed_elements: Size
    total_elements: Size
    num_segments: Index

    def manifest(self) -> Manifest:
        """Return the manifest with these fields.

        Raises:
            WeightsError: the fields contradict one another.
        """
        manifest = Manifest(**msgspec.structs.asdict(self))
        check_manifest(manifest)
        return manifest


@dataclass(frozen=True, slots=True)
class SignedSegment:
    header: SegmentHeader
    signature: bytes  # Ed25519 over the header's canonical bytes


@dataclass(frozen=True, slots=True)
class SignedManifest:
    manifest: Manifest
    signature: bytes  # Ed25519 over the manifest's canonical bytes


def admit_codec(name: str) -> None:
    """Accept keys of the run's own codec in this process; `codec.table.take_codec` calls it."""
    _CODES[name], _CODECS[_OWN_CODEC] = _OWN_CODEC, name


def key_of(manifest: Manifest) -> PublicationKey:
    """Return the key of the publication that a manifest commits."""
    return PublicationKey(manifest.lineage, manifest.version, manifest.codec, manifest.base_version)


# --- checks --------------------------------------------------------------------------------------


def check_key(key: PublicationKey) -> None:
    """Check that a key is well formed.

    Raises:
        WeightsError: the lineage is not 1 to 64 letters, digits, ".", "_", "-" with a letter or digit first,
            the codec is unknown, the version is negative, the base is not older, or `full` has a base.
    """
    check(key, PublicationKey, "a publication's key")
    if key.codec == "full" and key.base_version != -1:
        raise WeightsError(f"a full publication has no base, but names version {key.base_version}")
    if key.codec != "full" and not 0 <= key.base_version < key.version:
        raise WeightsError(f"version {key.version} cannot be a patch of version {key.base_version}")


def check_codec(codec: object) -> None:
    """Check that this process knows a codec of that name.

    Raises:
        WeightsError: it is neither a bundled one nor the run's own.
    """
    if not isinstance(codec, str) or codec not in _CODES:
        raise WeightsError(f"unknown codec {_shown(codec)}; known are {', '.join(_CODES)}")


def check_header(header: SegmentHeader) -> None:
    """Check that a segment header is well formed in itself.

    Raises:
        WeightsError: a field is of a wrong type or out of range, or there is not one hash per chunk.
    """
    check_key(header.key)
    check(header, SegmentHeader, "a segment's header")
    _check_base_digest(header.key, header.base_digest)
    if header.size_bytes > _MAX_SIZE - header.offset_bytes:
        raise WeightsError(f"segment {header.index} ends beyond {_MAX_SIZE} bytes")
    hashes = header.chunk_hashes
    if not isinstance(hashes, bytes) or len(hashes) != header.num_chunks * HASH_BYTES:
        raise WeightsError(f"segment {header.index} must have {header.num_chunks} chunk hashes")


def check_manifest(manifest: Manifest) -> None:
    """Check that a manifest is well formed in itself.

    Raises:
        WeightsError: a field is of a wrong type or out of range, or fields contradict one another.
    """
    check_key(key_of(manifest))
    check(manifest, ManifestFields, "a manifest")
    _check_base_digest(key_of(manifest), manifest.base_digest)
    if manifest.changed_elements > manifest.total_elements:
        raise WeightsError(
            f"version {manifest.version} changes {manifest.changed_elements} of "
            f"{manifest.total_elements} elements"
        )


def _check_base_digest(key: PublicationKey, digest: str) -> None:
    if (key.codec == "full") != (digest == ""):
        raise WeightsError("a patch names the digest of its base, a full publication has none")


def _shown(value: object) -> str:
    if isinstance(value, str):
        return repr(value[:80])
    if isinstance(value, int) and value.bit_length() <= 64:
        return repr(value)
    return f"of type {type(value).__name__}"


# --- keys ----------------------------------------------------------------------------------------


def key_bytes(key: PublicationKey) -> bytes:
    """Return a key's canonical bytes, at most `MAX_KEY_BYTES`. The key must be well formed."""
    lineage = key.lineage.encode()
    return _KEY.pack(key.version, key.base_version, _CODES[key.codec], len(lineage)) + lineage


def parse_key(data: Buffer) -> tuple[PublicationKey, int]:
    """Return the key that `data` begins with, and its length in bytes.

    Raises:
        WeightsError: the key is cut short, or not well formed.
    """
    try:
        version, base_version, code, length = _KEY.unpack_from(data)
    except struct.error as error:
        raise WeightsError("a publication's key is cut short") from error
    end = _KEY.size + length
    codec = _CODECS.get(code)
    if codec is None:
        raise WeightsError(f"unknown codec number {code}")
    key = PublicationKey(_text(data, _KEY.size, end), version, codec, base_version)
    check_key(key)
    return key, end


def key_text(key: PublicationKey) -> str:
    """Return the key as one part of a path or URL: "lineage.version.codec.base"."""
    return f"{key.lineage}.{key.version}.{key.codec}.{key.base_version}"


def parse_key_text(text: str) -> PublicationKey:
    """Parse a key as `key_text` writes it.

    Raises:
        WeightsError: `key_text` does not write such a text.
    """
    parts = text[: 3 * MAX_LINEAGE].rsplit(".", 3)
    try:
        lineage, version, codec, base_version = parts
        key = PublicationKey(lineage, int(version), codec, int(base_version))
    except ValueError as error:
        raise WeightsError(f"{_shown(text)} is no name of a publication") from error
    check_key(key)
    if key_text(key) != text:
        raise WeightsError(f"{_shown(text)} is no name of a publication")
    return key


def _text(data: Buffer, start: int, end: int) -> str:
    part = bytes(data[start:end])
    if len(part) != end - start or not part.isascii():
        raise WeightsError("a text field is cut short or not ASCII")
    return part.decode("ascii")


# --- segment headers -----------------------------------------------------------------------------


def header_bytes(header: SegmentHeader) -> bytes:
    """Return the canonical bytes of a segment header.

    Raises:
        WeightsError: the header is not well formed.
    """
    check_header(header)
    digest = header.base_digest.encode()
    place = _PLACE.pack(header.index, header.offset_bytes, header.size_bytes, header.chunk_bytes)
    return b"".join((key_bytes(header.key), bytes((len(digest),)), digest, place, header.chunk_hashes))


def parse_header(data: Buffer) -> SegmentHeader:
    """Return the segment header whose canonical bytes `data` is.

    Raises:
        WeightsError: no well-formed header has these bytes.
    """
    key, start = parse_key(data)
    if start >= len(data):
        raise WeightsError("a segment header is cut short")
    end = start + 1 + data[start]
    base_digest = _text(data, start + 1, end)
    try:
        index, offset_bytes, size_bytes, chunk_bytes = _PLACE.unpack_from(data, end)
    except struct.error as error:
        raise WeightsError("a segment header is cut short") from error
    hashes = bytes(data[end + _PLACE.size :])
    header = SegmentHeader(key, base_digest, index, offset_bytes, size_bytes, chunk_bytes, hashes)
    check_header(header)
    return header


# --- manifests -----------------------------------------------------------------------------------


def manifest_bytes(manifest: Manifest) -> bytes:
    """Return a manifest's canonical bytes, at most `MAX_MANIFEST_BYTES`: ASCII JSON, keys sorted, no spaces.

    Raises:
        WeightsError: the manifest is not well formed.
    """
    check_manifest(manifest)
    return msgspec.json.encode(manifest, order="sorted")


def parse_manifest(data: Buffer) -> Manifest:
    """Return the manifest whose canonical bytes `data` is.

    Raises:
        WeightsError: no well-formed manifest has these bytes.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise WeightsError(f"a manifest of {len(data)} bytes is too long: at most {MAX_MANIFEST_BYTES}")
    manifest = decode(data, ManifestFields, "a manifest").manifest()
    if manifest_bytes(manifest) != data:
        raise WeightsError("a manifest is not in its canonical form")
    return manifest
