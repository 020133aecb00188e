"""Signed publications of made-up payloads, for tests of the store: small segments, small chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from blake3 import blake3

from echo_planes.types import Codec, Manifest
from echo_planes.weights.store.paths import Entry
from echo_planes.weights.store.reading import StoredPublication
from echo_planes.weights.store.writing import PutOutcome, StoreWriter
from echo_planes.weights.wire.limits import TransferLimits, relay_limits
from echo_planes.weights.wire.manifest import PublicationKey, SegmentHeader, SignedManifest, SignedSegment
from echo_planes.weights.wire.signing import Signer, Verifier

SIGNER = Signer.from_private_bytes(bytes(range(32)))
VERIFIER = Verifier(SIGNER.public_bytes())
CHUNK_BYTES = 64
LIMITS: TransferLimits = relay_limits(1_000_000, min_chunk_bytes=CHUNK_BYTES)


@dataclass(frozen=True)
class Signed:
    """Publication as its sender has it."""

    manifest: SignedManifest
    segments: tuple[SignedSegment, ...]
    payload: bytes


def digest_of(version: int, lineage: str = "L0") -> str:
    return f"xxh3:{lineage}-{version}"


def manifest_of(version: int, base: int = -1, payload_bytes: int = 300, **fields: Any) -> Manifest:
    """A manifest of a patch from `base`, or of a snapshot."""
    lineage = fields.get("lineage", "L0")
    codec: Codec = "full" if base < 0 else "compact"
    defaults: dict[str, Any] = {
        "lineage": lineage,
        "version": version,
        "num_updates": version,
        "codec": codec,
        "base_version": base,
        "base_digest": "" if base < 0 else digest_of(base, lineage),
        "digest": digest_of(version, lineage),
        "payload_digest": "b3:" + "0" * 64,
        "payload_bytes": payload_bytes,
        "dense_bytes": 1000,
        "changed_elements": 10,
        "total_elements": 500,
    }
    return Manifest(**defaults | fields)


def entry_of(version: int, base: int = -1, sequence: int = 0, **fields: Any) -> Entry:
    """An entry that only planning sees: unsigned."""
    manifest = manifest_of(version, base, **fields)
    name = f"{manifest.lineage}-{base}-{version}-{manifest.codec}"
    return Entry(name, sequence or version + 1, SignedManifest(manifest, b""))


def sign(manifest: Manifest, payload: bytes, segment_bytes: int = 130) -> Signed:
    """`payload` cut into segments, everything signed; sizes and digest of `manifest` made to fit."""
    parts = [payload[i : i + segment_bytes] for i in range(0, len(payload), segment_bytes)] or [b""]
    key = PublicationKey(manifest.lineage, manifest.version, manifest.codec, manifest.base_version)
    segments, offset = [], 0
    for index, part in enumerate(parts):
        chunks = [part[i : i + CHUNK_BYTES] for i in range(0, len(part), CHUNK_BYTES)]
        hashes = b"".join(blake3(chunk).digest() for chunk in chunks)
        header = SegmentHeader(key, manifest.base_digest, index, offset, len(part), CHUNK_BYTES, hashes)
        segments.append(SIGNER.segment(header))
        offset += len(part)
    fields = {
        "payload_bytes": len(payload),
        "payload_digest": f"b3:{blake3(payload).hexdigest()}",
        "num_segments": len(parts),
    }
    whole = Manifest(**{**{n: getattr(manifest, n) for n in Manifest.__slots__}, **fields})
    return Signed(SIGNER.manifest(whole), tuple(segments), payload)


def publication(version: int, base: int = -1, **fields: Any) -> Signed:
    """A signed publication with a payload of its own."""
    size = fields.pop("payload_bytes", 300)
    payload = np.random.default_rng([version, base + 1]).bytes(size)
    return sign(manifest_of(version, base, **fields), payload)


def put(writer: StoreWriter, signed: Signed) -> PutOutcome:
    """Store it, its payload in two pieces."""
    half = len(signed.payload) // 2
    pieces: list[bytes | memoryview] = [signed.payload[:half], memoryview(signed.payload)[half:]]
    return writer.put(signed.manifest, signed.segments, pieces)


def bytes_of(stored: StoredPublication) -> bytes:
    """The whole payload, as a reader gets it."""
    return b"".join(data.tobytes() for _, data in stored.payload())
