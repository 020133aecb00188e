"""bench.chaos recovery: when work counts as resumed, and what the figures and verdicts are made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.chaos.leases import LeaseRecord
from bench.chaos.recovery import BARS_S, LIMIT_S, faults_left, figures_of, recovery_verdicts

FAULT_S = 10.0


def leased(at_s: float, worker: str, epoch: int, **leases: int) -> dict[str, Any]:
    return {"kind": "leased", "at_s": at_s, "worker": worker, "epoch": epoch, "leases": leases}


def came(kind: str, at_s: float, worker: str, epoch: int, *leases: str) -> dict[str, Any]:
    return {"kind": kind, "at_s": at_s, "worker": worker, "epoch": epoch, "leases": list(leases)}


def record_of(*notes: dict[str, Any]) -> LeaseRecord:
    record = LeaseRecord()
    for note in notes:
        record.add(note)
    return record


BEFORE = (
    leased(1.0, "w0", 0, a=1, b=2, c=3),
    leased(1.0, "w1", 0, d=4),
    came("heard", 9.0, "w0", 0, "a", "b"),
    came("taken", 9.5, "w0", 0, "c"),
)


def test_work_has_resumed_when_tokens_of_the_last_lost_prompt_came_from_another() -> None:
    record = record_of(*BEFORE)
    assert record.open_leases(("w0", 0), FAULT_S) == [1, 2]
    for note in (
        leased(14.0, "w1", 0, e=1, f=2),
        came("heard", 15.0, "w1", 0, "e", "d"),
    ):
        record.add(note)
        assert record.resumed_s(("w0", 0), FAULT_S) is None
    record.add(came("heard", 16.5, "w1", 0, "e", "f"))
    assert record.resumed_s(("w0", 0), FAULT_S) == 16.5


def test_what_the_lost_one_still_delivers_is_not_waited_for() -> None:
    record = record_of(*BEFORE, came("taken", 10.1, "w0", 0, "a"))
    record.add(leased(12.0, "w0", 1, g=2))  # its successor is another incarnation
    record.add(came("taken", 13.0, "w0", 1, "g"))
    assert record.resumed_s(("w0", 0), FAULT_S) == 13.0


def test_leases_given_after_the_fault_or_to_the_lost_one_itself_do_not_count() -> None:
    record = record_of(*BEFORE, leased(10.5, "w0", 0, h=5, i=1, j=2), came("heard", 10.6, "w0", 0, "i", "j"))
    assert record.open_leases(("w0", 0), FAULT_S) == [1, 2]
    assert record.resumed_s(("w0", 0), FAULT_S) is None


def test_a_worker_samples_while_its_newest_incarnation_is_heard_of_and_has_leases() -> None:
    record = record_of(*BEFORE)
    assert record.samples("w0", 5.0) == ("w0", 0)
    assert record.samples("w0", 9.6) is None
    assert record.samples("w1", 5.0) is None
    record.add(leased(11.0, "w0", 1, k=6))
    record.add(came("taken", 12.0, "w0", 1, "k"))
    assert record.samples("w0", 5.0) is None  # nothing is leased to the newest


def test_a_lease_was_taken_away_if_its_prompt_is_leased_again_before_it_is_handed_in() -> None:
    record = record_of(*BEFORE)
    assert record.taken_away() == 0
    record.add(leased(20.0, "w1", 0, m=1))
    assert record.taken_away() == 1
    assert not record.was_lost("w0", FAULT_S, 30.0)
    record.add({"kind": "lost", "at_s": 12.0, "worker": "w0"})
    assert record.was_lost("w0", FAULT_S, 30.0)
    assert not record.was_lost("w0", FAULT_S, 11.0)


def test_a_record_is_read_as_it_grows_and_no_half_line(tmp_path: Path) -> None:
    path = tmp_path / "seen.jsonl"
    record = LeaseRecord(path)
    record.read()
    whole = "".join(json.dumps(note) + "\n" for note in ({"kind": "batch", "at_s": 0.0}, *BEFORE))
    path.write_text(whole[:-9])
    record.read()
    assert record.open_leases(("w0", 0), FAULT_S) == [1, 2, 3]
    path.write_text(whole)
    record.read()
    record.read()
    assert record.open_leases(("w0", 0), FAULT_S) == [1, 2]


def sample(fault: str, seconds: float | None, settings: str = "recommended") -> dict[str, Any]:
    return {"settings": settings, "fault": fault, "seconds": seconds, "noticed": "loss"}


QUIET = {
    **{"seconds": 120.0, "round_trip_s": 0.16, "sent": 1000, "again": 20},
    **{"steps": 9, "workers_lost": 0, "leases_taken_away": 1},
}


def verdicts_of(samples: list[dict[str, Any]], quiet: list[dict[str, Any]]) -> list[str]:
    """Claims that fail."""
    verdicts = recovery_verdicts(figures_of(samples, quiet), 20, 4.0)
    assert len(verdicts) == 6
    return [claim for claim, holds in verdicts.items() if not holds]


def test_every_claim_can_hold_and_fail() -> None:
    good = [sample(fault, 3.9) for fault in BARS_S for _ in range(20)]
    assert verdicts_of(good, [QUIET, QUIET]) == []
    assert verdicts_of(good, [QUIET]) == ["no false death in 4 minutes of 160 ms and 2 % loss"]
    assert len(verdicts_of(good, [QUIET, {**QUIET, "workers_lost": 1}])) == 1
    assert len(verdicts_of(good, [{**QUIET, "again": 0}] * 2)) == 1  # nothing was lost on that link
    assert verdicts_of(good[1:], [QUIET, QUIET]) == ["20 faults of each kind"]
    assert len(verdicts_of([], [])) == 6


@pytest.mark.parametrize("fault", list(BARS_S))
def test_one_of_twenty_may_be_late_and_two_may_not(fault: str) -> None:
    others = [sample(other, 0.5) for other in BARS_S if other != fault for _ in range(20)]
    one = [sample(fault, 0.5)] * 19 + [sample(fault, None)]
    assert verdicts_of(others + one, [QUIET, QUIET]) == []
    (failed,) = verdicts_of(others + one[1:] + [sample(fault, None)], [QUIET, QUIET])
    assert failed.startswith(f"{fault}: ")
    assert figures_of([*one, sample("none", None)], [])["recommended: given up for nothing"] == 1
    assert figures_of(one, [])["recommended"][fault]["samples_s"][-1] == LIMIT_S


def test_an_interrupted_campaign_goes_on_with_what_is_missing() -> None:
    assert faults_left([], "defaults", 2) == [*BARS_S, *BARS_S]
    done = [
        sample("actor", 1.0),
        sample("none", None),
        sample("link", 1.0),
        sample("actor", 1.0),
        sample("link", 5.0, "defaults"),
    ]
    assert faults_left(done, "recommended", 2) == ["node stopped", "node killed"] * 2 + ["link"]
    assert faults_left(done * 2, "recommended", 2) == ["node stopped", "node killed"] * 2
