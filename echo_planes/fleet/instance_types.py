"""Instance types, or offers, that a fleet is chosen from, its limits, and the plan or the shortfall.

Plain values that the capacity model, the provisioner, the planner and the simulator share. A *worker* is one
inference engine on one machine, whatever number of GPUs it spans.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from echo_planes.types import Market

SAME = 1e-9  # a sum of prices may be off by so much


@dataclass(frozen=True, slots=True)
class Offer:
    """One way to get a worker: a SKU in one region, on one market, at one price (ECHO-2 section 3.2)."""

    name: str  # unique among the offers of a fleet
    sku: str
    usd_per_hour: float  # c_i of one worker; 0.0: a machine that is paid for already
    mu: float  # mu_i of one worker, trajectories/s end to end, waiting for permits excluded
    max_count: int  # quota, workers
    min_count: int = 0  # workers that are always kept
    region: str = ""
    market: Market = "on_demand"
    interruptions_per_hour: float = 0.0  # of one worker
    boot_s: float = 0.0  # from asking for it until it generates

    @property
    def rho(self) -> float:
        """Unit throughput cost c_i / mu_i: dollars an hour for one trajectory a second."""
        return self.usd_per_hour / self.mu


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the size and cost of a fleet. None: no such limit."""

    usd_per_hour: float | None = None  # of all workers together
    usd_left: float | None = None  # of the total budget; nothing new is bought at 0 or below
    interruptions_per_hour: float | None = None  # expected, of all workers together
    min_workers: int = 0
    max_workers: int | None = None

    def permit(self, offers: Sequence[Offer], counts: Mapping[str, int]) -> bool:
        """Whether so many workers of these offers may be there together. What is left of a budget is not
        looked at: it stops what is new."""
        some = [(offer, counts.get(offer.name, 0)) for offer in offers]
        found = (
            (self.usd_per_hour, math.fsum(n * offer.usd_per_hour for offer, n in some)),
            (self.interruptions_per_hour, math.fsum(n * offer.interruptions_per_hour for offer, n in some)),
            (self.max_workers, sum(n for _, n in some)),
        )
        return all(limit is None or value <= limit + SAME for limit, value in found)


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """Workers of each offer, and what they come to."""

    counts: Mapping[str, int] = field(
        default_factory=dict
    )  # offer name -> workers; offers with none are absent
    usd_per_hour: float = 0.0
    mu: float = 0.0  # trajectories/s
    interruptions_per_hour: float = 0.0

    @property
    def num_workers(self) -> int:
        return sum(self.counts.values())


@dataclass(frozen=True, slots=True)
class Shortfall:
    """No fleet within the limits reaches the target: the best there is, and what is in the way."""

    best: FleetPlan  # most throughput within the limits
    mu_target: float  # trajectories/s that were asked for
    binding: tuple[
        str, ...
    ]  # which limits stop it: "quota", "usd_per_hour", "usd_left", "interruptions", "max_workers"


def limits_beside(
    limits: Limits, offers: Sequence[Offer], beside: Mapping[str, int], useful: int | None
) -> Limits:
    """Limits left for a fleet beside other workers; at most `useful` workers of it are to generate."""
    some = [(offer, beside.get(offer.name, 0)) for offer in offers]
    usd = math.fsum(n * offer.usd_per_hour for offer, n in some)
    events = math.fsum(n * offer.interruptions_per_hour for offer, n in some)
    num, most = sum(beside.values()), limits.max_workers
    left = useful if most is None else max(most - num, 0)
    return replace(
        limits,
        usd_per_hour=_less(limits.usd_per_hour, usd),
        interruptions_per_hour=_less(limits.interruptions_per_hour, events),
        max_workers=left if useful is None or left is None else min(left, useful),
    )


def cheapest_beside(
    limits: Limits,
    offers: Sequence[Offer],
    counts: Mapping[str, int],
    held: Mapping[str, int],
    prefer: str = "",
) -> str | None:
    """Of which offer one worker more is permitted: `prefer` first, then the lowest rho; None: of none.

    Args:
        limits: of all workers together.
        offers: their `max_count` is for `counts`.
        counts: workers of each offer that count towards it.
        held: all workers that are there.
    """
    for offer in sorted(offers, key=lambda one: (one.name != prefer, one.rho, one.name)):
        spent = limits.usd_left is not None and limits.usd_left <= 0 and offer.usd_per_hour > 0
        room = counts.get(offer.name, 0) < offer.max_count and not spent
        if room and limits.permit(offers, Counter(held) + Counter([offer.name])):
            return offer.name
    return None


def _less(limit: float | None, taken: float) -> float | None:
    return None if limit is None else max(limit - taken, 0.0)
