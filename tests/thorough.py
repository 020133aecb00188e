"""Tests that take minutes run where ECHO_PLANES_THOROUGH is set, as by `make proof`; elsewhere they skip."""

from __future__ import annotations

import os

import pytest

THOROUGH = "ECHO_PLANES_THOROUGH" in os.environ
takes_minutes = pytest.mark.skipif(not THOROUGH, reason="takes minutes: set ECHO_PLANES_THOROUGH=1")
