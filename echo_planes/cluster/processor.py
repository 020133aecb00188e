"""Speed of this machine's processors, measured."""

from __future__ import annotations

import time
from functools import cache

ROWS, SIZE = 64, 1024  # of the products that are timed: 0.13 GFLOP each
ROUNDS = 5
MARGIN = 1.2  # how much faster bf16 must be to be worth its rounding


@cache
def bf16_is_faster() -> bool:
    """Return whether this CPU multiplies matrices faster in bf16 than in float32. Takes about 50 ms.

    It does with matrix units (AMX). Other CPUs have half the speed in bf16, or emulate it.
    """
    import torch

    seconds = {torch.float32: float("inf"), torch.bfloat16: float("inf")}
    with torch.inference_mode():
        pairs = [(torch.ones(ROWS, SIZE, dtype=kind), torch.ones(SIZE, SIZE, dtype=kind)) for kind in seconds]
        for _ in range(ROUNDS):  # in turn, so that other work on the machine meets both alike
            for rows, matrix in pairs:
                began = time.perf_counter()
                torch.nn.functional.linear(rows, matrix)
                seconds[rows.dtype] = min(seconds[rows.dtype], time.perf_counter() - began)
    return seconds[torch.float32] > MARGIN * seconds[torch.bfloat16]
