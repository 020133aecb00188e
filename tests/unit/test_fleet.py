"""The workers of a fleet that follows price and need: who is launched, who leaves, what is learnt of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from echo_planes.errors import ConfigError
from echo_planes.fleet.capacity import Need
from echo_planes.fleet.estimates import CapacityModel, ThroughputSample
from echo_planes.fleet.instance_record import (
    FIRST_BACK_OFF_S,
    FIRST_WITHOUT_S,
    MOST_BACK_OFF_S,
    PRIOR_HOURS,
    YOUNG_S,
)
from echo_planes.fleet.instance_types import InstanceType, Limits
from echo_planes.fleet.provisioner import Provisioner
from echo_planes.fleet.reconciler import Reconciler
from echo_planes.fleet.workers import FleetAction, Launch, Leave

BOOT_LIMIT_S = 600.0
TICK_S = 5.0
HOUR_S = 3600.0


def instance_type(name: str, usd_per_hour: float = 1.0, **settings: object) -> InstanceType:
    known = {"sku": name, "mu": 1.0, "max_count": 4, **settings}
    return InstanceType(name=name, usd_per_hour=usd_per_hour, **known)  # type: ignore[arg-type]


def need(mu_target: float, max_staleness: int = 3) -> Need:
    """So many trajectories/s: with T_bcast = 0, mu_target = gamma R / T_train."""
    return Need(max_staleness, kappa=1, per_step=100, t_train_s=110.0 / mu_target, t_bcast_s=0.0, gamma=1.1)


class Story:
    """A fleet and its clock."""

    def __init__(
        self,
        instance_types: Sequence[InstanceType],
        first: Mapping[str, int] | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.fleet = Reconciler(
            instance_types,
            first or {},
            provisioner=Provisioner(limits or Limits(), sustain_s=0.0, release_sustain_s=30.0),
            model=CapacityModel(),
            boot_limit_s=BOOT_LIMIT_S,
            ask_limit_s=BOOT_LIMIT_S,
        )
        self.now_s = 0.0

    def wait(self, seconds: float, wanted: Need | None, *, published: bool = True) -> list[FleetAction]:
        """Ticks until then; what was decided."""
        actions: list[FleetAction] = []
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s = min(end_s, self.now_s + TICK_S)
            actions += self.fleet.tick(self.now_s, wanted, published=published)
        return actions

    def serve(self, actions: Sequence[FleetAction]) -> list[str]:
        """All that were launched come and serve, now."""
        launched = [action.worker_id for action in actions if isinstance(action, Launch)]
        for worker_id in launched:
            self.fleet.came(worker_id, self.now_s)
            self.fleet.serving(worker_id, self.now_s)
        return launched

    def interruptions_per_hour(self, name: str) -> float:
        return next(o for o in self.fleet.instance_types(self.now_s) if o.name == name).interruptions_per_hour


def launches(actions: Sequence[FleetAction]) -> list[str]:
    return [action.instance_type for action in actions if isinstance(action, Launch)]


def leaves(actions: Sequence[FleetAction]) -> list[str]:
    return [action.worker_id for action in actions if isinstance(action, Leave)]


# --- launches ------------------------------------------------------------------------------------


def test_the_first_fleet_is_launched_once_under_names_of_its_own() -> None:
    story = Story([instance_type("a"), instance_type("b")], {"a": 2, "b": 1})
    begun = story.fleet.begin(0.0)
    assert sorted(launches(begun)) == ["a", "a", "b"]
    assert len({action.worker_id for action in begun}) == 3
    assert story.wait(60.0, None) == []
    assert story.fleet.counts == {"a": 2, "b": 1}


@pytest.mark.parametrize(("first", "part"), [({"c": 1}, "1 workers of c"), ({"a": 5}, "quota is 4")])
def test_a_first_fleet_beyond_what_is_offered_is_refused(first: dict[str, int], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        Story([instance_type("a")], first)


def test_what_is_asked_for_or_boots_is_not_launched_a_second_time() -> None:
    story = Story([instance_type("a")])
    asked = story.wait(TICK_S, need(3.0))
    assert launches(asked) == ["a"] * 3
    assert story.wait(60.0, need(3.0)) == []
    for action in asked:
        story.fleet.came(action.worker_id, story.now_s)
    assert story.wait(60.0, need(3.0)) == []


def test_a_lost_worker_is_replaced_under_a_new_name() -> None:
    story = Story([instance_type("a")], {"a": 1})
    (lost,) = story.serve(story.fleet.begin(0.0))
    story.wait(2 * YOUNG_S, None)
    story.fleet.gone(lost, "died", story.now_s)
    (again,) = story.wait(TICK_S, None)
    assert isinstance(again, Launch)
    assert again.worker_id != lost


def test_gone_may_be_said_twice_and_of_strangers() -> None:
    story = Story([instance_type("a", market="spot")], {"a": 1})
    (worker,) = story.serve(story.fleet.begin(0.0))
    story.wait(2 * YOUNG_S, None)
    for worker_id in (worker, worker, "stranger"):
        story.fleet.gone(worker_id, "preempted", story.now_s)
        story.fleet.came(worker_id, story.now_s)
        story.fleet.serving(worker_id, story.now_s)
    assert story.fleet.machines == {}
    assert story.interruptions_per_hour("a") == pytest.approx(1 / (PRIOR_HOURS + 2 * YOUNG_S / HOUR_S))


# --- the end of the run --------------------------------------------------------------------------


def test_near_the_end_a_worker_is_bought_only_if_it_would_serve_for_as_long_as_others_took_to_boot() -> None:
    story = Story([instance_type("a", 1.0), instance_type("b", 2.0)], {"a": 1})
    (first,) = story.fleet.begin(0.0)
    assert isinstance(first, Launch)
    story.now_s = 40.0
    story.serve([first])  # 40 s after it was asked for; of b nothing is known but this
    story.fleet.limits = Limits(seconds_left=79.0)
    assert story.wait(60.0, need(3.0)) == []
    assert story.fleet.decision is not None
    assert "(seconds_left)" in story.fleet.decision.reason
    story.fleet.gone(first.worker_id, "died", story.now_s)  # without any the run never ends
    assert launches(story.wait(TICK_S, need(3.0))) != []
    story = Story([instance_type("a", 1.0)], {"a": 1})
    begun = story.fleet.begin(0.0)
    story.now_s = 40.0
    story.serve(begun)
    story.fleet.limits = Limits(seconds_left=81.0)
    assert launches(story.wait(TICK_S, need(3.0))) == ["a", "a"]


# --- the boot limit ------------------------------------------------------------------------------


def test_a_machine_that_never_comes_is_given_up_and_its_instance_type_backed_off() -> None:
    story = Story([instance_type("a", 1.0, min_count=1), instance_type("b", 2.0)])
    (asked,) = story.wait(TICK_S, need(1.0))
    assert launches([asked]) == ["a"]
    actions = story.wait(BOOT_LIMIT_S + TICK_S, need(1.0))
    assert leaves(actions) == [asked.worker_id]
    assert launches(actions) == ["b"]  # whatever the minimum of a
    assert story.fleet.machines == {"b": 1}


def test_the_machine_and_the_engine_have_the_limit_each() -> None:
    story = Story([instance_type("a")], {"a": 1})
    (asked,) = story.fleet.begin(0.0)
    assert story.wait(BOOT_LIMIT_S, None) == []
    story.fleet.came(asked.worker_id, story.now_s)
    assert story.wait(BOOT_LIMIT_S, None) == []
    assert leaves(story.wait(TICK_S, None)) == [asked.worker_id]


def test_who_serves_is_not_given_up() -> None:
    story = Story([instance_type("a")], {"a": 1})
    story.serve(story.fleet.begin(0.0))
    assert story.wait(3 * BOOT_LIMIT_S, None) == []


def test_engines_wait_for_the_first_publication_as_long_as_it_takes() -> None:
    story = Story([instance_type("a")], {"a": 2})
    came, asked = story.fleet.begin(0.0)
    story.fleet.came(came.worker_id, 0.0)
    actions = story.wait(2 * BOOT_LIMIT_S, None, published=False)
    assert leaves(actions)[0] == asked.worker_id  # machines do not wait for it
    assert came.worker_id not in leaves(actions)
    actions = story.wait(BOOT_LIMIT_S + TICK_S, None)
    assert came.worker_id in leaves(actions)


# --- back-off ------------------------------------------------------------------------------------


def test_back_off_grows_up_to_an_hour_and_ends() -> None:
    """Workers that die as soon as they serve: each next one is launched later, but it is."""
    story = Story([instance_type("a")], {"a": 1})
    story.fleet.begin(0.0)
    waits_s = []
    for number in range(9):
        story.serve([Launch(f"w{number}", "a")])
        story.wait(YOUNG_S - TICK_S, None)
        story.fleet.gone(f"w{number}", "died", story.now_s)
        begun_s = story.now_s
        while not story.wait(TICK_S, None):
            assert story.now_s - begun_s <= 2 * MOST_BACK_OFF_S, "it never ends"
        waits_s.append(story.now_s - begun_s)
    grown = [min(FIRST_BACK_OFF_S * 2**i, MOST_BACK_OFF_S) for i in range(9)]
    assert waits_s == grown


def test_workers_that_fail_together_back_off_once() -> None:
    story = Story([instance_type("a")], {"a": 3})
    story.fleet.begin(0.0)
    for number in range(3):
        story.fleet.gone(f"w{number}", "died", story.now_s)
    assert story.wait(FIRST_BACK_OFF_S - TICK_S, None) == []
    assert launches(story.wait(TICK_S, None)) == ["a"] * 3


def test_a_worker_that_stays_well_ends_what_was_held_against_its_instance_type() -> None:
    story = Story([instance_type("a")], {"a": 1})
    story.fleet.begin(0.0)
    story.fleet.gone("w0", "died", story.now_s)
    story.serve(story.wait(FIRST_BACK_OFF_S, None))
    story.wait(YOUNG_S, None)
    story.fleet.gone("w1", "died", story.now_s)  # no longer young
    story.serve(story.wait(TICK_S, None))
    story.fleet.gone("w2", "died", story.now_s)
    assert story.wait(FIRST_BACK_OFF_S - TICK_S, None) == []
    assert launches(story.wait(TICK_S, None)) == ["a"]


def test_one_worker_that_is_well_does_not_end_the_back_off_of_a_market_that_is_empty() -> None:
    story = Story([instance_type("a")], {"a": 2})
    story.serve(story.fleet.begin(0.0)[:1])
    story.wait(BOOT_LIMIT_S + TICK_S, None)  # the other one never came
    assert story.fleet.counts == {"a": 1}
    assert story.wait(FIRST_WITHOUT_S - TICK_S, None) == []
    assert launches(story.wait(TICK_S, None)) == ["a"]


def test_one_worker_that_stays_well_does_not_end_a_back_off_that_began_meanwhile() -> None:
    story = Story([instance_type("a")], {"a": 2})
    story.serve(story.fleet.begin(0.0)[:1])
    story.wait(YOUNG_S - TICK_S, None)
    story.fleet.gone("w1", "died", story.now_s)
    assert story.wait(TICK_S, None) == []
    assert story.fleet.instance_types(story.now_s)[0].max_count == 1


def test_others_stand_in_for_an_instance_type_that_is_backed_off_within_the_price_limit() -> None:
    instance_types = [
        instance_type("a", 1.0),
        instance_type("b", 3.0),
        instance_type("c", 2.0, max_count=1),
        instance_type("d", 9.0),
    ]
    story = Story(instance_types, {"a": 3}, Limits(usd_per_hour=6.0))
    asked = story.fleet.begin(0.0)
    actions = story.wait(BOOT_LIMIT_S + TICK_S, None)
    assert leaves(actions) == [action.worker_id for action in asked]
    assert launches(actions) == ["c", "b"]  # a third would cost more than is allowed
    assert story.wait(TICK_S, None) == []


def test_others_stand_in_also_while_some_serve() -> None:
    """Until the need is known nobody else would replace what did not come."""
    story = Story([instance_type("a", 1.0), instance_type("b", 3.0), instance_type("c", 9.0)], {"a": 3})
    story.serve(story.fleet.begin(0.0)[:1])
    assert launches(story.wait(BOOT_LIMIT_S + TICK_S, None)) == ["b", "b"]
    assert story.wait(TICK_S, None) == []


def test_stand_ins_make_up_for_throughput_not_for_heads() -> None:
    instance_types = [instance_type("a", mu=2.0), instance_type("b", 3.0), instance_type("c", 3.5, mu=1.9)]
    story = Story(instance_types, {"a": 2})
    story.serve(story.fleet.begin(0.0)[:1])
    assert launches(story.wait(BOOT_LIMIT_S + TICK_S, None)) == ["c"]  # 3.9 of 4: no other for the rest
    slow = Story(instance_types[:2], {"a": 2})
    slow.serve(slow.fleet.begin(0.0)[:1])
    assert launches(slow.wait(BOOT_LIMIT_S + TICK_S, None)) == ["b", "b"]


@pytest.mark.parametrize(("usd_per_hour", "back"), [(8.0, ["a"]), (7.9, [])])
def test_what_comes_back_beside_its_stand_ins_is_within_the_price_limit(
    usd_per_hour: float, back: list[str]
) -> None:
    """They may be slower than was believed when they were taken, so that throughput is missing still."""
    story = Story(
        [instance_type("a", 2.0), instance_type("b", 3.0)], {"a": 2}, Limits(usd_per_hour=usd_per_hour)
    )
    for action in story.fleet.begin(0.0):
        story.fleet.came(action.worker_id, 0.0)
        story.fleet.gone(action.worker_id, "died", 0.0)
    stand_ins = story.wait(TICK_S, None)
    assert launches(stand_ins) == ["b", "b"]
    story.serve(stand_ins)
    for i in range(1, 5):  # 50 tokens/s, 100 tokens a trajectory
        sample = ThroughputSample(100 * i, 2.0 * i, 100 * i, i)
        story.fleet.measured(stand_ins[0].worker_id, sample, story.now_s + 2.0 * i)
    assert launches(story.wait(FIRST_BACK_OFF_S, None)) == back


@pytest.mark.parametrize("limits", [Limits(usd_per_hour=6.0), Limits(interruptions_per_hour=0.2)])
def test_what_does_not_fit_the_limits_is_passed_over(limits: Limits) -> None:
    """The next one by price and throughput may fit."""
    big = instance_type("big", 8.0, mu=7.0, interruptions_per_hour=0.5)
    story = Story([instance_type("a", 1.0), big, instance_type("c", 2.0)], {"a": 2}, limits)
    assert launches(story.fleet.begin(0.0)) == ["a", "a"]
    assert launches(story.wait(BOOT_LIMIT_S + TICK_S, None)) == ["c", "c"]


def test_who_failed_before_stands_in_last() -> None:
    """Else its machines are waited for again while others could be there."""
    story = Story([instance_type("a", 1.0), instance_type("b", 2.0), instance_type("c", 3.0)], {"a": 1})
    story.fleet.begin(0.0)
    story.fleet.gone("w0", "died", story.now_s)
    asked = story.wait(TICK_S, None)
    assert launches(asked) == ["b"]
    story.fleet.gone(asked[0].worker_id, "died", story.now_s)
    asked = story.wait(TICK_S, None)
    assert launches(asked) == ["a"]  # its back-off is over
    story.fleet.came(asked[0].worker_id, story.now_s)
    story.fleet.gone(asked[0].worker_id, "died", story.now_s)
    assert launches(story.wait(FIRST_BACK_OFF_S, None)) == ["c"]  # and not "b" again


@pytest.mark.parametrize("size", [4, 20, 40])
def test_every_worker_of_the_first_fleet_is_replaced_however_large_it_is(size: int) -> None:
    story = Story([instance_type("a", max_count=size)], {"a": size})
    workers = story.serve(story.fleet.begin(0.0))
    story.wait(YOUNG_S, None)
    story.fleet.gone(workers[0], "preempted", story.now_s)
    assert launches(story.wait(TICK_S, None)) == ["a"]


@pytest.mark.parametrize("cause", ["died", "preempted"])
def test_a_spot_worker_that_ends_before_it_serves_is_not_launched_again_at_once(cause: str) -> None:
    """An engine that cannot start there would be started for ever."""
    story = Story([instance_type("a", market="spot")], {"a": 1})
    story.fleet.begin(0.0)
    story.fleet.came("w0", 0.0)
    story.fleet.gone("w0", cause, story.now_s)  # type: ignore[arg-type]
    assert story.wait(FIRST_BACK_OFF_S - TICK_S, None) == []
    assert launches(story.wait(TICK_S, None)) == ["a"]


def test_a_backed_off_instance_type_has_no_room_and_no_minimum_beyond_what_runs() -> None:
    story = Story([instance_type("a", min_count=2)], {"a": 2})
    story.serve(story.fleet.begin(0.0))
    story.fleet.gone("w1", "died", story.now_s)
    (seen,) = story.fleet.instance_types(story.now_s)
    assert (seen.max_count, seen.min_count) == (1, 1)
    (seen,) = story.fleet.instance_types(story.now_s + FIRST_BACK_OFF_S)
    assert (seen.max_count, seen.min_count) == (4, 2)


# --- leaving -------------------------------------------------------------------------------------


def test_surplus_leaves_the_newest_first_and_is_not_taken_for_interruptions() -> None:
    story = Story([instance_type("a", market="spot", interruptions_per_hour=0.1)])
    old = story.serve(story.wait(TICK_S, need(2.0)))
    story.wait(2 * YOUNG_S, need(2.0))
    new = story.serve(story.wait(TICK_S, need(4.0)))
    story.wait(2 * YOUNG_S, need(4.0))
    gone = leaves(story.wait(120.0, need(2.0)))
    assert sorted(gone) == sorted(new)
    assert story.fleet.counts == {"a": len(old)}
    assert story.fleet.machines == {"a": len(old) + len(new)}  # until they are gone
    believed = story.interruptions_per_hour("a")
    for worker_id in gone:
        story.fleet.gone(worker_id, "died", story.now_s)
    assert story.fleet.machines == {"a": len(old)}
    assert story.interruptions_per_hour("a") == pytest.approx(believed, rel=1e-9)


def test_what_is_still_booting_leaves_without_a_back_off() -> None:
    story = Story([instance_type("a")])
    story.serve(story.wait(TICK_S, need(1.0)))
    (second,) = story.wait(TICK_S, need(2.0))
    gone = leaves(story.wait(120.0, need(1.0)))
    assert gone == [second.worker_id]
    story.fleet.gone(second.worker_id, "died", story.now_s)
    assert launches(story.wait(TICK_S, need(2.0))) == ["a"]


def test_who_serves_stays_until_the_cheaper_worker_that_was_asked_for_serves() -> None:
    """The cheap machine may never come: then there would be nobody."""
    story = Story([instance_type("dear", 4.0), instance_type("cheap", 1.0)], {"dear": 1})
    (dear,) = story.serve(story.fleet.begin(0.0))
    (asked,) = story.wait(120.0, need(1.0))
    assert launches([asked]) == ["cheap"]
    assert story.wait(BOOT_LIMIT_S - 120.0, need(1.0)) == []  # long beyond the release wait
    story.serve([asked])
    assert leaves(story.wait(240.0, need(1.0))) == [dear]


def test_a_fleet_that_costs_just_its_limit_is_not_above_it() -> None:
    """0.2 + 0.1 in floats is a bit more than 0.3; above the limit, the only one that serves would go."""
    story = Story(
        [instance_type("dear", 0.2), instance_type("cheap", 0.1)], {"dear": 1}, Limits(usd_per_hour=0.3)
    )
    story.serve(story.fleet.begin(0.0))
    (asked,) = story.wait(120.0, need(1.0))
    assert launches([asked]) == ["cheap"]
    assert story.wait(BOOT_LIMIT_S - 120.0, need(1.0)) == []


def test_enough_serve_while_others_are_on_their_way() -> None:
    """Two are needed and three serve: one may go, whatever the cheap ones that were asked for do."""
    story = Story([instance_type("dear", 4.0), instance_type("cheap", 1.0)], {"dear": 3})
    dear = story.serve(story.fleet.begin(0.0))
    asked = story.wait(BOOT_LIMIT_S, need(2.0))
    gone = leaves(asked)
    assert len(gone) == 1
    assert launches(asked) == ["cheap"] * 2
    story.serve(asked)
    assert {*gone, *leaves(story.wait(240.0, need(2.0)))} == set(dear)


def test_the_last_one_that_serves_is_never_let_go() -> None:
    """The learnt rate of interruptions is over the limit; with no worker the learner would wait for ever."""
    story = Story(
        [instance_type("a", market="spot")], limits=Limits(interruptions_per_hour=0.5), first={"a": 1}
    )
    story.serve(story.fleet.begin(0.0))
    for number in range(9):
        story.wait(2 * YOUNG_S, None)
        story.fleet.notice(f"w{number}", 30.0, story.now_s)
        story.fleet.gone(f"w{number}", "preempted", story.now_s)
        story.serve(story.wait(TICK_S, None))
    assert story.interruptions_per_hour("a") > 0.5
    assert leaves(story.wait(600.0, need(1.0))) == []
    assert story.fleet.decision is not None
    assert "interruptions" in story.fleet.decision.reason
    assert story.fleet.num_serving == 1


# --- notices -------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["asked", "booting", "serving"])
def test_a_notice_makes_a_worker_leave_once_and_is_an_interruption(state: str) -> None:
    story = Story([instance_type("a", market="spot")], {"a": 1})
    (worker,) = [action.worker_id for action in story.fleet.begin(0.0)]
    if state != "asked":
        story.fleet.came(worker, 0.0)
    if state == "serving":
        story.fleet.serving(worker, 0.0)
    (action,) = story.fleet.notice(worker, 30.0, 0.0)
    assert isinstance(action, Leave)
    assert (action.worker_id, action.limit_s) == (worker, 30.0)
    assert story.fleet.notice(worker, 29.0, 1.0) == []
    assert story.fleet.counts == {}
    assert story.fleet.machines == {}  # it goes by itself: one more must not come in its place
    story.fleet.gone(worker, "died", 0.0)
    assert story.interruptions_per_hour("a") == pytest.approx(1 / PRIOR_HOURS)


def test_a_notice_for_one_that_leaves_already_asks_for_nothing_and_still_counts() -> None:
    story = Story([instance_type("a", market="spot")])
    story.serve(story.wait(TICK_S, need(2.0)))
    story.wait(YOUNG_S, need(2.0))
    (worker,) = leaves(story.wait(120.0, need(1.0)))
    before = story.interruptions_per_hour("a")
    assert story.fleet.notice(worker, 30.0, story.now_s) == []
    story.fleet.serving(worker, story.now_s)  # late news
    assert story.fleet.counts == {"a": 1}
    story.fleet.gone(worker, "died", story.now_s)
    assert story.interruptions_per_hour("a") > before


def test_machines_are_asked_for_within_the_quota_while_a_worker_leaves() -> None:
    """An autoscaler that cannot have all that is asked for may start none of it."""
    story = Story([instance_type("a", max_count=2)])
    story.serve(story.wait(TICK_S, need(2.0)))
    story.wait(YOUNG_S, need(2.0))
    assert len(leaves(story.wait(120.0, need(1.0)))) == 1
    assert launches(story.wait(TICK_S, need(2.0))) == ["a"]  # while the other is still there
    assert story.fleet.machines == {"a": 2}


# --- what is learnt ------------------------------------------------------------------------------


def test_hours_are_learnt_from_when_the_machine_came_until_it_went() -> None:
    story = Story([instance_type("a", market="spot", interruptions_per_hour=1.0)], {"a": 1})
    story.fleet.begin(0.0)
    story.wait(100.0, None)
    story.fleet.came("w0", story.now_s)
    story.wait(200.0, None)
    story.fleet.serving("w0", story.now_s)
    story.wait(300.0, None)
    story.now_s += 400.0  # without a tick
    story.fleet.gone("w0", "died", story.now_s)
    hours = PRIOR_HOURS + (200.0 + 300.0 + 400.0) / HOUR_S
    assert story.interruptions_per_hour("a") == pytest.approx((PRIOR_HOURS + 1) / hours)


def test_kinds_that_nobody_knows_count_as_the_others_until_they_are_measured() -> None:
    fleet = Reconciler(
        [instance_type("a", mu=2.0), instance_type("b", mu=2.0)],
        {"a": 1},
        provisioner=Provisioner(Limits()),
        model=CapacityModel(),
        boot_limit_s=BOOT_LIMIT_S,
        ask_limit_s=BOOT_LIMIT_S,
        guesses=["b"],
    )
    (asked,) = fleet.begin(0.0)
    fleet.came(asked.worker_id, 0.0)
    fleet.serving(asked.worker_id, 0.0)
    for i in range(1, 7):
        fleet.measured(asked.worker_id, ThroughputSample(100 * i, 2.0 * i, 100 * i, 10 * i), 2.0 * i)
    assert {o.name: o.mu for o in fleet.instance_types(12.0)} == pytest.approx({"a": 5.0, "b": 5.0})
    fleet.measured("stranger", ThroughputSample(1, 1.0, 1, 1), 12.0)
    fleet.gone(asked.worker_id, "died", 12.0)
    assert {o.name: o.mu for o in fleet.instance_types(12.0)} == pytest.approx({"a": 5.0, "b": 5.0})
