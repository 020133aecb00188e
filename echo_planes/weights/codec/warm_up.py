"""Compiles what publishing and installing run, or loads it from disk.

`python -m echo_planes.weights.codec.warm_up` takes seconds the first time, which should not fall between two
steps, and half a second later.
"""

from __future__ import annotations

import numpy as np

from echo_planes.cluster.clock import MonotonicClock
from echo_planes.weights.codec import exchange
from echo_planes.weights.codec.choice import PATCH_CODECS, measure
from echo_planes.weights.digest import BIT_DTYPES, BitTensor


def warm_up() -> None:
    """Every codec once, encoded and decoded, on a few weights."""
    old, new = {}, {}
    for dtype, width in BIT_DTYPES.items():
        bits = np.arange(4096, dtype=width)
        old[dtype] = BitTensor(bits, dtype, bits.shape)
        new[dtype] = BitTensor(bits ^ (bits % 3 == 0).astype(width), dtype, bits.shape)
    for codec in PATCH_CODECS:
        measure(codec, old, new, MonotonicClock())
    exchange.warm_up()


if __name__ == "__main__":
    warm_up()
