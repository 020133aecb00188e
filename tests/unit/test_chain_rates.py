"""The number of chains, learnt from what the seeds of one broadcast after another receive."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_planes.weights.chain.plan import num_chains
from echo_planes.weights.chain.rates import RETRY_BROADCASTS, ChainRates, next_count


class Links:
    """An uplink that seeds share fairly, and workers that carry so much each; the first ones are seeds."""

    def __init__(self, uplink: float, able: list[float], noise: float = 0.0, seed: int = 0) -> None:
        self.uplink = uplink
        self.able = able
        self._noise = noise
        self._rng = random.Random(seed)

    def broadcast(self, rates: ChainRates) -> int:
        """One with the chains as planned. Returns their number."""
        count = min(rates.count, len(self.able))
        got = self._shares(count)
        for place in range(count, len(self.able)):  # no relay gets more than the one before it
            got.append(min(self.able[place], got[place - count]))
        seen = {f"w{place}": rate * self._rng.uniform(1 - self._noise, 1) for place, rate in enumerate(got)}
        rates.take([f"w{place}" for place in range(count)], seen, len(self.able))
        return count

    def counts(self, rates: ChainRates, num: int) -> list[int]:
        return [self.broadcast(rates) for _ in range(num)]

    def _shares(self, count: int) -> list[float]:
        room, got = self.uplink, [0.0] * count
        for left, place in enumerate(sorted(range(count), key=lambda place: self.able[place])):
            got[place] = min(self.able[place], room / (count - left))
            room -= got[place]
        return got


def learner() -> ChainRates:
    return ChainRates(None, None)


@pytest.mark.parametrize(
    ("uplink", "num_workers", "expected"),
    [
        (300, 8, [1, 2, 3, 4, 3, 3]),
        (800, 8, [1, 2, 3, 4, 8, 8]),
        (800, 16, [1, 2, 3, 4, 6, 8, 16, 8, 8]),
        (100, 8, [1, 2, 1, 1]),
        (50, 8, [1, 2, 1, 1]),
        (5000, 1, [1, 1]),
    ],
)
def test_the_count_rises_until_the_uplink_is_full(
    uplink: float, num_workers: int, expected: list[int]
) -> None:
    rates = learner()
    links = Links(uplink, [100.0] * num_workers)
    assert links.counts(rates, len(expected)) == expected
    assert set(links.counts(rates, 50)) == {expected[-1]}


@given(
    uplink=st.floats(0.1, 30), num_workers=st.integers(1, 24), noise=st.floats(0, 0.04), seed=st.integers(0)
)
def test_it_is_that_of_the_formula_and_stays(
    uplink: float, num_workers: int, noise: float, seed: int
) -> None:
    rates = learner()
    counts = Links(uplink, [1.0] * num_workers, noise, seed).counts(rates, 60)
    assert max(counts) <= num_workers
    assert sum(a != b for a, b in itertools.pairwise(counts)) <= 2 * math.sqrt(num_workers) + 3
    [count] = set(counts[20:])
    assert min(num_chains(0.97 * uplink, 1.0), num_workers) <= count <= max(1.0, uplink / 0.85)


@given(
    uplink=st.floats(0.1, 20),
    able=st.lists(st.floats(0.2, 1), min_size=2, max_size=16),
    seed=st.integers(0),
)
def test_mixed_workers_fill_the_uplink_and_no_more(uplink: float, able: list[float], seed: int) -> None:
    able.sort(reverse=True)  # the quickest are seeds
    counts = Links(uplink, able, 0.03, seed).counts(learner(), 60)
    [count] = set(counts[20:])
    wanted = sum(able[:count])
    assert count == 1 or uplink >= 0.8 * wanted  # seeds get about what they can carry
    assert count == len(able) or uplink <= 1.25 * sum(able[: count + 1])  # one more would not


@given(st.floats(0.1, 30), st.integers(1, 24), st.integers(0))
def test_a_known_uplink_is_never_overdrawn(uplink: float, num_workers: int, seed: int) -> None:
    counts = Links(uplink, [1.0] * num_workers, 0.02, seed).counts(ChainRates(uplink, None), 40)
    assert counts == sorted(counts)  # there is nothing to try
    assert min(num_chains(uplink, 1.0), num_workers) <= counts[20] <= counts[-1] <= max(1.0, uplink / 0.9)


def test_what_is_set_wins() -> None:
    links = Links(800.0, [100.0] * 8)
    assert links.counts(ChainRates(300.0, None), 6) == [1, 2, 3, 3, 3, 3]
    assert links.counts(ChainRates(300.0, 50.0), 3) == [6, 6, 6]
    assert links.counts(ChainRates(40.0, 50.0), 3) == [1, 1, 1]
    slow = Links(300.0, [100.0] * 16)
    assert slow.counts(ChainRates(None, 50.0), 30)[-1] == 6  # as if workers could carry no more
    assert set(slow.counts(ChainRates(None, 400.0), 30)) == {1}


def test_one_hiccup_changes_nothing_and_two_in_a_row_do() -> None:
    rates, links = learner(), Links(300.0, [100.0] * 8)
    links.counts(rates, 6)
    links.uplink = 150.0
    assert links.broadcast(rates) == rates.count == 3
    links.uplink = 300.0
    assert links.counts(rates, 3) == [3, 3, 3]
    links.uplink = 150.0
    assert links.counts(rates, 5) == [3, 3, 1, 1, 1]


def test_an_uplink_that_has_grown_is_found_after_a_while() -> None:
    rates, links = learner(), Links(300.0, [100.0] * 8)
    links.counts(rates, 6)
    links.uplink = 900.0
    counts = links.counts(rates, RETRY_BROADCASTS + 10)
    assert set(counts[: RETRY_BROADCASTS - 5]) == {3}
    assert counts[-1] == 8


def test_a_full_uplink_is_tried_again_but_rarely() -> None:
    counts = Links(300.0, [100.0] * 8).counts(learner(), 10 * RETRY_BROADCASTS)
    assert 8 <= counts.count(4) <= 11


def test_rates_that_rise_say_that_the_uplink_was_not_full() -> None:
    rates, links = learner(), Links(300.0, [100.0] * 8)
    links.counts(rates, 6)
    links.uplink = 150.0
    links.counts(rates, 4)
    assert rates.count == 1
    links.able, links.uplink = [200.0] * 8, 1600.0
    assert links.counts(rates, 6) == [1, 2, 3, 4, 8, 8]


def test_slower_workers_get_more_chains() -> None:
    rates, links = learner(), Links(300.0, [100.0] * 8)
    links.counts(rates, 6)
    links.able = [50.0] * 8
    counts = links.counts(rates, RETRY_BROADCASTS + 20)
    assert set(counts[10:60]) == {3}  # as many as before: what three got was taken for a full uplink
    assert set(counts[-10:]) == {6}


def test_a_slow_first_broadcast_is_made_up_for() -> None:
    """Cold connections carry less."""
    for known in (None, 300.0):
        rates, links = ChainRates(known, None), Links(300.0, [50.0] * 8)
        links.broadcast(rates)
        links.able = [100.0] * 8
        assert links.counts(rates, 12)[-4:] == [3] * 4


@given(st.integers(1, 40), st.integers(1, 40))
def test_the_next_count_is_the_least_that_shortens_the_longest_chain(count: int, num_peers: int) -> None:
    def longest(chains: int) -> int:
        return math.ceil(num_peers / chains)

    shorter = [more for more in range(count + 1, num_peers + 1) if longest(more) < longest(count)]
    assert next_count(count, num_peers) == (shorter[0] if shorter else count)
