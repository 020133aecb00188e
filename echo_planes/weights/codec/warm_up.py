"""Compiles what publishing and installing run, or loads it from disk.

`python -m echo_planes.weights.codec.warm_up` takes seconds the first time, which should not fall between two
steps, and half a second later.
"""

from __future__ import annotations

import numpy as np

from echo_planes.cluster.clock import MonotonicClock
from echo_planes.types import TensorSpec
from echo_planes.weights.codec.changes import Change, exchange
from echo_planes.weights.codec.choice import PATCH_CODECS, measure
from echo_planes.weights.codec.entry import decode, overwrite_payload
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
    warm_up_install()


def warm_up_install() -> None:
    """Compile, or load, what installs a patch in an engine: that takes seconds that no pause should have."""
    for dtype in ("bfloat16", "float32"):
        bits = np.zeros(2, BIT_DTYPES[dtype])
        specs = {"": TensorSpec("", dtype, bits.shape)}
        payload = overwrite_payload([Change("", 0, np.arange(2, dtype=np.int32), bits)], specs)
        for change in decode("overwrite", payload, 0, specs, {"": bits}.__getitem__):
            exchange(change, bits)


if __name__ == "__main__":
    warm_up()
