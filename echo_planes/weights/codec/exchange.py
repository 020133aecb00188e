"""Writes a change and keeps what it replaced, in one pass over memory instead of two."""

from __future__ import annotations

import numpy as np
from numba import njit

from echo_planes.errors import WeightsError
from echo_planes.types import TensorSpec
from echo_planes.weights.codec.entry import Applied, Change, IndexArray, decode, overwrite_payload
from echo_planes.weights.digest import BitArray


def exchange(change: Change, bits: BitArray) -> Applied:
    """Write a change into the flat bits of its tensor; what was there comes back with it (`codec.undo`).

    Raises:
        WeightsError: it does not fit them; nothing was written.
    """
    where, values = change.indices, change.values
    if where is None:
        run = bits[change.start : change.start + values.size]
        if change.start < 0 or run.shape != values.shape or run.dtype != values.dtype:
            raise WeightsError(f"a change of tensor {change.name!r} lies outside its {bits.size} elements")
        old = run.copy()
        run[:] = values
        return Applied(change, old)
    if where.shape != values.shape or values.dtype != bits.dtype:
        raise WeightsError(
            f"a change of tensor {change.name!r} has {where.size} positions, {values.size} bits"
        )
    old = np.empty_like(values)
    if not _exchange(bits, where, values, old):
        raise WeightsError(f"a change of tensor {change.name!r} has positions out of range or out of order")
    return Applied(change, old)


def warm_up() -> None:
    """Compile, or load from disk, what the install of a patch runs: seconds that no pause should have."""
    for dtype, width in (("bfloat16", np.dtype("<u2")), ("float32", np.dtype("<u4"))):
        bits = np.zeros(2, width)
        specs = {"": TensorSpec("", dtype, bits.shape)}
        payload = overwrite_payload([Change("", 0, np.arange(2, dtype=np.int32), bits)], specs)
        for change in decode("overwrite", payload, 0, specs, {"": bits}.__getitem__):
            exchange(change, bits)


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _exchange(bits: BitArray, where: IndexArray, values: BitArray, old: BitArray) -> bool:
    last = -1
    for position in where:
        if position <= last or position >= bits.size:
            return False
        last = position
    for i in range(where.size):
        position = where[i]
        old[i] = bits[position]
        bits[position] = values[i]
    return True
