"""Tests of minutes: run where ECHO_PLANES_THOROUGH is set, as by `make proof`; elsewhere less, or none."""

from __future__ import annotations

import os

import pytest

THOROUGH = "ECHO_PLANES_THOROUGH" in os.environ
takes_minutes = pytest.mark.skipif(not THOROUGH, reason="takes minutes: set ECHO_PLANES_THOROUGH=1")


def examples(count: int) -> int:
    """Number of `count` drawn examples or seeds that are tried: all where it is thorough, else a quarter."""
    return count if THOROUGH else max(1, count // 4)
