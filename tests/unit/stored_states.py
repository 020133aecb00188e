"""Real weights in a real store: small states, encoded, signed and put."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from blake3 import blake3

from echo_planes.types import Codec, Manifest
from echo_planes.weights.codec.entry import encode, full_payload
from echo_planes.weights.digest import BitTensor, state_digest
from echo_planes.weights.store.objects import open_objects
from echo_planes.weights.store.reading import Store
from echo_planes.weights.store.replay import State
from echo_planes.weights.store.writing import StoreWriter
from echo_planes.weights.wire.limits import relay_limits
from echo_planes.weights.wire.manifest import PublicationKey, SegmentHeader
from tests.unit.store_publications import SIGNER, VERIFIER

CHUNK_BYTES = 4096
LIMITS = relay_limits(10_000_000)


def first_state(seed: int = 0) -> State:
    """Two layers of bf16 weights around 0.015, embeddings, an fp32 norm, an empty tensor."""
    rng = np.random.default_rng(seed)

    def bf16(*shape: int) -> BitTensor:
        wide = rng.normal(0.0, 0.015, int(np.prod(shape))).astype(np.float32)
        return BitTensor((wide.view(np.uint32) >> 16).astype(np.uint16), "bfloat16", shape)

    norm = rng.normal(1.0, 0.1, 32).astype(np.float32).view(np.uint32)
    return {
        "model.embed_tokens.weight": bf16(64, 32),
        "model.layers.0.mlp.weight": bf16(32, 32),
        "model.layers.1.mlp.weight": bf16(32, 32),
        "model.norm.weight": BitTensor(norm, "float32", (32,)),
        "model.nothing": BitTensor(np.zeros(0, np.uint16), "bfloat16", (0,)),
    }


def stepped(state: Mapping[str, BitTensor], changes: Mapping[str, list[int]], ulp: int = 1) -> State:
    """A copy whose elements at these flat positions are `ulp` patterns further on."""
    new = {name: BitTensor(t.bits.copy(), t.dtype, t.shape) for name, t in state.items()}
    for name, positions in changes.items():
        new[name].bits[positions] += np.asarray(ulp).astype(new[name].bits.dtype)
    return new


def store_state(
    writer: StoreWriter,
    version: int,
    state: State,
    base: tuple[int, State] | None = None,
    codec: Codec = "compact",
    lineage: str = "L0",
    digest: str = "",
) -> Manifest:
    """Encode, sign and put one version: in full, or as a patch of `base` (its version and state).

    `digest`: what the manifest claims, if not the truth.
    """
    codec = "full" if base is None else codec
    base_version = -1 if base is None else base[0]
    base_digest = "" if base is None else state_digest(base[1])
    parts = list(encode(codec, None if base is None else base[1], state, segment_bytes=2048))
    key = PublicationKey(lineage, version, codec, base_version)
    segments, offset = [], 0
    for index, part in enumerate(parts):
        data = part.payload.tobytes()
        chunks = [data[i : i + CHUNK_BYTES] for i in range(0, len(data), CHUNK_BYTES)]
        hashes = b"".join(blake3(chunk).digest() for chunk in chunks)
        header = SegmentHeader(key, base_digest, index, offset, len(data), CHUNK_BYTES, hashes)
        segments.append(SIGNER.segment(header))
        offset += len(data)
    payload = b"".join(part.payload.tobytes() for part in parts)
    manifest = Manifest(
        lineage=lineage,
        version=version,
        num_updates=version,
        codec=codec,
        base_version=base_version,
        base_digest=base_digest,
        digest=digest or state_digest(state),
        payload_digest=f"b3:{blake3(payload).hexdigest()}",
        payload_bytes=len(payload),
        dense_bytes=sum(tensor.nbytes for tensor in state.values()),
        changed_elements=sum(sum(part.changed.values()) for part in parts),
        total_elements=sum(tensor.bits.size for tensor in state.values()),
        num_segments=len(parts),
    )
    outcome = writer.put(SIGNER.manifest(manifest), segments, [payload])
    assert outcome.stored, outcome.reason
    return manifest


def writer_at(place: Path) -> StoreWriter:
    writer = StoreWriter(open_objects(str(place)), VERIFIER, LIMITS)
    writer.claim(SIGNER.public_bytes())
    return writer


def reader_at(place: Path) -> Store:
    return Store(open_objects(str(place)), VERIFIER, LIMITS)


def store_chain(place: Path, last: int, *, snapshots: tuple[int, ...] = (0,)) -> list[State]:
    """Versions 0 to `last`: each changes 10 elements of layer 0 and one of the norm. All their states."""
    writer = writer_at(place)
    states = [first_state()]
    store_state(writer, 0, states[0])
    for version in range(1, last + 1):
        first = 10 * version % 1000
        changes = {"model.layers.0.mlp.weight": list(range(first, first + 10)), "model.norm.weight": [3]}
        states.append(stepped(states[-1], changes))
        codec: Codec = ("compact", "fast", "overwrite")[version % 3]
        store_state(writer, version, states[-1], (version - 1, states[-2]), codec)
        if version in snapshots:
            store_state(writer, version, states[-1])
    return states


def write_file(path: Path, state: State) -> Path:
    path.write_bytes(full_payload(state).tobytes())
    return path
