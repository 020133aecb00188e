"""Record of a fleet: all that is done, and where it stands now and then."""

from __future__ import annotations

import pytest

from echo_planes.fleet.reconciler import Leave
from echo_planes.fleet.record import EVERY_S, FleetRecord
from tests.unit.test_fleet import BOOT_LIMIT_S, Story, instance_type, need


class Told:
    """A story whose record is kept."""

    def __init__(self) -> None:
        self.story = Story(
            [instance_type("a", usd_per_hour=0.5), instance_type("b", usd_per_hour=3.0)], {"a": 1}
        )
        self.record = FleetRecord(self.story.fleet)
        first = self.story.fleet.begin(0.0)
        self.record.begun(first)
        self.story.serve(first)

    def tick(
        self, at_s: float, mu_target: float, max_staleness: int = 3
    ) -> tuple[str, dict[str, object]] | None:
        wanted = need(mu_target, max_staleness)
        actions = self.story.fleet.tick(at_s, wanted)
        return self.record.tick(wanted, actions, at_s)


def test_what_is_done_is_written_down_with_its_reason_and_numbers() -> None:
    told = Told()
    written = told.tick(10.0, 2.2)
    assert written is not None
    text, numbers = written
    decision = told.story.fleet.decision
    assert decision is not None
    assert text == decision.reason
    assert numbers == {
        "mu_min": 2.0,
        "mu_target": 2.2,
        "mu": 1.0,  # of the one that serves
        "usd_per_hour": 0.5,  # nothing is paid for what is only asked for
        "workers": {"serving": 1, "asked": 2},
        "launched": {"a": 2},
        "released": {},
    }


def test_a_fleet_that_stays_as_it_is_is_written_down_now_and_then_and_only_where_something_changed() -> None:
    told = Told()
    assert told.tick(0.0, 1.0) is not None
    assert told.tick(EVERY_S - 1, 0.9) is None  # too soon
    assert told.tick(EVERY_S, 1.0) is None  # nothing new
    assert told.tick(EVERY_S + 1, 0.99999) is None  # within the noise
    written = told.tick(EVERY_S + 2, 0.95)
    assert written is not None
    assert written[0] == ""
    assert written[1]["mu_target"] == pytest.approx(0.95)
    assert "launched" not in written[1]


def test_a_worker_that_is_given_up_is_a_release_of_its_instance_type() -> None:
    told = Told()
    told.tick(10.0, 2.2)
    limit_s = 10.0 + BOOT_LIMIT_S
    wanted = need(2.2)
    actions = told.story.fleet.tick(limit_s + 1, wanted)
    written = told.record.tick(wanted, actions, limit_s + 1)
    assert written is not None
    given_up = [action.reason for action in actions if isinstance(action, Leave)]
    assert len(given_up) == 2
    assert written[1]["released"] == {"a": 2}
    assert written[0].startswith(given_up[0])
    decision = told.story.fleet.decision
    assert decision is not None
    assert written[0].endswith(decision.reason)


def test_without_overlap_no_rate_is_needed() -> None:
    written = Told().tick(10.0, 1.0, max_staleness=0)
    assert written is not None
    assert written[1]["mu_min"] is written[1]["mu_target"] is None


def test_before_anything_is_known_the_reason_says_so() -> None:
    told = Told()
    told.story.fleet.gone("w0", "left", 5.0)
    actions = told.story.fleet.tick(10.0, None)
    written = told.record.tick(None, actions, 10.0)
    assert written is not None
    assert written[0] == "nothing is known of the need yet: the first fleet is kept"
    assert written[1]["launched"] == {"a": 1}
