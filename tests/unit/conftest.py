"""Unit tests compute on one thread: what they compute is so small that more would spin and wait."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported, which test modules do
