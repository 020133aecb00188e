"""The optimum as a policy: what hysteresis costs and saves is seen beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from echo_planes.fleet.capacity import Need
from echo_planes.fleet.exact import fleet_problem, solve
from echo_planes.fleet.greedy import more
from echo_planes.fleet.instance_types import Offer, Shortfall
from echo_planes.fleet.provisioner import Decision, Provisioner


class ExactPolicy(Provisioner):
    """Asks at every tick for the cheapest fleet of that moment, from the same estimates, and nothing more.

    No wait, no margin, nothing kept for what it cost to boot. At S = 0, and where T_bcast leaves no
    target, it decides as `Provisioner`; where no fleet within the limits is enough, it takes the best one.
    """

    def decide(
        self, need: Need, offers: Sequence[Offer], running: Mapping[str, int], now_s: float
    ) -> Decision:
        """One tick; see `Provisioner.decide`."""
        if need.max_staleness == 0 or need.mu_target is None:
            return super().decide(need, offers, running, now_s)
        outcome = solve(fleet_problem(offers, need.mu_target, self.limits, running))
        shortfall = outcome if isinstance(outcome, Shortfall) else None
        best = outcome.best if isinstance(outcome, Shortfall) else outcome
        launch, release = more(best.counts, running), more(running, best.counts)
        reason = f"{need.mu_target:.2f} trajectories/s are needed: the optimum is ${best.usd_per_hour:.2f}/h"
        return Decision(best, launch, release, reason, best.usd_per_hour, shortfall)
