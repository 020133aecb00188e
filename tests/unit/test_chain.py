"""Peer scores, the number of chains, their plan and their repair."""

from __future__ import annotations

import pytest

from echo_planes.weights.chain.events import SENDER_ID
from echo_planes.weights.chain.plan import (
    PeerStats,
    Topology,
    cancels,
    ideal_broadcast_s,
    is_misplaced,
    num_chains,
    peer_score,
    plan_chains,
)

MBIT = 1e6 / 8


def peer(name: str, mbit: float = 0.0, region: str = "", **more: float) -> PeerStats:
    return PeerStats(name, region, rate_bytes_per_s=mbit * MBIT, **more)  # type: ignore[arg-type]


def test_score_is_that_of_the_paper() -> None:
    # 10 Mbit/s: (7 - 3) / 5 = 80 points; 3 of 4 succeeded: 75; 3 successes of 10: 30; 60 s old: 0.9.
    one = peer("a", 10, num_successes=3, num_failures=1, consecutive_failures=1, measured_s=40.0)
    assert peer_score(one, 100.0) == pytest.approx(0.9 * (0.5 * 80 + 0.35 * 75 + 0.15 * 30))
    assert peer_score(peer("new"), 0.0) == pytest.approx(35)  # counts as successful, nothing else is known


@pytest.mark.parametrize(("mbit", "points"), [(0.0, 0), (0.0005, 0), (0.001, 0), (100, 100), (9000, 100)])
def test_speed_is_held_between_nothing_and_full_marks(mbit: float, points: float) -> None:
    assert peer_score(peer("a", mbit, num_successes=10), 0.0) == pytest.approx(0.5 * points + 35 + 15)


def test_stability_ends_with_the_fourth_failure_in_a_row() -> None:
    steady = peer_score(peer("a", num_successes=10, num_failures=3, consecutive_failures=3), 0.0)
    shaky = peer_score(peer("a", num_successes=10, num_failures=3, consecutive_failures=4), 0.0)
    assert steady - shaky == pytest.approx(15)


def test_old_measurements_lose_three_tenths_at_most() -> None:
    one = peer("a", 100, num_successes=10)
    assert peer_score(one, 180.0) == pytest.approx(70)
    assert peer_score(one, 1e6) == pytest.approx(70)
    assert peer_score(one, -5.0) == pytest.approx(100)  # measured a moment ago by another caller


def test_records_follow_what_happens() -> None:
    one = peer("a").after_success(100.0, 1.0).after_success(200.0, 2.0)
    assert one.rate_bytes_per_s == pytest.approx(130)
    assert one.after_success(0.0, 3.0).rate_bytes_per_s == pytest.approx(130)  # too small to measure
    failed = one.after_failure(4.0).after_failure(5.0)
    assert (failed.num_failures, failed.consecutive_failures, failed.measured_s) == (2, 2, 5.0)
    assert failed.after_success(0.0, 6.0).consecutive_failures == 0


@pytest.mark.parametrize(
    ("uplink", "worker", "expected"),
    [(300, 100, 3), (799, 100, 7), (50, 100, 1), (0.3, 0.1, 3)],
)
def test_number_of_chains(uplink: float, worker: float, expected: int) -> None:
    assert num_chains(uplink, worker) == expected


def test_best_are_seeds_and_the_rest_follow_in_rank_order() -> None:
    peers = [peer(f"w{i}", mbit=10 * (i + 1)) for i in range(7)]
    assert plan_chains(peers, 3, 0.0) == [["w6", "w3", "w0"], ["w5", "w2"], ["w4", "w1"]]
    assert plan_chains(peers[:2], 3, 0.0) == [["w1"], ["w0"]]
    assert plan_chains([], 3, 0.0) == []


def test_only_a_much_better_peer_behind_a_worse_one_is_misplaced() -> None:
    chains = [["a", "c", "leaf"], ["b"]]
    assert not is_misplaced(chains, {"a": 50, "b": 60, "c": 60}, 10)
    assert is_misplaced(chains, {"a": 50, "b": 60, "c": 61}, 10)
    assert not is_misplaced(chains, {"a": 50, "b": 90, "c": 55}, 10)  # equally near
    assert not is_misplaced([], {}, 10)


def test_each_chain_enters_a_region_once() -> None:
    peers = [peer(f"w{i}", mbit=100 - i, region="abc"[i % 3]) for i in range(12)]
    [chain] = plan_chains(peers, 1, 0.0)
    assert chain[0] == "w0"
    assert [f"w{i}" for i in (0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11)] == chain


def test_ideal_time() -> None:
    assert ideal_broadcast_s(1000.0, 4, 10.0, 100.0, 0.08) == pytest.approx(10 + 4 * (0.1 + 0.04))


def test_newer_cancels_only_where_it_is_whole_first() -> None:
    assert cancels(100, 99, newer_needs_older=False)
    assert not cancels(100, 100, newer_needs_older=False)
    assert not cancels(100, 1, newer_needs_older=True)


