"""Account of a simulated fleet's dollars beyond the optimum's, cause by cause."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.cost_fleets import HOUR_S, Stretch
from echo_planes.fleet.instance_types import InstanceType
from echo_planes.sim.world import World

EVERY_S = 15.0  # the simulator's default tick


@dataclass(slots=True)
class Watch:
    """Looks at the machines of a run every `EVERY_S` of its time, from its construction on.

    Args:
        world: the run, before it begins.
        mu: trajectories/s of one worker of each instance type.
    """

    world: World
    mu: Mapping[str, float]
    looks: list[tuple[float, float, float, float]] = field(
        default_factory=list
    )  # s, trajectories/s, $/h, $/h
    booting_usd: dict[str, float] = field(default_factory=dict)  # of each machine
    served: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.world.kernel.after(0.0, self._look)

    def _look(self) -> None:
        workers = self.world.workers
        serving = {member.name for member in workers.serving() if not member.cause}
        self.served |= serving
        mu = serving_usd = leaving_usd = 0.0  # dollars an hour
        for name, member in workers.members.items():
            if not workers.market.holds(name):
                continue
            usd_per_hour = member.instance_type.usd_per_hour
            if name in serving:
                mu, serving_usd = mu + self.mu[member.instance_type.name], serving_usd + usd_per_hour
            elif name in self.served:
                leaving_usd += usd_per_hour
            else:
                spent = self.booting_usd.get(name, 0.0)
                self.booting_usd[name] = spent + usd_per_hour * EVERY_S / HOUR_S
        self.looks.append((self.world.kernel.now_s, mu, serving_usd, leaving_usd))
        self.world.kernel.after(EVERY_S, self._look)


def mu_by_instance_type(instance_types: Sequence[InstanceType]) -> dict[str, float]:
    return {instance_type.name: instance_type.mu for instance_type in instance_types}


def account(watch: Watch, best: Sequence[Stretch], extra_usd: float) -> dict[str, float]:
    """Dollars beyond the optimum's, by cause. They come to `extra_usd`.

    At a moment with s dollars an hour for mu trajectories/s, and s* for mu* of the optimum, the difference
    s - s* is (mu - mu*) rho*, what is served more or less, and s - mu rho*, what it costs more for its price.

    Args:
        best: the optimum's fleets, in order of time.
    """
    hours = EVERY_S / HOUR_S
    usd = dict.fromkeys(("more capacity", "less capacity", "dearer machines", "going", "longer run"), 0.0)
    begins = [stretch.since_s for stretch in best]
    for now_s, mu, serving_usd, leaving_usd in watch.looks:
        usd["going"] += leaving_usd * hours
        if now_s >= best[-1].to_s:
            usd["longer run"] += serving_usd * hours
            continue
        plan = best[bisect_right(begins, now_s) - 1].plan
        rho = plan.usd_per_hour / plan.mu
        usd["more capacity" if mu > plan.mu else "less capacity"] += (mu - plan.mu) * rho * hours
        usd["dearer machines"] += (serving_usd - mu * rho) * hours
    usd["boots"] = sum(usd for name, usd in watch.booting_usd.items() if name in watch.served)
    usd["boots of machines that never served"] = sum(watch.booting_usd.values()) - usd["boots"]
    usd["rounding of moments"] = extra_usd - sum(usd.values())
    return usd
