"""Verdicts of `bench.sparse`: each can be false."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench.sparse import verdicts
from bench.sparse_distil import distil_verdicts, of_mean

SAME = {
    "tokens": 10_000,
    "answers": 16,
    "equal answers": 16,
    "largest difference, nats": 0.0,
    "equal answers with 4 pages": 3,
}
GOOD: dict[str, Any] = {
    "parity": {"float32": dict(SAME), "bfloat16": dict(SAME)},
    "audit": {"5th percentile": 0.999},
    "pages": {
        "steps": 1000,
        "tokens as by brute force": 0.999,
        "tails": {"best": {0: 0.9, 1: 0.8}, "newest": {0: 0.9, 1: 0.74}},
    },
    "schedule": {
        "schedule": [[{"share below target, most": 0.05}] * 2] * 3,
        "fixed": [
            [{"share below target, least": 0.0}, {"share below target, least": 0.06}] for _ in range(3)
        ],
        "range over bins, mean": 0.1,
        "range over bins, 5th percentile": 0.31,
    },
    "guard": {"runs": [{"answers until the rise": 64, "false alarm": False} for _ in range(3)]},
    "learner": {"S = 0": {"median difference": 0.004}, "S = 3": {"mean, learner": 0.8, "mean, audit": 0.9}},
    "learning": {
        kind: [{"last": end} for _ in range(3)]
        for kind, end in (
            ("dense", 0.5),
            ("schedule", 0.49),
            ("distilled", 0.49),
            ("two pages", 0.2),
            ("guarded", 0.51),
        )
    },
    "distil": {"seeds": [{"bins": [{"rise": [0.01, 0.05]}] * 4} for _ in range(3)]},
    "speed": {"1024": {"stock / sparse": 0.95}, "16384": {"stock / sparse": 1.5}},
}


def _with_numbers(tree: dict[str, Any]) -> dict[str | int, Any]:
    """JSON makes texts of the numbers of bins."""
    return {int(key) if key in ("0", "1") else key: value for key, value in tree.items()}


def test_all_hold_where_all_is_well() -> None:
    assert len(verdicts(GOOD)) == 20
    assert all(verdicts(GOOD).values())


@pytest.mark.parametrize(
    ("path", "value", "claim"),
    [
        (("parity", "float32", "tokens"), 9_999, "float32"),
        (("parity", "float32", "equal answers"), 15, "float32"),
        (("parity", "bfloat16", "largest difference, nats"), 1e-4, "bfloat16"),
        (("parity", "bfloat16", "equal answers with 4 pages"), 16, "bfloat16"),
        (("audit", "5th percentile"), 0.99, "dense pass"),
        (("pages", "steps"), 999, "1,000 steps"),
        (("pages", "tokens as by brute force"), 0.9, "1,000 steps"),
        (("pages", "tails", "newest", 1), 0.76, "newest"),
        (("schedule", "schedule", 2, 1, "share below target, most"), 0.051, "calibrated schedule keeps"),
        (("schedule", "fixed", 2, 1, "share below target, least"), 0.04, "fixed budget"),
        (("schedule", "range over bins, mean"), 0.2, "the tail tells"),
        (("guard", "runs", 2, "answers until the rise"), 65, "cut to a quarter"),
        (("guard", "runs", 2, "answers until the rise"), 0, "cut to a quarter"),
        (("guard", "runs", 0, "false alarm"), True, "whole budget"),
        (("learner", "S = 0", "median difference"), 0.006, "median within"),
        (("learner", "S = 3", "mean, learner"), 0.95, "three updates ahead"),
        (("learning", "schedule", 0, "last"), 0.4, "calibrated schedule ends"),
        (("learning", "distilled", 2, "last"), 0.4, "with distillation"),
        (("learning", "two pages", 1, "last"), 0.41, "two pages"),
        (("learning", "guarded", 1, "last"), 0.4, "with the guard"),
        (("distil", "seeds", 2, "bins", 3, "rise", 0), -0.01, "of a budget rises"),
        (("speed", "1024", "stock / sparse"), 0.94, "at 1k"),
        (("speed", "16384", "stock / sparse"), 1.49, "at 16k"),
    ],
)
def test_each_verdict_can_be_false(path: tuple[str | int, ...], value: float, claim: str) -> None:
    told = json.loads(json.dumps(GOOD), object_hook=_with_numbers)  # no part is shared
    place = told
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (false,) = (name for name, holds in verdicts(told).items() if not holds)
    assert claim in false


def test_a_rise_of_the_mean_may_hold_where_a_seeds_does_not() -> None:
    def held(*intervals: tuple[float, float]) -> list[bool]:
        told = {"seeds": [{"bins": [{"rise": list(one)}, {"rise": [0.1, 0.2]}]} for one in intervals]}
        return list(distil_verdicts(told).values())

    assert of_mean([(0.0, 0.06), (0.0, 0.08)]) == pytest.approx((0.035 - 0.025, 0.035 + 0.025))
    assert held((0.01, 0.05), (0.02, 0.06)) == [True, True]
    assert held((-0.01, 0.05), (0.02, 0.06)) == [False, True]
    assert held((-0.09, 0.05), (-0.02, 0.06)) == [False, False]
