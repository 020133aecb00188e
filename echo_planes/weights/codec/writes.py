"""Writing changes to scattered places, compiled."""

from __future__ import annotations

from typing import Any

import numpy as np

from echo_planes.weights.codec.kernels import kernel, prefetch
from echo_planes.weights.digest import BitArray

_AHEAD = 64  # elements by which scattered reads are fetched before they are needed


@kernel
def step_at(
    bits: BitArray, where: Any, steps: Any, shift: int, indices: Any, olds: Any, news: Any, write: bool
) -> None:
    """Element where[i] + shift changes by steps[i]: report index, old and new bits; write if asked to."""
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
    """bits[indices[i]] = values[i]; the caller has checked the indices."""
    num = indices.size
    for i in range(num):
        if i + _AHEAD < num:
            prefetch(bits, np.int64(indices[i + _AHEAD]))
        bits[indices[i]] = values[i]


@kernel
def exchange(bits: BitArray, indices: Any, values: BitArray, old: BitArray) -> None:
    """As `scatter`; old[i] gets what was there, in the same pass over memory."""
    num = indices.size
    for i in range(num):
        if i + _AHEAD < num:
            prefetch(bits, np.int64(indices[i + _AHEAD]))
        old[i] = bits[indices[i]]
        bits[indices[i]] = values[i]


@kernel
def increasing(indices: Any) -> bool:
    """Whether the indices rise strictly."""
    fine = True
    for i in range(1, indices.size):
        fine &= indices[i] > indices[i - 1]
    return fine
