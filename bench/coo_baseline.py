"""The patch format that PULSE publishes, as its paper describes it (section 4.1, algorithm 1; appendix E.4).

2D COO per tensor: of every changed element the row's difference to the one before, its column (difference to
the one before where the row is the same) and its new bf16 value, with rows in uint8 and columns in uint16
where they fit, and zstd level 1 over each kind of stream for the whole model. This is what the paper calls
its default (delta_coo_downscaled, zstd-1); like there, plain array operations do the work.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from echo_planes.weights.digest import BitTensor

_ZSTD = pa.Codec("zstd", 1)


@dataclass(frozen=True)
class _Stream:
    """One kind of numbers of all tensors, each tensor's in a type of its own, under zstd."""

    packed: bytes
    types: tuple[str, ...]  # by tensor


@dataclass(frozen=True)
class Patch:
    """The changes of a model: of which tensors, how many of each, and where and what they are."""

    names: tuple[str, ...]
    counts: tuple[int, ...]
    rows: _Stream
    columns: _Stream
    values: _Stream

    @property
    def num_bytes(self) -> int:
        """Bytes that travel, without the header that a file would have."""
        return sum(len(stream.packed) for stream in (self.rows, self.columns, self.values))


def encode(base: Mapping[str, BitTensor], tensors: Mapping[str, BitTensor]) -> Patch:
    """The patch from `base` to `tensors`."""
    names, rows, columns, values = [], [], [], []
    for name in sorted(tensors):
        new = tensors[name]
        where = np.flatnonzero(base[name].bits != new.bits)
        if not where.size:
            continue
        row, column = np.divmod(where, _width(new))
        steps = np.diff(row, prepend=0)
        names.append(name)
        rows.append(_narrowed(steps, np.uint8))
        columns.append(_narrowed(np.where(steps == 0, np.diff(column, prepend=0), column), np.uint16))
        values.append(new.bits[where])
    counts = tuple(part.size for part in values)
    return Patch(tuple(names), counts, _packed(rows), _packed(columns), _packed(values))


def apply(patch: Patch, tensors: Mapping[str, BitTensor]) -> None:
    """Write a patch into its base."""
    streams = (_unpacked(stream, patch.counts) for stream in (patch.rows, patch.columns, patch.values))
    for name, steps, across, values in zip(patch.names, *streams, strict=True):
        rows = np.cumsum(steps, dtype=np.int64)
        # Columns add up within a row: the running sum, less what it was before the row began.
        running = np.cumsum(across, dtype=np.int64)
        first = np.flatnonzero(np.diff(rows, prepend=-1))
        before = running[first] - across[first]
        columns = running - np.repeat(before, np.diff(first, append=rows.size))
        tensors[name].bits[rows * _width(tensors[name]) + columns] = values


def _width(tensor: BitTensor) -> int:
    return tensor.shape[-1] if len(tensor.shape) > 1 else max(math.prod(tensor.shape), 1)


def _narrowed(numbers: npt.NDArray[Any], narrowest: type[np.unsignedinteger[Any]]) -> npt.NDArray[Any]:
    return numbers.astype(max(np.dtype(narrowest), np.min_scalar_type(int(numbers.max()))))


def _packed(parts: Sequence[npt.NDArray[Any]]) -> _Stream:
    joined = b"".join(part.tobytes() for part in parts)
    return _Stream(_ZSTD.compress(joined, asbytes=True), tuple(part.dtype.str for part in parts))


def _unpacked(stream: _Stream, counts: Sequence[int]) -> Iterator[npt.NDArray[Any]]:
    sizes = [count * np.dtype(kind).itemsize for count, kind in zip(counts, stream.types, strict=True)]
    data = _ZSTD.decompress(stream.packed, decompressed_size=sum(sizes), asbytes=True)
    at = 0
    for count, kind, size in zip(counts, stream.types, sizes, strict=True):
        yield np.frombuffer(data, kind, count, at)
        at += size
