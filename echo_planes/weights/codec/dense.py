"""Codecs `full` and `overwrite`: new bits as safetensors bytes, which any state can take.

Payloads are untrusted: decoders check names, dtypes, shapes, sizes and index ranges against the receiver's
own specs. They return views into the payload, or into one copy of it, so a false header cannot cause a large
allocation.

A `full` payload is one ordinary safetensors file of every tensor, widest elements first, then by name. A
segment is any piece of it that splits no element; the first segment holds the whole header. An `overwrite`
segment is a safetensors file by itself. It has two entries for a changed tensor `name`, both of shape
(changes,): `name:indices` (flat, strictly increasing; int32, or int64 from 2^31 elements on) and
`name:values` (the new elements).
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from echo_planes.errors import WeightsError
from echo_planes.types import ByteArray, TensorSpec
from echo_planes.weights.codec import kernels, writes
from echo_planes.weights.codec.changes import Change, EncodedSegment, IndexArray, index_dtype
from echo_planes.weights.codec.layout import SLICE_BYTES
from echo_planes.weights.digest import BIT_DTYPES, BitArray, BitTensor, StateHasher
from echo_planes.weights.wire.manifest import SEGMENT_BYTES

_CODES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "int32": "I32", "int64": "I64"}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_NUMPY = BIT_DTYPES | {"int32": np.dtype("<i4"), "int64": np.dtype("<i8")}
_LENGTH_BYTES = 8  # safetensors: the header's length, little-endian, before the header
_ALIGN = 8
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
_INDICES, _VALUES = ":indices", ":values"
_BLOCK = 1 << 16  # elements in one part of `overwrite_pieces`


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    data: npt.NDArray[Any]  # flat


@dataclass(frozen=True, slots=True)
class _Piece:
    """Elements [start, stop) of a tensor, which begin at byte `at` of a piece of a file."""

    spec: TensorSpec
    start: int
    stop: int
    at: int

    def of(self, data: ByteArray) -> BitArray:
        """Return the elements as a view of the file's piece."""
        dtype = BIT_DTYPES[self.spec.dtype]
        return data[self.at : self.at + (self.stop - self.start) * dtype.itemsize].view(dtype)


