"""Parity with TRL: how recordings become batches, and that every verdict can be false."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.learning import parity
from bench.learning.intervals import difference, interval
from bench.learning.parity import Curve, Figures, Pair, Step

GRADIENTS = "cosine >= 0.9999 in each of 2 steps"
TOKENS = "the interval of the paired difference of tokens to 0.9 contains 0"


def figures(differences: list[int | None], cosines: tuple[float, float] = (1.0, 1.0)) -> Figures:
    steps = [Step(i, cosine, 1.0, 1.0, 0.0, 0.0) for i, cosine in enumerate(cosines)]
    pairs = [
        Pair(
            seed,
            Curve([0.5], [100], None if change is None else 20_000 + change),
            Curve([0.5], [100], 20_000),
        )
        for seed, change in enumerate(differences)
    ]
    return Figures(steps, steps, [replace(one, cosine=0.99) for one in steps], True, pairs)


def test_a_recording_loses_its_padding_and_keeps_its_groups() -> None:
    prompts = np.array([[0, 7], [8, 9]] * 8)
    answers = np.array([[4, 5, 6], [3, 2, 0]] * 8)
    recorded = {
        "prompt_ids": prompts,
        "prompt_mask": prompts > 0,
        "completion_ids": answers,
        "completion_mask": answers > 0,
        "logprobs": -answers.astype(np.float32),
        "rewards": np.arange(16, dtype=np.float32),
        "advantages": np.ones(16, np.float32),
    }
    batch = parity.recorded_batch(recorded, 3)
    assert batch.token_ids[:8].tolist() == [7, 4, 5, 6, 8, 9, 3, 2]
    assert batch.offsets[:3].tolist() == [0, 4, 8]
    assert batch.sampler_logprobs[:8].tolist() == [0, -4, -5, -6, 0, 0, -3, -2]
    assert batch.loss_mask[:8].tolist() == [False, True, True, True, False, False, True, True]
    assert batch.token_versions[:4].tolist() == [-1, 3, 3, 3]
    assert batch.advantage_groups.tolist() == [0] * 8 + [1] * 8
    assert np.isnan(batch.advantages).all()
    assert parity.recorded_batch(recorded, 3, given_advantages=True).advantages.tolist() == [1.0] * 16


def test_the_interval_is_students() -> None:
    found = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.mean == 3.0
    assert found.high - found.mean == pytest.approx(1.9634, abs=1e-3)  # 2.776 * 1.5811 / sqrt(5)
    assert not found.holds_zero


def test_the_interval_of_a_difference_has_one_variance() -> None:
    found = difference([1.0, 2.0, 3.0], [4.0])
    assert found.mean == -2.0
    assert found.half == pytest.approx(4.9687, abs=1e-3)  # 4.303 * sqrt(2 / 2 * (1 / 3 + 1))
    assert difference([1.0], [4.0]).half == math.inf


@pytest.mark.parametrize("worst", [0.9998, math.nan])
def test_one_step_that_is_off_is_enough(worst: float) -> None:
    assert parity.verdicts(figures([1, -1], (1.0, 0.9999)))[GRADIENTS]
    assert not parity.verdicts(figures([1, -1], (1.0, worst)))[GRADIENTS]


def test_the_control_must_differ() -> None:
    name = "control: dapo's average of tokens is told apart in each step"
    same = figures([1, -1])
    assert parity.verdicts(same)[name]
    assert not parity.verdicts(replace(same, steps_other=same.steps))[name]


@pytest.mark.parametrize(
    ("differences", "true"),
    [
        ([300, -200, 100, -400, 0], True),
        ([1300, 800, 1100, 600, 1000], False),
        ([300, -200, 100, -400, None], False),  # a run that never got there
    ],
)
def test_tokens_differ_where_the_interval_leaves_zero_out(differences: list[int | None], true: bool) -> None:
    assert parity.verdicts(figures(differences))[TOKENS] is true


def test_other_prompts_are_told() -> None:
    name = "TRL and we train on the same prompts"
    assert parity.verdicts(figures([1, -1]))[name]
    assert not parity.verdicts(replace(figures([1, -1]), same_prompts=False))[name]


def test_without_trl_nothing_is_claimed_and_it_is_said(tmp_path: Path) -> None:
    found = parity.run(tmp_path / "python")
    assert parity.verdicts(found) == {}
    assert list(parity.lines(found)) == [
        f"parity with TRL: skipped: there is no {tmp_path}/python; bench/trl_baseline.py says how it is made"
    ]
