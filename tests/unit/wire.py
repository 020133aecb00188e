"""Publications for tests: any bytes, cut into segments and chunks and signed."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3

from echo_planes.types import Manifest
from echo_planes.weights.wire.limits import relay_limits
from echo_planes.weights.wire.manifest import (
    PublicationKey,
    SegmentHeader,
    SignedManifest,
    SignedSegment,
)
from echo_planes.weights.wire.signing import Signer

SIGNER = Signer.from_private_bytes(bytes(range(32)))
FULL = PublicationKey("L0", 7, "full", -1)
PATCH = PublicationKey("L0", 8, "compact", 7)
DIGEST = "xxh3:" + "0" * 32
LIMITS = relay_limits(2**26, min_chunk_bytes=16)
FRAME_VERSION = 2  # written down apart from frames.py: tests fail where only one of them changes


@dataclass(frozen=True)
class Signed:
    """A signed publication and its bytes."""

    segments: list[SignedSegment]
    manifest: SignedManifest
    payload: bytes

    def chunk(self, segment_index: int, chunk_index: int) -> bytes:
        header = self.segments[segment_index].header
        start = header.offset_bytes + chunk_index * header.chunk_bytes
        stop = min(start + header.chunk_bytes, header.offset_bytes + header.size_bytes)
        return self.payload[start:stop]

    @property
    def chunks(self) -> list[tuple[int, int]]:
        return [
            (segment.header.index, chunk)
            for segment in self.segments
            for chunk in range(segment.header.num_chunks)
        ]


def frame_head(kind: int, length_bytes: int) -> bytes:
    """The first 8 bytes of a frame, whether or not such a frame may be."""
    return struct.pack("<2sBBI", b"EP", FRAME_VERSION, kind, length_bytes)


def header_of(
    payload: bytes,
    *,
    key: PublicationKey = FULL,
    index: int = 0,
    offset_bytes: int = 0,
    chunk_bytes: int = 64,
) -> SegmentHeader:
    """The header of a segment with these bytes."""
    starts = range(0, len(payload), chunk_bytes)
    return SegmentHeader(
        key=key,
        base_digest="" if key.codec == "full" else DIGEST,
        index=index,
        offset_bytes=offset_bytes,
        size_bytes=len(payload),
        chunk_bytes=chunk_bytes,
        chunk_hashes=b"".join(blake3(payload[s : s + chunk_bytes]).digest() for s in starts),
    )


def manifest_for(payload: bytes, num_segments: int, key: PublicationKey = FULL) -> Manifest:
    """A manifest that commits these bytes."""
    return Manifest(
        lineage=key.lineage,
        version=key.version,
        num_updates=key.version,
        codec=key.codec,
        base_version=key.base_version,
        base_digest="" if key.codec == "full" else DIGEST,
        digest="xxh3:" + "1" * 32,
        payload_digest=f"b3:{blake3(payload).hexdigest()}",
        payload_bytes=len(payload),
        dense_bytes=1000,
        changed_elements=10,
        total_elements=500,
        num_segments=num_segments,
    )


def signed(
    payload: bytes,
    sizes: Sequence[int] | None = None,
    *,
    key: PublicationKey = FULL,
    chunk_bytes: int = 64,
    signer: Signer = SIGNER,
) -> Signed:
    """`payload` as segments of these sizes, in chunks of `chunk_bytes`, all signed."""
    segments: list[SignedSegment] = []
    offset = 0
    for size in [len(payload)] if sizes is None else sizes:
        part = payload[offset : offset + size]
        header = header_of(part, key=key, index=len(segments), offset_bytes=offset, chunk_bytes=chunk_bytes)
        segments.append(signer.segment(header))
        offset += size
    manifest = manifest_for(payload, len(segments), key)
    return Signed(segments, signer.manifest(manifest), payload)
