"""What a publication must be before a stager takes it in (whole, of this model, and of its digest), and how
the engine's file is written without holding it in memory."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from echo_planes.errors import WeightsError
from echo_planes.types import ByteArray, Manifest, TensorSpec
from echo_planes.weights.codec.entry import IndexArray
from echo_planes.weights.digest import BIT_DTYPES, BitTensor

_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}  # of the safetensors format
_CODES: dict[str, str] = {dtype: code for code, dtype in _DTYPES.items()}
_LENGTH_BYTES = 8
_BLOCK = 1 << 16  # elements written at once


def whole(manifest: Manifest, segments: Iterable[tuple[int, ByteArray]]) -> Iterator[tuple[int, ByteArray]]:
    """The same segments, if they are the manifest's payload.

    Raises:
        WeightsError: they leave gaps, or are more or fewer.
    """
    covered = num_segments = 0
    for offset_bytes, segment in segments:
        if offset_bytes != covered or segment.size > manifest.payload_bytes - covered:
            raise WeightsError(
                f"version {manifest.version}: a segment of {segment.size} bytes at {offset_bytes} does "
                f"not follow {covered} of {manifest.payload_bytes} bytes"
            )
        yield offset_bytes, segment
        covered += segment.size
        num_segments += 1
    if (covered, num_segments) != (manifest.payload_bytes, manifest.num_segments):
        raise WeightsError(
            f"version {manifest.version} came as {covered} bytes in {num_segments} segments, its "
            f"manifest says {manifest.payload_bytes} in {manifest.num_segments}"
        )


def check_digest(manifest: Manifest, digest: str) -> None:
    """Whether the state came out as published.

    Raises:
        WeightsError: it did not.
    """
    if digest != manifest.digest:
        raise WeightsError(
            f"version {manifest.version} must have digest {manifest.digest}, but came to {digest}"
        )


def check_model(published: Mapping[str, TensorSpec], model: Mapping[str, TensorSpec]) -> None:
    """Whether the publication holds the model's tensors. An empty `model` is one that nobody knows yet.

    Raises:
        WeightsError: it does not; the message names the first tensor that differs, and both shapes.
    """
    for name in sorted(published.keys() | model.keys()) if model else ():
        theirs, ours = published.get(name), model.get(name)
        if theirs != ours:
            raise WeightsError(
                f"tensor {name!r} is {_shown(theirs)} in the publication, {_shown(ours)} in this model"
            )


def _shown(spec: TensorSpec | None) -> str:
    return f"{spec.dtype} {spec.shape}" if spec else "missing"


def learnt(segment: ByteArray, payload_bytes: int) -> dict[str, TensorSpec]:
    """What tensors a full publication holds, by the header it begins with; `decode` checks it closely.

    Raises:
        WeightsError: no such header, or sizes beyond those of the payload.
    """
    length = int.from_bytes(segment[:_LENGTH_BYTES].tobytes(), "little")
    try:
        header = json.loads(segment[_LENGTH_BYTES : _LENGTH_BYTES + length].tobytes())
        specs = {
            name: TensorSpec(name, _DTYPES[entry["dtype"]], tuple(map(operator.index, entry["shape"])))
            for name, entry in header.items()
        }
        num_bytes = sum(math.prod(s.shape) * BIT_DTYPES[s.dtype].itemsize for s in specs.values())
        sound = num_bytes <= payload_bytes and all(n >= 0 for s in specs.values() for n in s.shape)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(f"a full publication must begin with a safetensors header: {error}") from error
    if not sound:
        raise WeightsError(f"the tensors of a full publication do not fit its {payload_bytes} bytes")
    return specs


def overwrite_pieces(
    positions: Mapping[str, IndexArray], state: Mapping[str, BitTensor]
) -> Iterator[ByteArray]:
    """The bytes of `codec.overwrite_payload` for the bits of a state at these positions, in small parts.

    Args:
        positions: flat, strictly rising, by tensor; of `index_dtype`, not empty.
    """
    entries: list[tuple[int, str, str]] = []  # (bytes per element, entry, tensor)
    for name, indices in positions.items():
        entries.append((indices.itemsize, f"{name}:indices", name))
        entries.append((state[name].bits.itemsize, f"{name}:values", name))
    entries.sort(key=lambda entry: (-entry[0], entry[1]))
    header: dict[str, Any] = {}
    end = 0
    for itemsize, entry, name in entries:
        begin, count = end, positions[name].size
        end += count * itemsize
        code = f"I{8 * itemsize}" if entry.endswith(":indices") else _CODES[state[name].dtype]
        header[entry] = {"dtype": code, "shape": [count], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    yield np.frombuffer(len(text).to_bytes(_LENGTH_BYTES, "little") + text, np.uint8)
    for _, entry, name in entries:
        indices, bits = positions[name], state[name].bits
        for at in range(0, indices.size, _BLOCK):
            part = indices[at : at + _BLOCK]
            yield (part if entry.endswith(":indices") else bits[part]).view(np.uint8)
