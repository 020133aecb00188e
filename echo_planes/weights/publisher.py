"""The learner's end of the wire: turns the weights after an update into signed segments and a manifest.

The publisher hands each segment to the `Sink` before it scans the next one. The manifest, which commits the
publication, goes last.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from blake3 import blake3
from msgspec.structs import replace

from echo_planes.errors import WeightsError
from echo_planes.types import ByteArray, Manifest
from echo_planes.weights.codec.choice import CodecChoice
from echo_planes.weights.codec.entry import encode
from echo_planes.weights.digest import BitTensor, StateHasher
from echo_planes.weights.wire.manifest import PublicationKey, SegmentHeader, SignedManifest, SignedSegment
from echo_planes.weights.wire.signing import Signer
from echo_planes.weights.wire.transfer import chunk_hashes


class Sink(Protocol):
    """Destination of publications (`node.client.SenderNode`). It accepts a repeated publication."""

    def add_segment(self, signed: SignedSegment, payload: ByteArray) -> None: ...

    def commit(self, signed: SignedManifest) -> None: ...


class Publisher:
    """Publishes the versions of one lineage, each as a patch of the one before if that is smaller.

    Args:
        lineage: name of the learner incarnation that makes the versions.
        signer: signs segments and manifests.
        sink: receives them.
        choice: chooses the codec of each patch; None: every publication is full.
        digest: algorithm of the state digest: xxh3, blake3 or sha256.
        chunk_bytes: size of a chunk, the unit of hashing and transfer.
    """

    def __init__(
        self,
        lineage: str,
        signer: Signer,
        sink: Sink,
        *,
        choice: CodecChoice | None,
        digest: str = "xxh3",
        chunk_bytes: int = 256 * 1024,
    ) -> None:
        self.lineage = lineage
        self._signer = signer
        self._sink = sink
        self._choice = choice
        self._digest = digest
        self._chunk_bytes = chunk_bytes
        self._last: dict[str, BitTensor] = {}
        self._manifest: Manifest | None = None

    def publish(self, version: int, num_updates: int, tensors: Mapping[str, BitTensor]) -> Manifest:
        """Send the segments of `version`, and keep a copy of its weights. `commit` completes it.

        The first publication is full, so that any receiver can take it. So is the last version published
        again, for workers that missed it.

        Args:
            num_updates: optimizer updates made so far.
            tensors: the whole state by Hugging Face name, tied tensors once. The publisher does not read
                them after it has returned or raised.

        Raises:
            WeightsError: a version below the last one, other weights under the last version, or a state
                whose names, dtypes or shapes are not those of the last one.
        """
        self._check(version, tensors)
        last = self._manifest
        if last is not None and version > last.version and self._choice is not None:
            codec = self._choice.codec(self._last, tensors)
        else:
            codec = "full"
        key = PublicationKey(self.lineage, version, codec, -1)
        base_digest = ""
        if last is not None and codec != "full":
            key, base_digest = replace(key, base_version=last.version), last.digest
        manifest = self._send(key, base_digest, num_updates, tensors)
        if last is not None and version == last.version and manifest.digest != last.digest:
            raise WeightsError(f"version {version} of lineage {self.lineage} is published with other weights")
        self._remember(tensors)
        self._manifest = manifest
        return manifest

    def commit(self) -> None:
        """Send the manifest of the last publication, after which workers may install it.

        Raises:
            WeightsError: nothing was published yet.
        """
        if self._manifest is None:
            raise WeightsError("nothing was published yet")
        self._sink.commit(self._signer.manifest(self._manifest))

    def _send(
        self, key: PublicationKey, base_digest: str, num_updates: int, tensors: Mapping[str, BitTensor]
    ) -> Manifest:
        """Encode and send the segments. Return the manifest that commits them."""
        base = self._last or None
        state, whole = StateHasher(self._digest), blake3()
        offset_bytes = num_segments = changed = 0
        for segment in encode(key.codec, base, tensors, hasher=state):
            whole.update(segment.payload.data)
            header = SegmentHeader(
                key=key,
                base_digest=base_digest,
                index=num_segments,
                offset_bytes=offset_bytes,
                size_bytes=segment.payload.size,
                chunk_bytes=self._chunk_bytes,
                chunk_hashes=chunk_hashes(segment.payload.data, self._chunk_bytes),
            )
            self._sink.add_segment(self._signer.segment(header), segment.payload)
            offset_bytes += segment.payload.size
            num_segments += 1
            changed += sum(segment.changed.values())
        return Manifest(
            lineage=key.lineage,
            version=key.version,
            num_updates=num_updates,
            codec=key.codec,
            base_version=key.base_version,
            base_digest=base_digest,
            digest=state.digest(),
            payload_digest=f"b3:{whole.hexdigest()}",
            payload_bytes=offset_bytes,
            dense_bytes=sum(tensor.nbytes for tensor in tensors.values()),
            changed_elements=changed,
            total_elements=sum(tensor.bits.size for tensor in tensors.values()),
            num_segments=num_segments,
        )

    def _remember(self, tensors: Mapping[str, BitTensor]) -> None:
        for name, tensor in tensors.items():
            if name in self._last:
                np.copyto(self._last[name].bits, tensor.bits)  # reuses the memory of the last version
            else:
                self._last[name] = BitTensor(tensor.bits.copy(), tensor.dtype, tensor.shape)

    def _check(self, version: int, tensors: Mapping[str, BitTensor]) -> None:
        last = self._manifest
        if version < 0 or (last is not None and version < last.version):
            raise WeightsError(f"version {version} cannot follow version {last.version if last else -1}")
        if last is None:
            return
        if tensors.keys() != self._last.keys():
            odd = sorted(tensors.keys() ^ self._last.keys())
            raise WeightsError(f"the state's names changed within a lineage: {', '.join(odd[:3])}")
        for name, tensor in tensors.items():
            if tensor.spec(name) != self._last[name].spec(name):
                raise WeightsError(
                    f"tensor {name!r} changed from {self._last[name].spec(name)} to {tensor.spec(name)}"
                )
