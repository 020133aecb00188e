"""The optimum against brute force, greedy against its bound, and noisy fleets."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_planes.fleet.advice import advise
from echo_planes.fleet.capacity import Need
from echo_planes.fleet.exact import exact, plan_of
from echo_planes.fleet.instance_types import FleetPlan, InstanceType, Limits, Shortfall
from echo_planes.fleet.provisioner import Provisioner, greedy
from tests.thorough import examples

EPSILON = 1e-9


@st.composite
def markets(draw: st.DrawFn, max_instance_types: int, max_count: int) -> tuple[list[InstanceType], float]:
    """Instance types with prices in cents, some alike, and a target up to a little more than they make."""
    mus = draw(st.lists(st.integers(1, 400), min_size=1, max_size=4))
    instance_types = []
    for number in range(draw(st.integers(1, max_instance_types))):
        count = draw(st.integers(0, max_count))
        instance_types.append(
            InstanceType(
                f"o{number:02}",
                "sku",
                usd_per_hour=draw(st.integers(0, 300)) / 100,
                mu=draw(st.sampled_from(mus)) / 100,
                max_count=count,
                min_count=draw(st.integers(0, count)) if draw(st.integers(0, 5)) == 0 else 0,
                interruptions_per_hour=draw(st.sampled_from([0.0, 0.05, 0.1, 0.25])),
            )
        )
    total = sum(instance_type.mu * instance_type.max_count for instance_type in instance_types)
    target = max(0.01, round(total * draw(st.floats(0.01, 1.1)), 2))
    return instance_types, target


@st.composite
def some_limits(draw: st.DrawFn) -> Limits:
    return Limits(
        usd_per_hour=draw(st.none() | st.integers(0, 2000).map(lambda cents: cents / 100)),
        usd_left=draw(st.sampled_from([None, None, None, 5.0, 0.0])),
        interruptions_per_hour=draw(st.none() | st.integers(0, 40).map(lambda n: n / 20)),
        min_workers=draw(st.sampled_from([0, 0, 0, 2, 5])),
        max_workers=draw(st.none() | st.integers(0, 12)),
    )


def is_within(plan: FleetPlan, limits: Limits) -> bool:
    return (
        plan.usd_per_hour <= (math.inf if limits.usd_per_hour is None else limits.usd_per_hour + EPSILON)
        and plan.interruptions_per_hour
        <= (math.inf if limits.interruptions_per_hour is None else limits.interruptions_per_hour + EPSILON)
        and plan.num_workers <= (math.inf if limits.max_workers is None else limits.max_workers)
    )


def by_hand(instance_types: list[InstanceType], target: float, limits: Limits) -> tuple[float | None, float]:
    """The least $/h that reaches the target, and the most throughput, of all fleets within the limits."""
    cheapest, most = None, 0.0
    nothing = limits.usd_left is not None and limits.usd_left <= 0
    ranges = [
        range(0, 1) if nothing and o.usd_per_hour > 0 else range(o.min_count, o.max_count + 1)
        for o in instance_types
    ]
    for counts in itertools.product(*ranges):
        plan = plan_of({o.name: n for o, n in zip(instance_types, counts, strict=True)}, instance_types)
        if is_within(plan, limits):
            most = max(most, plan.mu)
            reaches = plan.mu >= target * (1 - EPSILON) and plan.num_workers >= limits.min_workers
            if reaches and (cheapest is None or plan.usd_per_hour < cheapest):
                cheapest = plan.usd_per_hour
    return cheapest, most


@settings(max_examples=examples(300), deadline=None)
@given(market=markets(max_instance_types=5, max_count=4), limits=some_limits())
def test_the_optimum_is_the_best_of_all_fleets(
    market: tuple[list[InstanceType], float], limits: Limits
) -> None:
    instance_types, target = market
    cheapest, most = by_hand(instance_types, target, limits)
    found, prefix = exact(instance_types, target, limits, {}), greedy(instance_types, target, limits, {})
    if isinstance(found, Shortfall):
        assert cheapest is None
        assert isinstance(prefix, Shortfall)
        assert found.binding
        minimums = sum(o.min_count for o in instance_types)
        if minimums == 0:  # minimums are kept, whatever they break
            assert found.best.mu == pytest.approx(most, abs=1e-9)
            assert is_within(found.best, limits)
    else:
        assert cheapest is not None
        assert found.usd_per_hour == pytest.approx(cheapest, abs=1e-9)
        assert found.mu >= target * (1 - EPSILON)
        assert is_within(found, limits)
        if isinstance(prefix, FleetPlan):
            assert found.usd_per_hour <= prefix.usd_per_hour + EPSILON
            assert is_within(prefix, limits)


def relaxed_usd_per_hour(instance_types: list[InstanceType], target: float) -> float:
    """The linear relaxation of the rule without limits: the cheapest rho, the last worker in part."""
    cost, missing = 0.0, target
    for instance_type in sorted(instance_types, key=lambda o: o.rho):
        share = min(instance_type.max_count, missing / instance_type.mu)
        cost, missing = cost + share * instance_type.usd_per_hour, missing - share * instance_type.mu
    return cost


@settings(max_examples=examples(200), deadline=None)
@given(market=markets(max_instance_types=40, max_count=2000))
def test_greedy_is_within_one_worker_of_the_relaxed_optimum(market: tuple[list[InstanceType], float]) -> None:
    instance_types, target = [replace(instance_type, min_count=0) for instance_type in market[0]], market[1]
    prefix, found = greedy(instance_types, target, Limits(), {}), exact(instance_types, target, Limits(), {})
    if isinstance(prefix, Shortfall):
        assert isinstance(found, Shortfall)
        return
    assert isinstance(found, FleetPlan)
    relaxed, worker = (
        relaxed_usd_per_hour(instance_types, target),
        max(o.usd_per_hour for o in instance_types),
    )
    rounding = 1e-8 * (1 + relaxed)
    assert relaxed - rounding <= found.usd_per_hour <= prefix.usd_per_hour + rounding
    assert prefix.usd_per_hour <= relaxed + worker + rounding


@settings(max_examples=examples(100), deadline=None)
@given(
    market=markets(max_instance_types=5, max_count=6),
    kappa=st.integers(1, 4),
    per_step=st.integers(1, 200),
    t_train_s=st.floats(1, 20),
    t_bcast_s=st.floats(0, 60),
    usd_per_hour=st.none() | st.integers(1, 2000).map(lambda cents: cents / 100),
)
def test_every_advice_is_enough(
    market: tuple[list[InstanceType], float],
    kappa: int,
    per_step: int,
    t_train_s: float,
    t_bcast_s: float,
    usd_per_hour: float | None,
) -> None:
    need = Need(kappa + 1, kappa, per_step, t_train_s, t_bcast_s)
    limits = Limits(usd_per_hour=usd_per_hour)

    def fleet(changed: Need, within: Limits) -> FleetPlan | None:
        if changed.mu_target is None:
            return None
        found = exact(market[0], changed.mu_target, within, {})
        return found if isinstance(found, FleetPlan) else None

    given_advice = advise(need, market[0], limits)
    if fleet(need, limits) is not None:
        assert given_advice == ()
    for advice in given_advice:
        assert fleet(advice.need, advice.limits) == advice.plan
        if advice.change == "kappa" and advice.value > kappa + 1:
            assert fleet(replace(advice.need, kappa=int(advice.value) - 1), limits) is None
        if advice.change == "per_step" and advice.value + 1 < per_step:
            assert fleet(replace(advice.need, per_step=int(advice.value) + 1), limits) is None


@settings(max_examples=examples(60), deadline=None)
@given(
    market=markets(max_instance_types=4, max_count=8),
    counts=st.lists(st.integers(0, 8), min_size=4, max_size=4),
)
def test_where_nothing_changes_the_fleet_comes_to_rest(
    market: tuple[list[InstanceType], float], counts: list[int]
) -> None:
    """Any fleet at first comes to rest, not dearer than greedy's by more than the margins say."""
    instance_types, target = market
    need = Need(3, 2, round(target * 1e5), 1e5, 0.0, gamma=1.0)
    running = {o.name: min(n, o.max_count) for o, n in zip(instance_types, counts, strict=False)}
    provisioner = Provisioner(Limits(), sustain_s=10.0, release_sustain_s=20.0)
    changes = []
    for number in range(150):
        decision = provisioner.decide(need, instance_types, running, number * 10.0)
        if decision.launch or decision.release:
            changes.append(number)
        running = dict(decision.plan.counts)
    assert not [number for number in changes if number > 100]
    best = greedy(instance_types, need.mu_target or 0.0, Limits(), {})
    if isinstance(best, FleetPlan):
        free = {instance_type.name for instance_type in instance_types if instance_type.usd_per_hour == 0}
        usd_per_hour = plan_of(
            {n: c for n, c in running.items() if n not in free}, instance_types
        ).usd_per_hour
        assert usd_per_hour <= best.usd_per_hour / 0.95 + EPSILON


