"""The tracker's decisions, one at a time: who is cut out, moved, demoted, dropped, and who is left alone."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_planes.errors import WeightsError
from echo_planes.types import BroadcastStats
from echo_planes.weights.chain.events import (
    SENDER_ID,
    Accusation,
    Action,
    Assign,
    CancelBroadcast,
    Demote,
    Drop,
    Event,
    PeerJoined,
    PublicationCommitted,
    PublicationOpened,
    Readmit,
    Report,
    SegmentAdded,
    Throttle,
    Tick,
)
from echo_planes.weights.chain.hops import Broadcast, steady_rates
from echo_planes.weights.chain.tracker import EXPELLED_S
from echo_planes.weights.wire.manifest import PublicationKey
from echo_planes.weights.wire.messages import decode
from tests.unit.tracker_fleet import RATE, STEP_S, Fleet, key

# --- joining and leaving -------------------------------------------------------------------------


def test_a_chain_of_one() -> None:
    fleet = Fleet("a")
    assert fleet.actions == [Assign("a", SENDER_ID, "", "")]
    one = fleet.publish(0, 2000)
    assert fleet.run(4.0) == []
    stats = fleet.tracker.stats(one)
    assert stats is not None
    assert (stats.num_peers, stats.num_complete, stats.repairs, stats.seconds) == (1, 1, 0, 2.0)


def test_joiners_form_chains_and_know_their_parents_addresses() -> None:
    fleet = Fleet("abcd", chains=2)
    assert fleet.tracker.parents() == {"a": SENDER_ID, "b": SENDER_ID, "c": "a", "d": "b"}
    assert fleet.tracker.assignment("c") == Assign("c", "a", "http://a", "")
    assert fleet.tracker.assignment("z") is None


def test_direct_is_a_star_without_repairs() -> None:
    fleet = Fleet("abc", direct=True)
    assert set(fleet.tracker.parents().values()) == {SENDER_ID}
    fleet.publish(0, 50_000)
    fleet.factor["b"] = 0.2
    fleet.extra["c"] = {"parent_silent_s": 9.0, "parent_closed": True}
    assert fleet.run(6.0) == []


def test_a_peer_that_restarts_is_replaced_by_the_one_before_it() -> None:
    fleet = Fleet("abc")
    assert fleet.assigned(fleet.send(PeerJoined("b", "http://b2", ""))) == {"c": "a", "b": "c"}
    assert fleet.assigned(fleet.send(PeerJoined("a", "http://a2", ""))) == {"c": SENDER_ID, "a": "b"}


def test_a_lost_peer_whose_parent_was_expelled_meanwhile_joins_again() -> None:
    fleet = Fleet("xc")
    fleet.publish(0, 50_000)
    fleet.mute.add("c")
    fleet.run(4.0)
    assert fleet.tracker.parents() == {"x": SENDER_ID}
    for child in "def":
        fleet.join("x")
        fleet.join(child)
        fleet.send(Accusation("x", by=child))
    assert fleet.tracker.is_dropped("x")
    assert fleet.tracker.assignment("c") is None
    fleet.report("c")
    assert fleet.tracker.assignment("c") == Assign("c", "f", "http://f", "")


def test_nobody_may_call_itself_sender() -> None:
    assert Fleet("a").send(PeerJoined(SENDER_ID, "http://evil", "")) == []


def test_a_worker_joins_in_mid_broadcast() -> None:
    fleet = Fleet("ab")
    one = fleet.publish(0, 6000)
    fleet.run(3.0)
    fleet.join("x")
    assert fleet.tracker.parents()["x"] == "b"
    assert fleet.run(12.0) == []
    stats = fleet.tracker.stats(one)
    assert stats is not None
    assert (stats.num_complete, stats.repairs) == (3, 0)


# --- trouble -------------------------------------------------------------------------------------


def running(names: str = "abcd", **more: object) -> Fleet:
    """Two seconds into a long broadcast."""
    fleet = Fleet(names, **more)  # type: ignore[arg-type]
    fleet.publish(0, 50_000)
    assert fleet.run(4.0) == []
    return fleet


def test_a_silent_peer_is_cut_out_and_back_at_a_tail_when_it_speaks() -> None:
    fleet = running()
    fleet.mute.add("b")
    actions = fleet.run(1.75)
    assert fleet.assigned(actions) == {"c": "a"}
    (stats,) = fleet.tracker.all_stats()
    assert stats.at_fault == ("b falls silent in mid-broadcast",)
    assert fleet.run(2.0) == []
    fleet.mute.clear()
    assert fleet.assigned(fleet.run(STEP_S)) == {"b": "d"}


def test_a_mute_peer_is_lost_within_three_seconds_even_without_children() -> None:
    fleet = running()
    fleet.mute.add("d")
    fleet.run(1.75)
    assert "d" not in fleet.tracker.parents()


def test_a_peer_that_its_child_still_receives_from_is_not_lost_so_soon() -> None:
    fleet = running()
    fleet.mute.add("b")
    fleet.extra["c"] = {"parent_silent_s": 0.1}
    assert fleet.assigned(fleet.run(3.0)) == {}
    assert fleet.assigned(fleet.run(4.0)) == {"c": "a"}


def test_when_nobody_is_heard_nobody_is_lost() -> None:
    fleet = running()
    before = fleet.tracker.parents()
    fleet.mute.update("abcd")
    assert fleet.run(4.0) == []
    assert fleet.tracker.parents() == before


def test_a_standstill_of_the_senders_own_process_blames_nobody() -> None:
    fleet = running()
    before = fleet.tracker.parents()
    fleet.now_s += 30.0
    assert fleet.send(Tick()) == []
    assert fleet.tracker.parents() == before
    assert fleet.run(3.0) == []


def test_a_closed_connection_between_living_peers_dissolves_the_hop() -> None:
    fleet = running()
    fleet.extra["c"] = {"parent_silent_s": 1.1, "parent_closed": True}
    assert fleet.assigned(fleet.run(STEP_S)) == {"c": "a", "b": "d"}


def test_a_peer_that_reaches_nobody_is_moved_ever_more_rarely() -> None:
    fleet = running()
    fleet.extra["c"] = {"parent_silent_s": 1.1, "parent_closed": True}
    moves = [a for a in fleet.run(30.0) if isinstance(a, Assign) and a.peer_id == "c"]
    assert 3 <= len(moves) <= 9


def test_a_slow_relay_becomes_a_leaf_at_the_tail() -> None:
    fleet = running()
    fleet.factor["c"] = 0.5
    for _ in range(12):
        if moved := fleet.assigned(fleet.run(STEP_S)):
            break
    assert fleet.now_s - 4.0 <= 3.0
    assert moved == {"c": "a", "b": "d"}
    fleet.factor.clear()
    assert fleet.run(6.0) == []


def test_a_child_that_stays_slow_was_at_fault_itself() -> None:
    fleet = running("abcde")
    fleet.factor["c"] = 0.5
    actions = fleet.run(10.0)
    moved = [(a.peer_id, a.parent_id) for a in actions if isinstance(a, Assign)]
    assert moved[:2] == [("c", "a"), ("b", "e")]
    assert ("d", "a") in moved
    assert fleet.tracker.parents()["c"] == "e"
    assert all(parent != "c" for parent in fleet.tracker.parents().values())
    (stats,) = fleet.tracker.all_stats()
    assert [peer.split()[0] for peer in stats.at_fault] == ["c"]  # and not its parent, which was blamed first


def test_a_slow_source_is_nobodys_fault() -> None:
    fleet = Fleet("abcd", chains=2)
    one = fleet.publish(0, 50_000, ready=500)
    for _ in range(40):
        fleet.ready[one] += 60  # a quarter of what a hop carries
        fleet.send(SegmentAdded(one, fleet.ready[one], fleet.ready[one]))
        assert fleet.run(STEP_S) == []


def test_a_slow_uplink_of_the_sender_costs_one_replacement_at_most() -> None:
    fleet = running("abcd")
    fleet.factor = dict.fromkeys("abcd", 1.0) | {"a": 0.4, "b": 0.4, "c": 0.4, "d": 0.4}
    actions = fleet.run(20.0)
    assert len(fleet.assigned(actions)) <= 2
    assert not any(isinstance(a, Demote) for a in actions)


def test_the_end_of_a_chain_waits_without_blame() -> None:
    fleet = Fleet("abcdefgh")
    fleet.publish(0, 9000)
    assert fleet.run(20.0) == []


def test_damage_throttles_the_link_and_then_dissolves_the_hop() -> None:
    fleet = running()

    def damage(total: int) -> list[Action]:
        fleet.extra["c"] = {"damaged_chunks": total}
        return fleet.run(STEP_S)  # 250 sound chunks

    assert damage(30) == []
    assert damage(60) == [Throttle("c", "b", 0.5 * RATE)]
    for total in range(80, 220, 20):  # two seconds, in which other hops may turn out to be no better
        assert damage(total) == []
    assert fleet.assigned(damage(240)) == {"c": "a", "b": "d"}


def test_a_throttle_is_lifted_when_the_link_is_clean() -> None:
    fleet = running()
    fleet.extra["c"] = {"damaged_chunks": 60}
    assert fleet.run(STEP_S) == [Throttle("c", "b", 0.5 * RATE)]
    assert fleet.run(6.0) == [Throttle("c", "b", 0.0)]


@pytest.mark.parametrize("seconds", [0.0, 4.0])
def test_a_throttle_always_limits(seconds: float) -> None:
    fleet = Fleet("abcd")
    fleet.publish(0, 50_000)
    fleet.extra["c"] = {"rate_bytes_per_s": 0.0}
    assert fleet.run(2.0 + seconds) == []
    fleet.extra["c"] |= {"damaged_chunks": 200}
    [throttle] = fleet.run(STEP_S)
    assert throttle == Throttle("c", "b", pytest.approx(0.5 * RATE))  # half of its mean rate so far


def test_a_link_of_which_nothing_is_known_is_throttled_once_something_is() -> None:
    fleet = Fleet("ab", chains=None)
    fleet.factor["a"], fleet.extra["a"] = 0.0, {"rate_bytes_per_s": 0.0}
    fleet.publish(0, 50_000)
    fleet.run(1.0)
    fleet.extra["a"] = {"damaged_chunks": 60, "rate_bytes_per_s": 0.0}
    assert fleet.run(STEP_S) == []
    fleet.extra["a"] = {"damaged_chunks": 61, "rate_bytes_per_s": 300.0}
    assert fleet.run(STEP_S) == [Throttle("a", SENDER_ID, 150.0)]


def test_a_link_that_only_damages_is_left_though_its_rate_is_not_known() -> None:
    fleet = Fleet("abc", chains=None)
    fleet.factor["a"], fleet.extra["a"] = 0.0, {"rate_bytes_per_s": 0.0}
    fleet.publish(0, 50_000)
    fleet.run(1.0)
    actions: list[Action] = []
    for total in range(60, 360, 20):
        fleet.extra["a"] = {"damaged_chunks": total, "rate_bytes_per_s": 0.0}
        actions += fleet.run(STEP_S)
    assert not [a for a in actions if isinstance(a, Throttle)]
    assert fleet.tracker.parents()["b"] == SENDER_ID


def test_damage_everywhere_throttles_but_moves_nobody() -> None:
    fleet = running()
    for step in range(1, 30):
        for name in "abcd":
            fleet.extra[name] = {"damaged_chunks": 100 * step}
        assert not fleet.assigned(fleet.run(STEP_S))


def test_one_accusation_moves_no_more_than_a_bad_hop_would() -> None:
    fleet = running()
    actions = fleet.send(Accusation("b", by="c"))
    assert fleet.assigned(actions) == {"c": "a", "b": "d"}
    assert not [a for a in actions if isinstance(a, Drop | Demote)]
    assert not fleet.tracker.is_dropped("b")
    fleet.run(60.0)
    stats = fleet.tracker.all_stats()[-1]
    assert stats.num_complete == 4  # it goes on receiving like everybody


@pytest.mark.parametrize("about", ["a", "d", "c", SENDER_ID, "nobody"])
def test_nobody_is_accused_but_by_its_present_child(about: str) -> None:
    fleet = running()
    before = fleet.tracker.parents()
    assert before["c"] == "b"
    assert fleet.send(Accusation(about, by="c")) == []
    assert fleet.send(Accusation("b", by="nobody")) == []
    assert fleet.tracker.parents() == before


def test_a_lost_peer_accuses_nobody() -> None:
    fleet = running()
    fleet.extra["c"] = {"parent_silent_s": 1.1, "parent_closed": True}
    fleet.run(STEP_S)
    fleet.mute.add("c")
    fleet.run(2.0)
    before = fleet.tracker.parents()
    assert "c" not in before
    assert fleet.send(Accusation("a", by="c")) == []
    assert fleet.tracker.parents() == before
    fleet.mute.clear()
    fleet.report("c")
    assert sum("c" in chain for chain in fleet.tracker.chains()) == 1
    assert fleet.tracker.parents()["c"] == fleet.tracker.chains()[0][-2]


def test_whoever_accuses_one_parent_after_another_is_not_believed() -> None:
    fleet = running()
    fleet.send(Accusation("b", by="c"))
    actions = fleet.send(Accusation("a", by="c"))
    assert [type(a) for a in actions][:1] == [Demote]
    assert fleet.tracker.parents()["a"] == SENDER_ID
    assert not fleet.tracker.is_dropped("a")


def accused(by: str) -> Fleet:
    """A fleet in which these children have accused "x", each when it was its parent."""
    fleet = Fleet("x" + by)
    for version, child in enumerate(by):
        fleet.publish(version, 1000)
        others = [name for name in by if name != child]
        for name in others:
            fleet.join(name)
        while fleet.tracker.parents()[child] != "x":  # the order of joining is that of the chain
            for name in ("x", child):
                fleet.join(name)
        fleet.send(Accusation("x", by=child))
    return fleet


def test_several_children_expel_a_parent_for_a_while() -> None:
    assert not accused("cd").tracker.is_dropped("x")
    fleet = accused("cde")
    [drop] = [a for a in fleet.actions if isinstance(a, Drop)]
    assert drop.peer_id == "x"
    assert drop.reason.endswith("its children c, d, e")
    assert "x" not in fleet.tracker.parents()
    assert fleet.send(PeerJoined("x", "http://x", "")) == []
    fleet.now_s += EXPELLED_S - 1.0
    assert not [a for a in fleet.send(Tick()) if isinstance(a, Readmit)]
    assert fleet.tracker.is_dropped("x")
    fleet.now_s += 1.0
    assert [a for a in fleet.send(Tick()) if isinstance(a, Readmit)] == [Readmit("x")]
    assert fleet.send(PeerJoined("x", "http://x", ""))
    fleet.send(Accusation("x", by="c"))  # one word is not enough again
    assert not fleet.tracker.is_dropped("x")


def test_one_child_that_repeats_itself_is_one_child() -> None:
    assert not accused("ccc").tracker.is_dropped("x")


def test_a_version_of_another_lineage_completes_nothing() -> None:
    fleet = Fleet("a")
    new = fleet.publish(8, 2000)
    of_old = {"key": PublicationKey("before", 10, "full", -1), "installed_version": 10, "bytes_received": 0}
    fleet.extra["a"] = {**of_old, "complete": True}
    fleet.report("a")
    stats = fleet.tracker.stats(new)
    assert stats is not None
    assert stats.num_complete == 0
    fleet.extra["a"] = {"key": None, "installed_version": 8}
    fleet.report("a")
    stats = fleet.tracker.stats(new)
    assert stats is not None
    assert stats.num_complete == 1


def test_repeated_trouble_makes_a_peer_rollout_only() -> None:
    fleet = Fleet("abcd")
    for version in range(4):
        fleet.publish(version, 4000)
        fleet.mute.add("b")
        fleet.run(3.0)
        fleet.mute.clear()
        actions = fleet.run(12.0)
    assert [a.peer_id for a in fleet.actions if isinstance(a, Demote)] == ["b"]
    assert not [a for a in actions if isinstance(a, Demote)]  # at once, when it fell silent
    fleet.join("x")
    fleet.run(1.0)
    assert "b" in fleet.tracker.parents()
    assert "b" not in fleet.tracker.parents().values()


def test_a_demoted_peer_that_joins_again_forwards_no_more_than_before() -> None:
    fleet = running()
    fleet.send(Accusation("b", by="c"))
    fleet.send(Accusation("a", by="c"))
    fleet.join("c")
    fleet.join("x")
    fleet.run(60.0)
    fleet.publish(1, 1000)
    fleet.run(3.0)
    assert "c" not in fleet.tracker.parents().values()


def test_a_peer_cannot_erase_its_faults_by_joining_again() -> None:
    fleet = Fleet("abcd")
    for version in range(4):
        fleet.publish(version, 4000)
        fleet.mute.add("b")
        fleet.run(3.0)
        fleet.mute.clear()
        fleet.send(PeerJoined("b", "http://b", ""))
        fleet.run(12.0)
    assert [a.peer_id for a in fleet.actions if isinstance(a, Demote)] == ["b"]


def test_trouble_between_publications_is_repaired_and_forgotten() -> None:
    fleet = Fleet("abcd")
    for _ in range(6):
        fleet.mute.add("b")
        fleet.run(4.0)
        assert "b" not in fleet.tracker.parents()
        fleet.mute.clear()
        fleet.run(4.0)
    assert not [a for a in fleet.actions if isinstance(a, Demote)]


def test_success_in_between_forgives() -> None:
    fleet = Fleet("abcd")
    for version in range(8):
        fleet.publish(version, 4000)
        fleet.mute.update("b" if version % 2 else "")
        fleet.run(3.0)
        fleet.mute.clear()
        fleet.run(12.0)
    assert not [a for a in fleet.actions if isinstance(a, Demote)]


def test_somebody_always_forwards() -> None:
    fleet = Fleet("abc")
    for version in range(6):
        fleet.publish(version, 4000)
        fleet.mute.update("bc")
        fleet.run(3.0)
        fleet.mute.clear()
        fleet.run(12.0)
    assert len([a for a in fleet.actions if isinstance(a, Demote)]) == 1


def test_order_changes_between_publications_only() -> None:
    fleet = running("abcd")
    fleet.factor["c"] = 0.5
    fleet.run(3.0)
    assert fleet.tracker.parents()["b"] == "d"
    fleet.factor.clear()
    settled = fleet.tracker.parents()
    while fleet.tracker.stats(key(0)).num_complete < 4:  # type: ignore[union-attr]
        assert fleet.tracker.parents() == settled
        fleet.run(STEP_S)
    fleet.run(1.0)
    assert fleet.tracker.chains()[0][-1] == "b"  # a relay again, as the last in rank


def test_small_differences_move_nobody() -> None:
    fleet = Fleet("abc", chains=2)
    fleet.publish(0, 4000)
    fleet.run(6.0)
    before = fleet.tracker.parents()
    fleet.factor["a"] = 0.8  # b is now the better seed, by two points or so
    for version in range(1, 12):  # all become more stable meanwhile, by more than the margin
        fleet.publish(version, 4000)
        fleet.run(10.0)
    assert fleet.tracker.parents() == before


# --- the number of chains ------------------------------------------------------------------------


def broadcast(fleet: Fleet, version: int, size: int = 5000, seconds: float = 12.0) -> int:
    """Returns how many chains it went along."""
    one = fleet.publish(version, size)
    count = len(fleet.tracker.chains())
    fleet.run(seconds)
    stats = fleet.tracker.stats(one)
    assert stats is not None
    assert stats.num_complete == stats.num_peers
    return count


def test_an_uplink_with_room_gets_more_chains_between_broadcasts() -> None:
    fleet = Fleet("abcdef", chains=None)
    assert [broadcast(fleet, version) for version in range(6)] == [1, 2, 3, 6, 6, 6]
    stats = fleet.tracker.all_stats()
    assert [one.repairs for one in stats] == [0] * 6


def test_a_star_learns_nothing() -> None:
    fleet = Fleet("abc", direct=True, chains=None)
    assert [broadcast(fleet, version) for version in range(3)] == [3, 3, 3]


def test_what_is_too_small_to_measure_changes_nothing() -> None:
    fleet = Fleet("abcd", chains=None)
    assert {broadcast(fleet, version, size=2000) for version in range(5)} == {1}
    assert [broadcast(fleet, version) for version in range(5, 8)] == [1, 2, 4]
    assert {broadcast(fleet, version, size=2000) for version in range(8, 12)} == {4}


def test_a_few_large_chunks_are_too_little_to_measure() -> None:
    fleet = Fleet("abcd", chains=None)
    fleet.extra = {name: {"chunks_have": 31} for name in "abcd"}
    assert {broadcast(fleet, version) for version in range(3)} == {1}


def test_a_slow_source_says_nothing_of_links() -> None:
    fleet = Fleet("abcd", chains=None)
    for version in range(3):
        one = fleet.publish(version, 5000, ready=200)
        assert len(fleet.tracker.chains()) == 1
        while fleet.ready[one] < 5000:
            fleet.ready[one] += 200  # of 250 that a hop carries
            fleet.send(SegmentAdded(one, fleet.ready[one], fleet.ready[one]))
            fleet.run(STEP_S)
        fleet.send(PublicationCommitted(one, 5000, 5000))
        fleet.run(4.0)
        assert fleet.tracker.stats(one).num_complete == 4  # type: ignore[union-attr]
    fleet.run(1.0)
    assert len(fleet.tracker.chains()) == 1


def test_broadcasts_side_by_side_say_nothing_of_links() -> None:
    fleet = Fleet("abcd", chains=None)
    for version in range(0, 6, 2):
        fleet.publish(version, 5000)
        fleet.run(1.0)
        assert broadcast(fleet, version + 1, seconds=14.0) == 1
    fleet.run(1.0)
    assert len(fleet.tracker.chains()) == 1


@pytest.mark.parametrize("trouble", ["repair", "throttle", "join", "leave"])
def test_a_disturbed_broadcast_says_nothing_of_links(trouble: str) -> None:
    fleet = Fleet("abcd", chains=None)
    fleet.publish(0, 8000)
    fleet.run(3.0)
    if trouble == "repair":
        fleet.extra["c"] = {"parent_silent_s": 1.1, "parent_closed": True}
    elif trouble == "throttle":
        fleet.extra["c"] = {"damaged_chunks": 60}
    elif trouble == "join":
        fleet.join("x")
    else:
        fleet.mute.add("d")
    fleet.run(STEP_S)
    fleet.extra.clear()
    fleet.run(16.0)
    assert all(one.num_complete == one.num_peers for one in fleet.tracker.all_stats())
    assert broadcast(fleet, 1) == 1
    assert broadcast(fleet, 2) == 2


def test_a_repair_anywhere_makes_rates_unsteady() -> None:
    one = Broadcast(key(0), 0.0, 5000)
    for step in range(13):
        one.of("a").add(step * STEP_S, 250 * (step + 1))
    one.of("a").chunks = 100
    assert steady_rates(one, ["a"], ["a"]) == {"a": RATE}
    assert steady_rates(one, ["a"], ["a", "b"]) == {}  # a seed of which nothing is known
    one.repairs = 1
    assert steady_rates(one, ["a"], ["a"]) == {}


# --- publications --------------------------------------------------------------------------------


def test_time_ends_when_the_fraction_has_it() -> None:
    fleet = Fleet("abcdefghijkl", direct=True)
    fleet.factor["l"] = 0.25
    one = fleet.publish(0, 1000)
    fleet.run(2.0)
    stats = fleet.tracker.stats(one)
    assert stats is not None
    assert (stats.num_complete, stats.seconds) == (11, 1.0)  # ceil(12 / 1.1) = 11


def test_a_newer_full_cancels_an_older_one_where_it_is_sooner() -> None:
    fleet = Fleet("abc")
    old = fleet.publish(0, 8000)
    fleet.run(3.0)
    fleet.publish(1, 7200)
    # a lacks 5,000 of 8,000 and goes on; nobody behind it has less left than 7,200 either, until they do.
    cancelled = [a for a in fleet.actions if isinstance(a, CancelBroadcast)]
    assert cancelled == []
    fleet.publish(2, 5400)
    [action] = [a for a in fleet.actions if isinstance(a, CancelBroadcast) and a.key == old]
    assert action.peer_ids == ("c",)
    assert fleet.tracker.cancelled("c") == [old, key(1)]
    assert fleet.tracker.cancelled("a") == [key(1)]


def test_the_base_of_a_newer_patch_is_never_cancelled() -> None:
    fleet = Fleet("ab")
    fleet.publish(0, 100_000)
    fleet.run(1.0)
    fleet.publish(1, 10, codec="fast", base=0)
    assert not [a for a in fleet.actions if isinstance(a, CancelBroadcast)]


def test_the_base_of_a_patch_on_its_way_outlives_a_smaller_full_one() -> None:
    fleet = Fleet("ab")
    fleet.publish(0, 100_000)
    fleet.run(1.0)
    fleet.publish(1, 3000, codec="fast", base=0)
    fleet.publish(2, 4000)
    assert not [a for a in fleet.actions if isinstance(a, CancelBroadcast)]


def test_a_stuck_peer_does_not_keep_broadcasts_open_for_ever() -> None:
    fleet = Fleet("ab")
    fleet.factor["b"] = 0.0
    for version in range(40):
        fleet.publish(version, 100)
        fleet.run(0.5)
    assert len(fleet.tracker.all_stats()) == 40
    assert sum(s.num_complete == 1 for s in fleet.tracker.all_stats()) >= 38


def test_a_report_cannot_claim_more_than_there_is() -> None:
    fleet = Fleet("ab")
    one = fleet.publish(0, 50_000, ready=1000)
    for claimed in range(1000, 17_000, 1000):
        fleet.extra["a"] = {"bytes_received": claimed, "complete": True}
        fleet.run(STEP_S)
    stats = fleet.tracker.stats(one)
    assert stats is not None
    assert stats.num_complete == 0
    assert fleet.tracker.parents() == {"a": SENDER_ID, "b": "a"}


# --- JSON ----------------------------------------------------------------------------------------

names = st.text(max_size=20)
numbers = st.integers(-1, 2**62)
rates = st.floats(0, 1e12)
keys = st.builds(
    PublicationKey,
    st.from_regex(r"[0-9A-Za-z][0-9A-Za-z._-]{0,63}", fullmatch=True),
    st.integers(0, 2**63 - 1),
    st.sampled_from(["compact", "fast", "overwrite", "full"]),
    st.integers(-1, 2**63 - 1),
)
events = st.one_of(
    st.builds(PeerJoined, names, names, names),
    st.builds(PublicationOpened, keys, numbers),
    st.builds(SegmentAdded, keys, numbers, numbers),
    st.builds(PublicationCommitted, keys, numbers, numbers),
    st.builds(
        Report,
        names,
        names,
        st.none() | keys,
        numbers,
        numbers,
        rates,
        numbers,
        rates,
        st.booleans(),
        st.booleans(),
        numbers,
        numbers,
    ),
    st.builds(Accusation, names, names),
    st.just(Tick()),
)
actions = st.one_of(
    st.builds(Assign, names, names, names, names),
    st.builds(Drop, names, names),
    st.builds(Readmit, names),
    st.builds(Demote, names, names),
    st.builds(Throttle, names, names, rates),
    st.builds(CancelBroadcast, keys, st.lists(names).map(tuple)),
)
junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | names,
    lambda inner: st.lists(inner) | st.dictionaries(names, inner),
    max_leaves=8,
)


@given(events)
def test_events_survive_json(event: Event) -> None:
    assert decode(msgspec.json.encode(event), Event, "an event") == event


@given(actions)
def test_actions_survive_json(action: Action) -> None:
    assert decode(msgspec.json.encode(action), Action, "an action") == action


@given(events, st.data())
def test_anything_else_is_refused(event: Event, data: st.DataObject) -> None:
    record = msgspec.to_builtins(event)
    field = data.draw(st.sampled_from(sorted(record)))
    record[field] = data.draw(junk)
    try:
        read = decode(json.dumps(record), Event, "an event")
    except WeightsError:
        return
    assert msgspec.to_builtins(read) == record


@pytest.mark.parametrize("record", [None, [], {}, {"kind": "Tick", "more": 1}, {"kind": "Assign"}])
def test_malformed_events_are_refused(record: object) -> None:
    with pytest.raises(WeightsError):
        decode(json.dumps(record), Event, "an event")


def test_figures_survive_json() -> None:
    fleet = Fleet("ab")
    fleet.publish(0, 3000)
    fleet.run(1.0)
    [running_now] = fleet.tracker.all_stats()
    fleet.run(5.0)
    [done] = fleet.tracker.all_stats()
    for stats in (running_now, done):
        assert msgspec.json.decode(msgspec.json.encode(stats), type=BroadcastStats) == stats
    assert running_now.seconds is None
    assert done.hop_bytes_per_s
