"""Verdicts of `bench.sparse`: each can be false."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from bench.sparse import verdicts

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
    "speed": {"1024": {"stock / sparse": 0.95}, "16384": {"stock / sparse": 1.5}},
}


def test_all_hold_where_all_is_well() -> None:
    assert len(verdicts(GOOD)) == 5
    assert all(verdicts(GOOD).values())


@pytest.mark.parametrize(
    ("path", "value", "claim"),
    [
        (("parity", "float32", "tokens"), 9_999, "float32"),
        (("parity", "float32", "equal answers"), 15, "float32"),
        (("parity", "bfloat16", "largest difference, nats"), 1e-4, "bfloat16"),
        (("parity", "bfloat16", "equal answers with 4 pages"), 16, "bfloat16"),
        (("audit", "5th percentile"), 0.99, "dense pass"),
        (("speed", "1024", "stock / sparse"), 0.94, "at 1k"),
        (("speed", "16384", "stock / sparse"), 1.49, "at 16k"),
    ],
)
def test_each_verdict_can_be_false(path: tuple[str, ...], value: float, claim: str) -> None:
    told = copy.deepcopy(GOOD)
    place = told
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (false,) = (name for name, holds in verdicts(told).items() if not holds)
    assert claim in false