@settings(max_examples=examples(100), deadline=None)
@given(
    market=markets(max_instance_types=4, max_count=6),
    boots=st.lists(st.integers(0, 300), min_size=4, max_size=4),
    counts=st.lists(st.integers(0, 6), min_size=4, max_size=4),
    limits=some_limits(),
    max_staleness=st.sampled_from([0, 3]),
    steps=st.integers(0, 60),
    step_s=st.floats(0.5, 20.0),
)
def test_nothing_is_bought_that_would_boot_for_longer_than_it_serves(
    market: tuple[list[InstanceType], float],
    boots: list[int],
    counts: list[int],
    limits: Limits,
    max_staleness: int,
    steps: int,
    step_s: float,
) -> None:
    """To the end of a run; and as long as every worker would serve for long, time changes no decision."""
    instance_types = [
        replace(instance_type, boot_s=float(boot_s))
        for instance_type, boot_s in zip(market[0], boots, strict=False)
    ]
    need = Need(max_staleness, 2, round(market[1] * 1e5), 1e5, 0.0, gamma=1.0)
    running = {o.name: min(n, o.max_count) for o, n in zip(instance_types, counts, strict=False)}
    timed, timeless = (Provisioner(limits, sustain_s=10.0, release_sustain_s=20.0) for _ in range(2))
    is_same = True
    for step in range(steps):
        left_s = (steps - step) * step_s
        timed.limits = replace(limits, seconds_left=left_s)
        decision = timed.decide(need, instance_types, running, step * step_s)
        late = {o.name for o in instance_types if 2 * o.boot_s > left_s and o.usd_per_hour > 0}
        assert not late & decision.launch.keys()
        is_same = is_same and not late
        if is_same:
            expected = timeless.decide(need, instance_types, running, step * step_s)
            # Advice holds the limits that it was found under; its text is in the reason.
            assert replace(decision, advice=()) == replace(expected, advice=())
        running = dict(decision.plan.counts)


