"""Compiled loops that write changes to scattered positions."""

from __future__ import annotations

from typing import Any

import numpy as np

from echo_planes.weights.codec.kernels import kernel, prefetch
from echo_planes.weights.digest import BitArray

_AHEAD = 64  # elements by which `step_at` prefetches


@kernel
def step_at(
    bits: BitArray, where: Any, steps: Any, shift: int, indices: Any, olds: Any, news: Any, write: bool
) -> None:
    """Add steps[i] to element where[i] + shift: report index, old and new bits, and write them if `write`."""
    num = where.size
    for i in range(num):
        if i + _AHEAD < num:
            prefetch(bits, np.int64(where[i + _AHEAD]) + shift)
        position = np.int64(where[i]) + shift
        old = bits[position]
        value = old + steps[i]
        indices[i], olds[i], news[i] = position, old, value
        if write:
            bits[position] = value


@kernel
def scatter(bits: BitArray, indices: Any, values: BitArray) -> None:
    """Assign bits[indices[i]] = values[i]; the caller has checked the indices."""
    for i in range(indices.size):  # measured: prefetching gains nothing here
        bits[indices[i]] = values[i]


@kernel
def exchange(bits: BitArray, indices: Any, values: BitArray, old: BitArray) -> None:
    """Do `scatter`, and save the old bits in old[i] in the same pass over memory."""
    for i in range(indices.size):
        position = indices[i]
        old[i] = bits[position]
        bits[position] = values[i]


@kernel
def increasing(indices: Any) -> bool:
    """Return whether the indices rise strictly."""
    fine = True
    for i in range(1, indices.size):
        fine &= indices[i] > indices[i - 1]
    return fine
