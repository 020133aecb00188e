"""Dispatch in any state of the workers: sums are exact, none gets too much, and nothing moves in vain."""

from __future__ import annotations

from dataclasses import fields
from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.dispatch import one_at_a_time, with_a_heap
from echo_planes.data.replay.dispatch import Move, Proportional, ShortestQueue, Workers
from tests.thorough import examples

SPEEDS = st.one_of(st.floats(0.1, 1e4), st.sampled_from([0.0, 1.0, 2.0, 1e-9, 1e9]))
TENTHS = st.integers(0, 12)  # of the places there are


@st.composite
def fleets(draw: st.DrawFn, *, most: int = 12, busy: bool = True) -> Workers:
    n = draw(st.integers(0, most))

    def column(values: st.SearchStrategy[object]) -> list[object]:
        return draw(st.lists(values, min_size=n, max_size=n))

    workers = Workers.named(*(f"w{row}" for row in range(n)))
    workers.newest = draw(st.integers(0, 3))
    newest = workers.newest
    workers.version[:] = column(st.sampled_from([-1, 0, max(0, newest - 1), newest, newest, newest]))
    workers.pending[:] = column(st.integers(0, 6)) if busy else 0
    workers.running[:] = column(st.integers(0, 20))
    workers.slots[:] = column(st.sampled_from([1, 8, 20]))
    workers.room[:] = column(st.one_of(st.integers(0, 4), st.integers(0, 30)))
    workers.plateau[:] = column(st.sampled_from([0, 4, 8]))
    workers.tokens_per_s[:] = column(SPEEDS)
    return workers


def copy_of(workers: Workers) -> Workers:
    values = [getattr(workers, field.name) for field in fields(Workers)]
    return Workers(*(value.copy() if isinstance(value, np.ndarray) else value for value in values))


def is_same(one: Workers, other: Workers) -> bool:
    return all(
        np.array_equal(getattr(one, f.name), getattr(other, f.name))
        for f in fields(Workers)
        if f.name != "ids"
    )


# --- handing out ---------------------------------------------------------------------------------


@settings(max_examples=examples(500), deadline=None)
@given(workers=fleets(), tenths=TENTHS, theta=st.integers(1, 9))
def test_jsq_is_the_loop_of_the_paper(workers: Workers, tenths: int, theta: int) -> None:
    before = copy_of(workers)
    places = np.where(workers.able, np.clip(theta - workers.pending, 0, workers.room), 0)
    num_requests = int(places.sum()) * tenths // 10
    counts = ShortestQueue(theta).assign(num_requests, workers).counts
    assert counts.tolist() == one_at_a_time(num_requests, workers, theta).tolist()
    assert counts.tolist() == with_a_heap(num_requests, workers, theta).tolist()
    assert (counts <= places).all()
    assert counts.sum() == min(num_requests, places.sum())
    assert is_same(workers, before)


@settings(max_examples=examples(200), deadline=None)
@given(workers=fleets(), first=st.integers(0, 20), second=st.integers(0, 20), theta=st.integers(1, 9))
def test_jsq_in_two_batches_is_jsq_in_one(workers: Workers, first: int, second: int, theta: int) -> None:
    policy = ShortestQueue(theta)
    at_once = policy.assign(first + second, workers).counts
    one = policy.assign(first, workers).counts
    workers.pending += one
    workers.room -= one
    assert (one + policy.assign(second, workers).counts).tolist() == at_once.tolist()


def exact_quotas(num_requests: int, weights: list[Fraction], room: list[int]) -> list[Fraction]:
    """Shares before they are made whole: again and again, until nobody exceeds its room."""
    quotas = [Fraction(0)] * len(weights)
    left, going = Fraction(min(num_requests, sum(room))), [row for row, most in enumerate(room) if most]
    while going:
        level = left / sum(weights[row] for row in going)
        full = [row for row in going if level * weights[row] >= room[row]]
        if not full:
            return [level * weights[row] if row in going else quotas[row] for row in range(len(weights))]
        for row in full:
            quotas[row] = Fraction(room[row])
            left -= room[row]
        going = [row for row in going if row not in full]
    return quotas


@settings(max_examples=examples(500), deadline=None)
@given(workers=fleets(), tenths=TENTHS)
def test_proportional_is_exact_and_nobody_is_a_request_off(workers: Workers, tenths: int) -> None:
    before = copy_of(workers)
    num_requests = int(workers.room.sum()) * tenths // 10
    assigned = Proportional(0.5, 0.5).assign(num_requests, workers)
    eligible = (before.version >= 0) & (before.version >= before.newest - 1)
    room = np.where(eligible, before.room, 0).tolist()
    able = [row for row, most in enumerate(room) if most]
    known = [speed for speed in before.tokens_per_s[able] if speed > 0]
    median = float(np.median(known)) if known else 1.0
    weights = [Fraction(float(speed) or median) for speed in before.tokens_per_s]
    assert assigned.counts.sum() == min(num_requests, sum(room))
    for count, quota, most in zip(
        assigned.counts.tolist(), exact_quotas(num_requests, weights, room), room, strict=True
    ):
        assert 0 <= count <= most
        assert abs(count - quota) < 1 + Fraction(1, 10**6)
    # A worker that takes part, or serves nothing, keeps its estimate; one of an older version loses half.
    behind = (before.version >= 0) & ~eligible
    assert workers.tokens_per_s.tolist() == (np.where(behind, 0.5, 1.0) * before.tokens_per_s).tolist()
    assert assigned.commit.tolist() == (eligible & (before.version == before.newest - 1)).tolist()
    workers.tokens_per_s[:] = before.tokens_per_s
    assert is_same(workers, before)


