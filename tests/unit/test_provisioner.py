"""The greedy fleet, the optimum, the advice and the hysteresis, by worked examples."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from echo_planes.errors import ConfigError
from echo_planes.fleet.advice import advise
from echo_planes.fleet.capacity import Need
from echo_planes.fleet.exact import exact, solve
from echo_planes.fleet.instance_types import FleetPlan, InstanceType, Limits, Shortfall
from echo_planes.fleet.provisioner import Provisioner, greedy

FREE = Limits()
# 4 x 256 trajectories while 4 steps of 10 s last, of which 8 s go to the broadcast: 32 a second.
NEED = Need(max_staleness=5, kappa=4, per_step=256, t_train_s=10.0, t_bcast_s=8.0, gamma=1.0)
SMALL = InstanceType("small", "L40S", usd_per_hour=0.8, mu=4.0, max_count=20)
LARGE = InstanceType("large", "H100", usd_per_hour=3.0, mu=12.0, max_count=10)


def plan(outcome: FleetPlan | Shortfall) -> FleetPlan:
    assert isinstance(outcome, FleetPlan), outcome
    return outcome


def shortfall(outcome: FleetPlan | Shortfall) -> Shortfall:
    assert isinstance(outcome, Shortfall), outcome
    return outcome


def test_greedy_takes_the_cheapest_prefix_by_rho() -> None:
    found = plan(greedy([LARGE, replace(SMALL, max_count=6)], 32.0, FREE, {}))
    assert found.counts == {"small": 6, "large": 1}
    assert found.usd_per_hour == pytest.approx(6 * 0.8 + 3.0)
    assert found.mu == 36.0


def test_the_optimum_is_cheaper_where_the_last_worker_of_the_prefix_is_too_large() -> None:
    big = InstanceType("big", "8xH100", usd_per_hour=10.0, mu=50.0, max_count=5)
    little = InstanceType("little", "L4", usd_per_hour=0.3, mu=1.0, max_count=20)
    assert plan(greedy([big, little], 52.0, FREE, {})).counts == {"big": 2}
    assert plan(exact([big, little], 52.0, FREE, {})).counts == {"big": 1, "little": 2}


def test_minimums_come_first_and_ties_go_by_name() -> None:
    twin = replace(SMALL, name="another")
    dear = InstanceType("dear", "A100", 9.0, 4.0, max_count=3, min_count=1)
    assert plan(greedy([SMALL, twin, dear], 8.0, FREE, {})).counts == {"another": 1, "dear": 1}
    assert plan(exact([SMALL, twin, dear], 8.0, FREE, {})).usd_per_hour == pytest.approx(9.8)


@pytest.mark.parametrize("choose", [greedy, exact])
@pytest.mark.parametrize(
    ("limits", "binding"),
    [
        (Limits(usd_per_hour=4.0), ("usd_per_hour",)),
        (Limits(interruptions_per_hour=0.2), ("interruptions",)),
        (Limits(max_workers=3), ("max_workers",)),
        (Limits(usd_left=0.0), ("usd_left",)),
        (Limits(), ("quota",)),
    ],
)
def test_a_shortfall_names_what_is_in_the_way(
    choose: object, limits: Limits, binding: tuple[str, ...]
) -> None:
    instance_type = replace(SMALL, max_count=8, interruptions_per_hour=0.05)
    found = shortfall(choose([instance_type], 40.0, limits, {}))  # type: ignore[operator]
    assert found.binding == binding
    most = {"usd_per_hour": 5, "interruptions": 4, "max_workers": 3, "usd_left": 0, "quota": 8}[binding[0]]
    assert found.best.num_workers == most


def test_the_optimum_finds_fleets_that_the_prefix_misses() -> None:
    limits = Limits(max_workers=3)
    assert isinstance(greedy([SMALL, LARGE], 32.0, limits, {}), Shortfall)
    assert plan(exact([SMALL, LARGE], 32.0, limits, {})).counts == {"large": 3}


def test_without_money_only_what_is_held_and_what_is_free_has_room() -> None:
    own = InstanceType("own", "A100", usd_per_hour=0.0, mu=1.0, max_count=2)
    found = shortfall(exact([SMALL, own], 20.0, Limits(usd_left=0.0), {"small": 3}))
    assert found.best.counts == {"small": 3, "own": 2}


@pytest.mark.parametrize(("seconds_left", "wanted"), [(200.0, 8), (199.0, 2), (0.0, 2)])
def test_a_worker_that_would_serve_for_less_than_it_boots_is_not_bought(
    seconds_left: float, wanted: int
) -> None:
    slow, limits = replace(SMALL, boot_s=100.0), Limits(seconds_left=seconds_left)
    for choose in (greedy, exact):
        found = choose([slow], 32.0, limits, {"small": 2})
        counts = found.best.counts if isinstance(found, Shortfall) else found.counts
        assert counts == {"small": wanted}
        assert not isinstance(found, Shortfall) or found.binding == ("seconds_left",)
        # What is free costs nothing by booting, and what boots sooner still pays.
        own = replace(slow, name="own", usd_per_hour=0.0)
        quick = replace(SMALL, name="quick", usd_per_hour=2.0, boot_s=seconds_left / 2)
        assert plan(choose([slow, own], 32.0, limits, {"small": 2})).counts["own"] >= 6
        assert plan(choose([slow, quick], 32.0, limits, {"small": 2})).mu == 32.0
    assert advise(NEED, [slow], Limits(seconds_left=0.0)) == ()


def test_a_fleet_too_small_in_number_is_filled_up_with_the_cheapest() -> None:
    for choose in (greedy, exact):
        found = plan(choose([SMALL, LARGE], 8.0, Limits(min_workers=5), {}))
        assert found.counts == {"small": 5}


def test_money_is_counted_exactly() -> None:
    # In floats ten times 0.1 is less than 1.0, and three times 0.1 is more than 0.3.
    instance_type = InstanceType("dime", "L4", usd_per_hour=0.1, mu=1.0, max_count=20)
    assert plan(exact([instance_type], 3.0, Limits(usd_per_hour=0.3), {})).num_workers == 3
    assert isinstance(exact([instance_type], 4.0, Limits(usd_per_hour=0.3), {}), Shortfall)


@pytest.mark.parametrize(
    ("instance_types", "limits", "said"),
    [
        ([SMALL, SMALL], FREE, "two instance types"),
        ([replace(SMALL, mu=0.0)], FREE, "mu=0.0"),
        ([replace(SMALL, usd_per_hour=float("nan"))], FREE, "usd_per_hour=nan"),
        ([replace(SMALL, usd_per_hour=-1.0)], FREE, "usd_per_hour=-1.0"),
        ([SMALL], Limits(max_workers=-1), "max_workers=-1"),
    ],
)
def test_impossible_input_is_refused_in_one_line(
    instance_types: list[InstanceType], limits: Limits, said: str
) -> None:
    for choose in (greedy, exact):
        with pytest.raises(ConfigError, match=said) as caught:
            choose(instance_types, 1.0, limits, {})
        assert "\n" not in str(caught.value)


# -- advice -------------------------------------------------------------------------------------------------


def test_advice_is_the_smallest_change_and_enough() -> None:
    # 40 s of 4 steps, 30 of them broadcast: 102.4 trajectories/s are needed, 80 can be had.
    need, limits = replace(NEED, t_bcast_s=30.0), Limits(usd_per_hour=16.0)
    instance_types = [SMALL]
    given = {advice.change: advice for advice in advise(need, instance_types, limits)}
    # 16 $/h buy 20 workers, which is the quota too: money alone does not help.
    assert set(given) == {"kappa", "per_step", "t_bcast_s"}
    # 80 (10 k - 30) >= 256 k from k = 4.41 on; at R = 200 it is 80 x 10 / 4; T_bcast = 40 - 1024 / 80.
    # A broadcast of three steps wants more than S = kappa + 1 (eq. 7: 5 + ceil((30 + 256/80) / 10) - 1).
    assert (given["kappa"].value, given["kappa"].need.max_staleness) == (5, 8)
    assert given["per_step"].value == 200
    assert given["t_bcast_s"].value == pytest.approx(27.2)
    for advice in given.values():
        target = advice.need.mu_target
        assert target is not None
        assert plan(exact(instance_types, target, advice.limits, {})) == advice.plan
    assert isinstance(
        exact(instance_types, replace(need, per_step=201).mu_target or 0.0, limits, {}), Shortfall
    )


def test_advice_on_staleness_is_kappa_plus_one_where_broadcasts_are_short() -> None:
    need = replace(NEED, max_staleness=2, kappa=1)  # 256 / 2 s = 128
    kappa = advise(need, [SMALL], FREE)[0]
    # 80 (10 k - 8) >= 256 k from k = 1.18 on
    assert (kappa.change, kappa.value, kappa.need.max_staleness) == ("kappa", 2, 3)


def test_advice_on_staleness_tells_what_drift_will_cost() -> None:
    need = replace(NEED, max_staleness=2, kappa=1)
    assert "drift" not in advise(need, [SMALL], FREE)[0].text
    slowed = advise(replace(need, rate_factor=0.6), [SMALL], FREE)[0].text
    assert "60% of the learning rate" in slowed
    assert "about 40%" in slowed  # S = 3 instead of 2


def test_advice_on_the_budget_is_what_the_fleet_costs() -> None:
    given = {a.change: a for a in advise(NEED, [SMALL], Limits(usd_per_hour=5.0))}
    assert given["usd_per_hour"].value == pytest.approx(6.4)
    given = {a.change: a for a in advise(NEED, [SMALL], Limits(usd_left=0.0))}
    assert set(given) == {"usd_left"}
    assert given["usd_left"].value == pytest.approx(6.4)


def test_no_advice_where_a_fleet_is_possible_or_nothing_helps() -> None:
    assert advise(NEED, [SMALL], FREE) == ()
    assert advise(NEED, [], FREE) == ()
    assert advise(replace(NEED, max_staleness=0), [], FREE) == ()


# -- the hysteresis -----------------------------------------------------------------------------------------


class Fleet:
    """A fleet that does what it is told at once."""

    def __init__(self, limits: Limits = FREE, **running: int) -> None:
        self.provisioner = Provisioner(limits, sustain_s=30.0, release_sustain_s=100.0)
        self.running = running
        self.changes: list[float] = []

    def tick(self, now_s: float, instance_types: list[InstanceType], need: Need = NEED) -> str:
        decision = self.provisioner.decide(need, instance_types, self.running, now_s)
        for name, n in decision.launch.items():
            self.running[name] = self.running.get(name, 0) + n
        for name, n in decision.release.items():
            self.running[name] -= n
        self.running = {name: n for name, n in self.running.items() if n}
        assert dict(decision.plan.counts) == self.running
        if decision.launch or decision.release:
            self.changes.append(now_s)
        return decision.reason


def test_the_first_fleet_is_bought_at_once_and_then_nothing_changes() -> None:
    fleet = Fleet()
    reason = fleet.tick(0.0, [SMALL, LARGE])
    assert fleet.running == {"small": 8}
    assert "32.00 trajectories/s are needed (mu_min 32.00 x gamma 1.00), 0.00 are there" in reason
    assert "+8 small at $0.80/h (rho 0.2)" in reason
    assert "anew, by greedy: $6.40/h" in reason
    for now_s in range(10, 1000, 10):
        fleet.tick(float(now_s), [SMALL, LARGE])
    assert fleet.changes == [0.0]


def test_a_shortage_is_answered_when_it_lasted() -> None:
    fleet = Fleet()
    fleet.tick(0.0, [SMALL])
    slower = replace(SMALL, mu=3.5)
    for now_s in (10.0, 20.0, 30.0):
        assert "waiting" in fleet.tick(now_s, [slower])
    fleet.tick(35.0, [SMALL])  # it was noise: counted anew
    for now_s in (40.0, 50.0, 60.0):
        fleet.tick(now_s, [slower])
    assert fleet.changes == [0.0]
    fleet.tick(70.0, [slower])
    assert fleet.running == {"small": 10}


def test_a_loss_below_mu_min_is_replaced_at_once_and_one_above_it_is_not() -> None:
    fleet = Fleet()
    roomy = replace(NEED, gamma=1.25)  # a target of 40
    fleet.tick(0.0, [SMALL], roomy)
    assert fleet.running == {"small": 10}
    fleet.running["small"] -= 2  # 32 of 40: the learner does not wait
    assert "waiting" in fleet.tick(10.0, [SMALL], roomy)
    fleet.running["small"] -= 1  # 28
    assert "at once" in fleet.tick(20.0, [SMALL], roomy)
    assert fleet.running == {"small": 10}


def test_a_surplus_beyond_the_margin_goes_dearest_first_and_minimums_stay() -> None:
    fleet = Fleet(small=8, large=3)
    instance_types = [SMALL, replace(LARGE, min_count=1)]
    fleet.tick(0.0, instance_types)
    assert "surplus" in fleet.tick(90.0, instance_types)
    assert fleet.changes == []
    fleet.tick(100.0, instance_types)
    assert fleet.running == {"small": 5, "large": 1}


def test_a_surplus_goes_also_where_no_fleet_could_be_bought_anew() -> None:
    fleet = Fleet(small=12)
    for now_s in (0.0, 100.0):
        fleet.tick(now_s, [replace(SMALL, max_count=0)])
    assert fleet.running == {"small": 8}


def test_a_surplus_has_to_last_whatever_else_has_lasted() -> None:
    fleet, instance_types = Fleet(large=3), [replace(SMALL, boot_s=400.0), LARGE]
    fleet.tick(0.0, instance_types)
    fleet.tick(95.0, instance_types, replace(NEED, per_step=128))  # 36 for 16
    assert "would do" in fleet.tick(100.0, instance_types, replace(NEED, per_step=128))
    assert fleet.running["large"] == 3


def test_what_is_let_go_is_what_the_lowest_ratio_of_that_time_permits() -> None:
    fleet = Fleet(small=10)  # 40 for 32
    fleet.tick(0.0, [SMALL])
    fleet.tick(50.0, [replace(SMALL, mu=3.7)])  # 37 for 32: still above the margin
    fleet.tick(100.0, [SMALL])
    assert fleet.running == {"small": 9}
    steady = Fleet(small=10)
    steady.tick(0.0, [SMALL])
    steady.tick(100.0, [SMALL])
    assert steady.running == {"small": 8}
    earlier = Fleet(small=10)  # how long it lasted is how far back it looks
    earlier.tick(0.0, [replace(SMALL, mu=3.7)])
    earlier.tick(50.0, [SMALL])
    earlier.tick(100.0, [SMALL])
    assert earlier.running == {"small": 9}


def test_a_low_from_before_that_time_does_not_count_where_machines_still_boot() -> None:
    fleet, booting = Fleet(), replace(SMALL, boot_s=400.0)
    fleet.tick(0.0, [booting])
    assert fleet.running == {"small": 8}
    fleet.tick(10.0, [booting], replace(NEED, per_step=160))  # 32 for 20: of 16, two could go
    for now_s in range(20, 400, 10):
        fleet.tick(float(now_s), [booting], replace(NEED, per_step=128))  # 32 for 16
    assert fleet.running == {"small": 8}
    fleet.tick(400.0, [booting], replace(NEED, per_step=128))
    assert fleet.running == {"small": 4}


def test_what_is_as_good_as_the_target_is_enough() -> None:
    """The last bit does not count, nor a little below it where no other fleet can be had."""
    fleet = Fleet(small=8)
    for now_s in range(0, 500, 50):
        assert "enough" in fleet.tick(float(now_s), [replace(SMALL, mu=math.nextafter(4.0, 0.0))])
    fleet = Fleet(small=8)
    for now_s in range(0, 500, 50):
        reason = fleet.tick(float(now_s), [replace(SMALL, max_count=8)], replace(NEED, gamma=1.03))
        assert reason.endswith("32.00 are there: enough")
    assert fleet.changes == []


def test_where_nothing_can_be_added_to_what_runs_another_fleet_takes_its_place() -> None:
    fleet = Fleet(Limits(max_workers=3), small=2)
    for now_s in (0.0, 20.0):
        assert "waiting" in fleet.tick(now_s, [SMALL, LARGE])
    assert "+3 large at $3.00/h (rho 0.25), -2 small at $0.80/h (rho 0.2)" in fleet.tick(30.0, [SMALL, LARGE])
    assert fleet.running == {"large": 3}


def test_a_surplus_within_the_margin_is_kept_and_so_are_machines_that_cost_nothing() -> None:
    fleet = Fleet(small=33)
    own = replace(SMALL, usd_per_hour=0.0)
    for now_s in range(0, 1000, 50):
        fleet.tick(float(now_s), [replace(SMALL, mu=1.0, max_count=40)])
    assert fleet.changes == []
    fleet = Fleet(small=20)
    for now_s in range(0, 1000, 50):
        fleet.tick(float(now_s), [own])
    assert fleet.changes == []


def test_an_instance_type_that_is_gone_keeps_its_workers_and_gets_no_more() -> None:
    fleet = Fleet(large=2)
    fleet.tick(0.0, [SMALL, LARGE])
    fleet.running = {"large": 2}
    fleet.tick(10.0, [SMALL])
    fleet.tick(50.0, [SMALL])
    assert fleet.running == {"large": 2, "small": 2}
    with pytest.raises(ConfigError, match="no such type is known"):
        Provisioner(FREE).decide(NEED, [SMALL], {"unheard-of": 1}, 0.0)


def test_a_reason_names_a_price_only_where_there_is_one() -> None:
    own = replace(SMALL, usd_per_hour=0.0)
    for instance_type, said in (
        (own, "+8 small of no price (4 trajectories/s each)"),
        (SMALL, "$0.80/h (rho 0.2)"),
    ):
        reason = Provisioner(FREE).decide(NEED, [instance_type], {}, 0.0).reason
        assert said in reason
        assert ("rho" in reason) == (instance_type is SMALL)


def test_a_fleet_that_became_dear_is_changed_without_a_gap() -> None:
    fleet = Fleet(large=3)
    instance_types = [replace(SMALL, boot_s=400.0), LARGE]
    lowest = 1e9
    for now_s in range(0, 1500, 20):
        fleet.tick(float(now_s), instance_types)
        lowest = min(lowest, sum(n * (4.0 if name == "small" else 12.0) for name, n in fleet.running.items()))
    assert fleet.running == {"small": 8}
    assert lowest >= 32.0
    assert fleet.changes[0] >= 100.0
    assert fleet.changes[1] >= fleet.changes[0] + 400.0  # not before the new ones have booted
    assert len(fleet.changes) == 2


def test_a_fleet_that_became_dear_is_changed_also_without_a_wait() -> None:
    fleet = Fleet(large=3)
    fleet.provisioner = Provisioner(FREE, sustain_s=0.0, release_sustain_s=0.0)
    for now_s in range(3):
        fleet.tick(float(now_s), [SMALL, LARGE])
    assert fleet.running == {"small": 8}


def test_a_fleet_is_not_changed_for_one_that_is_no_longer_cheaper() -> None:
    """33 a second need one small worker more than 32: then they cost about what the large do."""
    fleet = Fleet(large=3)
    instance_types = [SMALL, replace(LARGE, usd_per_hour=2.42)]
    for now_s in range(0, 100, 10):
        assert "dear" in fleet.tick(float(now_s), instance_types)
    for now_s in range(100, 500, 10):  # within the drift that calls for no new plan
        fleet.tick(float(now_s), instance_types, replace(NEED, per_step=264))
    assert fleet.running == {"large": 3}


def test_a_surplus_of_whole_workers_is_released_at_once() -> None:
    """40 for 30 are two workers too many, though (40 / 30 - 1) * 30 / 5 is a bit below 2."""
    fleet, five = Fleet(five=8), replace(SMALL, name="five", mu=5.0)
    for now_s in (0.0, 100.0):
        fleet.tick(now_s, [five], replace(NEED, per_step=240))
    assert fleet.running == {"five": 6}


def test_a_fleet_above_a_limit_is_trimmed() -> None:
    fleet = Fleet(Limits(usd_per_hour=6.4), small=8)
    fleet.tick(0.0, [SMALL])
    dearer = replace(SMALL, usd_per_hour=1.0)
    fleet.tick(10.0, [dearer])
    assert fleet.running == {"small": 8}
    fleet.tick(40.0, [dearer])
    assert fleet.running == {"small": 6}
    fleet.tick(50.0, [dearer])
    reason = fleet.tick(80.0, [dearer])
    assert "no fleet within the limits is enough (usd_per_hour)" in reason
    assert "allow $8.00/h instead of $6.40/h" in reason


def test_a_need_that_no_fleet_meets_gets_advice_only() -> None:
    fleet = Fleet(small=3)
    decision = fleet.provisioner.decide(replace(NEED, t_bcast_s=40.0), [SMALL], fleet.running, 0.0)
    assert (decision.launch, decision.release) == ({}, {})
    assert decision.plan.counts == {"small": 3}
    assert decision.advice
    assert "kappa T_train = 4 x 10.0 s is not longer than T_bcast = 40.0 s" in decision.reason
    again = fleet.provisioner.decide(replace(NEED, t_bcast_s=40.1), [SMALL], fleet.running, 10.0)
    assert again.advice is decision.advice  # not searched anew for noise
    longer = fleet.provisioner.decide(replace(NEED, t_bcast_s=80.0), [SMALL], fleet.running, 20.0)
    assert longer.advice != decision.advice


def test_without_staleness_the_useful_number_is_kept() -> None:
    need = replace(NEED, max_staleness=0, kappa=1)
    fleet = Fleet(Limits(max_workers=4))
    fleet.tick(0.0, [replace(SMALL, max_count=3), LARGE], need)
    assert fleet.running == {"small": 3, "large": 1}
    fleet.provisioner.limits = Limits(max_workers=2)
    fleet.tick(10.0, [SMALL, LARGE], need)
    fleet.tick(120.0, [SMALL, LARGE], need)
    assert fleet.running == {"small": 2}
    unknown = Fleet()
    unknown.tick(0.0, [replace(SMALL, min_count=1), LARGE], need)
    assert unknown.running == {"small": 1}


def test_before_the_useful_number_is_known_a_minimum_replaces_nobody() -> None:
    need = replace(NEED, max_staleness=0, kappa=1)
    fleet = Fleet(small=2)
    for now_s in (0.0, 40.0):
        fleet.tick(now_s, [SMALL, replace(LARGE, min_count=1)], need)
    assert fleet.running == {"small": 2, "large": 1}


def test_a_release_that_was_regretted_does_not_keep_the_next_surplus_longer() -> None:
    fleet, half = Fleet(small=8), replace(NEED, per_step=128)
    for now_s in (0.0, 100.0):
        fleet.tick(now_s, [SMALL], half)
    assert fleet.running == {"small": 4}
    for now_s in (110.0, 140.0):
        fleet.tick(now_s, [SMALL])
    assert fleet.running == {"small": 8}
    for now_s in (150.0, 240.0):
        fleet.tick(now_s, [SMALL], half)
    assert fleet.running == {"small": 8}
    fleet.tick(250.0, [SMALL], half)
    assert fleet.running == {"small": 4}


@pytest.mark.parametrize(
    ("gamma", "share", "grows"),
    [(1.1, 0.96, False), (1.1, 0.94, True), (1.02, 0.985, False), (1.02, 0.975, True), (1.0, 0.99, True)],
)
def test_a_small_shortage_is_borne_while_the_learner_does_not_wait_for_it(
    gamma: float, share: float, grows: bool
) -> None:
    """The band is 5 % of the target, and never reaches below mu_min."""
    fleet, need = Fleet(), replace(NEED, gamma=gamma)
    fine = replace(SMALL, mu=need.mu_target / 100 if need.mu_target else 0.0, max_count=200)
    fleet.tick(0.0, [fine], need)
    assert fleet.running == {"small": 100}
    for now_s in range(10, 100, 10):
        fleet.tick(float(now_s), [replace(fine, mu=share * fine.mu)], need)
    assert (fleet.running["small"] > 100) == grows


def test_of_a_better_fleet_the_best_part_is_bought_first() -> None:
    """Its machines may not come; then the other parts alone would be no better fleet."""
    fleet = Fleet(large=3)
    parts = [replace(SMALL, max_count=6), replace(SMALL, name="next", usd_per_hour=0.85, max_count=9)]
    for now_s in range(0, 110, 10):
        fleet.tick(float(now_s), [*parts, LARGE])
    assert fleet.running == {"large": 3, "small": 6}
    for now_s in range(110, 1000, 10):
        fleet.tick(float(now_s), [*parts, LARGE])
    assert fleet.running == {"small": 6, "next": 2}


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """One entry for each search for the optimum."""
    found: list[object] = []

    def counted(*args: object, **options: object) -> object:
        found.append(solve(*args, **options))  # type: ignore[arg-type]
        return found[-1]

    monkeypatch.setattr("echo_planes.fleet.greedy.solve", counted)
    return found


def test_a_cheaper_fleet_without_room_beside_what_runs_is_not_searched_at_every_tick(
    searches: list[object],
) -> None:
    fleet = Fleet(Limits(max_workers=3), large=3)
    cheap = replace(LARGE, name="cheap", usd_per_hour=1.0)
    reasons = [fleet.tick(float(now_s), [cheap, LARGE]) for now_s in range(0, 2000, 10)]
    assert fleet.running == {"large": 3}
    assert any("the limits leave no room" in reason for reason in reasons)
    assert len(searches) <= 2000 / 100 + 2


def test_what_cannot_be_added_to_is_not_searched_again_at_every_tick(searches: list[object]) -> None:
    fleet = Fleet()
    few = replace(SMALL, max_count=3)
    fleet.tick(0.0, [few])
    for now_s in range(10, 2000, 10):
        noisy = replace(few, mu=4.0 + 0.1 * (now_s % 20 > 0))
        fleet.tick(float(now_s), [noisy])
    assert fleet.running == {"small": 3}
    assert len(searches) <= 6


@pytest.mark.parametrize("change", [{"t_train_s": 11.0}, {"t_bcast_s": 55.0}, {"kappa": 3}])
def test_advice_is_of_the_need_as_it_is_now(change: dict[str, Any]) -> None:
    provisioner, need = Provisioner(FREE), replace(NEED, t_bcast_s=50.0)
    first = provisioner.decide(need, [SMALL], {}, 0.0)
    assert first.advice == advise(need, [SMALL], FREE)
    noisy = replace(need, t_train_s=10.1, t_bcast_s=50.5)
    assert provisioner.decide(noisy, [SMALL], {}, 10.0).advice == first.advice
    changed = replace(need, **change)
    assert provisioner.decide(changed, [SMALL], {}, 20.0).advice == advise(changed, [SMALL], FREE)
    assert advise(changed, [SMALL], FREE) != first.advice


@pytest.mark.parametrize("assumed", [False, True])
def test_what_nobody_measured_is_no_ground_for_advice(assumed: bool) -> None:
    need = replace(NEED, t_bcast_s=30.0, assumed=assumed)
    decision = Provisioner(Limits()).decide(need, [replace(SMALL, max_count=1)], {}, 0.0)
    assert decision.launch == {"small": 1}
    assert bool(decision.advice) is not assumed
    assert ("before a broadcast was measured" in decision.reason) is assumed


def test_a_low_of_long_ago_does_not_keep_a_surplus_for_ever() -> None:
    """The need falls in two moves: what the first permits is forgotten once the second has lasted."""
    provisioner = Provisioner(Limits(), sustain_s=4.0, release_sustain_s=8.0, saving_margin=10.0)
    instance_types = [InstanceType("a", "a", 0.02, 35.0, 1), InstanceType("b", "b", 0.08, 48.0, 1)]
    released = {}
    for tick in range(40):
        need = Need(3, 2, 128, 4.6 if tick < 4 else 8.1, 0.1, 1.1)
        released = dict(provisioner.decide(need, instance_types, {"a": 1, "b": 1}, float(tick)).release)
        if released:
            break
    assert released == {"b": 1}
    assert tick > 8


# -- minimums -----------------------------------------------------------------------------------------------


def test_a_minimum_that_is_lost_comes_back_where_nothing_else_can_be_added() -> None:
    fleet, few = Fleet(), replace(SMALL, max_count=2, min_count=2)
    for now_s in (0.0, 10.0, 40.0):  # there is no more to be had, and this is remembered
        fleet.tick(now_s, [few])
    fleet.running = {"small": 1}
    fleet.tick(50.0, [few])
    assert fleet.running == {"small": 2}


def test_a_minimum_is_kept_where_no_fleet_is_enough() -> None:
    fleet, hopeless = Fleet(small=1), replace(NEED, t_bcast_s=40.0)
    kept = replace(SMALL, min_count=3)
    assert "+2 small" in fleet.tick(0.0, [kept, LARGE], hopeless)
    fleet.tick(10.0, [kept, LARGE], hopeless)
    assert fleet.running == {"small": 3}


def test_beside_minimums_that_are_beyond_a_limit_nobody_is_added() -> None:
    fleet, own = Fleet(Limits(usd_per_hour=2.0, max_workers=3)), replace(SMALL, usd_per_hour=0.0)
    for now_s in range(0, 200, 10):
        fleet.tick(float(now_s), [replace(LARGE, min_count=1), own], replace(NEED, max_staleness=0, kappa=1))
    assert fleet.running == {"large": 1}


@pytest.mark.parametrize(
    "need", [NEED, replace(NEED, t_bcast_s=40.0), replace(NEED, max_staleness=0, kappa=1)]
)
def test_a_minimum_waits_until_there_is_room_for_it(need: Need) -> None:
    """It goes before what is no minimum, but the limit holds at every moment."""
    fleet = Fleet(Limits(usd_per_hour=6.4, max_workers=8), small=8)
    steady = replace(LARGE, min_count=1)
    spent = []
    for now_s in range(0, 200, 10):
        fleet.tick(float(now_s), [SMALL, steady], need)
        spent.append(0.8 * fleet.running.get("small", 0) + 3.0 * fleet.running.get("large", 0))
        if now_s == 0:
            assert "large" not in fleet.running
    assert max(spent) <= 6.4 + 1e-9
    assert fleet.running["large"] == 1
    assert fleet.running["small"] == 4
