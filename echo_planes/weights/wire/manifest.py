"""Messages that travel beside a publication's bytes: signed segment headers first, the signed manifest last.

A publication's payload is a sequence of segments, each the encoding of at most `SEGMENT_BYTES` of dense
weights, cut into chunks of `chunk_bytes`. A segment's header carries the hash of every chunk and is signed
by itself, so that its bytes may travel, and be forwarded, before the rest is even encoded. The manifest
comes last; without it nothing is installed.

Here are the messages and their canonical bytes: for each value exactly one byte string, which is what is
signed and what travels. Parsing takes nothing but that byte string, and nothing out of range.
"""

from __future__ import annotations

import dataclasses
import json
import re
import struct
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from echo_planes.errors import WeightsError
from echo_planes.types import Codec, Manifest

SEGMENT_BYTES = 32 * 1024**2  # dense bytes scanned per segment, at most
HASH_BYTES = 32  # BLAKE3
SIGNATURE_BYTES = 64  # Ed25519
MAX_LINEAGE = 64  # characters
MAX_DIGEST = 160  # characters
MAX_KEY_BYTES = 18 + MAX_LINEAGE  # a key's canonical bytes are no longer
MAX_MANIFEST_BYTES = 4096  # a manifest's neither

_CODES: dict[Codec, int] = {"compact": 1, "fast": 2, "overwrite": 3, "full": 4}
_CODECS = {code: codec for codec, code in _CODES.items()}
_KEY = struct.Struct("<qqBB")  # version, base version, codec, length of lineage
_PLACE = struct.Struct("<IQQI")  # index, offset, size, chunk size
_MAX_INDEX = 2**32 - 1
_MAX_SIZE = 2**63 - 1
# Lineages become parts of file names and URLs; digests are compared, and shown.
_LINEAGE = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,63}", re.ASCII)
_DIGEST = re.compile(r"[0-9A-Za-z:._-]{0,160}", re.ASCII)

Buffer = bytes | bytearray | memoryview  # of single bytes