class FullFile:
    """Layout of the safetensors file of a model's whole state, computed from the specs alone."""

    def __init__(self, specs: Mapping[str, TensorSpec]) -> None:
        # Widest elements first, the order of safetensors itself, aligns every tensor without padding.
        self._order = sorted(specs.values(), key=lambda spec: (-BIT_DTYPES[spec.dtype].itemsize, spec.name))
        shapes = {spec.name: (spec.dtype, spec.shape) for spec in self._order}
        self.header, self.data_bytes = _header(shapes)

    def cuts(self, segment_bytes: int) -> Iterator[tuple[int, int]]:
        """Yield (first, last) byte of the data after the header, exclusive, in each segment of a payload.

        There is at least one segment. The first holds the header too.
        """
        step = max(segment_bytes // _ALIGN, 1) * _ALIGN
        for first in range(0, max(self.data_bytes, 1), step):
            yield first, min(first + step, self.data_bytes)

    def segment(self, first: int, last: int) -> tuple[ByteArray, ByteArray]:
        """Return a new segment that holds the header if it is the first, and its part for the data."""
        lead = len(self.header) if first == 0 else 0
        payload = np.empty(lead + last - first, np.uint8)
        payload[:lead] = np.frombuffer(self.header[:lead], np.uint8)
        return payload, payload[lead:]

    def pieces(self, first: int, last: int) -> Iterator[_Piece]:
        """Yield the parts of tensors in bytes [first, last) of the data after the header.

        Raises:
            WeightsError: `first` or `last` splits an element.
        """
        begin = 0
        for spec in self._order:
            itemsize = BIT_DTYPES[spec.dtype].itemsize
            end = begin + math.prod(spec.shape) * itemsize
            low, high = max(first, begin), min(last, end)
            if low < high:
                if (low - begin) % itemsize or (high - begin) % itemsize:
                    raise WeightsError(f"a segment splits an element of tensor {spec.name!r}")
                yield _Piece(spec, (low - begin) // itemsize, (high - begin) // itemsize, low - first)
            begin = end


def encode_full(
    base: Mapping[str, BitTensor] | None,
    tensors: Mapping[str, BitTensor],
    hasher: StateHasher | None,
    segment_bytes: int,
) -> Iterator[EncodedSegment]:
    """Yield a state's safetensors file in segments. Without a base, every element counts as changed."""
    file = FullFile({name: tensor.spec(name) for name, tensor in tensors.items()})
    ahead = _CanonicalHash(tensors, hasher) if hasher else None
    for first, last in file.cuts(segment_bytes):
        payload, data = file.segment(first, last)
        changed: dict[str, int] = {}
        for piece in file.pieces(first, last):
            name, out = piece.spec.name, piece.of(data)
            bits, count = tensors[name].bits, 0
            stride = SLICE_BYTES // bits.itemsize
            for low in range(piece.start, piece.stop, stride):
                high = min(low + stride, piece.stop)
                out[low - piece.start : high - piece.start] = bits[low:high]
                count += kernels.count_changes(base[name].bits, bits, low, high) if base else high - low
                if ahead:
                    ahead.advance((high - low) * bits.itemsize)
            if count:
                changed[name] = count
        if ahead and last == file.data_bytes:
            ahead.finish()
        yield EncodedSegment(payload, changed)


class _CanonicalHash:
    """Digest of a state in canonical order, advanced while the state's file is written in file order.

    If all elements have one width, the two orders are equal, and the hasher finds the bits in the cache.
    """

    def __init__(self, tensors: Mapping[str, BitTensor], hasher: StateHasher) -> None:
        self._tensors, self._hasher = tensors, hasher
        self._names = iter(sorted(tensors))
        self._bits: BitArray = np.empty(0, np.uint16)
        self._at = self._due = 0

    def advance(self, num_bytes: int) -> None:
        """Digest the next `num_bytes`, rounded up to an element. The next call digests that much less."""
        self._due += num_bytes
        while self._due > 0:
            if self._at == self._bits.size:
                self._begin(next(self._names))
                continue
            part = self._bits[self._at : self._at + -(-self._due // self._bits.itemsize)]
            self._hasher.update(part)
            self._at += part.size
            self._due -= part.nbytes

    def finish(self) -> None:
        """Digest the rest."""
        self._hasher.update(self._bits[self._at :])
        for name in self._names:
            self._begin(name)
            self._hasher.update(self._bits)

    def _begin(self, name: str) -> None:
        tensor = self._tensors[name]
        self._bits, self._at = tensor.bits, 0
        self._hasher.begin(name, tensor.dtype, tensor.shape)


def decode_full(segment: ByteArray, offset_bytes: int, specs: Mapping[str, TensorSpec]) -> list[Change]:
    """Return the bits in a segment, as views into it, or into a copy if it is unaligned.

    Raises:
        WeightsError: a header other than the model's, byte for byte, or a piece outside the file.
    """
    file = FullFile(specs)
    lead = len(file.header)
    if segment.dtype != np.uint8 or segment.ndim != 1:
        raise WeightsError("a segment is a flat array of bytes")
    if offset_bytes == 0:
        if segment[:lead].tobytes() != file.header:
            raise WeightsError(
                f"a full payload must hold the model's {len(specs)} tensors exactly, in their dtypes and "
                f"shapes; the header of this one says otherwise"
            )
        data, first = segment[lead:], 0
    else:
        data, first = segment, offset_bytes - lead
    if first < 0 or first + data.size > file.data_bytes:
        raise WeightsError(
            f"bytes [{offset_bytes}, {offset_bytes + segment.size}) are no piece of a full payload of "
            f"{lead + file.data_bytes} bytes"
        )
    if data.size and data.ctypes.data % _ALIGN:
        data = data.copy()
    return [
        Change(piece.spec.name, piece.start, None, piece.of(data))
        for piece in file.pieces(first, first + data.size)
    ]


def full_specs(segment: ByteArray, payload_bytes: int) -> dict[str, TensorSpec]:
    """Return the specs in a `full` payload's header, given its first segment.

    The check here is coarse; `decode_full` compares the header byte for byte.

    Raises:
        WeightsError: no such header, or tensors larger than the payload.
    """
    try:
        header, _ = _split(segment)
        specs = {
            name: TensorSpec(name, _DTYPES[entry["dtype"]], tuple(map(operator.index, entry["shape"])))
            for name, entry in header.items()
        }
        num_bytes = sum(math.prod(s.shape) * BIT_DTYPES[s.dtype].itemsize for s in specs.values())
        sound = num_bytes <= payload_bytes and all(n >= 0 for s in specs.values() for n in s.shape)
    except (WeightsError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"a full publication must begin with a safetensors header: {error}") from error
    if not sound:
        raise WeightsError(f"the tensors of a full publication do not fit its {payload_bytes} bytes")
    return specs


def full_payload(tensors: Mapping[str, BitTensor]) -> ByteArray:
    """Return a whole state as one safetensors file, shape (bytes,)."""
    return np.concatenate([part.payload for part in encode_full(None, tensors, None, SEGMENT_BYTES)])


def overwrite_payload(changes: Iterable[Change], specs: Mapping[str, TensorSpec]) -> ByteArray:
    """Return changes as one `overwrite` segment, shape (bytes,).

    Args:
        changes: changes of one tensor must be in order of positions and must not overlap.
    """
    parts: dict[str, list[Change]] = {}
    for change in changes:
        if change.values.size:
            parts.setdefault(change.name, []).append(change)
    entries: dict[str, _Entry] = {}
    for name, of_tensor in parts.items():
        kind = index_dtype(math.prod(specs[name].shape))
        indices = np.concatenate([_positions(change, _NUMPY[kind]) for change in of_tensor])
        values = np.concatenate([change.values for change in of_tensor])
        entries[name + _INDICES] = _Entry(kind, indices.shape, indices)
        entries[name + _VALUES] = _Entry(specs[name].dtype, values.shape, values)
    return _pack(entries)


def _positions(change: Change, dtype: np.dtype[Any]) -> IndexArray:
    if change.indices is None:
        return np.arange(change.start, change.start + change.values.size, dtype=dtype)
    return change.indices.astype(dtype, copy=False)


def decode_overwrite(segment: ByteArray, specs: Mapping[str, TensorSpec]) -> list[Change]:
    """Return the changes in a segment, as views into it, or into a copy if it is unaligned.

    Raises:
        WeightsError: an unknown tensor, another dtype or shape, or positions out of range or out of order.
    """
    if segment.dtype == np.uint8 and segment.ndim == 1 and segment.size and segment.ctypes.data % _ALIGN:
        segment = segment.copy()
    entries = _unpack(segment)
    names = {key.rpartition(":")[0] for key in entries}
    expected = {name + suffix for name in names for suffix in (_INDICES, _VALUES)}
    if entries.keys() != expected or not names <= specs.keys():
        odd = sorted((entries.keys() ^ expected) | (names - specs.keys()))
        raise WeightsError(
            f"an overwrite payload must pair indices with values of known tensors: {_some(odd)}"
        )
    changes = []
    for name in sorted(names):
        spec, indices, values = specs[name], entries[name + _INDICES], entries[name + _VALUES]
        elements = math.prod(spec.shape)
        if indices.dtype != index_dtype(elements) or values.dtype != spec.dtype:
            raise WeightsError(
                f"tensor {name!r}: {indices.dtype} indices and {values.dtype} values, "
                f"expected {index_dtype(elements)} and {spec.dtype}"
            )
        if len(indices.shape) != 1 or indices.shape != values.shape:
            raise WeightsError(f"tensor {name!r}: indices {indices.shape} but values {values.shape}")
        _check_indices(name, indices.data, elements)
        if indices.data.size:
            changes.append(Change(name, int(indices.data[0]), indices.data, values.data))
    return changes


def _check_indices(name: str, indices: IndexArray, elements: int) -> None:
    if indices.size == 0:
        return
    if indices[0] < 0 or indices[-1] >= elements or not writes.increasing(indices):
        raise WeightsError(
            f"tensor {name!r}: indices must increase strictly within [0, {elements}); "
            f"they run from {indices[0]} to {indices[-1]}"
        )


def overwrite_pieces(
    positions: Mapping[str, IndexArray], state: Mapping[str, BitTensor]
) -> Iterator[ByteArray]:
    """Yield the bytes of `overwrite_payload` for a state's bits at these positions, in small parts.

    Args:
        positions: by tensor; flat, strictly rising, of `index_dtype`, not empty.
    """
    entries: dict[str, tuple[str, IndexArray, BitArray | None]] = {}
    for name, indices in positions.items():
        entries[name + _INDICES] = (index_dtype(state[name].bits.size), indices, None)
        entries[name + _VALUES] = (state[name].dtype, indices, state[name].bits)
    order = _in_order({name: _NUMPY[dtype].itemsize for name, (dtype, _, _) in entries.items()})
    header, _ = _header({name: (entries[name][0], entries[name][1].shape) for name in order})
    yield np.frombuffer(header, np.uint8)
    for name in order:
        _, indices, bits = entries[name]
        for at in range(0, indices.size, _BLOCK):
            part = indices[at : at + _BLOCK]
            yield (part if bits is None else bits[part]).view(np.uint8)


def _in_order(itemsizes: Mapping[str, int]) -> list[str]:
    """Return the names of a file's entries in file order: widest elements first, then by name."""
    return sorted(itemsizes, key=lambda name: (-itemsizes[name], name))


def _pack(entries: Mapping[str, _Entry]) -> ByteArray:
    order = _in_order({name: entry.data.itemsize for name, entry in entries.items()})
    header, data_bytes = _header({name: (entries[name].dtype, entries[name].shape) for name in order})
    payload = np.empty(len(header) + data_bytes, dtype=np.uint8)
    payload[: len(header)] = np.frombuffer(header, dtype=np.uint8)
    at = len(header)
    for name in order:
        data = entries[name].data.view(np.uint8)
        payload[at : at + data.size] = data
        at += data.size
    return payload


def _header(entries: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, int]:
    """Return a file's first bytes (a multiple of 8) for entries (dtype, shape), and the size of its data."""
    header: dict[str, Any] = {}
    offset = 0
    for name, (dtype, shape) in entries.items():
        end = offset + math.prod(shape) * _NUMPY[dtype].itemsize
        header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text, offset


def _unpack(payload: ByteArray) -> dict[str, _Entry]:
    header, data = _split(payload)
    entries: dict[str, _Entry] = {}
    covered = 0
    try:
        items = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        for name, fields in items:
            dtype, shape = _DTYPES[fields["dtype"]], tuple(fields["shape"])
            start, stop = fields["data_offsets"]
            if not all(type(n) is int and n >= 0 for n in (*shape, start, stop)):
                raise WeightsError(f"payload entry {name!r} has sizes that are no counts")
            # Entries must tile the data without gap or overlap, so that together they are no larger than it.
            if (
                start != covered
                or stop > data.size
                or stop - start != math.prod(shape) * _NUMPY[dtype].itemsize
            ):
                raise WeightsError(f"payload entry {name!r}: {shape} does not fit bytes [{start}, {stop})")
            covered = stop
            entries[name] = _Entry(dtype, shape, data[start:stop].view(_NUMPY[dtype]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WeightsError(f"malformed payload header: {type(error).__name__}: {error}") from error
    if covered != data.size:
        raise WeightsError(f"payload has {data.size - covered} bytes that belong to no tensor")
    return entries


def _split(payload: ByteArray) -> tuple[dict[str, Any], ByteArray]:
    if payload.dtype != np.uint8 or payload.ndim != 1 or payload.size < _LENGTH_BYTES:
        raise WeightsError("a payload is a flat array of at least 8 bytes")
    length = int.from_bytes(payload[:_LENGTH_BYTES].tobytes(), "little")
    if length > min(_MAX_HEADER_BYTES, payload.size - _LENGTH_BYTES):
        raise WeightsError(f"payload header claims {length} bytes; the payload has {payload.size}")
    end = _LENGTH_BYTES + length
    try:
        header = json.loads(payload[_LENGTH_BYTES:end].tobytes())
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"payload header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise WeightsError("payload header is not a JSON object")
    return header, payload[end:]


def _some(names: Iterable[str]) -> str:
    shown = list(names)
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")
