"""Limits on the size of a model's publication: a node refuses a larger one before it allocates memory for it.

Signatures exclude messages of strangers. The limits keep a faulty or compromised learner from filling a
worker's memory and disk, and bound the bytes that a node buffers before it has seen a signature.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from echo_planes.errors import WeightsError
from echo_planes.types import Codec, Manifest, TensorSpec
from echo_planes.weights.digest import BIT_DTYPES
from echo_planes.weights.wire.manifest import HASH_BYTES, SEGMENT_BYTES, SegmentHeader

MIN_CHUNK_BYTES = 4 * 1024
MAX_CHUNK_BYTES = 4 * 1024**2

_INDEX_BYTES = 8  # per changed element, at most: int64 in `overwrite`, escapes in the others
_TENSOR_BYTES = 512  # per tensor and segment, without its name, dimensions and elements
_SEGMENT_OVERHEAD_BYTES = 64 * 1024  # per segment: coding tables
_MIN_SEGMENT_DENSE_BYTES = 1024**2  # encoders end a segment earlier only at a tensor's end
_MIN_SEGMENTS = 4096  # least limit, since small models may be cut into small segments


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """Limits of the publications that a receiver takes. `limits_for` and `relay_limits` make them."""

    max_full_bytes: int  # payload of codec full
    max_patch_bytes: int  # payload of the other codecs
    max_segment_bytes: int
    max_segments: int
    min_chunk_bytes: int = MIN_CHUNK_BYTES
    max_chunk_bytes: int = MAX_CHUNK_BYTES
    dense_bytes: int | None = None  # of the model, where it is known
    total_elements: int | None = None

    @property
    def max_chunks_per_segment(self) -> int:
        """Most chunks of a segment, and so most hashes of its header."""
        return -(-self.max_segment_bytes // self.min_chunk_bytes)

    @property
    def max_header_bytes(self) -> int:
        """Most canonical bytes of a segment header."""
        return 1024 + HASH_BYTES * self.max_chunks_per_segment

    @property
    def max_chunks(self) -> int:
        """Most chunks of one publication, in which each segment's last chunk may be short."""
        return max(self.max_full_bytes, self.max_patch_bytes) // self.min_chunk_bytes + self.max_segments

    def max_payload_bytes(self, codec: Codec) -> int:
        """Return the most payload bytes of one publication."""
        return self.max_full_bytes if codec == "full" else self.max_patch_bytes

    def check_header(self, header: SegmentHeader) -> None:
        """Check that the model can need such a segment; the header is well formed.

        Raises:
            WeightsError: its size or place exceeds the limits, or its chunks have a wrong size.
        """
        if not self.min_chunk_bytes <= header.chunk_bytes <= self.max_chunk_bytes:
            raise WeightsError(
                f"chunks of {header.chunk_bytes} bytes; they must have "
                f"{self.min_chunk_bytes} to {self.max_chunk_bytes}"
            )
        if header.index >= self.max_segments:
            raise WeightsError(f"segment {header.index}: the model needs at most {self.max_segments}")
        if header.size_bytes > self.max_segment_bytes:
            raise WeightsError(
                f"segment {header.index} has {header.size_bytes} bytes; "
                f"the model needs at most {self.max_segment_bytes}"
            )
        self._check_payload(header.key.codec, header.offset_bytes + header.size_bytes)

    def check_manifest(self, manifest: Manifest) -> None:
        """Check that this can be a manifest of the model; the manifest is well formed.

        Raises:
            WeightsError: its sizes exceed the limits, or are those of another model.
        """
        self._check_payload(manifest.codec, manifest.payload_bytes)
        if manifest.num_segments > self.max_segments:
            raise WeightsError(
                f"{manifest.num_segments} segments; the model needs at most {self.max_segments}"
            )
        for what, ours, theirs in (
            ("bytes", self.dense_bytes, manifest.dense_bytes),
            ("elements", self.total_elements, manifest.total_elements),
        ):
            if ours is not None and ours != theirs:
                raise WeightsError(
                    f"version {manifest.version} is of a model of {theirs} {what}; the one here has {ours}"
                )

    def _check_payload(self, codec: Codec, num_bytes: int) -> None:
        most = self.max_payload_bytes(codec)
        if num_bytes > most:
            raise WeightsError(f"a {codec} payload of {num_bytes} bytes; the model needs at most {most}")


def limits_for(
    specs: Mapping[str, TensorSpec],
    *,
    min_chunk_bytes: int = MIN_CHUNK_BYTES,
    max_chunk_bytes: int = MAX_CHUNK_BYTES,
) -> TransferLimits:
    """Return the limits for a model: a full snapshot, or a patch that changes every element at worst cost.

    Args:
        specs: the model's tensors by name, tied ones once.
        min_chunk_bytes, max_chunk_bytes: range of accepted chunk sizes.

    Raises:
        WeightsError: a dtype that no codec takes.
    """
    dense_bytes = total = names_bytes = 0
    for spec in specs.values():
        if spec.dtype not in BIT_DTYPES:
            raise WeightsError(f"tensor {spec.name!r}: no codec takes {spec.dtype}")
        elements = math.prod(spec.shape)
        total += elements
        dense_bytes += elements * BIT_DTYPES[spec.dtype].itemsize
        # JSON escapes make a name longer than its characters; `overwrite` writes each name twice.
        names_bytes += _TENSOR_BYTES + 2 * len(json.dumps(spec.name)) + 24 * len(spec.shape)
    segments = 2 * -(-dense_bytes // _MIN_SEGMENT_DENSE_BYTES) + len(specs)
    entries = 2 * names_bytes + segments * (_SEGMENT_OVERHEAD_BYTES + _TENSOR_BYTES)
    patch_bytes = dense_bytes + total * _INDEX_BYTES + entries
    widest = (2 + _INDEX_BYTES) / 2  # bytes of a two-byte element with its index, per dense byte
    return TransferLimits(
        max_full_bytes=dense_bytes + names_bytes + _TENSOR_BYTES,
        max_patch_bytes=patch_bytes,
        max_segment_bytes=min(
            patch_bytes, int(SEGMENT_BYTES * widest) + names_bytes + _SEGMENT_OVERHEAD_BYTES
        ),
        max_segments=max(_MIN_SEGMENTS, segments),
        min_chunk_bytes=min_chunk_bytes,
        max_chunk_bytes=max_chunk_bytes,
        dense_bytes=dense_bytes,
        total_elements=total,
    )


def relay_limits(
    max_payload_bytes: int,
    *,
    min_chunk_bytes: int = MIN_CHUNK_BYTES,
    max_chunk_bytes: int = MAX_CHUNK_BYTES,
) -> TransferLimits:
    """Return the limits for a node that does not know the model: payloads of at most `max_payload_bytes`."""
    return TransferLimits(
        max_full_bytes=max_payload_bytes,
        max_patch_bytes=max_payload_bytes,
        max_segment_bytes=min(max_payload_bytes, 6 * SEGMENT_BYTES),
        max_segments=max(_MIN_SEGMENTS, 2 * -(-max_payload_bytes // _MIN_SEGMENT_DENSE_BYTES)),
        min_chunk_bytes=min_chunk_bytes,
        max_chunk_bytes=max_chunk_bytes,
    )
