"""Unit and simulation tests must never start Ray: there it raises."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]

# The same examples every time, so that a change is judged alone, and as long as the machine needs for each;
# HYPOTHESIS_PROFILE=explore seeks new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", derandomize=False, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.fixture(autouse=True)
def _no_ray(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "integration" not in request.path.parts:

        def refuse(*args: object, **options: object) -> None:
            raise AssertionError("this test started Ray; only tests/integration may")

        if "ray" in sys.modules:
            monkeypatch.setattr("ray.init", refuse)
        else:
            monkeypatch.setitem(sys.modules, "ray", None)  # `import ray` raises ImportError
