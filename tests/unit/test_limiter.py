"""Staleness arithmetic, leases and the prompt stream, each against its definition."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_planes.data.leases import LeaseBook
from echo_planes.data.limiter import is_admissible, num_permits, num_urgent
from echo_planes.data.prompts import PromptCursor
from echo_planes.data.roll import WorkerRoll
from echo_planes.errors import LeaseError
from echo_planes.types import Lease, Prompt

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


# --- leases --------------------------------------------------------------------------------------

LEASE_S = 10.0


def book(epoch: int = 0) -> LeaseBook:
    leases = LeaseBook(LEASE_S, LEASE_S)
    leases.register("w0", epoch)
    return leases


def issue(
    leases: LeaseBook, name: str = "l0", worker: str = "w0", epoch: int = 0, now_s: float = 0.0
) -> Lease:
    ends_s = now_s + leases.lasts_s(0)
    return leases.issue(Lease(name, name, epoch, worker, Prompt(0, (1,)), 2, 0, ends_s), now_s)


def close(leases: LeaseBook, worker: str = "w0", epoch: int = 0, now_s: float = 0.0, name: str = "l0") -> str:
    try:
        leases.close(name, worker, epoch, now_s)
    except LeaseError as why:
        return str(why)
    return "closed"


def test_a_lease_runs_from_its_issue_and_ends_at_its_expiry() -> None:
    leases = book()
    assert issue(leases, now_s=5.0).expires_s == 15.0
    assert leases.expire(14.999) == []
    assert close(leases, now_s=14.999) == "closed"
    issue(leases, now_s=5.0)
    assert close(leases, now_s=15.0) == "expired"
    assert [lease.lease_id for lease in leases.expire(15.0)] == ["l0"]
    assert len(leases) == 0


def test_a_lease_ends_once() -> None:
    leases = book()
    issue(leases)
    assert close(leases) == "closed"
    assert close(leases) == "unknown"
    assert leases.expire(100.0) == []
    issue(leases)
    with pytest.raises(LeaseError, match="l0 was issued twice"):
        issue(leases)


@pytest.mark.parametrize(("worker", "epoch"), [("w1", 0), ("w0", 1), ("w1", 1)])
def test_only_the_holder_closes_a_lease(worker: str, epoch: int) -> None:
    leases = book()
    leases.register("w1", 0)
    issue(leases)
    assert close(leases, worker, epoch) == "fenced"
    assert close(leases) == "closed"  # the attempt changed nothing


def test_a_new_incarnation_fences_the_old_one() -> None:
    leases = book()
    issue(leases)
    leases.register("w0", 1)
    assert leases.is_current("w0", 1)
    assert not leases.is_current("w0", 0)
    assert close(leases, epoch=0) == "fenced"
    assert close(leases, epoch=1) == "fenced"  # it does not inherit the lease either


def test_an_old_incarnation_cannot_come_back() -> None:
    leases = book(epoch=3)
    with pytest.raises(LeaseError, match="w0 registered epoch 2 after 3"):
        leases.register("w0", 2)
    leases.forget("w0")
    assert not leases.is_current("w0", 3)
    with pytest.raises(LeaseError, match="w0 registered epoch 2 after 3"):
        leases.register("w0", 2)
    leases.register("w0", 4)
    assert leases.is_current("w0", 4)


def test_forgetting_a_worker_ends_its_leases_and_no_others() -> None:
    leases = book()
    leases.register("w1", 0)
    issue(leases, "l0")
    issue(leases, "l1", "w1")
    assert [lease.lease_id for lease in leases.forget("w0")] == ["l0"]
    assert [lease.lease_id for lease in leases.live] == ["l1"]
    assert close(leases, name="l0") == "unknown"
    assert leases.forget("w0") == []


def test_renewal_counts_from_now() -> None:
    leases = book()
    issue(leases)
    leases.renew("w0", 0, ["l0", "no such lease"], 9.0)
    assert close(leases, now_s=18.9) == "closed"


@pytest.mark.parametrize(("worker", "epoch", "now_s"), [("w1", 0, 9.0), ("w0", 1, 9.0), ("w0", 0, 10.0)])
def test_a_renewal_by_somebody_else_or_too_late_does_nothing(worker: str, epoch: int, now_s: float) -> None:
    leases = book()
    issue(leases)
    leases.renew(worker, epoch, ["l0"], now_s)
    assert close(leases, now_s=10.0) == "expired"


# --- prompts -------------------------------------------------------------------------------------


def test_prompts_are_handed_out_in_order_and_returned_ones_first() -> None:
    cursor = PromptCursor()
    assert [cursor.take() for _ in range(4)] == [0, 1, 2, 3]
    cursor.give_back(2)
    cursor.give_back(0)
    assert cursor.returned == (0, 2)
    assert cursor.next_index == 4
    assert [cursor.take() for _ in range(3)] == [0, 2, 4]


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
    roll = WorkerRoll()
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