@dataclass(frozen=True, slots=True, order=True)
class PublicationKey:
    """Key of one encoding of one version, by which peers ask one another for it."""

    lineage: str
    version: int
    codec: Codec
    base_version: int  # -1 for full


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """One segment: where it lies in the payload and what each of its chunks must hash to."""

    key: PublicationKey
    base_digest: str  # "" for full
    index: int
    offset_bytes: int  # of its first byte in the payload
    size_bytes: int
    chunk_bytes: int  # all its chunks but the last are so long; chunks never span segments
    chunk_hashes: bytes  # BLAKE3, HASH_BYTES each, in order

    @property
    def num_chunks(self) -> int:
        return -(-self.size_bytes // self.chunk_bytes)


@dataclass(frozen=True, slots=True)
class SignedSegment:
    header: SegmentHeader
    signature: bytes  # Ed25519 over the header's canonical bytes


@dataclass(frozen=True, slots=True)
class SignedManifest:
    manifest: Manifest
    signature: bytes  # Ed25519 over the manifest's canonical bytes


def key_of(manifest: Manifest) -> PublicationKey:
    """The key of the publication that a manifest commits."""
    return PublicationKey(manifest.lineage, manifest.version, manifest.codec, manifest.base_version)


# --- what is well formed -------------------------------------------------------------------------


def check_key(key: PublicationKey) -> None:
    """Whether such a publication can be at all.

    Raises:
        WeightsError: a lineage that is no name (1 to 64 letters, digits, ".", "_", "-", not beginning with a
            mark), an unknown codec, a negative version, a base that is not older, or a base for `full`.
    """
    if not isinstance(key.lineage, str) or not _LINEAGE.fullmatch(key.lineage):
        raise WeightsError(f"{_shown(key.lineage)} is no name of a lineage")
    if not isinstance(key.codec, str) or key.codec not in _CODES:
        raise WeightsError(f"unknown codec {_shown(key.codec)}; known are {', '.join(_CODES)}")
    _check_int("version", key.version, 0, _MAX_SIZE)
    if key.codec == "full":
        _check_int("base version of a full publication", key.base_version, -1, -1)
    else:
        _check_int(f"base version of a patch to version {key.version}", key.base_version, 0, key.version - 1)


def check_header(header: SegmentHeader) -> None:
    """Whether a segment header is well formed in itself.

    Raises:
        WeightsError: a field of the wrong type or out of range, or other than one hash per chunk.
    """
    check_key(header.key)
    _check_base_digest(header.key, header.base_digest)
    _check_int("segment index", header.index, 0, _MAX_INDEX)
    _check_int("segment size", header.size_bytes, 0, _MAX_SIZE)
    _check_int("segment offset", header.offset_bytes, 0, _MAX_SIZE - header.size_bytes)
    _check_int("chunk size", header.chunk_bytes, 1, _MAX_INDEX)
    hashes = header.chunk_hashes
    if not isinstance(hashes, bytes) or len(hashes) != header.num_chunks * HASH_BYTES:
        raise WeightsError(f"segment {header.index} must have {header.num_chunks} chunk hashes")


def check_manifest(manifest: Manifest) -> None:
    """Whether a manifest is well formed in itself.

    Raises:
        WeightsError: a field of the wrong type or out of range.
    """
    check_key(key_of(manifest))
    _check_base_digest(key_of(manifest), manifest.base_digest)
    for name in ("digest", "payload_digest"):
        _check_digest(name, getattr(manifest, name))
    for name in ("num_updates", "payload_bytes", "dense_bytes", "total_elements"):
        _check_int(name, getattr(manifest, name), 0, _MAX_SIZE)
    _check_int("changed_elements", manifest.changed_elements, 0, manifest.total_elements)
    _check_int("num_segments", manifest.num_segments, 0, _MAX_INDEX)


def _check_base_digest(key: PublicationKey, digest: object) -> None:
    _check_digest("base digest", digest)
    if (key.codec == "full") != (digest == ""):
        raise WeightsError("a patch names the digest of its base, a full publication has none")


def _check_digest(name: str, digest: object) -> None:
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise WeightsError(f"{name} {_shown(digest)} is no digest")


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise WeightsError(f"{name} {_shown(value)} is not a whole number from {low} to {high}")


def _shown(value: object) -> str:
    if isinstance(value, str):
        return repr(value[:80])
    if isinstance(value, int) and value.bit_length() <= 64:
        return repr(value)
    return f"of type {type(value).__name__}"


# --- keys ----------------------------------------------------------------------------------------

_KEY_FIELDS = tuple(field.name for field in dataclasses.fields(PublicationKey))


def key_bytes(key: PublicationKey) -> bytes:
    """Canonical bytes, at most `MAX_KEY_BYTES`. The key must be well formed."""
    lineage = key.lineage.encode()
    return _KEY.pack(key.version, key.base_version, _CODES[key.codec], len(lineage)) + lineage


def parse_key(data: Buffer) -> tuple[PublicationKey, int]:
    """The key that `data` begins with, and how many bytes it took.

    Raises:
        WeightsError: too short, or not well formed.
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
    """The key as one part of a path or URL: "lineage.version.codec.base"."""
    return f"{key.lineage}.{key.version}.{key.codec}.{key.base_version}"


def parse_key_text(text: str) -> PublicationKey:
    """The inverse of `key_text`.

    Raises:
        WeightsError: anything that `key_text` does not write.
    """
    parts = text[: 3 * MAX_LINEAGE].rsplit(".", 3)
    try:
        lineage, version, codec, base_version = parts
        key = PublicationKey(lineage, int(version), typing.cast(Codec, codec), int(base_version))
    except ValueError as error:
        raise WeightsError(f"{_shown(text)} is no name of a publication") from error
    check_key(key)
    if key_text(key) != text:
        raise WeightsError(f"{_shown(text)} is no name of a publication")
    return key


def key_to_dict(key: PublicationKey) -> dict[str, Any]:
    """The key as a JSON object: its fields."""
    return dataclasses.asdict(key)


def key_from_dict(fields: object) -> PublicationKey:
    """The inverse of `key_to_dict`.

    Raises:
        WeightsError: not exactly the fields of a well-formed key.
    """
    if not isinstance(fields, Mapping) or set(fields) != set(_KEY_FIELDS):
        raise WeightsError(f"a publication's key has the fields {', '.join(_KEY_FIELDS)}, and no others")
    key = PublicationKey(**fields)
    check_key(key)
    return key


def _text(data: Buffer, start: int, end: int) -> str:
    part = bytes(data[start:end])
    if len(part) != end - start or not part.isascii():
        raise WeightsError("a text field is cut short or not ASCII")
    return part.decode("ascii")


# --- segment headers -----------------------------------------------------------------------------


def header_bytes(header: SegmentHeader) -> bytes:
    """Canonical bytes of a segment header.

    Raises:
        WeightsError: it is not well formed.
    """
    check_header(header)
    digest = header.base_digest.encode()
    place = _PLACE.pack(header.index, header.offset_bytes, header.size_bytes, header.chunk_bytes)
    return b"".join((key_bytes(header.key), bytes((len(digest),)), digest, place, header.chunk_hashes))


def parse_header(data: Buffer) -> SegmentHeader:
    """The segment header whose canonical bytes `data` is.

    Raises:
        WeightsError: it is not that of any well-formed header.
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

_MANIFEST_FIELDS = tuple(field.name for field in dataclasses.fields(Manifest))


def manifest_to_dict(manifest: Manifest) -> dict[str, Any]:
    """The manifest as a JSON object: its fields."""
    return dataclasses.asdict(manifest)


def manifest_from_dict(fields: object) -> Manifest:
    """The inverse of `manifest_to_dict`.

    Raises:
        WeightsError: not exactly the fields of a well-formed manifest.
    """
    if not isinstance(fields, Mapping) or set(fields) != set(_MANIFEST_FIELDS):
        raise WeightsError(f"a manifest has the fields {', '.join(_MANIFEST_FIELDS)}, and no others")
    manifest = Manifest(**fields)
    check_manifest(manifest)
    return manifest


def manifest_bytes(manifest: Manifest) -> bytes:
    """Canonical bytes of a manifest, at most `MAX_MANIFEST_BYTES`: JSON in ASCII, keys sorted, no spaces.

    Raises:
        WeightsError: it is not well formed.
    """
    check_manifest(manifest)
    return json.dumps(manifest_to_dict(manifest), sort_keys=True, separators=(",", ":")).encode("ascii")


def parse_manifest(data: Buffer) -> Manifest:
    """The manifest whose canonical bytes `data` is.

    Raises:
        WeightsError: it is not that of any well-formed manifest.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise WeightsError(f"a manifest of {len(data)} bytes is too long: at most {MAX_MANIFEST_BYTES}")
    text = bytes(data)
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"a manifest is not JSON: {error}") from error
    manifest = manifest_from_dict(fields)
    if manifest_bytes(manifest) != text:
        raise WeightsError("a manifest is not in its canonical form")
    return manifest
