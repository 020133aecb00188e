"""The three policies by worked examples; the properties are in tests/sim/test_dispatch_properties.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from echo_planes.data.replay.dispatch import (
    DispatchPolicy,
    Move,
    Proportional,
    ShortestQueue,
    Workers,
    policy_named,
)
from echo_planes.errors import ConfigError


def fleet(n: int, **columns: Any) -> Workers:
    """Workers w0, w1, ... at the newest publication, 7, with plenty of room, but for `columns`."""
    workers = Workers.named(*(f"w{row}" for row in range(n)))
    workers.newest = 7
    for name, value in {"version": 7, "room": 100, "slots": 64, **columns}.items():
        getattr(workers, name)[:] = value
    return workers


def named(name: str, theta: int = 8) -> DispatchPolicy:
    policy = policy_named(name, theta)
    assert policy is not None
    return policy


def counts(name: str, num_requests: int, workers: Workers, **settings: int) -> list[int]:
    assigned = named(name, **settings).assign(num_requests, workers).counts
    return [int(count) for count in assigned]


# --- all -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["jsq", "proportional"])
def test_nobody_is_sent_anything_who_serves_nothing_or_has_no_room(name: str) -> None:
    workers = fleet(3, version=[-1, 7, 7], room=[100, 0, 100], tokens_per_s=1.0)
    assert counts(name, 2, workers)[:2] == [0, 0]
    assert counts(name, 0, workers) == [0, 0, 0]
    assert counts(name, 5, Workers.named()) == []
    assert named(name).rebalance(Workers.named()) == ()


def test_a_first_publication_has_none_before_it() -> None:
    """Version 0 is the newest: the one before it would be -1, which is what a booting worker serves."""
    workers = fleet(2, version=[-1, 0], tokens_per_s=8.0)
    workers.newest = 0
    assigned = Proportional(0.5, 0.5).assign(4, workers)
    assert assigned.counts.tolist() == [0, 4]
    assert not assigned.commit.any()
    assert workers.tokens_per_s.tolist() == [8.0, 8.0]


def test_what_cannot_be_is_refused_with_its_name() -> None:
    with pytest.raises(ConfigError, match=r"sampling\.router='random' is not of the form package"):
        policy_named("random", 8)
    for theta in (0, 2**16 + 1):
        with pytest.raises(ConfigError, match=f"theta is {theta}"):
            policy_named("jsq", theta)
    for settings in ({"exclusion_decay": 0.0}, {"exclusion_decay": 1.1}, {"ema": 1.0}, {"ema": -0.1}):
        with pytest.raises(ConfigError, match=next(iter(settings))):
            Proportional(**settings)
    for name in ("jsq", "proportional"):
        with pytest.raises(ConfigError, match="requests in one batch"):
            named(name).assign(2**31 + 1, fleet(1))


# --- join the shortest queue ---------------------------------------------------------------------


def test_jsq_levels_the_queues() -> None:
    assert counts("jsq", 6, fleet(3, pending=[4, 0, 1]), theta=8) == [0, 4, 2]
    assert counts("jsq", 7, fleet(3, pending=[4, 0, 1]), theta=8) == [0, 4, 3]
    assert counts("jsq", 8, fleet(3, pending=[4, 0, 1]), theta=8) == [1, 4, 3]


def test_jsq_passes_over_a_worker_whose_room_ends_below_the_level() -> None:
    assert counts("jsq", 4, fleet(3, room=[1, 5, 5]), theta=8) == [1, 2, 1]


def test_jsq_holds_back_what_no_queue_below_theta_has_place_for() -> None:
    workers = fleet(4, pending=[4, 0, 1, 9], room=[9, 2, 9, 9])
    assert counts("jsq", 100, workers, theta=4) == [0, 2, 3, 0]
    assert counts("jsq", 3, fleet(2, pending=3), theta=3) == [0, 0]


def test_every_worker_with_an_empty_queue_gets_one_of_the_longest() -> None:
    workers = fleet(4, pending=[0, 3, 0, 5], running=[9, 64, 3, 64])
    assert named("jsq").rebalance(workers) == (
        Move("w3", "w2", 1, "pending"),
        Move("w3", "w0", 1, "pending"),
    )


def test_nothing_is_moved_to_a_worker_without_room() -> None:
    workers = fleet(3, pending=[0, 3, 0], room=[0, 9, 0], version=[7, 7, 7])
    assert named("jsq").rebalance(workers) == ()
    # But away from one that drains.
    workers = fleet(2, pending=[0, 3], room=[9, 0])
    assert named("jsq").rebalance(workers) == (Move("w1", "w0", 1, "pending"),)


def test_the_last_of_a_queue_moves_only_to_a_less_full_worker() -> None:
    small_and_large = {"slots": [8, 256]}
    workers = fleet(2, pending=[1, 0], running=[8, 100], **small_and_large)
    assert named("jsq").rebalance(workers) == (Move("w0", "w1", 1, "pending"),)
    workers = fleet(2, pending=[1, 0], running=[8, 256], **small_and_large)
    assert named("jsq").rebalance(workers) == ()
    workers = fleet(2, pending=[0, 1], running=[8, 256], **small_and_large)
    assert named("jsq").rebalance(workers) == ()


def test_an_idle_worker_takes_what_the_most_loaded_executes_beyond_its_plateau() -> None:
    workers = fleet(3, running=[40, 0, 50], plateau=16)
    assert named("jsq").rebalance(workers) == (Move("w2", "w1", 34, "running"),)
    workers.room[1] = 10
    assert named("jsq").rebalance(workers) == (Move("w2", "w1", 10, "running"),)
    # Below the plateau a smaller batch is not faster; and nothing executing moves while something is queued.
    assert named("jsq").rebalance(fleet(2, running=[16, 0], plateau=16)) == ()
    workers = fleet(3, running=[40, 0, 50], plateau=16, pending=[0, 0, 1], room=[9, 0, 9])
    assert [move.kind for move in named("jsq").rebalance(workers)] == ["pending"]


def test_until_a_plateau_is_known_nothing_that_executes_is_moved() -> None:
    assert named("jsq").rebalance(fleet(2, running=[40, 0])) == ()


def test_several_idle_workers_share_the_excess_of_the_most_loaded() -> None:
    workers = fleet(6, running=[0, 30, 0, 20, 0, 25], plateau=[0, 10, 0, 10, 0, 24])
    assert named("jsq").rebalance(workers) == (
        Move("w1", "w0", 20, "running"),
        Move("w3", "w2", 10, "running"),
        Move("w5", "w4", 1, "running"),
    )
    workers = fleet(4, running=[0, 0, 27, 0], plateau=20)
    assert named("jsq").rebalance(workers) == (
        Move("w2", "w0", 3, "running"),
        Move("w2", "w1", 2, "running"),
        Move("w2", "w3", 2, "running"),
    )


# --- proportional --------------------------------------------------------------------------------


def test_proportional_is_the_example_of_the_paper() -> None:
    """SparrowRL 5.3: 5,000 and 2,500 tokens/s split 300 requests into 200 and 100."""
    assert counts("proportional", 300, fleet(2, tokens_per_s=[5000.0, 2500.0], room=999)) == [200, 100]


def test_the_remainder_goes_by_the_largest_fraction_and_ties_to_the_first() -> None:
    workers = fleet(3, tokens_per_s=[1.0, 2.0, 4.0])  # of 10: 1.43, 2.86, 5.71
    assert counts("proportional", 10, workers) == [1, 3, 6]
    assert counts("proportional", 8, fleet(3, tokens_per_s=3.0)) == [3, 3, 2]


def test_what_exceeds_a_room_goes_to_the_others() -> None:
    workers = fleet(3, tokens_per_s=[8.0, 1.0, 1.0], room=[4, 100, 2])
    assert counts("proportional", 10, workers) == [4, 4, 2]
    assert counts("proportional", 1000, workers) == [4, 100, 2]


def test_workers_too_far_behind_get_nothing_and_lose_part_of_their_estimate() -> None:
    workers = fleet(4, version=[7, 6, 5, 0], tokens_per_s=8.0)
    assigned = Proportional(0.5, 0.5).assign(10, workers)
    assert assigned.counts.tolist() == [5, 5, 0, 0]
    assert assigned.commit.tolist() == [False, True, False, False]
    assert workers.tokens_per_s.tolist() == [8.0, 8.0, 4.0, 4.0]


def test_an_estimate_that_decayed_for_ever_still_splits() -> None:
    with np.errstate(all="raise"):
        assert counts("proportional", 10, fleet(2, tokens_per_s=[5e-324, 1e5])) == [0, 10]
        assert counts("proportional", 10, fleet(2, tokens_per_s=[5e-324, 1e5], room=[9, 6])) == [4, 6]


def test_without_an_estimate_a_worker_counts_as_the_median() -> None:
    assert counts("proportional", 16, fleet(4, tokens_per_s=[0.0, 1.0, 3.0, 2.0])) == [4, 2, 6, 4]
    assert counts("proportional", 4, fleet(2)) == [2, 2]


def test_settling_moves_the_estimate_by_its_share() -> None:
    workers = fleet(2, tokens_per_s=[100.0, 0.0])
    policy = Proportional(0.5, 0.75)
    policy.settle(workers, 0, 2000, 10.0)
    assert workers.tokens_per_s[0] == 0.75 * 100 + 0.25 * 200
    policy.settle(workers, 1, 2000, 10.0)  # the first measurement stands for itself
    policy.settle(workers, 1, 2000, 0.0)
    policy.settle(workers, 1, -5, 1.0)
    assert workers.tokens_per_s[1] == 200.0


def test_jsq_is_the_policy_it_says() -> None:
    assert isinstance(named("jsq"), ShortestQueue)
    assert isinstance(named("proportional"), Proportional)
