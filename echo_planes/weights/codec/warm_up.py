"""Warm-up: compiles the kernels of publishing and installing, or loads them from disk.

`python -m echo_planes.weights.codec.warm_up` takes seconds the first time, and half a second later. Run it
before training, so that no step waits for it.
"""

from __future__ import annotations

import numpy as np

from echo_planes.cluster.clock import MonotonicClock
from echo_planes.types import TensorSpec
from echo_planes.weights.codec.changes import Change, exchange
from echo_planes.weights.codec.choice import measure
from echo_planes.weights.codec.entry import decode, overwrite_payload
from echo_planes.weights.codec.kernels import upper_halves
from echo_planes.weights.codec.table import CODECS
from echo_planes.weights.digest import BIT_DTYPES, BitTensor


def warm_up() -> None:
    """Encode and decode a few weights with every codec, then do `warm_up_install`."""
    old, new = {}, {}
    for dtype, width in BIT_DTYPES.items():
        bits = np.arange(4096, dtype=width)
        old[dtype] = BitTensor(bits, dtype, bits.shape)
        new[dtype] = BitTensor(bits ^ (bits % 3 == 0).astype(width), dtype, bits.shape)
    for codec in CODECS:
        measure(codec, old, new, MonotonicClock())
    warm_up_install()


def warm_up_install() -> None:
    """Compile or load the kernels that install a patch, so that no install has to: it takes seconds."""
    for dtype in ("bfloat16", "float32"):
        bits = np.zeros(2, BIT_DTYPES[dtype])
        specs = {"": TensorSpec("", dtype, bits.shape)}
        payload = overwrite_payload([Change("", 0, np.arange(2, dtype=np.int32), bits)], specs)
        for change in decode("overwrite", payload, 0, specs, {"": bits}.__getitem__):
            exchange(change, bits)
    upper_halves(np.zeros(2, BIT_DTYPES["float32"]), np.zeros(2, BIT_DTYPES["bfloat16"]))


if __name__ == "__main__":
    warm_up()
