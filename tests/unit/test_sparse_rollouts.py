"""Schedules of KV budgets, the choice of pages, and acceptance: against loops and exact sums."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bench.sparse_reference import chosen_pages
from echo_planes.config.kv_schedule import Schedule
from echo_planes.errors import ConfigError, TaskError
from echo_planes.rollout.sparsity.acceptance import Histogram, acceptance
from echo_planes.rollout.sparsity.pages import add_keys, choose_pages

# --- schedules ---------------------------------------------------------------------------------


def test_a_budget_follows_from_the_length_of_the_sequence() -> None:
    schedule = Schedule(pages=(8, 16, 0), bin_tokens=200)
    lengths = np.array([1, 128, 129, 200, 201, 400, 401, 5000])
    assert schedule.bins(lengths).tolist() == [0, 0, 0, 0, 1, 1, 2, 2]
    assert schedule.budgets(lengths).tolist() == [1, 8, 8, 8, 13, 16, 26, 313]


@pytest.mark.parametrize("seed", range(20))
def test_the_tokens_read_are_those_of_the_pages_read(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = (16, 32)[seed % 2]
    lengths = rng.integers(1, 3000, 50)
    schedule = Schedule(pages=(int(rng.integers(3, 60)), 0, 99), bin_tokens=500, page_tokens=size)
    for length, budget, count, tokens in zip(
        lengths,
        schedule.budgets(lengths),
        schedule.pages_of(lengths),
        schedule.read_tokens(lengths),
        strict=True,
    ):
        assert (count - 1) * size < length <= count * size
        # All pages are full but the last one, which is always read.
        assert tokens == (budget - 1) * size + length - (count - 1) * size
        assert 1 <= tokens <= length


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"pages": ()}, "no bins"),
        ({"pages": (8, 2)}, "bin 1 reads 2 pages"),
        ({"pages": (8,), "last_pages": 0}, "sparse.last_pages=0"),
        ({"pages": (8,), "bin_tokens": 0}, "sparse.bin_tokens=0"),
        ({"pages": (8,), "dense_layers": -1}, "sparse.dense_layers=-1"),
        ({"pages": (-4,)}, "bin 0 reads -4 pages"),
        ({"pages": (8,), "page_tokens": 64}, "sparse.page_tokens=64"),
        ({"pages": (8,), "number": -1}, "sparse.number=-1"),
    ],
)
def test_a_schedule_that_cannot_be_is_one_line(fields: dict[str, int], why: str) -> None:
    with pytest.raises(ConfigError, match=why) as error:
        Schedule(**fields)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


# --- pages -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(50))
def test_pages_are_those_of_a_loop(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, heads, size = int(rng.integers(1, 6)), int(rng.integers(1, 4)), 8
    first, last = int(rng.integers(0, 3)), int(rng.integers(1, 4))
    pages = rng.integers(1, 40, rows)
    budgets = np.minimum(pages, rng.integers(first + last, 30, rows))
    blocks = rng.permutation(1000)[: rows * int(pages.max())].reshape(rows, -1)
    queries, landmarks = (
        rng.integers(-3, 4, shape).astype(np.float32)  # small integers: exact, and many are equal
        for shape in ((rows, heads, size), (1000, heads, size))
    )
    table = np.zeros((rows * heads, int(budgets.max())), np.int32)
    choose_pages(queries, landmarks, blocks, pages, budgets, first, last, table)
    for row in range(rows):
        for head in range(heads):
            scores = landmarks[blocks[row, : pages[row]], head] @ queries[row, head]
            expected = chosen_pages(scores.astype(np.float64), int(budgets[row]), first, last)
            read = table[row * heads + head, : budgets[row]]
            assert read.tolist() == (blocks[row, expected] * heads + head).tolist()
            assert expected[-1] == pages[row] - 1  # partly filled, so it comes last


@pytest.mark.parametrize("broken", ["a query", "a landmark", "all"])
def test_nothing_is_written_beyond_a_budget_where_scores_are_no_numbers(broken: str) -> None:
    """A diverged policy: its answers are lost anyway, the memory beside the table is not."""
    queries, landmarks = np.ones((2, 1, 4), np.float32), np.ones((40, 1, 4), np.float32)
    if broken != "a landmark":
        queries[1] = np.nan
    if broken != "a query":
        landmarks[7] = np.nan
    pages, budgets = np.full(2, 40), np.full(2, 5)
    guarded = np.full((4, 5), -1, np.int32)
    table = guarded[:2]
    choose_pages(queries, landmarks, np.arange(40)[None].repeat(2, 0), pages, budgets, 1, 2, table)
    assert (guarded[2:] == -1).all()
    assert table.max() <= 39


@pytest.mark.parametrize("size", [16, 32])
def test_landmarks_are_the_sums_of_the_keys_that_are_there_now(size: int) -> None:
    rng = np.random.default_rng(0)
    landmarks = rng.normal(size=(6, 2, 4)).astype(np.float32)  # what others left behind
    untouched = landmarks.copy()
    keys = rng.normal(size=(3 * size + 12, 2, 4)).astype(np.float32)
    third, first = np.arange(3 * size, 4 * size + 10), np.arange(size)
    slots = np.concatenate([third, [-1, -1], first, third[:size]])
    for start in range(0, len(slots), 7):  # pieces, as a batch after another writes them
        add_keys(landmarks, slots[start : start + 7], keys[start : start + 7], size)
    assert landmarks[0] == pytest.approx(keys[size + 12 : 2 * size + 12].sum(0), abs=1e-5)
    assert landmarks[3] == pytest.approx(keys[2 * size + 12 :].sum(0), abs=1e-5)  # its block was used twice
    assert landmarks[4] == pytest.approx(keys[size : size + 10].sum(0), abs=1e-5)
    for block in (1, 2, 5):
        assert (landmarks[block] == untouched[block]).all()


# --- acceptance --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(200))
def test_bounds_hold_the_exact_acceptance(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size, k = int(rng.integers(1, 60)), int(rng.integers(1, 25))
    p, q = rng.dirichlet(np.full(size, rng.choice([0.05, 1.0])), 2)
    if seed % 3 == 0:
        q = p + rng.uniform(0, 0.2) * (q - p)
    exact = float(np.minimum(p, q).sum())
    top = [
        [(int(token), math.log(max(float(one[token]), 1e-300))) for token in np.argsort(-one)[:k]]
        for one in (p, q)
    ]
    found = acceptance(*top)
    assert found.lower - 1e-12 <= exact <= found.upper + 1e-12
    assert found.lower <= found.likely <= found.upper
    if k >= size:
        assert found.upper - found.lower < 1e-9


def test_the_upper_bound_shares_out_what_the_lists_leave_open() -> None:
    """By hand. p = a .5, b .3 and .2 beyond; q = a .4, c .1 and .5 beyond.

    b has at most .3 in both, c at most .1, others at most .1, the rest of p: .4 + .3 + .1 + .1. It is reached
    by p = a .5, b .3, c .1, d .1 and q = a .4, b .3, c .1, d .1, e .1.
    """
    p, q = (
        [(token, math.log(share)) for token, share in one]
        for one in (((1, 0.5), (2, 0.3)), ((1, 0.4), (3, 0.1)))
    )
    for found in (acceptance(p, q), acceptance(q, p)):
        assert (found.lower, found.upper) == (pytest.approx(0.4), pytest.approx(0.9))
        # Of what is seen of both, .8, half agrees; so half of the .5 that is open does.
        assert found.likely == pytest.approx(0.65)


def test_equal_distributions_are_accepted_whole() -> None:
    top = [(1, math.log(0.5)), (2, math.log(0.25)), (3, math.log(0.25))]
    found = acceptance(top, top)
    assert found.lower == pytest.approx(1.0) == found.upper
    found = acceptance(top[:1], top[:1])
    assert (found.lower, found.likely, found.upper) == (pytest.approx(0.5), pytest.approx(1.0), 1.0)
    found = acceptance(top[:1], [(9, 0.0)])
    assert (found.lower, found.likely, found.upper) == (0.0, 0.0, pytest.approx(0.5))


def test_without_log_probabilities_there_is_no_acceptance() -> None:
    with pytest.raises(TaskError, match="top_logprobs"):
        acceptance([], [(1, 0.0)])


def test_a_histogram_tells_the_tail_and_the_mean_of_each_bin() -> None:
    rng = np.random.default_rng(0)
    told = Histogram()
    kept: dict[int, list[float]] = {0: [], 1: []}
    for _ in range(40):
        bins, alphas = rng.integers(0, 2, 100).tolist(), rng.beta(20, 1, 100).tolist()
        told.add(bins, alphas)
        for place, alpha in zip(bins, alphas, strict=True):
            kept[place].append(alpha)
    for place, alphas in kept.items():
        assert told.tail(place) == pytest.approx(np.percentile(alphas, 5), abs=2e-3)
        assert told.mean(place) == pytest.approx(np.mean(alphas), abs=1e-3)
    assert math.isnan(told.tail(7))
    assert math.isnan(told.mean(7))
    whole = Histogram()
    whole.add([0, 0], [1.0, 1.0])
    assert whole.tail(0) == 0.999  # the last cell
