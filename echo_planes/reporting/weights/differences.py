"""Differences between two states of one model, tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from echo_planes.reporting.weights.sparsity import changed_elements
from echo_planes.weights.digest import BitArray, BitTensor


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """Difference of one tensor between two states."""

    name: str
    num_elements: int
    num_changed: int
    max_ulp_step: int  # largest distance between old and new value, in representable values; 0: unchanged


def tensor_differences(old: Mapping[str, BitTensor], new: Mapping[str, BitTensor]) -> list[TensorDifference]:
    """Return one row per tensor, in order of names.

    Raises:
        WeightsError: names, dtypes or shapes differ.
    """
    return [
        TensorDifference(name, old[name].bits.size, count, max_ulp_step(old[name].bits, new[name].bits))
        for name, count in sorted(changed_elements(old, new).items())
    ]


def max_ulp_step(old: BitArray, new: BitArray) -> int:
    """Return the largest distance of an element's old and new value, in representable values.

    Both arrays have shape (elements,). From -0.0 to 0.0 the distance is one; NaNs lie beyond the infinities.
    """
    where = np.flatnonzero(old != new)
    if not where.size:
        return 0
    return int(np.abs(_places(old[where]) - _places(new[where])).max())


def _places(bits: BitArray) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Return the rank of each bit pattern among all values of the dtype, from the lowest."""
    top = 1 << (8 * bits.itemsize - 1)
    wide = bits.astype(np.int64)
    return np.where(wide >= top, top - 1 - (wide - top), wide + top)
