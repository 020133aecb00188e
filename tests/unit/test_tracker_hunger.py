"""A parent that keeps its child from what the learner has committed, whatever it does or reports."""

from __future__ import annotations

from typing import Any

import pytest

from echo_planes.weights.chain.events import SENDER_ID, Demote, PeerJoined
from echo_planes.weights.chain.starvation import MAX_NEED_BYTES_PER_S, needed_bytes_per_s
from echo_planes.weights.chain.tracker import STARVED_S, TrackerSettings
from echo_planes.weights.wire.manifest import PublicationKey
from tests.unit.tracker_fleet import RATE, Fleet, key

SIZE = 2000  # bytes of a version: two seconds on one hop
CHUNKS_S = 2 * 1 / (0.1 * 2000)  # that two chunks, of a byte each here, take at the least rate that counts
JUDGED_S = STARVED_S + CHUNKS_S + 1.0  # and the reports, and the time a new parent gets
OLD = PublicationKey("run", 0, "full", -1)

MODES: dict[str, dict[str, Any]] = {  # what the starved child can say of such a parent
    "pings": {"key": None, "bytes_received": 0, "chunks_have": 0},
    "an old version": {"key": OLD, "bytes_received": SIZE, "chunks_have": SIZE, "complete": True},
    "cancels": {
        "key": key(1),
        "bytes_received": 3,
        "chunks_have": 3,
        "complete": False,
    },  # again and again the same ones
    "single bytes": {"key": key(1), "bytes_received": 0, "complete": False},
    "headers without chunks": {"key": key(1), "chunks_have": 0, "bytes_received": 0, "complete": False},
}


def frozen(names: str, freezing: str, mode: str = "pings", **options: Any) -> Fleet:
    """A fleet that has version 0 and is sent version 1, which these peers do not pass on."""
    fleet = Fleet(names, **options)
    fleet.publish(0, SIZE)
    fleet.run(SIZE / RATE + 3.0)
    for name in freezing:
        fleet.freezing[name] = 3 if mode == "cancels" else 0
    fleet.publish(1, SIZE)
    return fleet


def whole(fleet: Fleet, version: int = 1) -> set[str]:
    return {name for name, have in fleet.have.items() if have.get(key(version)) == SIZE}


@pytest.mark.parametrize("mode", MODES)
def test_a_starved_child_gets_another_parent_whatever_its_parent_reports(mode: str) -> None:
    fleet = frozen("abcd", "b", mode)
    said = {**MODES[mode], "installed_version": 0, "parent_silent_s": 0.0}
    fleet.extra["c"] = said
    fleet.extra["b"] = {"key": key(1), "bytes_received": SIZE, "complete": True, "installed_version": 1}
    before = fleet.tracker.parents()
    assert before["c"] == "b"
    begun_s = fleet.now_s
    while fleet.tracker.parents()["c"] == "b" and fleet.now_s < begun_s + JUDGED_S:
        fleet.run(0.25)
    assert fleet.tracker.parents()["c"] == "a"
    fleet.extra.pop("c")
    fleet.run(SIZE / RATE + 3.0)
    assert whole(fleet) >= {"a", "c", "d"}
    assert fleet.tracker.parents().get("b") not in (None, SENDER_ID)  # a leaf: it has no child to starve
    assert "b" not in fleet.tracker.parents().values()


def test_two_freezing_parents_in_a_row_end_with_the_sender_itself() -> None:
    fleet = frozen("abcd", "ab")
    fleet.extra["a"] = fleet.extra["b"] = {"key": key(1), "bytes_received": SIZE, "complete": True}
    fleet.run(3 * JUDGED_S + SIZE / RATE)
    assert whole(fleet) >= {"c", "d"}


def test_a_parent_that_says_it_is_hungry_itself_does_not_hide_so() -> None:
    fleet = frozen("abc", "b")
    fleet.extra["b"] = {"key": None, "bytes_received": 0, "complete": False, "installed_version": 0}
    fleet.run(3 * JUDGED_S + SIZE / RATE)
    assert "c" in whole(fleet)


def test_a_parent_that_says_it_gets_a_little_now_and_then_does_not_hide_so() -> None:
    fleet = frozen("abc", "b")
    for step in range(60):
        said = int(200 * max(0.0, step * 0.25 - 3.0))  # just enough, always a little late
        fleet.extra["b"] = {"key": key(1), "bytes_received": said, "complete": False, "installed_version": 0}
        fleet.run(0.25)
    assert "c" in whole(fleet)


