"""Numbers that an engine's process raises as it computes, and its parent reads without a call.

A call would be answered between two steps of the scheduler only, and one step may take longer than the watch
over a run waits for an answer.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

COUNTER = "ECHO_PLANES_WORK_COUNTER"  # variable of the engine's process: path of the file
_NUMBERS = 2


class WorkCounter:
    """Two numbers in a file that processes of one machine share.

    Args:
        path: the file, in memory-backed storage.
        create: make it anew; else it exists.
    """

    def __init__(self, path: Path, *, create: bool) -> None:
        self._numbers = np.memmap(path, np.uint64, "w+" if create else "r+", shape=(_NUMBERS,))

    @classmethod
    def of_this_process(cls) -> WorkCounter | None:
        """Return the counter that the parent made for this engine process; None: it made none."""
        path = os.environ.get(COUNTER)
        return None if path is None else cls(Path(path), create=False)

    def add_tokens(self, count: int) -> None:
        """Count tokens, of prompts too, that a step of the scheduler begins to compute."""
        self._numbers[0] += count

    def add_layer(self) -> None:
        """Count a layer that a forward pass begins with."""
        self._numbers[1] += 1

    @property
    def tokens(self) -> int:
        """Tokens computed so far."""
        return int(self._numbers[0])

    def __str__(self) -> str:
        return f"{self.tokens} tokens and {int(self._numbers[1])} layers computed"
