"""Verdicts of the benchmark of a model of half a billion weights."""

from __future__ import annotations

from typing import Any

from bench import size

GOOD: dict[str, Any] = {
    "steps": size.STEPS,
    "steps with gradients": size.STEPS,
    "digest_mismatches": 0,
    "learner, peak / arithmetic": 1.08,
    "peak_bytes": {"all": 20 * 2**30},
}


def test_each_verdict_can_be_false() -> None:
    assert all(size.verdicts(GOOD).values())
    for wrong in (
        {"steps with gradients": 1},
        {"digest_mismatches": 1},
        {"learner, peak / arithmetic": 1.2},
        {"learner, peak / arithmetic": 0.8},
        {"peak_bytes": {"all": 25 * 2**30}},
    ):
        assert list(size.verdicts({**GOOD, **wrong}).values()).count(False) == 1