def test_the_honest_parent_of_one_that_starves_is_not_blamed_for_it() -> None:
    fleet = frozen("abcdef", "a")
    fleet.run(2 * JUDGED_S + SIZE / RATE)
    assert whole(fleet) >= set("bcdef")
    blamed = {a.peer_id for a in fleet.actions if isinstance(a, Demote)}
    assert not blamed
    assert "a" not in fleet.tracker.parents().values()
    order = fleet.tracker.chains()[0]
    assert [name for name in order if name != "a"] == list("bcdef")  # nobody else lost its place


def test_who_starves_at_the_sender_itself_is_at_fault_and_its_parents_are_not() -> None:
    fleet = frozen("abcd", "")
    fleet.factor["c"] = 0.0  # takes nothing, whoever sends
    fleet.run(6 * JUDGED_S)
    fleet.factor["c"] = 1.0
    fleet.run(8.0)
    for version in range(2, 5):
        fleet.publish(version, SIZE)
        fleet.run(8.0)
    assert whole(fleet, 4) == set("abcd")
    assert not [a for a in fleet.actions if isinstance(a, Demote)]


@pytest.mark.parametrize("factor", [0.15, 0.5])
def test_a_slow_and_honest_link_is_not_a_freezing_one(factor: float) -> None:
    """With the rate known to be 2,000 bytes/s, a tenth of it is enough."""
    fleet = Fleet("abcd", regions="abcd")
    fleet.publish(0, 200)
    fleet.run(4.0)
    for name in "abcd":
        fleet.factor[name] = 2 * factor  # every link alike: nobody else would be faster
    fleet.publish(1, 6000)
    fleet.run(6000 / (RATE * 2 * factor) + 6.0)
    assert all(have[key(1)] == 6000 for have in fleet.have.values())
    moves = [a for a in fleet.actions if isinstance(a, Demote)]
    assert not moves
    assert fleet.tracker.chains() == [list("abcd")]


def test_a_worker_that_joins_late_under_a_freezing_parent_gets_what_was_committed_before() -> None:
    fleet = frozen("ab", "")
    fleet.run(6.0)
    assert whole(fleet) == {"a", "b"}
    fleet.freezing["b"] = 0
    fleet.join("c")
    assert fleet.tracker.parents()["c"] == "b"
    fleet.run(2 * JUDGED_S + 2 * SIZE / RATE)  # nothing is being published
    assert "c" in whole(fleet)
    fleet.run(1.0)
    assert fleet.tracker.parents()["c"] != "b"


def test_a_version_that_a_peer_was_told_to_give_up_starves_nobody() -> None:
    fleet = Fleet("abc")
    fleet.publish(0, 20_000)
    fleet.run(2.0)
    fleet.publish(1, 500, ready=0)  # smaller: the older is given up for it, but it is not made yet
    before = fleet.tracker.parents()
    fleet.run(3 * JUDGED_S)
    assert fleet.tracker.parents() == before


def test_who_caught_up_from_the_store_is_not_starved_by_a_parent_that_skips_it() -> None:
    fleet = frozen("abc", "b")
    fleet.extra["c"] = {"key": None, "bytes_received": 0, "installed_version": 0, "staged_version": 1}
    fleet.extra["b"] = {"key": key(1), "bytes_received": SIZE, "complete": True}
    before = fleet.tracker.parents()
    fleet.run(3 * JUDGED_S)
    assert fleet.tracker.parents() == before


def test_in_a_star_nobody_is_moved() -> None:
    fleet = frozen("abc", "", direct=True)
    fleet.factor["b"] = 0.0
    fleet.run(3 * JUDGED_S)
    assert fleet.tracker.parents() == dict.fromkeys("abc", SENDER_ID)


def test_what_an_absent_rate_and_a_huge_one_mean() -> None:
    assert needed_bytes_per_s(None, 5.0) == 5.0
    assert needed_bytes_per_s(40.0, 5.0) == 4.0  # links known to be slow are judged as such
    assert needed_bytes_per_s(1e12, 5.0) == MAX_NEED_BYTES_PER_S
    assert TrackerSettings().starved_s == STARVED_S


def test_a_peer_that_begins_anew_has_its_whole_time() -> None:
    fleet = frozen("abc", "b")
    fleet.extra["b"] = {"key": key(1), "bytes_received": SIZE, "complete": True}
    fleet.run(STARVED_S - 1.0)
    fleet.send(PeerJoined("c", "http://c", ""))
    actions = fleet.run(1.5)
    assert "b" not in fleet.assigned(actions)
