"""Staleness arithmetic, the prompt stream and the roll of workers, each against its definition."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_planes.data.replay.prompts import PromptCursor
from echo_planes.data.replay.staleness import is_admissible, num_permits, num_urgent
from echo_planes.data.replay.worker_registry import WorkerRegistry

quick = settings(max_examples=150, deadline=None)

# --- admission -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "step", "s", "admissible"),
    [(4, 4, 0, True), (3, 4, 0, False), (1, 4, 3, True), (0, 4, 3, False), (5, 4, 0, True)],
)
def test_a_trajectory_may_be_at_most_s_versions_old(
    version: int, step: int, s: int, admissible: bool
) -> None:
    assert is_admissible(version, step, s) is admissible


# --- permits -------------------------------------------------------------------------------------


def permits(
    *,
    p: int,
    t: int,
    s: int,
    r: int = 4,
    outstanding: int = 0,
    queue: float = 1e9,
    leased: int = 0,
    u: float = 0.0,
) -> int:
    return num_permits(
        worker_version=p,
        step=t,
        max_staleness=s,
        groups_per_step=r,
        outstanding_groups=outstanding,
        queue_batches=queue,
        leased_groups=leased,
        uninformative=u,
    )


@pytest.mark.parametrize(
    ("p", "t", "s", "batches"),
    [(5, 5, 0, 1), (4, 5, 0, 0), (5, 5, 3, 4), (2, 5, 3, 1), (1, 5, 3, 0), (0, 9, 3, 0)],
)
def test_permits_are_the_batches_left_times_r(p: int, t: int, s: int, batches: int) -> None:
    assert permits(p=p, t=t, s=s) == batches * 4
    assert permits(p=p, t=t, s=s, outstanding=1) == max(0, batches * 4 - 1)


@pytest.mark.parametrize(("queue", "expected"), [(1.0, 4), (1.5, 6), (2.0, 8), (100.0, 16), (0.1, 4)])
def test_the_queue_lowers_the_ceiling_but_never_below_one_batch(queue: float, expected: int) -> None:
    assert permits(p=5, t=5, s=3, queue=queue) == expected


def test_the_queue_is_of_groups_that_are_expected_to_count() -> None:
    # Six groups fill the queue; of those that are leased every second one is expected to be replaced.
    assert permits(p=5, t=5, s=3, queue=1.5, u=0.5) == 12
    assert permits(p=5, t=5, s=3, queue=1.5, u=0.5, outstanding=12, leased=12) == 0
    assert permits(p=5, t=5, s=3, queue=1.5, u=0.5, outstanding=8, leased=4) == 0  # 4 and half of 4
    assert permits(p=5, t=5, s=3, queue=1.5, u=0.5, outstanding=6, leased=4) == 4
    # All of them may count, and must be trained within the bound then.
    assert permits(p=5, t=5, s=3, queue=1.5, u=0.9) == 16
    assert permits(p=5, t=5, s=0, queue=1.5, u=0.9, outstanding=3, leased=3) == 1


def test_who_says_nothing_of_refill_has_none() -> None:
    granted = partial(
        num_permits, worker_version=5, step=5, max_staleness=3, groups_per_step=4, queue_batches=1.5
    )
    assert granted(outstanding_groups=2, leased_groups=2) == 4  # both of them count
    assert granted(outstanding_groups=6, uninformative=0.5) == 0  # none of them is leased


@quick
@given(
    p=st.integers(0, 9),
    t=st.integers(0, 9),
    s=st.integers(0, 6),
    r=st.integers(1, 9),
    outstanding=st.integers(0, 60),
    queue=st.floats(1.0, 10.0),
    leased=st.integers(0, 60),
    u=st.floats(0.0, 0.99),
)
def test_permits_never_promise_more_than_can_be_trained(
    p: int, t: int, s: int, r: int, outstanding: int, queue: float, leased: int, u: float
) -> None:
    leased = min(leased, outstanding)
    granted = permits(p=p, t=t, s=s, r=r, outstanding=outstanding, queue=queue, leased=leased, u=u)
    trainable = sum(is_admissible(p, step, s) for step in range(t, t + 20)) * r
    assert 0 <= granted <= max(0, trainable - outstanding)
    if is_admissible(p, t, s):
        assert granted >= r - outstanding


# --- urgency -------------------------------------------------------------------------------------


def survives(versions: Sequence[int], step: int, s: int, r: int) -> bool:
    """Whether work of these versions can all be trained in the batches formed from `step` on, r at a time."""
    left = sorted(versions)
    while left:
        if left[0] + s < step:
            return False
        left = left[r:]
        step += 1
    return True


@quick
@given(
    buffered=st.lists(st.integers(0, 6), max_size=12),
    leased=st.lists(st.integers(0, 6), max_size=8),
    step=st.integers(0, 8),
    s=st.integers(0, 5),
    r=st.integers(1, 4),
)
def test_urgent_is_the_fewest_that_must_go_now_and_none_where_some_of_it_is_still_out(
    buffered: list[int], leased: list[int], step: int, s: int, r: int
) -> None:
    buffered = sorted(v for v in buffered if is_admissible(v, step, s))
    leased = [v for v in leased if is_admissible(v, step, s)]
    if not survives(buffered + leased, step, s, r):
        return  # more was handed out than can be trained: permits prevent it
    enough = [u for u in range(min(r, len(buffered)) + 1) if survives(buffered[u:] + leased, step + 1, s, r)]
    urgent = num_urgent(
        buffered_versions=buffered, leased_versions=leased, step=step, max_staleness=s, groups_per_step=r
    )
    assert urgent == (min(enough) if enough else None)


@quick
@given(
    buffered=st.lists(st.integers(0, 6), max_size=20),
    step=st.integers(0, 9),
    s=st.integers(0, 5),
    r=st.integers(1, 4),
)
def test_without_leases_the_learner_is_never_held(buffered: list[int], step: int, s: int, r: int) -> None:
    urgent = num_urgent(
        buffered_versions=buffered, leased_versions=[], step=step, max_staleness=s, groups_per_step=r
    )
    assert urgent is not None
    assert 0 <= urgent <= min(r, len(buffered))


# --- prompts -------------------------------------------------------------------------------------


def test_prompts_are_handed_out_in_order_and_returned_ones_first() -> None:
    cursor = PromptCursor()
    assert [cursor.take() for _ in range(4)] == [0, 1, 2, 3]
    cursor.give_back(2)
    cursor.give_back(0)
    assert cursor.returned == (0, 2)
    assert cursor.next_index == 4
    assert [cursor.take() for _ in range(3)] == [0, 2, 4]


def test_returned_prompts_go_out_smallest_first_in_whatever_order_they_came() -> None:
    cursor = PromptCursor(9, [7, 2, 5, 1])
    assert [cursor.take() for _ in range(5)] == [1, 2, 5, 7, 9]


def test_what_is_set_aside_is_handed_out_by_name_alone_and_is_not_forgotten() -> None:
    cursor = PromptCursor(9, [7, 2, 5, 1])
    cursor.set_aside(1)
    cursor.set_aside(5)
    assert cursor.returned == (1, 2, 5, 7)  # what a cut writes down
    assert [cursor.take() for _ in range(3)] == [2, 7, 9]
    assert cursor.take_aside(5) == 5
    assert cursor.returned == (1,)


@quick
@given(moves=st.lists(st.integers(0, 3), max_size=60), seed=st.integers(0, 99))
def test_no_prompt_is_skipped_or_out_twice_across_any_resume(moves: list[int], seed: int) -> None:
    rng = random.Random(seed)
    cursor = PromptCursor()
    out: list[int] = []
    done: set[int] = set()
    for move in moves:
        if move <= 1:
            index = cursor.take()
            assert index not in out
            assert index not in done
            out.append(index)
        elif out and move == 2:
            done.add(out.pop(rng.randrange(len(out))))
        elif out:
            cursor.give_back(out.pop(rng.randrange(len(out))))
        cursor = PromptCursor(cursor.next_index, cursor.returned)
        assert sorted([*out, *done, *cursor.returned]) == list(range(cursor.next_index))


# --- workers -------------------------------------------------------------------------------------


@quick
@given(
    moves=st.lists(
        st.tuples(
            st.sampled_from(["serve", "park", "unpark", "remove"]), st.integers(0, 3), st.integers(-1, 2)
        ),
        max_size=40,
    )
)
def test_the_roll_counts_who_may_be_given_prompts_by_version(moves: list[tuple[str, int, int]]) -> None:
    roll = WorkerRegistry()
    for move, number, version in moves:
        name = f"w{number}"
        if move == "serve":
            roll.serves(name, version)
        elif move == "remove":
            roll.remove(name)
        else:
            roll.park(name, move == "park")
        leasing = dict(roll.leasing())
        assert roll.versions == Counter(leasing.values())
        assert roll.num_leasing == len(leasing)
