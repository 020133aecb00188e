"""Advice when no fleet within the limits is enough: a change of S and kappa, R, T_bcast (B0) or the budget.

Each change alone makes the overlap rule hold. `advise` solves the fleet again with a change before it returns
the change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from echo_planes.fleet.capacity import Need, staleness_bound
from echo_planes.fleet.exact import TOLERANCE, fleet_problem, solve
from echo_planes.fleet.instance_types import FleetPlan, InstanceType, Limits, Shortfall

_ATTEMPTS = 3  # integers tried beside the computed one, because `most` may not be the proven maximum


@dataclass(frozen=True, slots=True)
class Advice:
    """Change that makes a fleet possible."""

    change: Literal["kappa", "per_step", "t_bcast_s", "usd_per_hour", "usd_left"]
    value: float  # new value; for usd_left: price of the fleet, $/h
    need: Need  # with the change
    limits: Limits  # with the change
    plan: FleetPlan  # cheapest fleet that is enough with the change
    text: str


def advise(need: Need, instance_types: Sequence[InstanceType], limits: Limits) -> tuple[Advice, ...]:
    """Return the changes that make a fleet possible, in the order kappa, R, T_bcast, budget.

    The result is empty if a fleet is possible already, if no single change helps, or at S = 0, where the
    overlap rule does not apply.

    Raises:
        ConfigError: an instance type or a limit has an impossible value.
    """
    if need.max_staleness == 0 or not instance_types or _fleet(need, instance_types, limits) is not None:
        return ()
    most = most_throughput(instance_types, limits)
    found = [_budget(need, instance_types, limits)]
    if most.mu > 0:
        found = [
            _kappa(need, instance_types, limits, most.mu),
            _per_step(need, instance_types, limits, most.mu),
            _t_bcast(need, instance_types, limits, most.mu),
            *found,
        ]
    return tuple(advice for advice in found if advice is not None)


def most_throughput(instance_types: Sequence[InstanceType], limits: Limits) -> FleetPlan:
    """Return the fleet with the most trajectories/s within the limits."""
    beyond = 1.0 + 2 * math.fsum(
        instance_type.mu * instance_type.max_count for instance_type in instance_types
    )
    outcome = solve(fleet_problem(instance_types, beyond, limits, {}))
    return outcome.best if isinstance(outcome, Shortfall) else outcome


def _fleet(need: Need, instance_types: Sequence[InstanceType], limits: Limits) -> FleetPlan | None:
    target = need.mu_target
    if target is None:
        return None
    outcome = solve(fleet_problem(instance_types, target, limits, {}))
    return None if isinstance(outcome, Shortfall) else outcome


def _kappa(need: Need, instance_types: Sequence[InstanceType], limits: Limits, most: float) -> Advice | None:
    # gamma kappa R / (kappa T_train - T_bcast) <= most, solved for kappa.
    gain = most * need.t_train_s - need.gamma * need.sampled
    if gain <= 0:
        return None  # slower than the learner even with nothing to broadcast
    kappa = max(need.kappa + 1, math.ceil(most * need.t_bcast_s / gain * (1 - TOLERANCE)))
    for candidate in range(max(need.kappa + 1, kappa - _ATTEMPTS), kappa + _ATTEMPTS):
        changed = replace(need, kappa=candidate)
        plan = _fleet(changed, instance_types, limits)
        if plan is None:
            continue
        # S = kappa + 1 satisfies the staleness bound if T_bcast < T_train; a longer broadcast needs more.
        bound = staleness_bound(changed, plan.mu) or 0
        changed = replace(changed, max_staleness=max(need.max_staleness, candidate + 1, bound))
        text = (
            f"publish every {candidate} steps instead of {need.kappa}, with max_staleness "
            f"{changed.max_staleness} instead of {need.max_staleness}: {_rate(changed)} are then enough"
        )
        if need.rate_factor < 1:
            there = need.rate_factor * need.max_staleness / changed.max_staleness
            text += (
                f"; but drift control leaves {need.rate_factor:.0%} of the learning rate at this staleness, "
                f"and would leave about {there:.0%}"
            )
        return Advice("kappa", candidate, changed, limits, plan, text + _price(plan))
    return None


def _per_step(
    need: Need, instance_types: Sequence[InstanceType], limits: Limits, most: float
) -> Advice | None:
    window_s = need.kappa * need.t_train_s - need.t_bcast_s
    if window_s <= 0:
        return None
    accepted = most * (1 - need.uninformative)
    largest = math.floor(accepted * window_s / (need.gamma * need.kappa) * (1 + TOLERANCE))
    for candidate in range(min(largest + _ATTEMPTS, need.per_step - 1), max(0, largest - _ATTEMPTS), -1):
        changed = replace(need, per_step=candidate)
        if (plan := _fleet(changed, instance_types, limits)) is not None:
            text = (
                f"train on {candidate} trajectories a step instead of {need.per_step} "
                f"(at the same time per step): {_rate(changed)} are then enough"
            )
            return Advice("per_step", candidate, changed, limits, plan, text + _price(plan))
    return None


def _t_bcast(
    need: Need, instance_types: Sequence[InstanceType], limits: Limits, most: float
) -> Advice | None:
    longest_s = need.kappa * (need.t_train_s - need.gamma * need.sampled / most) * (1 - TOLERANCE)
    if not 0 < longest_s < need.t_bcast_s:
        return None
    changed = replace(need, t_bcast_s=longest_s)
    if (plan := _fleet(changed, instance_types, limits)) is None:
        return None
    text = (
        f"broadcast in {longest_s:.1f} s instead of {need.t_bcast_s:.1f} s, "
        f"as {need.t_bcast_s / longest_s:.2f} times the learner's uplink would: "
        f"{_rate(changed)} are then enough"
    )
    return Advice("t_bcast_s", longest_s, changed, limits, plan, text + _price(plan))


def _budget(need: Need, instance_types: Sequence[InstanceType], limits: Limits) -> Advice | None:
    if limits.usd_left is not None and limits.usd_left <= 0:
        changed = replace(limits, usd_left=None)
        if (plan := _fleet(need, instance_types, changed)) is None:
            return None
        text = "raise the total budget, of which nothing is left"
        return Advice("usd_left", plan.usd_per_hour, need, changed, plan, text + _price(plan))
    if limits.usd_per_hour is None:
        return None
    plan = _fleet(need, instance_types, replace(limits, usd_per_hour=None))
    if plan is None:
        return None
    cents = math.ceil(plan.usd_per_hour * 100 - TOLERANCE) / 100
    changed = replace(limits, usd_per_hour=cents)
    if (plan := _fleet(need, instance_types, changed)) is None:
        return None
    text = f"allow ${cents:.2f}/h instead of ${limits.usd_per_hour:.2f}/h"
    return Advice("usd_per_hour", cents, need, changed, plan, text + _price(plan))


def _rate(need: Need) -> str:
    return f"{need.mu_target or math.nan:.2f} trajectories/s"


def _price(plan: FleetPlan) -> str:
    return f" ({plan.num_workers} workers, {plan.mu:.2f} trajectories/s, ${plan.usd_per_hour:.2f}/h)"
