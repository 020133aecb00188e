"""Calibration and cost model of sparse decoding, against loops and sums by hand."""

from __future__ import annotations

import numpy as np
import pytest

from echo_planes.config.kv_schedule import Schedule
from echo_planes.rollout.sparsity.calibration import LEAST_ANSWERS, Surface
from echo_planes.rollout.sparsity.cost import Decoder, mean_read_tokens, token_s
from echo_planes.sparsity import as_text, main


def surface(shares: dict[tuple[int, int], float], answers: int = 200, tail_share: float = 0.05) -> Surface:
    """By budget and bin, the share of tokens below the target."""
    made, rng = Surface(100, 0.86, tail_share), np.random.default_rng(0)
    for (pages, place), share in shares.items():
        for _ in range(answers):
            made.add(pages, 100 * place, np.where(rng.random(100) < share, 0.5, 0.99).tolist())
    return made


def test_the_smallest_budget_that_keeps_the_target_is_chosen_in_each_bin() -> None:
    made = surface({(8, 0): 0.02, (16, 0): 0.01, (8, 1): 0.2, (16, 1): 0.03, (8, 2): 0.3, (16, 2): 0.2})
    assert made.schedule(300) == [8, 16, 0]
    assert made.schedule(1000) == [8, 16, 0, 0]  # what was not measured is dense


def test_where_less_may_be_below_the_target_budgets_are_larger() -> None:
    shares = {(8, 0): 0.02, (16, 0): 0.002}
    assert surface(shares).schedule(100) == [8]
    strict = surface(shares, tail_share=0.01)
    assert strict.schedule(100) == [16]
    assert "at most 1.0% of the tokens" in as_text(strict, [16])


def test_a_budget_does_not_fall_with_the_length() -> None:
    made = surface({(8, 0): 0.2, (16, 0): 0.01, (8, 1): 0.01, (16, 1): 0.01})
    assert made.schedule(200) == [16, 16]


def test_a_target_that_may_be_missed_is_not_kept() -> None:
    assert surface({(8, 0): 0.045}, answers=40).schedule(100) == [0]


def test_a_bin_with_too_few_answers_takes_the_budget_of_the_next_longer_one() -> None:
    made = surface({(8, 1): 0.01, (16, 1): 0.01, (16, 3): 0.01})
    made.add(8, 0, [0.99] * 50)
    assert made.schedule(400) == [8, 8, 16, 16]
    assert made.schedule(500) == [8, 8, 16, 16, 0]


def test_bins_with_too_few_answers_say_so_and_are_dense() -> None:
    made = surface({(8, 0): 0.01}, answers=LEAST_ANSWERS - 1)
    assert made.schedule(100) == [0]
    assert "too few" in as_text(made, [0])
    made = surface({(8, 0): 0.01}, answers=LEAST_ANSWERS)
    assert made.schedule(100) == [8]
    assert "0.990 *" in as_text(made, [8])


@pytest.mark.parametrize("prompt", [1, 100, 5000])
def test_tokens_read_are_those_of_a_loop(prompt: int) -> None:
    schedule = Schedule(pages=(8, 0, 20), bin_tokens=1000)
    total = 0.0
    for length in range(prompt + 1, prompt + 501):
        pages = -(-length // 16)
        budget = schedule.pages[min((length - 1) // 1000, 2)] or pages
        if budget < pages:
            total += 0.25 * length + 0.75 * min(length, length - (pages - budget) * 16 + pages / 2)
        else:
            total += length
    assert mean_read_tokens(schedule, prompt, 500, num_layers=8) == pytest.approx(total / 500)
    assert mean_read_tokens(None, prompt, 500) == pytest.approx(prompt + 250.5)


def test_a_token_takes_reading_or_arithmetic_whichever_is_longer() -> None:
    model = Decoder(num_params=1e9, num_layers=2, kv_numbers=1000, shared=4)
    assert token_s(model, 500, 10, bytes_per_s=1e9, operations_per_s=1e15) == pytest.approx(
        (2e9 + 10 * 2 * 1000 * 500) / 1e9
    )
    assert token_s(model, 500, 10, bytes_per_s=1e15, operations_per_s=1e9) == pytest.approx(
        10 * (2e9 + 2 * 4 * 1000 * 500) / 1e9
    )


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["sweep"], "unknown command"),
        (["calibrate"], "out=FILE.yaml"),
        (["calibrate", "out=a.json"], "ends with .yaml"),
        (["calibrate", "out=a.yaml", "prompts=3"], "prompts=3"),
        (["calibrate", "out=a.yaml", "budgets=x"], "budgets=x"),
        (["calibrate", "out=a.yaml", "budgets=2"], "budgets=2: the first 1"),
        (["calibrate", "out=a.yaml", "budgets=8", "sampling.temperature=0.7"], "temperature=0.7"),
        (
            [
                "calibrate",
                "out=a.yaml",
                "budgets=8",
                "sampling.top_p=0.9",
                "sparse.audit_share=0",
                "sparse.guard=off",
            ],
            "top_p=0.9: every answer",
        ),
        (["calibrate", "out=a.yaml", "budgets=8", "sparse.audit_share=0"], "audit_share=0 audits none"),
        (["calibrate", "out=a.yaml", "model.max_model_len=100"], "none can be left out"),
    ],
)
def test_mistakes_of_a_calibration_are_one_line(
    words: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert told.count("\n") == 1
    assert error in told