@settings(max_examples=examples(40), deadline=None)
@given(
    seed=st.integers(0, 10**6),
    noise=st.floats(0, 0.3),
    worker_share=st.sampled_from([0.02, 0.1, 0.4]),
    tick_s=st.sampled_from([1.0, 10.0, 60.0]),
)
def test_noise_moves_few_machines(seed: int, noise: float, worker_share: float, tick_s: float) -> None:
    """Under any noise, releases stay as rare as their wait says, and changes few; little noise brings
    hardly any."""
    rng = random.Random(seed)
    need = Need(5, 4, 256, 10.0, 8.0)
    target = need.mu_target or 0.0
    instance_types = [
        InstanceType("a", "x", 1.0, target * worker_share, max_count=60),
        InstanceType("b", "y", 1.5, target * worker_share * 1.3, max_count=60),
    ]
    provisioner = Provisioner(Limits(), sustain_s=30.0, release_sustain_s=300.0)
    running: dict[str, int] = {}
    launches = releases = 0
    ticks = 300
    for number in range(ticks):
        seen = [replace(o, mu=o.mu * (1 + noise * rng.uniform(-1, 1))) for o in instance_types]
        decision = provisioner.decide(need, seen, running, number * tick_s)
        for instance_type in instance_types:
            name = instance_type.name
            running[name] = (
                running.get(name, 0) + decision.launch.get(name, 0) - decision.release.get(name, 0)
            )
            assert 0 <= running[name] <= instance_type.max_count
        assert not (decision.launch and decision.release)
        if decision.release:
            assert plan_of(running, seen).mu >= target * (1 - EPSILON)
        launches += bool(decision.launch)
        releases += bool(decision.release)
    duration_s = ticks * tick_s
    assert releases <= duration_s / 300.0
    if noise <= 0.1:
        assert launches + releases <= 4 + 10 * duration_s / 3600.0
    if noise <= 0.05 and tick_s <= 10.0:
        assert launches <= 3
        assert releases <= 1


@settings(max_examples=examples(40), deadline=None)
@given(seed=st.integers(0, 10**6))
def test_a_market_that_moves_never_breaks_a_limit(seed: int) -> None:
    """Prices, quotas and the need change at random: no launch goes above a quota or a limit."""
    rng = random.Random(seed)
    limits = Limits(usd_per_hour=rng.choice([None, 8.0, 20.0]), max_workers=rng.choice([None, 6, 15]))
    provisioner = Provisioner(limits, sustain_s=20.0, release_sustain_s=60.0)
    instance_types = [
        InstanceType(f"o{j}", "x", rng.uniform(0.2, 3), rng.uniform(1, 9), max_count=rng.randint(0, 6))
        for j in range(4)
    ]
    running: dict[str, int] = {}
    need = Need(5, 4, 256, 10.0, 8.0)
    for number in range(80):
        if rng.random() < 0.2:
            j = rng.randrange(4)
            instance_types[j] = replace(
                instance_types[j],
                usd_per_hour=rng.uniform(0.2, 3),
                max_count=rng.randint(0, 6),
                mu=rng.uniform(1, 9),
            )
        if running and rng.random() < 0.1:
            name = rng.choice(sorted(running))
            running[name] -= 1
        running = {name: n for name, n in running.items() if n > 0}
        if number % 30 == 0:
            need = replace(need, per_step=rng.randint(50, 300))
        decision = provisioner.decide(need, instance_types, running, number * 10.0)
        after = decision.plan
        for instance_type in instance_types:
            assert after.counts.get(instance_type.name, 0) <= max(
                instance_type.max_count, running.get(instance_type.name, 0)
            )
        before = plan_of(running, instance_types)
        if decision.launch and is_within(before, limits):
            assert is_within(after, limits)
        for name, n in decision.release.items():
            assert n <= running[name]
        running = dict(after.counts)
