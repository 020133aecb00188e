"""Instance types to choose a fleet from, the fleet's limits, and the plan or the shortfall.

The provisioner, the planner and the simulator share these plain values. A *worker* is one inference engine on
one machine, with any number of GPUs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Literal

from echo_planes.types import Market

SAME = 1e-9  # tolerance of a limit for the rounding of sums


@dataclass(frozen=True, slots=True)
class InstanceType:
    """Way to get a worker: a SKU in one region, on one market, at one price (ECHO-2 section 3.2)."""

    name: str  # unique among the instance types of a fleet
    sku: str
    usd_per_hour: float  # c_i of one worker; 0.0: a machine that is paid for already
    mu: float  # mu_i of one worker, trajectories/s end to end, waiting for permits excluded
    max_count: int  # quota, workers
    min_count: int = 0  # workers that the fleet always keeps
    region: str = ""
    market: Market = "on_demand"
    interruptions_per_hour: float = 0.0  # of one worker
    boot_s: float = 0.0  # seconds from the request until the worker generates

    @property
    def rho(self) -> float:
        """Unit throughput cost c_i / mu_i: dollars an hour for one trajectory a second."""
        return self.usd_per_hour / self.mu


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the size and cost of a fleet. None: no such limit."""

    usd_per_hour: float | None = None  # of all workers together
    usd_left: float | None = None  # of the total budget; nothing new is bought at 0 or below
    seconds_left: float | None = None  # of the run; no worker is bought that would boot longer than it serves
    interruptions_per_hour: float | None = None  # expected, of all workers together
    min_workers: int = 0
    max_workers: int | None = None

    def stop(self, instance_type: InstanceType) -> Literal["usd_left", "seconds_left"] | None:
        """Return the limit that forbids any new worker of a type, or None.

        A new worker must be able to serve for at least as long as it boots.
        """
        if instance_type.usd_per_hour == 0:
            return None
        if self.usd_left is not None and self.usd_left <= 0:
            return "usd_left"
        is_late = self.seconds_left is not None and self.seconds_left < 2 * instance_type.boot_s
        return "seconds_left" if is_late else None

    def permit(self, instance_types: Sequence[InstanceType], counts: Mapping[str, int]) -> bool:
        """Return whether these workers together keep the limits on price, interruptions and number.

        `usd_left` and `seconds_left` do not count here: they only stop new workers (`stop`).
        """
        some = [(instance_type, counts.get(instance_type.name, 0)) for instance_type in instance_types]
        found = (
            (self.usd_per_hour, math.fsum(n * instance_type.usd_per_hour for instance_type, n in some)),
            (
                self.interruptions_per_hour,
                math.fsum(n * instance_type.interruptions_per_hour for instance_type, n in some),
            ),
            (self.max_workers, sum(n for _, n in some)),
        )
        return all(limit is None or value <= limit + SAME for limit, value in found)


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """Workers of each instance type, with their total price, throughput and interruptions."""

    counts: Mapping[str, int] = field(
        default_factory=dict
    )  # instance type name -> workers; types without workers are absent
    usd_per_hour: float = 0.0
    mu: float = 0.0  # trajectories/s
    interruptions_per_hour: float = 0.0

    @property
    def num_workers(self) -> int:
        return sum(self.counts.values())


@dataclass(frozen=True, slots=True)
class Shortfall:
    """Best fleet when none within the limits reaches the target, and the limits that prevent a better one."""

    best: FleetPlan  # most throughput within the limits
    mu_target: float  # trajectories/s that were asked for
    binding: tuple[
        str, ...
    ]  # some of "quota", "usd_per_hour", "usd_left", "seconds_left", "interruptions", "max_workers"


def limits_beside(
    limits: Limits, instance_types: Sequence[InstanceType], beside: Mapping[str, int], useful: int | None
) -> Limits:
    """Return the limits left for a fleet beside other workers, with at most `useful` workers in the fleet."""
    some = [(instance_type, beside.get(instance_type.name, 0)) for instance_type in instance_types]
    num, most = sum(beside.values()), limits.max_workers
    left = useful if most is None else max(most - num, 0)
    return replace(
        limits,
        usd_per_hour=_less(limits.usd_per_hour, ((n, o.usd_per_hour) for o, n in some)),
        interruptions_per_hour=_less(
            limits.interruptions_per_hour, ((n, o.interruptions_per_hour) for o, n in some)
        ),
        max_workers=left if useful is None or left is None else min(left, useful),
    )


def cheapest_beside(
    limits: Limits,
    instance_types: Sequence[InstanceType],
    counts: Mapping[str, int],
    held: Mapping[str, int],
    prefer: str = "",
) -> str | None:
    """Return the type of which one more worker is permitted: `prefer`, else the lowest rho; None if none.

    Args:
        limits: of all workers together.
        instance_types: types to choose from; their `max_count` limits `counts`.
        counts: workers of each instance type that count towards its quota.
        held: all workers of each instance type, standbys included.
        prefer: instance type that comes first, whatever its rho.
    """
    for instance_type in sorted(instance_types, key=lambda one: (one.name != prefer, one.rho, one.name)):
        room = (
            counts.get(instance_type.name, 0) < instance_type.max_count and limits.stop(instance_type) is None
        )
        if room and limits.permit(instance_types, Counter(held) + Counter([instance_type.name])):
            return instance_type.name
    return None


def _less(limit: float | None, taken: Iterable[tuple[int, float]]) -> float | None:
    """Return what is left of a limit beside n times each value; in decimals, where 1.2 - 0.3 is 0.9."""
    if limit is None:
        return None
    left = Decimal(str(limit)) - sum(n * Decimal(str(value)) for n, value in taken)
    return max(float(left), 0.0)
