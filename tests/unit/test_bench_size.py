"""Verdicts of the benchmark of a model of half a billion weights."""

from __future__ import annotations

from typing import Any

from bench import size

ONE: dict[str, Any] = {
    "steps": size.STEPS,
    "steps with gradients": size.STEPS,
    "digest_mismatches": 0,
    "learner, peak / arithmetic": 1.08,
    "peak_bytes": {"all": 20 * 2**30, size.LEARNER: 10 * 2**30},
}
FEW = {"peak_bytes": {"all": 14 * 2**30, size.LEARNER: 4 * 2**30}}


def test_each_verdict_can_be_false() -> None:
    good = {size.ALL: ONE, size.ADAPTERS: {**ONE, **FEW}}
    assert all(size.verdicts(good).values())
    for wrong in (
        {"steps with gradients": 1},
        {"digest_mismatches": 1},
        {"learner, peak / arithmetic": 1.2},
        {"learner, peak / arithmetic": 0.8},
        {"peak_bytes": {"all": 25 * 2**30, size.LEARNER: 4 * 2**30}},
        {"peak_bytes": {"all": 14 * 2**30, size.LEARNER: 6 * 2**30}},
    ):
        changed = {**good, size.ADAPTERS: {**good[size.ADAPTERS], **wrong}}
        assert list(size.verdicts(changed).values()).count(False) == 1
