"""Optimum as a policy, a baseline for the costs and savings of hysteresis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from echo_planes.fleet.capacity import Need
from echo_planes.fleet.exact import fleet_problem, solve
from echo_planes.fleet.greedy import more
from echo_planes.fleet.instance_types import InstanceType, Shortfall
from echo_planes.fleet.provisioner import Decision, Provisioner


class ExactPolicy(Provisioner):
    """Policy that takes the cheapest fleet of each tick, from the same estimates as `Provisioner`.

    It has no waits and no margins, and ignores the cost of booting. At S = 0, and if T_bcast leaves no
    target, it decides as `Provisioner`. If no fleet within the limits is enough, it takes the one of most
    throughput.
    """

    def decide(
        self, need: Need, instance_types: Sequence[InstanceType], running: Mapping[str, int], now_s: float
    ) -> Decision:
        """Decide at one tick; see `Provisioner.decide`."""
        if need.max_staleness == 0 or need.mu_target is None:
            return super().decide(need, instance_types, running, now_s)
        outcome = solve(fleet_problem(instance_types, need.mu_target, self.limits, running))
        shortfall = outcome if isinstance(outcome, Shortfall) else None
        best = outcome.best if isinstance(outcome, Shortfall) else outcome
        launch, release = more(best.counts, running), more(running, best.counts)
        reason = f"{need.mu_target:.2f} trajectories/s are needed: the optimum is ${best.usd_per_hour:.2f}/h"
        return Decision(best, launch, release, reason, best.usd_per_hour, shortfall)
