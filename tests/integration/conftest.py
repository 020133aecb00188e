"""The order of the files: the long ones first, so that two processes end at about the same time."""

from __future__ import annotations

import pytest

# Files whose whole time is one or two real jobs. What is not named comes after them, as it is collected.
LONG_FIRST = (
    "test_fleet_job.py",
    "test_long_run.py",
    "test_preemption.py",
    "test_vllm_engine.py",
    "test_ray_autoscaler.py",
    "test_vllm_parallel.py",
    "test_faults.py",
    "test_job.py",
    "test_learner.py",
    "test_run.py",
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: position for position, name in enumerate(LONG_FIRST)}
    items.sort(key=lambda item: place.get(item.path.name, len(LONG_FIRST)))
