"""Fleets that `bench.cost` compares with: the optimum at every moment, random ones, and of one SKU.

They are priced without boot times, waits and losses of work: what is compared with them pays all of that.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bench.cost_market import SpotMarket
from echo_planes.errors import DataError
from echo_planes.fleet.capacity import Need
from echo_planes.fleet.exact import fleet_problem, solve
from echo_planes.fleet.instance_types import FleetPlan, InstanceType, Limits

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Priced:
    """A fleet that follows the market without any friction."""

    usd: float  # of all workers over the time that the work takes without waits
    seconds: float
    workers: float = 0.0  # mean
    boot_usd: float = 0.0  # not in `usd`: for what it starts after its first workers, if that booted


@dataclass(frozen=True, slots=True)
class Stretch:
    """The cheapest fleet between two changes of the market."""

    since_s: float
    to_s: float
    plan: FleetPlan


def target_of(need: Need) -> float:
    """mu_target.

    Raises:
        DataError: no fleet is enough for such a learner.
    """
    if need.mu_target is None:
        raise DataError(f"kappa T_train is not above T_bcast = {need.t_bcast_s:.0f} s: no fleet is enough")
    return need.mu_target


def work_s(need: Need, steps: int) -> float:
    """Seconds of so many steps without a wait: the first batch is sampled, then the learner trains."""
    return need.per_step / target_of(need) + steps * need.t_train_s


def homogeneous(instance_type: InstanceType, need: Need) -> int:
    """Workers of one instance type that reach the target."""
    return math.ceil(target_of(need) / instance_type.mu - 1e-9)


def cheapest_single(instance_types: Sequence[InstanceType], need: Need) -> InstanceType:
    """The on-demand instance type of which a whole fleet is the cheapest."""
    steady = [instance_type for instance_type in instance_types if instance_type.market == "on_demand"]
    return min(steady, key=lambda o: (homogeneous(o, need) * o.usd_per_hour, o.name))


def cheapest_fleets(market: SpotMarket, need: Need, steps: int) -> list[Stretch]:
    """The cheapest fleet for the target of what there is, at every moment until the work is done.

    Raises:
        DataError: at some moment there is no fleet for the target.
    """
    known: dict[tuple[int, ...], FleetPlan] = {}

    def best(instance_types: Sequence[InstanceType]) -> FleetPlan:
        key = tuple(instance_type.max_count for instance_type in instance_types)
        if key not in known:
            outcome = solve(fleet_problem(instance_types, target_of(need), Limits(), {}))
            if not isinstance(outcome, FleetPlan):
                raise DataError(f"no fleet reaches {target_of(need):.2f} trajectories/s: raise the quotas")
            known[key] = outcome
        return known[key]

    until_s = work_s(need, steps)
    return [Stretch(since_s, to_s, best(market.at(since_s))) for since_s, to_s in _intervals(market, until_s)]


def optimum(
    instance_types: Sequence[InstanceType], fleets: Sequence[Stretch], install_s: float = 0.0
) -> Priced:
    """The cheapest fleet for the target at every moment, changed at once and for nothing.

    Args:
        fleets: `cheapest_fleets` of these instance types.
        install_s: from the end of a boot until the weights are there; for `boot_usd` only.
    """
    until_s = fleets[-1].to_s
    usd = workers = boot_usd = 0.0
    before: Mapping[str, int] | None = None
    for stretch in fleets:
        plan, hours = stretch.plan, (stretch.to_s - stretch.since_s) / HOUR_S
        usd, workers = usd + plan.usd_per_hour * hours, workers + plan.num_workers * hours
        if before is not None:
            for instance_type in instance_types:
                started = plan.counts.get(instance_type.name, 0) - before.get(instance_type.name, 0)
                boot_usd += (
                    max(started, 0) * instance_type.usd_per_hour * (instance_type.boot_s + install_s) / HOUR_S
                )
        before = plan.counts
    return Priced(usd, until_s, workers * HOUR_S / until_s, boot_usd)


def random_fleet(market: SpotMarket, need: Need, steps: int, rng: random.Random) -> Priced:
    """A fleet drawn at random (ECHO-2, 5.5.2, "w/o Cost").

    While it is below the target, one of the instance types that have a machine left is drawn and gives one.

    What is taken away is made up for at once. Nothing is given back.
    """
    held: dict[str, int] = {}
    until_s, target = work_s(need, steps), target_of(need)
    usd = workers = 0.0
    for since_s, to_s in _intervals(market, until_s):
        instance_types = market.at(since_s)
        held = {
            instance_type.name: min(held.get(instance_type.name, 0), instance_type.max_count)
            for instance_type in instance_types
        }
        mu = math.fsum(instance_type.mu * held[instance_type.name] for instance_type in instance_types)
        while mu < target:
            drawn = rng.choice(
                [
                    instance_type
                    for instance_type in instance_types
                    if held[instance_type.name] < instance_type.max_count
                ]
            )
            held[drawn.name] += 1
            mu += drawn.mu
        hours = (to_s - since_s) / HOUR_S
        usd += hours * math.fsum(
            instance_type.usd_per_hour * held[instance_type.name] for instance_type in instance_types
        )
        workers += hours * sum(held.values())
    return Priced(usd, until_s, workers=workers * HOUR_S / until_s)


def plan_counts(instance_types: Sequence[InstanceType], need: Need) -> Mapping[str, int]:
    """Counts that `echo_planes.plan` would begin with, by type: the cheapest fleet if all quotas were there.

    Raises:
        DataError: there is none.
    """
    outcome = solve(fleet_problem(instance_types, target_of(need), Limits(), {}))
    if not isinstance(outcome, FleetPlan):
        raise DataError(f"no fleet reaches {target_of(need):.2f} trajectories/s: raise the quotas")
    return outcome.counts


def _intervals(market: SpotMarket, until_s: float) -> list[tuple[float, float]]:
    moments = [*market.moments(until_s), until_s]
    return list(pairwise(moments))
