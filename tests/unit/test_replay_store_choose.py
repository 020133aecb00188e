"""Choosing groups: the five selectors, against what they say they do."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from echo_planes.data.store.choose import REWARD_FLOOR, STALENESS_DECAY, Selector, choose
from echo_planes.data.store.index import Fate, GroupIndex
from echo_planes.data.store.segment import GROUP_ENTRY
from echo_planes.types import IntArray

SELECTORS: tuple[Selector, ...] = ("fifo", "freshest", "uniform", "staleness", "reward")


def index_of(versions: list[int], rewards: list[float] | None = None) -> GroupIndex:
    """One group per version, in order of arrival."""
    index = GroupIndex()
    for version, reward in zip(versions, rewards or [0.0] * len(versions), strict=True):
        group = np.zeros(1, GROUP_ENTRY)
        group["version"], group["reward_mean"], group["num_rows"] = version, reward, 1
        number = index.num_groups
        index.add_new(0, [(0, 0, number, 1)], group, [f"g{number}"])
    return index


def pick(
    index: GroupIndex, count: int, selector: Selector, *, min_version: int = 0, seed: int = 0, urgent: int = 0
) -> list[int]:
    chosen: IntArray = choose(
        index,
        count,
        selector=selector,
        min_version=min_version,
        rng=np.random.default_rng(seed),
        urgent=urgent,
    )
    numbers: list[int] = chosen.tolist()
    return numbers


def test_fifo_takes_the_oldest_arrivals_and_freshest_the_newest_versions() -> None:
    index = index_of([3, 1, 2, 3, 1, 2])
    assert pick(index, 3, "fifo") == [0, 1, 2]
    assert pick(index, 3, "fifo", min_version=2) == [0, 2, 3]
    assert pick(index, 3, "freshest") == [3, 0, 5]
    index.settle(np.array([0, 3]), Fate.TRAINED, 1)
    assert pick(index, 3, "fifo") == [1, 2, 4]
    assert pick(index, 3, "freshest") == [5, 2, 4]


@pytest.mark.parametrize("selector", SELECTORS)
def test_the_urgent_oldest_versions_always_go_first(selector: Selector) -> None:
    index = index_of([5] * 40 + [3, 2, 5, 2])
    chosen = pick(index, 6, selector, urgent=3)
    assert chosen[:3] == [41, 43, 40]
    assert len(set(chosen)) == 6


@pytest.mark.parametrize("selector", SELECTORS)
def test_only_buffered_admissible_groups_each_once_and_all_of_them_if_need_be(selector: Selector) -> None:
    rng = np.random.default_rng(4)
    versions = rng.integers(0, 50, 9000).tolist()
    index = index_of(versions, rng.random(9000).tolist())
    gone: set[int] = set()
    for start in range(0, 8000, 500):
        leaving = rng.permutation(np.arange(start, start + 500))[:450]
        index.settle(leaving, Fate.TRAINED, 0)
        gone |= set(leaving.tolist())
        expected = {n for n, v in enumerate(versions) if v >= 20 and n not in gone}
        assert index.num_buffered(20) == len(expected)
        chosen = pick(index, 100, selector, min_version=20)
        assert len(set(chosen)) == 100
        assert set(chosen) <= expected
    assert set(pick(index, len(expected), selector, min_version=20)) == expected
    with pytest.raises(ValueError, match=f"cannot choose {len(expected) + 1} of {len(expected)} groups"):
        pick(index, len(expected) + 1, selector, min_version=20)


def shares(index: GroupIndex, selector: Selector, of: list[int], draws: int = 4000) -> list[float]:
    """Share of draws in which each of `of` is the first drawn."""
    seen = Counter(pick(index, 1, selector, seed=seed)[0] for seed in range(draws))
    return [seen[number] / draws for number in of]


@pytest.mark.parametrize("exactly", [False, True])
def test_draws_have_the_weights_they_should(monkeypatch: pytest.MonkeyPatch, exactly: bool) -> None:
    """By rejection, and where that gives up. The bound is 5 standard deviations of the worst share."""
    if exactly:
        monkeypatch.setattr("echo_planes.data.store.choose._ROUNDS", 0)
    tolerance = 5 * 0.5 / 4000**0.5
    index = index_of([1, 2, 3, 3, 3, 9, 9, 9], [0.0, 5.0, 10.0, 10.0, 10.0, 1.0, 1.0, 1.0])
    index.settle(np.array([3, 5, 6, 7]), Fate.DROPPED, -1)
    left = [0, 1, 2, 4]
    assert shares(index, "uniform", left) == pytest.approx([0.25] * 4, abs=tolerance)
    stale = np.array([STALENESS_DECAY**2, STALENESS_DECAY, 1.0, 1.0])
    assert shares(index, "staleness", left) == pytest.approx((stale / stale.sum()).tolist(), abs=tolerance)
    reward = np.array([REWARD_FLOOR, (1 + REWARD_FLOOR) / 2, 1.0, 1.0])
    assert shares(index, "reward", left) == pytest.approx((reward / reward.sum()).tolist(), abs=tolerance)


def test_very_old_versions_and_rewards_that_are_no_numbers_can_still_be_drawn() -> None:
    index = index_of([0, 5000, 5000], [float("nan"), float("inf"), 1.0])
    for selector in SELECTORS:
        assert sorted(pick(index, 3, selector)) == [0, 1, 2]


def test_an_unknown_selector_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown selector 'best'"):
        pick(index_of([1]), 1, "best")  # type: ignore[arg-type]