def three_chains(**regions: str) -> Topology:
    names = dict.fromkeys("abcdefg", "") | regions
    topology = Topology(names)
    topology.set_plan([["a", "d", "g"], ["b", "e"], ["c", "f"]], [])
    return topology


def test_a_cut_joins_its_neighbours() -> None:
    topology = three_chains()
    topology.remove("d")
    assert topology.parents()["g"] == "a"
    topology.remove("a")
    assert topology.parents()["g"] == SENDER_ID
    topology.remove("g")
    assert topology.chains == [["b", "e"], ["c", "f"]]


def test_joiners_go_to_new_chains_first_and_then_to_short_ones() -> None:
    topology = three_chains()
    topology.append("x", 4)
    assert topology.parents()["x"] == SENDER_ID
    topology.append("y", 4)
    assert topology.parents()["y"] == "x"
    topology.append("z", 2)  # there are more chains than are wanted now
    assert topology.parents()["z"] in ("e", "f", "y")


def test_a_chain_is_as_long_as_its_peers_and_the_leaves_of_its_tail() -> None:
    topology = Topology(dict.fromkeys("abcdxyz", "") | {"d": "eu", "new": "eu"})
    topology.set_plan([["a", "b"], ["c", "d"]], [])
    for leaf in "xyz":
        topology.hang(leaf, avoid="b")
    assert [topology.parents()[leaf] for leaf in "xyz"] == ["d"] * 3
    topology.append("new", 2)
    assert topology.parents()["new"] == "b"  # five are behind the other one's head, though its tail is near


def test_a_chain_whose_tail_has_a_leaf_is_one_longer() -> None:
    topology = Topology(dict.fromkeys("abcdx", "") | {"d": "eu", "new": "eu"})
    topology.set_plan([["a", "b"], ["c", "d"]], [])
    topology.hang("x", avoid="b")
    assert topology.parents()["x"] == "d"
    topology.append("new", 2)
    assert topology.parents()["new"] == "d"  # three, where the shortest has two: its region decides


def test_joiners_stay_in_their_region_unless_that_chain_is_long() -> None:
    topology = three_chains(g="eu", f="eu", x="eu", y="eu")
    topology.append("x", 3)
    assert topology.parents()["x"] == "f"
    topology.append("y", 3)
    assert topology.parents()["y"] in ("g", "x")  # both tails are in its region
    far = three_chains(g="eu", h="eu", x="eu")
    far.append("h", 3)
    far.append("x", 3)
    assert far.parents()["x"] != "h"  # four deep already, where others are two


def test_no_chain_enters_a_region_twice_for_a_joiner() -> None:
    topology = Topology({"a": "eu", "b": "us", "c": "us", "d": "us", "x": "eu", "y": "eu", "z": "asia"})
    topology.set_plan([["a", "b"], ["c", "d"]], [])
    topology.append("x", 2)
    assert topology.parents()["x"] == "d"  # the other chain was in its region, and has left it
    topology.append("y", 2)
    assert topology.parents()["y"] == "x"
    topology.append("z", 2)
    assert topology.parents()["z"] == "b"  # new to both: the shorter one


def test_a_leaf_hangs_on_a_tail_of_its_region_where_it_can_choose() -> None:
    topology = three_chains(e="eu", f="us", x="us", y="eu", z="us")
    for leaf, tail in (("x", "f"), ("y", "e"), ("z", "g")):
        topology.hang(leaf)
        assert topology.parents()[leaf] == tail


def test_leaves_spread_over_tails_and_move_with_them() -> None:
    topology = three_chains()
    topology.hang("x")
    topology.hang("y")
    topology.hang("z")
    assert sorted(topology.parents()[leaf] for leaf in "xyz") == ["e", "f", "g"]
    assert all(topology.is_leaf(leaf) for leaf in "xyz")
    at_g = next(leaf for leaf in "xyz" if topology.parents()[leaf] == "g")
    topology.remove("g")
    assert topology.parents()[at_g] in ("d", "e", "f")
    topology.hang(at_g, avoid=topology.parents()[at_g])
    assert at_g in topology


def test_a_leaf_avoids_the_only_tail_by_going_before_it() -> None:
    topology = Topology({})
    topology.set_plan([["a", "b"]], [])
    topology.hang("x", avoid="b")
    assert topology.parents()["x"] == "a"
    alone = Topology({})
    alone.hang("x")
    assert alone.parents() == {"x": SENDER_ID}


def test_a_plan_replaces_everything_its_leaves_too() -> None:
    topology = three_chains()
    topology.hang("old")
    topology.set_plan([["a", "b"], [], ["c"]], ["x", "y", "z"])
    assert topology.chains == [["a", "b"], ["c"]]
    assert sorted(topology.parents()[leaf] for leaf in "xyz") in (["b", "b", "c"], ["b", "c", "c"])
    assert [peer in topology for peer in ("a", "b", "c", "x", "old", "g")] == [True] * 4 + [False] * 2
    assert not topology.is_leaf("b")
