"""The cheapest fleet there is: an integer programme over worker counts, solved to its optimum.

    minimise  sum c_j x_j   with   sum mu_j x_j >= mu_target,   floor_j <= x_j <= cap_j,
    and, where given:   sum c_j x_j <= $/h,   sum i_j x_j <= interruptions/h,   min <= sum x_j <= max workers

ECHO-2 (eq. 3) states it and takes the cheapest prefix by rho instead. Here it is searched depth first. The
bound of a node is its linear relaxation: a fractional knapsack over what is still open, read from tables, in
which the other limits take part with Lagrange multipliers found once. Any multipliers give a valid bound.

Prices are counted in integers, in the largest unit that divides them all, so that no two sums of money are
ever taken for equal, or for different, because of rounding. Throughput is counted in 2^-50 of the target,
rounded down, and a target counts as reached within 1e-9 of it: no estimate is better than that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from echo_planes.errors import ConfigError
from echo_planes.fleet.branch_bound import Programme, Row, minimise
from echo_planes.fleet.instance_types import FleetPlan, Limits, Offer, Shortfall

NODE_LIMIT = 20_000  # some tenths of a second
TOLERANCE = 1e-9  # of a target, or of an allowance of interruptions
_MOST_NODE_LIMIT = 10_000  # of the search for the most throughput, where the target cannot be had
_BITS = 50


@dataclass(frozen=True, slots=True)
class FleetProblem:
    """Offers and limits as integers. Positions are those of `offers`, ranked by rho, then by name."""

    offers: tuple[Offer, ...]
    mu_target: float
    floors: tuple[int, ...]
    caps: tuple[int, ...]  # what there is room for; never below what is held
    quotas: tuple[int, ...]  # the same if money were left
    costs: tuple[int, ...]
    rates: tuple[int, ...]
    risks: tuple[int, ...]
    target: int  # in units of `rates`
    budget: int | None  # in units of `costs`
    allowance: int | None  # in units of `risks`
    min_workers: int
    max_workers: int | None

    def total(self, values: Sequence[int], counts: Sequence[int]) -> int:
        return sum(value * count for value, count in zip(values, counts, strict=True))

    def reaches(self, counts: Sequence[int]) -> bool:
        """Whether these workers make the target, and are as many as there must be."""
        return self.total(self.rates, counts) >= self.target and sum(counts) >= self.min_workers

    def keeps_minimums(self, counts: Sequence[int]) -> bool:
        return all(n >= floor for n, floor in zip(counts, self.floors, strict=True))

    def room(self, counts: Sequence[int], position: int) -> tuple[int, tuple[str, ...]]:
        """How many more of one offer fit beside `counts`, and which limits say so."""
        left = {
            "quota": self.quotas[position] - counts[position],
            "usd_left": self.caps[position] - counts[position],
        }
        if left["usd_left"] == left["quota"]:
            del left["usd_left"]
        for name, limit, values in (
            ("usd_per_hour", self.budget, self.costs),
            ("interruptions", self.allowance, self.risks),
            ("max_workers", self.max_workers, (1,) * len(self.offers)),
        ):
            if limit is not None and values[position]:
                left[name] = max(0, limit - self.total(values, counts)) // values[position]
        least = min(left.values())
        return least, tuple(name for name, more in left.items() if more == least)

    def fill(self, counts: list[int], order: Iterable[int], enough: int | None) -> None:
        """Adds to `counts`, offer by offer, the whole workers that fit, no more than reach `enough`."""
        missing = None if enough is None else enough - self.total(self.rates, counts)
        for position in order:
            if missing is not None and missing <= 0:
                break
            more, rate = self.room(counts, position)[0], self.rates[position]
            if missing is not None:
                more = min(more, -(-missing // rate)) if rate else 0
                missing -= more * rate
            counts[position] += more

    def broken(self, counts: Sequence[int]) -> tuple[str, ...]:
        """Limits that these workers break, as the minimums alone may do."""
        sums = (
            ("usd_per_hour", self.budget, self.total(self.costs, counts)),
            ("interruptions", self.allowance, self.total(self.risks, counts)),
            ("max_workers", self.max_workers, sum(counts)),
        )
        return tuple(name for name, limit, value in sums if limit is not None and value > limit)

    def plan(self, counts: Sequence[int]) -> FleetPlan:
        return plan_of({offer.name: n for offer, n in zip(self.offers, counts, strict=True)}, self.offers)

    def shortfall(self, counts: Sequence[int]) -> Shortfall:
        """What to say of a best that is not enough: a limit is named where it alone refuses one more worker,
        and all of them where none does alone."""
        refusing = []
        for position in range(len(self.offers)):
            room, names = self.room(counts, position)
            if room == 0:
                refusing.append(names)
        alone = [names for names in refusing if len(names) == 1] or refusing
        binding = {name for names in alone for name in names} | set(self.broken(counts))
        return Shortfall(self.plan(counts), self.mu_target, tuple(sorted(binding)) or ("quota",))


@dataclass(frozen=True, slots=True)
class Solution:
    """What the search came to."""

    outcome: FleetPlan | Shortfall
    counts: tuple[int, ...] | None  # by position in the problem; None where no fleet was found
    proved: bool  # the node limit was not reached: the outcome is the optimum, or there is none
    gap: float  # share of the cost that a better fleet could still save; 0.0 where proved
    nodes: int


def plan_of(counts: Mapping[str, int], offers: Sequence[Offer]) -> FleetPlan:
    """What these workers come to. Offers with none are left out."""
    some = [(offer, counts[offer.name]) for offer in offers if counts.get(offer.name, 0) > 0]
    return FleetPlan(
        counts={offer.name: n for offer, n in some},
        usd_per_hour=math.fsum(n * offer.usd_per_hour for offer, n in some),
        mu=math.fsum(n * offer.mu for offer, n in some),
        interruptions_per_hour=math.fsum(n * offer.interruptions_per_hour for offer, n in some),
    )


def fleet_problem(
    offers: Sequence[Offer], mu_target: float, limits: Limits, held: Mapping[str, int]
) -> FleetProblem:
    """Offers, target and limits as integers.

    A minimum above the quota asks for the quota. What is `held` may stay, even above a quota or with no money
    left; without money nothing else that costs anything has room.

    Raises:
        ConfigError: an offer, the target or a limit is not a possible value, or two offers share a name.
    """
    _check(offers, mu_target, limits)
    ranked = tuple(sorted(offers, key=lambda offer: (offer.rho, offer.name)))
    quotas = tuple(max(o.max_count, held.get(o.name, 0)) for o in ranked)
    spent = limits.usd_left is not None and limits.usd_left <= 0
    caps = tuple(
        held.get(o.name, 0) if spent and o.usd_per_hour > 0 else quota
        for o, quota in zip(ranked, quotas, strict=True)
    )
    prices = [_decimal(o.usd_per_hour) for o in ranked]
    scale = math.lcm(*(price.denominator for price in prices))
    costs = [price.numerator * (scale // price.denominator) for price in prices]
    unit = math.gcd(*costs) or 1
    shift = _BITS - math.frexp(mu_target)[1]
    allowance = limits.interruptions_per_hour
    risks = [o.interruptions_per_hour for o in ranked]
    risk_shift = _BITS - math.frexp(allowance or max(risks, default=0.0) or 1.0)[1]
    budget = None if limits.usd_per_hour is None else _decimal(limits.usd_per_hour) * scale
    return FleetProblem(
        offers=ranked,
        mu_target=mu_target,
        floors=tuple(min(o.min_count, cap) for o, cap in zip(ranked, caps, strict=True)),
        caps=caps,
        quotas=quotas,
        costs=tuple(cost // unit for cost in costs),
        rates=tuple(int(math.ldexp(o.mu, shift)) for o in ranked),
        risks=tuple(math.ceil(math.ldexp(risk, risk_shift)) for risk in risks),
        target=math.ceil(math.ldexp(mu_target * (1 - TOLERANCE), shift)),
        budget=None if budget is None else math.floor(budget / unit),
        allowance=None
        if allowance is None
        else math.floor(math.ldexp(allowance * (1 + TOLERANCE), risk_shift)),
        min_workers=limits.min_workers,
        max_workers=limits.max_workers,
    )


def solve(
    problem: FleetProblem, start: Sequence[int] | None = None, node_limit: int = NODE_LIMIT
) -> Solution:
    """The least $/h that reaches the target within all limits, or the most throughput within them.

    Args:
        start: a fleet that reaches the target, to improve on (greedy's).
        node_limit: nodes after which the best fleet so far is returned, with the gap that is left.
    """
    floors = problem.floors
    if problem.broken(floors):
        return Solution(problem.shortfall(floors), None, True, 0.0, 0)
    extra = _cheapest(problem)
    base = problem.total(problem.costs, floors)
    ceiling = None if problem.budget is None else problem.budget - base + 1
    best = None if start is None else problem.total(problem.costs, start) - base
    below = min((value for value in (ceiling, best) if value is not None), default=None)
    found = minimise(extra, below, node_limit)
    counts = tuple(start) if start is not None else None
    if found.counts is not None:
        counts = tuple(a + b for a, b in zip(floors, found.counts, strict=True))
    if counts is None:
        best_effort = problem.shortfall(_most(problem))
        gap = 0.0 if found.proved else math.inf
        return Solution(best_effort, None, found.proved, gap, found.nodes)
    cost = problem.total(problem.costs, counts)
    gap = 0.0 if found.proved or not cost else max(0.0, (cost - base - found.bound) / cost)
    return Solution(problem.plan(counts), counts, found.proved, gap, found.nodes)


def exact(
    offers: Sequence[Offer], mu_target: float, limits: Limits, held: Mapping[str, int]
) -> FleetPlan | Shortfall:
    """The fleet of least $/h that reaches `mu_target`, trajectories/s, or the best there is where none does.

    Beyond `NODE_LIMIT` nodes it is the best that was found; `solve` says how far from the optimum it may be.

    Raises:
        ConfigError: as `fleet_problem`.
    """
    return solve(fleet_problem(offers, mu_target, limits, held)).outcome


def _cheapest(problem: FleetProblem) -> Programme:
    """Least money for what the floors lack."""
    floors, caps = problem.floors, _open_caps(problem)
    ones = (1,) * len(caps)
    missing = problem.target - problem.total(problem.rates, floors)
    # At least as many workers as the fastest would need: without it the bound of a few large workers is weak.
    fewest, left = 0, missing
    for rate, cap in sorted(zip(problem.rates, caps, strict=True), reverse=True):
        if left <= 0 or rate == 0:
            break
        taken = min(cap, -(-left // rate))
        fewest, left = fewest + taken, left - taken * rate
    fewest = max(fewest, problem.min_workers - sum(floors))
    cover = [Row(problem.rates, missing)] + ([Row(ones, fewest)] if fewest > 0 else [])
    return Programme(problem.costs, caps, tuple(cover), tuple(_sides(problem)))


def _most(problem: FleetProblem) -> Sequence[int]:
    """The most throughput within the limits: filled in plausible orders, then the search for a better one."""
    rates, positions = problem.rates, range(len(problem.offers))
    fleets = []
    for values in ((1,) * len(rates), problem.costs, problem.risks):
        worth = [rate / value if value else math.inf for rate, value in zip(rates, values, strict=True)]
        counts = list(problem.floors)
        problem.fill(counts, sorted(positions, key=worth.__getitem__, reverse=True), enough=None)
        fleets.append(counts)
    best = max(fleets, key=lambda counts: problem.total(rates, counts))
    caps = _open_caps(problem)
    all_open = [floor + cap for floor, cap in zip(problem.floors, caps, strict=True)]
    given_up = problem.total(rates, all_open) - problem.total(rates, best)
    found = minimise(_lost(problem), given_up, _MOST_NODE_LIMIT)
    if found.counts is None:
        return best
    return [count - lost for count, lost in zip(all_open, found.counts, strict=True)]


def _lost(problem: FleetProblem) -> Programme:
    """Least throughput to give up, from as many workers as each limit alone permits, so that all are kept."""
    caps = _open_caps(problem)
    rows = [row for row in _sides(problem, with_budget=True) if any(row.coefs)]
    if problem.budget is not None:
        # No more workers than the cheapest that the budget buys.
        left, most = problem.budget - problem.total(problem.costs, problem.floors), 0
        for cost, cap in sorted(zip(problem.costs, caps, strict=True)):
            bought = cap if cost == 0 else min(cap, left // cost)
            most, left = most + bought, left - bought * cost
        rows.append(Row((1,) * len(caps), most))
    cover = tuple(Row(row.coefs, problem.total(row.coefs, caps) - row.bound) for row in rows)
    return Programme(problem.rates, caps, cover or (Row((0,) * len(caps), 0),), ())


def _sides(problem: FleetProblem, with_budget: bool = False) -> list[Row]:
    """What may be added to the floors, limit by limit."""
    floors = problem.floors
    rows = []
    if with_budget and problem.budget is not None:
        rows.append(Row(problem.costs, problem.budget - problem.total(problem.costs, floors)))
    if problem.allowance is not None and any(problem.risks):
        rows.append(Row(problem.risks, problem.allowance - problem.total(problem.risks, floors)))
    if problem.max_workers is not None:
        rows.append(Row((1,) * len(floors), problem.max_workers - sum(floors)))
    return rows


def _open_caps(problem: FleetProblem) -> tuple[int, ...]:
    """Workers of each offer that could be added to the floors, if they were all that is added."""
    return tuple(problem.room(problem.floors, position)[0] for position in range(len(problem.offers)))


@lru_cache(maxsize=4096)
def _decimal(value: float) -> Fraction:
    """The number as it is written: 0.8 is 4/5."""
    return Fraction(repr(float(value)))


def _check(offers: Sequence[Offer], mu_target: float, limits: Limits) -> None:
    if not (math.isfinite(mu_target) and mu_target > 0):
        raise ConfigError(f"mu_target={mu_target}: not a throughput; give trajectories/s above 0")
    names = set()
    for offer in offers:
        if offer.name in names:
            raise ConfigError(f"offer {offer.name}: two offers have this name; give each its own")
        names.add(offer.name)
        for key, value, is_possible in (
            ("mu", offer.mu, offer.mu > 0),
            ("usd_per_hour", offer.usd_per_hour, offer.usd_per_hour >= 0),
            ("interruptions_per_hour", offer.interruptions_per_hour, offer.interruptions_per_hour >= 0),
            ("max_count", offer.max_count, offer.max_count >= 0),
            ("min_count", offer.min_count, offer.min_count >= 0),
        ):
            if not (is_possible and math.isfinite(value)):
                raise ConfigError(
                    f"offer {offer.name}: {key}={value} is not possible; correct it or take the offer out"
                )
    for key, limit in (
        ("usd_per_hour", limits.usd_per_hour),
        ("interruptions_per_hour", limits.interruptions_per_hour),
        ("min_workers", limits.min_workers),
        ("max_workers", limits.max_workers),
    ):
        if limit is not None and not (math.isfinite(limit) and limit >= 0):
            raise ConfigError(f"{key}={limit}: not a limit; give a number of at least 0, or leave it out")
