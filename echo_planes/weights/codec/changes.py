"""Messages between codecs and their callers: changes of tensors, and segments of encoded bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from echo_planes.errors import WeightsError
from echo_planes.types import ByteArray
from echo_planes.weights.codec import writes
from echo_planes.weights.digest import BitArray

IndexArray = npt.NDArray[np.signedinteger[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """New bits of part of one tensor."""

    name: str
    start: int  # the first flat element, if `indices` is None; otherwise unused
    indices: IndexArray | None  # None: [start, start + len(values)); else flat positions, strictly rising
    values: BitArray  # new bits


@dataclass(frozen=True, slots=True, eq=False)
class Applied:
    """A written change, and the bits that it replaced, in the same order as its values."""

    change: Change
    old: BitArray


@dataclass(frozen=True, slots=True, eq=False)
class EncodedSegment:
    """The next bytes of a payload."""

    payload: ByteArray  # decodable by itself; for `full`, the next bytes of one safetensors file
    changed: Mapping[str, int]  # number of changed elements in this segment, by tensor


def index_dtype(elements: int) -> str:
    """Return the integer type of positions in a tensor with this number of elements."""
    return "int32" if elements < 2**31 else "int64"


def apply(change: Change, bits: BitArray) -> None:
    """Write a change into the flat bits of its tensor.

    Raises:
        WeightsError: the change does not fit the tensor; nothing was written.
    """
    _check_fit(change, bits)
    if change.indices is None:
        bits[change.start : change.start + change.values.size] = change.values
    else:
        writes.scatter(bits, change.indices, change.values)


def exchange(change: Change, bits: BitArray) -> Applied:
    """Write a change, and return it with the bits that it replaced, in one pass over memory.

    Raises:
        WeightsError: as `apply`.
    """
    _check_fit(change, bits)
    old = np.empty_like(change.values)
    if change.indices is None:
        run = bits[change.start : change.start + change.values.size]
        old[:], run[:] = run, change.values
    else:
        writes.exchange(bits, change.indices, change.values, old)
    return Applied(change, old)


def _check_fit(change: Change, bits: BitArray) -> None:
    where, num = change.indices, change.values.size
    if where is None:
        if change.start < 0 or change.start + num > bits.size or change.values.dtype != bits.dtype:
            raise WeightsError(f"a change of tensor {change.name!r} lies outside its {bits.size} elements")
        return
    if where.shape != change.values.shape or change.values.dtype != bits.dtype:
        raise WeightsError(f"a change of tensor {change.name!r} has {where.size} positions, {num} values")
    if num and (where[0] < 0 or where[-1] >= bits.size or not writes.increasing(where)):
        raise WeightsError(f"a change of tensor {change.name!r} has positions out of range or out of order")


def undo(applied: Applied, bits: BitArray) -> None:
    """Put back the bits that a change replaced. Undo changes in the reverse order of their writing."""
    apply(Change(applied.change.name, applied.change.start, applied.change.indices, applied.old), bits)