@settings(max_examples=examples(200), deadline=None)
@given(workers=fleets(), num_requests=st.integers(0, 300))
def test_proportional_gives_the_faster_of_two_no_less(workers: Workers, num_requests: int) -> None:
    workers.version[:] = workers.newest
    workers.room[:] = 1000
    workers.tokens_per_s += 0.5
    counts = Proportional(0.5, 0.5).assign(num_requests, workers).counts
    by_speed = counts[np.argsort(workers.tokens_per_s, kind="stable")]
    assert (np.diff(by_speed) >= 0).all() or len(set(workers.tokens_per_s.tolist())) < len(counts)


# --- rebalancing ---------------------------------------------------------------------------------


def apply(workers: Workers, moves: tuple[Move, ...]) -> None:
    for move in moves:
        source, target = workers.ids.index(move.source), workers.ids.index(move.target)
        column = getattr(workers, move.kind)
        column[source] -= move.count
        column[target] += move.count
        workers.room[target] -= move.count


@settings(max_examples=examples(500), deadline=None)
@given(workers=fleets(), theta=st.integers(1, 9))
def test_queued_requests_move_as_in_the_paper_one_at_a_time(workers: Workers, theta: int) -> None:
    workers.pending[: len(workers.ids) // 2] += 1
    before = copy_of(workers)
    moves = ShortestQueue(theta).rebalance(workers)
    assert is_same(workers, before)
    if not workers.pending.any():
        return
    fullness = workers.running / workers.slots
    given_to: set[int] = set()
    for move in moves:
        source, target = workers.ids.index(move.source), workers.ids.index(move.target)
        assert (move.kind, move.count) == ("pending", 1)
        assert workers.pending[source] == workers.pending.max() >= 1
        assert before.pending[target] == 0
        assert target not in given_to
        assert before.able[target]
        assert workers.pending[source] >= 2 or fullness[target] < fullness[source]
        given_to.add(target)
        workers.pending[source] -= 1  # what has moved is under way: it counts at its target only in the end
    # No move of that kind is left.
    for target in np.flatnonzero(before.able & (before.pending == 0)):
        if int(target) not in given_to:
            assert workers.pending.max() <= 1
            assert not (fullness[workers.pending > 0] > fullness[target]).any()


@settings(max_examples=examples(300), deadline=None)
@given(workers=fleets(), theta=st.integers(1, 9))
def test_queued_requests_come_to_rest(workers: Workers, theta: int) -> None:
    """If no worker ever starts a request, moves end within 100 rounds: nothing goes to and fro."""
    queued = int(workers.pending.sum())
    policy = ShortestQueue(theta)
    for _ in range(100):
        longest = workers.pending.max(initial=0)
        moves = tuple(move for move in policy.rebalance(workers) if move.kind == "pending")
        apply(workers, moves)
        assert workers.pending.sum() == queued
        assert workers.pending.min(initial=0) >= 0
        assert workers.room.min(initial=0) >= 0
        assert workers.pending.max(initial=0) <= longest
        if not moves:
            return
    raise AssertionError("requests still move after 100 rounds")


@settings(max_examples=examples(500), deadline=None)
@given(workers=fleets(busy=False))
def test_executing_requests_leave_only_beyond_the_plateau_and_reach_only_the_idle(workers: Workers) -> None:
    before = copy_of(workers)
    moves = ShortestQueue(4).rebalance(workers)
    assert is_same(workers, before)
    sources = {workers.ids.index(move.source) for move in moves}
    targets = [workers.ids.index(move.target) for move in moves]
    assert len(set(targets)) == len(targets)
    assert all(move.count > 0 and move.kind == "running" for move in moves)
    assert all(before.able[row] and before.running[row] == 0 for row in targets)
    apply(workers, moves)
    assert workers.room.min(initial=0) >= 0
    assert all(workers.running[row] >= before.plateau[row] > 0 for row in sources)
    idle = np.flatnonzero(before.able & (before.running == 0))
    excess = np.where(before.plateau > 0, before.running - before.plateau, 0)
    if len(idle) == 1 and excess.max(initial=0) > 0:
        row = int(np.argmax(excess))
        count = min(int(excess[row]), int(before.room[idle[0]]))
        assert moves == (Move(f"w{row}", f"w{idle[0]}", count, "running"),)
    # The most loaded come first, and nobody idle is passed over while there is excess.
    if len(idle) and (excess > 0).any():
        assert moves
        assert min(excess[list(sources)]) >= max(
            (excess[row] for row in range(len(excess)) if row not in sources), default=0
        )
