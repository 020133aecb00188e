"""The cheapest fleet there is: an integer programme over worker counts, solved to its optimum.

    minimise  sum c_j x_j   with   sum mu_j x_j >= mu_target,   floor_j <= x_j <= cap_j,
    and, where given:   sum c_j x_j <= $/h,   sum i_j x_j <= interruptions/h,   min <= sum x_j <= max workers

ECHO-2 (eq. 3) states it and takes the cheapest prefix by rho instead (`greedy`). HiGHS solves it.

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
from echo_planes.fleet.instance_types import FleetPlan, Limits, Offer, Shortfall

TOLERANCE = 1e-9  # of a target, or of an allowance of interruptions
_SETTINGS = {
    "output_flag": False,
    "threads": 1,  # the same inputs give the same fleet
    "mip_rel_gap": 0.0,
    "mip_abs_gap": 0.0,
    "mip_feasibility_tolerance": TOLERANCE,
    "primal_feasibility_tolerance": TOLERANCE,
    "time_limit": 2.0,  # seconds; it takes milliseconds
}
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
        """Number of further workers of one offer that fit beside `counts`, and the limits that bind."""
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
        """Shortfall of a best that is not enough: a limit is named where it alone refuses one more worker,
        and all of them where none does alone."""
        refusing = []
        for position in range(len(self.offers)):
            room, names = self.room(counts, position)
            if room == 0:
                refusing.append(names)
        alone = [names for names in refusing if len(names) == 1] or refusing
        binding = {name for names in alone for name in names} | set(self.broken(counts))
        return Shortfall(self.plan(counts), self.mu_target, tuple(sorted(binding)) or ("quota",))


def plan_of(counts: Mapping[str, int], offers: Sequence[Offer]) -> FleetPlan:
    """Plan of these counts: its price, throughput and interruptions. Offers with none are left out."""
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


def exact(
    offers: Sequence[Offer], mu_target: float, limits: Limits, held: Mapping[str, int]
) -> FleetPlan | Shortfall:
    """The fleet of least $/h that reaches `mu_target`, trajectories/s, or the best there is where none does.

    Raises:
        ConfigError: as `fleet_problem`.
    """
    return solve(fleet_problem(offers, mu_target, limits, held))


def solve(problem: FleetProblem) -> FleetPlan | Shortfall:
    """The least $/h that reaches the target within all limits, or the most throughput within them."""
    if problem.broken(problem.floors):
        return problem.shortfall(problem.floors)
    counts = _optimum(problem, [offer.usd_per_hour for offer in problem.offers], reaching=True)
    if counts is not None and problem.reaches(counts) and not problem.broken(counts):
        return problem.plan(counts)
    most = _optimum(problem, [-offer.mu for offer in problem.offers], reaching=False)
    return problem.shortfall(most if most is not None and not problem.broken(most) else problem.floors)


def _optimum(problem: FleetProblem, weights: Sequence[float], *, reaching: bool) -> tuple[int, ...] | None:
    """Counts of the least sum of weights within the limits, by HiGHS; None where there are none.

    Where its time is up, the best so far. The caller compares what comes back with the target and the
    limits in whole numbers.
    """
    import highspy  # not before a fleet is planned: a fixed one never needs it

    offers = problem.offers
    rows: list[tuple[float, float, list[float]]] = []
    if reaching:
        rows.append((1.0, math.inf, [offer.mu / problem.mu_target for offer in offers]))
        rows.append((problem.min_workers, math.inf, [1.0] * len(offers)))
    for limit, values in (
        (problem.budget, problem.costs),
        (problem.allowance, problem.risks),
        (problem.max_workers, (1,) * len(offers)),
    ):
        if limit is not None:
            scale = max(1, limit)
            rows.append((-math.inf, limit / scale, [value / scale for value in values]))

    class Quiet(highspy.Highs):
        def enableCallbacks(self) -> None:  # nothing here needs them, and they print a banner
            pass

    solver = Quiet()  # type: ignore[no-untyped-call]
    for name, value in _SETTINGS.items():
        solver.setOptionValue(name, value)
    caps = (problem.room(problem.floors, place)[0] for place in range(len(offers)))
    for floor, more, weight in zip(problem.floors, caps, weights, strict=True):
        solver.addCol(weight, floor, floor + more, 0, [], [])
    for place in range(len(offers)):
        solver.changeColIntegrality(place, highspy.HighsVarType.kInteger)
    places = list(range(len(offers)))
    for low, high, row in rows:
        solver.addRow(low, high, len(places), places, row)
    solver.run()
    status = highspy.HighsModelStatus
    if solver.getModelStatus() not in (status.kOptimal, status.kTimeLimit):
        return None
    return tuple(round(count) for count in solver.getSolution().col_value)


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
