"""Standbys take the places of lost workers, and slow workers are replaced: what the fleet decides."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_planes.fleet.capacity import Need
from echo_planes.fleet.estimates import CapacityModel, ThroughputSample
from echo_planes.fleet.health import (
    ENOUGH_CHANGES,
    RECENT_CHANGES,
    SLOW_S,
    SLOW_SHARE,
    SpeedWatch,
    worst,
)
from echo_planes.fleet.instance_record import FIRST_BACK_OFF_S
from echo_planes.fleet.instance_types import InstanceType, Limits
from echo_planes.fleet.provisioner import Provisioner
from echo_planes.fleet.reconciler import Reconciler
from echo_planes.fleet.workers import Activate, FleetAction, Launch, Leave, Park
from tests.unit.test_fleet import TICK_S, instance_type, launches, leaves, need

TOKENS_PER_S = 100.0
LENGTH = 100  # tokens of a trajectory
WATCHED_S = 5 * SLOW_S  # three workers: enough to know the noise
ALONE_S = (ENOUGH_CHANGES + 2) * SLOW_S  # the same of one


class Story:
    """A fleet whose workers come, serve and work as they are told."""

    def __init__(
        self,
        instance_types: Sequence[InstanceType],
        first: Mapping[str, int],
        *,
        standby: int = 0,
        limits: Limits | None = None,
    ) -> None:
        self.fleet = Reconciler(
            instance_types,
            first,
            provisioner=Provisioner(limits or Limits(), sustain_s=0.0, release_sustain_s=30.0),
            model=CapacityModel(),
            boot_limit_s=600.0,
            standby=standby,
        )
        self.now_s = 0.0
        self.speeds: dict[str, float] = {}  # of those that serve, share of the usual
        self.full = 1.0  # share of the time
        self._made: dict[str, tuple[float, float]] = {}

    def start(self) -> list[FleetAction]:
        """All that there is to be serves."""
        actions = self.fleet.begin(0.0) + self.tick()
        self.serve(actions)
        return actions

    def tick(self, wanted: Need | None = None) -> list[FleetAction]:
        self.now_s += TICK_S
        for worker_id, speed in self.speeds.items():
            full_s, tokens = self._made.get(worker_id, (0.0, 0.0))
            full_s, tokens = full_s + self.full * TICK_S, tokens + self.full * TICK_S * speed * TOKENS_PER_S
            self._made[worker_id] = full_s, tokens
            made = int(tokens)
            sample = ThroughputSample(made, full_s, made, made // LENGTH)
            self.fleet.measured(worker_id, sample, self.now_s)
        return self.fleet.tick(self.now_s, wanted)

    def wait(self, seconds: float) -> list[FleetAction]:
        return [action for _ in range(math.ceil(seconds / TICK_S)) for action in self.tick()]

    def until_any(self, limit_s: float) -> tuple[list[FleetAction], float]:
        """Ticks until something is decided; what, and after how long."""
        begun_s = self.now_s
        while not (actions := self.tick()):
            assert self.now_s - begun_s < limit_s, "nothing was decided"
        return actions, self.now_s - begun_s

    def serve(self, actions: Sequence[FleetAction]) -> None:
        for action in actions:
            if isinstance(action, Launch):
                self.fleet.came(action.worker_id, self.now_s)
                self.fleet.serving(action.worker_id, self.now_s)
                self.speeds[action.worker_id] = 1.0

    def gone(self, worker_id: str, cause: str = "died") -> None:
        del self.speeds[worker_id]
        self.fleet.gone(worker_id, cause, self.now_s)  # type: ignore[arg-type]


def activated(actions: Sequence[FleetAction]) -> list[str]:
    return [action.worker_id for action in actions if isinstance(action, Activate)]


def parked(actions: Sequence[FleetAction]) -> list[str]:
    return [action.worker_id for action in actions if isinstance(action, Park)]


# --- standbys ------------------------------------------------------------------------------------


def test_a_standby_is_launched_beside_the_fleet_parked_and_no_part_of_its_capacity() -> None:
    story = Story([instance_type("dear", 4.0), instance_type("cheap", 1.0)], {"dear": 2}, standby=1)
    actions = story.start()
    assert launches(actions) == ["dear", "dear", "cheap"]
    assert parked(actions) == ["w2"]
    assert actions.index(Park("w2")) > actions.index(Launch("w2", "cheap"))
    assert story.fleet.counts == {"dear": 2}
    assert story.fleet.machines == {"dear": 2, "cheap": 1}
    assert (story.fleet.num_serving, story.fleet.num_standby) == (2, 1)
    assert story.wait(300.0) == []


@pytest.mark.parametrize("how", ["died", "preempted", "notice"])
def test_a_standby_takes_the_place_of_a_lost_worker_and_a_new_one_is_launched(how: str) -> None:
    story = Story([instance_type("a", max_count=8)], {"a": 2}, standby=1)
    story.start()
    story.wait(300.0)
    actions: list[FleetAction] = []
    if how == "notice":
        actions = story.fleet.notice("w0", 30.0, story.now_s)
        assert leaves(actions) == ["w0"]
        assert activated(actions) == ["w2"]  # at once
    else:
        story.gone("w0", how)
    actions += story.tick()
    assert activated(actions) == ["w2"]
    assert story.fleet.num_serving == 2
    assert parked(actions) == ["w3"]
    assert launches(actions) == ["a"]  # the next standby, and no worker besides
    assert story.wait(60.0) == []


def test_who_leaves_anyway_and_who_never_served_are_no_vacancy() -> None:
    story = Story([instance_type("a", max_count=8)], {"a": 1}, standby=1)
    story.start()
    story.wait(300.0)
    story.fleet.notice("w1", 30.0, story.now_s)  # the standby itself
    actions = story.tick()
    assert activated(actions) == []
    assert parked(actions) == ["w2"]
    story.fleet.gone("w1", "died", story.now_s)
    story.fleet.gone("w2", "died", story.now_s)  # it booted
    assert activated(story.wait(60.0)) == []
    assert story.fleet.num_serving == 1


@pytest.mark.parametrize("limits", [Limits(usd_per_hour=2.5), Limits(max_workers=2), Limits(usd_left=0.0)])
def test_no_standby_beyond_the_limits(limits: Limits) -> None:
    story = Story([instance_type("a", max_count=8)], {"a": 2}, standby=2, limits=limits)
    assert parked(story.start()) == []
    assert parked(story.wait(60.0)) == []


def test_a_quota_holds_with_standbys_and_the_rest_of_the_limits_is_the_fleets() -> None:
    story = Story([instance_type("a", max_count=3), instance_type("b", 2.0)], {"a": 1}, standby=1)
    story.start()
    actions = story.tick(need(4.0))
    assert story.fleet.machines == {"a": 3, "b": 2}  # a: two and what was the standby or is one
    assert all(count <= 3 for count in story.fleet.machines.values())
    assert story.fleet.counts["a"] + story.fleet.counts["b"] == 4, actions


def test_the_price_of_a_standby_leaves_the_fleet_exactly_the_rest() -> None:
    """1.2 - 0.3 in floats is a bit less than 0.9, the price of three workers."""
    limits = Limits(usd_per_hour=1.2)
    story = Story([instance_type("a", 0.3, max_count=8)], {"a": 3}, standby=1, limits=limits)
    story.start()
    for _ in range(20):
        assert story.tick(need(3.0)) == []
    assert story.fleet.counts == {"a": 3}


def test_where_no_fleet_is_enough_the_standby_takes_part_and_stays() -> None:
    story = Story([instance_type("a", max_count=8)], {"a": 2}, standby=1, limits=Limits(max_workers=3))
    story.start()
    actions = story.tick(need(5.0))
    assert activated(actions) == ["w2"]
    assert story.fleet.counts == {"a": 3}
    for _ in range(20):
        assert story.tick(need(5.0)) == []


def test_one_more_that_is_needed_is_the_standby() -> None:
    story = Story([instance_type("a", max_count=8)], {"a": 2}, standby=1)
    story.start()
    actions = story.tick(need(3.0))
    assert activated(actions) == ["w2"]
    assert launches(actions) == ["a"]
    assert parked(actions) == ["w3"]


def test_at_no_staleness_standbys_are_beside_the_useful_ones() -> None:
    story = Story([instance_type("a", max_count=8)], {"a": 1}, standby=1, limits=Limits(max_workers=8))
    story.start()
    actions = story.fleet.tick(story.now_s, need(5.0, max_staleness=0), useful=3)
    assert story.fleet.counts == {"a": 3}
    assert story.fleet.machines == {"a": 4}, actions


def test_surplus_lets_no_standby_go() -> None:
    story = Story([instance_type("a", max_count=8)], {"a": 3}, standby=1)
    story.start()
    gone = [one for _ in range(60) for one in leaves(story.tick(need(1.0)))]
    assert len(gone) == 2
    assert "w3" not in gone
    assert story.fleet.num_standby == 1


# --- slow workers --------------------------------------------------------------------------------


def test_a_slow_worker_stays_until_the_one_that_is_launched_for_it_serves() -> None:
    story = Story([instance_type("a", max_count=8)], {"a": 4})
    story.start()
    assert story.wait(WATCHED_S) == []
    story.speeds["w1"] = 0.5
    launched, after_s = story.until_any(SLOW_S)
    assert after_s == pytest.approx((1 - SLOW_SHARE) / 0.5 * SLOW_S, abs=15.0)
    assert launches(launched) == ["a"]
    assert story.fleet.counts == {"a": 4}
    assert story.wait(60.0) == []
    story.serve(launched)
    (left,) = story.tick()
    assert isinstance(left, Leave)
    assert left.worker_id == "w1"
    assert "tokens/s over 240 s without a free place, 59% of the 100 that others" in left.reason
    assert story.fleet.num_serving == 4
    story.gone("w1")
    assert story.wait(2 * SLOW_S) == []
    assert story.fleet.instance_types(story.now_s)[0].interruptions_per_hour == 0.0


def test_a_standby_takes_a_slow_workers_place_at_once_and_its_instance_type_is_backed_off() -> None:
    story = Story([instance_type("a", max_count=8), instance_type("b", 5.0)], {"a": 4}, standby=1)
    story.start()
    story.wait(WATCHED_S)
    story.speeds["w1"] = 0.3
    actions, _ = story.until_any(SLOW_S)
    assert activated(actions) == ["w4"]
    assert leaves(actions) == ["w1"]
    assert launches(actions) == ["b"]  # the next standby, while a is backed off
    assert story.fleet.instance_types(story.now_s)[0].max_count == 4
    assert story.fleet.instance_types(story.now_s + FIRST_BACK_OFF_S)[0].max_count == 8
    assert story.fleet.num_serving == 4


def test_without_room_a_slow_worker_goes_first_unless_it_is_the_only_one() -> None:
    story = Story([instance_type("a", max_count=3)], {"a": 3})
    story.start()
    story.wait(WATCHED_S)
    story.speeds["w0"] = 0.3
    actions, _ = story.until_any(SLOW_S)
    assert leaves(actions) == ["w0"]
    alone = Story([instance_type("a", max_count=1)], {"a": 1})
    alone.start()
    alone.wait(ALONE_S)
    alone.speeds["w0"] = 0.3
    assert alone.wait(2 * SLOW_S) == []


def test_one_that_is_alone_is_held_against_its_own_past() -> None:
    story = Story([instance_type("a", mu=1000.0, max_count=2)], {"a": 1})
    story.start()
    assert story.wait(ALONE_S) == []  # whatever was believed of it
    story.speeds["w0"] = 0.4
    actions, _ = story.until_any(SLOW_S)
    assert launches(actions) == ["a"]
    story.serve(actions)
    (left,) = story.tick()
    assert isinstance(left, Leave)
    assert "that it made before" in left.reason


def test_waiting_for_permits_is_not_slowness() -> None:
    story = Story([instance_type("a", max_count=8)], {"a": 3})
    story.start()
    story.full = 0.2
    story.speeds["w0"] = 0.8
    assert story.wait(WATCHED_S / story.full) == []
    story.speeds["w0"] = 0.4
    _, after_s = story.until_any(10 * SLOW_S)
    assert after_s > SLOW_S  # only full time counts


def test_one_at_a_time_and_none_where_most_are_slow() -> None:
    story = Story([instance_type("a", max_count=8)], {"a": 5})
    story.start()
    story.wait(WATCHED_S)
    story.speeds |= {"w0": 0.3, "w1": 0.2}
    actions, _ = story.until_any(SLOW_S)
    assert len(actions) == 1
    assert story.wait(60.0) == []  # the second waits until the first one's successor serves
    story.serve(actions)
    assert leaves(story.tick()) == ["w1"]
    assert worst({}, 5) is None
    many = Story([instance_type("a", max_count=8)], {"a": 5})
    many.start()
    many.wait(WATCHED_S)
    many.speeds |= {"w0": 0.3, "w1": 0.3, "w2": 0.3}
    assert many.wait(5 * SLOW_S) == []


def test_a_successor_that_never_serves_is_asked_for_again() -> None:
    story = Story([instance_type("a", max_count=8)], {"a": 4})
    story.start()
    story.wait(WATCHED_S)
    story.speeds["w1"] = 0.5
    (launched,), _ = story.until_any(SLOW_S)
    story.fleet.gone(launched.worker_id, "died", story.now_s)
    again, _ = story.until_any(SLOW_S)
    assert launches(again) == ["a"]
    assert story.fleet.num_serving == 4
    story.serve(again)
    assert leaves(story.tick()) == ["w1"]


def test_the_noise_is_measured_and_who_is_within_it_is_not_slow() -> None:
    """Few long answers: what a worker makes in one stretch is half as much again as in the next."""
    story = Story([instance_type("a", max_count=16)], {"a": 6})
    story.start()
    for i in range(round(40 * SLOW_S / TICK_S)):
        stretch = int(i * TICK_S / SLOW_S)
        story.speeds |= {f"w{n}": 1.5 if (stretch + n) % 2 else 0.7 for n in range(6)}
        assert story.tick() == []
    story.speeds |= {f"w{n}": 1.0 for n in range(6)}
    story.wait(ALONE_S + RECENT_CHANGES * SLOW_S)  # it is quiet for long
    story.speeds["w3"] = 0.4
    actions, _ = story.until_any(2 * SLOW_S)
    assert launches(actions) == ["a"]


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_workers=st.integers(1, 8),
    spread=st.floats(0.0, 0.3),
    full=st.floats(0.2, 1.0),
)
def test_noise_replaces_nobody(seed: int, num_workers: int, spread: float, full: float) -> None:
    """Noise of so much over a look of 5 s: a minute of it varies less, and that is what is seen of fleets."""
    rng = random.Random(seed)
    story = Story([instance_type("a", max_count=16)], {"a": num_workers}, standby=0)
    story.start()
    story.full = full
    for _ in range(240):
        for worker_id in story.speeds:
            story.speeds[worker_id] = max(0.0, rng.gauss(1.0, spread))
        assert story.tick() == []


def test_a_worker_that_began_anew_is_measured_anew() -> None:
    watch = SpeedWatch()
    for i in range(1, 160):
        watch.measured("a", ThroughputSample(1000 * i, 10.0 * i, 0, 0))
        watch.measured("b", ThroughputSample(300 * i, 10.0 * i, 0, 0))
    assert list(watch.slow(["a", "b"])) == ["b"]
    watch.measured("b", ThroughputSample(0, 0.0, 0, 0))
    assert watch.slow(["a", "b"]) == {}
    watch.forget("a")
    assert watch.slow(["a", "b"]) == {}
