"""This machine's processors: which number format they multiply faster, and how many of them are free."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

ROWS, SIZE = 64, 1024  # of the products that are timed: 0.13 GFLOP each
ROUNDS = 5
MARGIN = 1.2  # how much faster bf16 must be to be worth its rounding
INTERVAL_S = 0.2  # over which the use of cores is measured; the kernel counts in hundredths of a second
SLACK = 0.4  # of a core, that others may use beside a thread


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


class Threads:
    """Number of threads of a process: the cores that other processes leave, measured again and again.

    A kernel waits for the slowest of its threads, and one that shares its core with another process makes the
    rest wait. So a process takes fewer threads while others compute, and more while they wait.

    Args:
        cores: of the machine, or those that the process may use.
        most, least: threads that it may take; if they are equal, nothing is measured.
        machine_s, own_s: seconds of all cores that were used so far, by all processes and by this one.
    """

    def __init__(
        self,
        cores: int,
        most: int,
        least: int = 1,
        *,
        clock: Callable[[], float] = time.monotonic,
        machine_s: Callable[[], float] | None = None,
        own_s: Callable[[], float] = time.process_time,
    ) -> None:
        self._cores, self._most, self._least = cores, most, least
        self._clock, self._machine_s, self._own_s = clock, machine_s or used_s, own_s
        self._number = most
        self._last = self._read()

    def now(self) -> int:
        """Return the number of threads to take; a new one once in `INTERVAL_S` at most."""
        if self._least < self._most and self._clock() - self._last[0] >= INTERVAL_S:
            found = self._read()
            passed_s, machine_s, own_s = (new - old for new, old in zip(found, self._last, strict=True))
            self._last = found
            free = self._cores - max(machine_s - own_s, 0.0) / passed_s
            fits = min(max(math.floor(free + SLACK), self._least), self._most)
            # Half of what is free at a time: else all that find it free would take it at once.
            self._number = min(fits, math.ceil((self._number + fits) / 2))
        return self._number

    def __str__(self) -> str:
        return str(self._most) if self._least == self._most else f"{self._least} to {self._most}"

    def _read(self) -> tuple[float, float, float]:
        return self._clock(), self._machine_s(), self._own_s()


def used_s() -> float:
    """Return the seconds that this machine's cores were used so far, added up (Linux, proc(5))."""
    user, nice, system, _, _, irq, softirq, *_ = map(
        int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9]
    )
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
