"""Cheapest fleet: an integer programme over worker counts, solved to its optimum.

    minimise  sum c_j x_j   with   sum mu_j x_j >= mu_target,   floor_j <= x_j <= cap_j,
    and, where given:   sum c_j x_j <= $/h,   sum i_j x_j <= interruptions/h,   min <= sum x_j <= max workers

ECHO-2 (eq. 3) states the programme, but takes the cheapest prefix by rho (`greedy`). This module uses HiGHS.

Prices are integers in the largest unit that divides them all, so rounding never makes two sums of money equal
or different. Throughput is an integer in units of about 2^-50 of the target, rounded down. A target counts as
reached within 1e-9 of it, which is finer than any estimate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from echo_planes.errors import ConfigError
from echo_planes.fleet.instance_types import FleetPlan, InstanceType, Limits, Shortfall

TOLERANCE = 1e-9  # relative, of a target or of an interruption limit
_SETTINGS = {
    "output_flag": False,
    "threads": 1,  # the same inputs give the same fleet
    "mip_rel_gap": 0.0,
    "mip_abs_gap": 0.0,
    "mip_feasibility_tolerance": TOLERANCE,
    "primal_feasibility_tolerance": TOLERANCE,
    "time_limit": 2.0,  # seconds; the usual problem takes milliseconds
}
_BITS = 50


@dataclass(frozen=True, slots=True)
class FleetProblem:
    """Instance types and limits as integers; all tuples follow `instance_types`, sorted by rho, then name."""

    instance_types: tuple[InstanceType, ...]
    mu_target: float
    floors: tuple[int, ...]
    caps: tuple[int, ...]  # most workers: the quota, or the held workers where `stops` names a limit
    quotas: tuple[int, ...]  # quota of each instance type, at least the held workers
    stops: tuple[str | None, ...]  # limit that forbids new workers (`Limits.stop`)
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
        """Return whether these workers reach the target and the minimum number of workers."""
        return self.total(self.rates, counts) >= self.target and sum(counts) >= self.min_workers

    def keeps_minimums(self, counts: Sequence[int]) -> bool:
        return all(n >= floor for n, floor in zip(counts, self.floors, strict=True))

    def room(self, counts: Sequence[int], position: int) -> tuple[int, tuple[str, ...]]:
        """Return how many more workers of one type fit beside `counts`, and the limits that bind."""
        left = {"quota": self.quotas[position] - counts[position]}
        stop = self.stops[position]
        if stop is not None and self.caps[position] < self.quotas[position]:
            left[stop] = self.caps[position] - counts[position]
        for name, limit, values in (
            ("usd_per_hour", self.budget, self.costs),
            ("interruptions", self.allowance, self.risks),
            ("max_workers", self.max_workers, (1,) * len(self.instance_types)),
        ):
            if limit is not None and values[position]:
                left[name] = max(0, limit - self.total(values, counts)) // values[position]
        least = min(left.values())
        return least, tuple(name for name, more in left.items() if more == least)

    def fill(self, counts: list[int], order: Iterable[int], enough: int | None) -> None:
        """Add to `counts`, type by type, all workers that fit, or only as many as `enough` needs."""
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
        """Return the limits that these workers exceed; the minimums alone can exceed some."""
        sums = (
            ("usd_per_hour", self.budget, self.total(self.costs, counts)),
            ("interruptions", self.allowance, self.total(self.risks, counts)),
            ("max_workers", self.max_workers, sum(counts)),
        )
        return tuple(name for name, limit, value in sums if limit is not None and value > limit)

    def plan(self, counts: Sequence[int]) -> FleetPlan:
        return plan_of(
            {instance_type.name: n for instance_type, n in zip(self.instance_types, counts, strict=True)},
            self.instance_types,
        )

    def shortfall(self, counts: Sequence[int]) -> Shortfall:
        """Return the shortfall with `counts` as the best fleet, and name the limits in the way.

        A limit is named if it alone refuses one more worker of some type. If no limit does so alone, all
        limits that refuse one are named.
        """
        refusing = []
        for position in range(len(self.instance_types)):
            room, names = self.room(counts, position)
            if room == 0:
                refusing.append(names)
        alone = [names for names in refusing if len(names) == 1] or refusing
        binding = {name for names in alone for name in names} | set(self.broken(counts))
        return Shortfall(self.plan(counts), self.mu_target, tuple(sorted(binding)) or ("quota",))


def plan_of(counts: Mapping[str, int], instance_types: Sequence[InstanceType]) -> FleetPlan:
    """Return the plan of these counts, with its price, throughput and interruptions."""
    some = [
        (instance_type, counts[instance_type.name])
        for instance_type in instance_types
        if counts.get(instance_type.name, 0) > 0
    ]
    return FleetPlan(
        counts={instance_type.name: n for instance_type, n in some},
        usd_per_hour=math.fsum(n * instance_type.usd_per_hour for instance_type, n in some),
        mu=math.fsum(n * instance_type.mu for instance_type, n in some),
        interruptions_per_hour=math.fsum(
            n * instance_type.interruptions_per_hour for instance_type, n in some
        ),
    )


def fleet_problem(
    instance_types: Sequence[InstanceType], mu_target: float, limits: Limits, held: Mapping[str, int]
) -> FleetProblem:
    """Convert instance types, target and limits to integers.

    A minimum above the quota counts as the quota. Workers that are `held` may stay, even above a quota or
    with no money left. Without money, or time to serve, no other worker with a price has room.

    Raises:
        ConfigError: a type, the target or a limit has an impossible value, or two types share a name.
    """
    _check(instance_types, mu_target, limits)
    ranked = tuple(sorted(instance_types, key=lambda instance_type: (instance_type.rho, instance_type.name)))
    quotas = tuple(max(o.max_count, held.get(o.name, 0)) for o in ranked)
    stops = tuple(map(limits.stop, ranked))
    caps = tuple(
        quota if stop is None else held.get(o.name, 0)
        for o, quota, stop in zip(ranked, quotas, stops, strict=True)
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
        instance_types=ranked,
        mu_target=mu_target,
        floors=tuple(min(o.min_count, cap) for o, cap in zip(ranked, caps, strict=True)),
        caps=caps,
        quotas=quotas,
        stops=stops,
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
    instance_types: Sequence[InstanceType], mu_target: float, limits: Limits, held: Mapping[str, int]
) -> FleetPlan | Shortfall:
    """Return the cheapest fleet that reaches `mu_target`, trajectories/s, or the shortfall if none does.

    Raises:
        ConfigError: as `fleet_problem`.
    """
    return solve(fleet_problem(instance_types, mu_target, limits, held))


def solve(problem: FleetProblem) -> FleetPlan | Shortfall:
    """Return the cheapest fleet that reaches the target within all limits, or the shortfall."""
    if problem.broken(problem.floors):
        return problem.shortfall(problem.floors)
    counts = _optimum(
        problem, [instance_type.usd_per_hour for instance_type in problem.instance_types], reaching=True
    )
    if counts is not None and problem.reaches(counts) and not problem.broken(counts):
        return problem.plan(counts)
    most = _optimum(problem, [-instance_type.mu for instance_type in problem.instance_types], reaching=False)
    return problem.shortfall(most if most is not None and not problem.broken(most) else problem.floors)


def _optimum(problem: FleetProblem, weights: Sequence[float], *, reaching: bool) -> tuple[int, ...] | None:
    """Return the counts with the least sum of weights within the limits, by HiGHS; None if there are none.

    When the time limit ends the solver, the counts are its best so far. The caller checks them against the
    target and the limits in integers.
    """
    import highspy  # imported late: a fixed fleet never needs it

    instance_types = problem.instance_types
    rows: list[tuple[float, float, list[float]]] = []
    if reaching:
        rows.append(
            (1.0, math.inf, [instance_type.mu / problem.mu_target for instance_type in instance_types])
        )
        rows.append((problem.min_workers, math.inf, [1.0] * len(instance_types)))
    for limit, values in (
        (problem.budget, problem.costs),
        (problem.allowance, problem.risks),
        (problem.max_workers, (1,) * len(instance_types)),
    ):
        if limit is not None:
            scale = max(1, limit)
            rows.append((-math.inf, limit / scale, [value / scale for value in values]))

    class Quiet(highspy.Highs):
        def enableCallbacks(self) -> None:  # unused here, and enabling them prints a banner
            pass

    solver = Quiet()  # type: ignore[no-untyped-call]
    for name, value in _SETTINGS.items():
        solver.setOptionValue(name, value)
    caps = (problem.room(problem.floors, place)[0] for place in range(len(instance_types)))
    for floor, more, weight in zip(problem.floors, caps, weights, strict=True):
        solver.addCol(weight, floor, floor + more, 0, [], [])
    for place in range(len(instance_types)):
        solver.changeColIntegrality(place, highspy.HighsVarType.kInteger)
    places = list(range(len(instance_types)))
    for low, high, row in rows:
        solver.addRow(low, high, len(places), places, row)
    solver.run()
    status = highspy.HighsModelStatus
    if solver.getModelStatus() not in (status.kOptimal, status.kTimeLimit):
        return None
    return tuple(round(count) for count in solver.getSolution().col_value)


@lru_cache(maxsize=4096)
def _decimal(value: float) -> Fraction:
    """Return the number as it is written in decimal: 0.8 is 4/5."""
    return Fraction(repr(float(value)))


def _check(instance_types: Sequence[InstanceType], mu_target: float, limits: Limits) -> None:
    if not (math.isfinite(mu_target) and mu_target > 0):
        raise ConfigError(f"mu_target={mu_target}: not a throughput; give trajectories/s above 0")
    names = set()
    for instance_type in instance_types:
        if instance_type.name in names:
            raise ConfigError(
                f"instance type {instance_type.name}: two instance types have this name; give each its own"
            )
        names.add(instance_type.name)
        for key, value, is_possible in (
            ("mu", instance_type.mu, instance_type.mu > 0),
            ("usd_per_hour", instance_type.usd_per_hour, instance_type.usd_per_hour >= 0),
            (
                "interruptions_per_hour",
                instance_type.interruptions_per_hour,
                instance_type.interruptions_per_hour >= 0,
            ),
            ("max_count", instance_type.max_count, instance_type.max_count >= 0),
            ("min_count", instance_type.min_count, instance_type.min_count >= 0),
        ):
            if not (is_possible and math.isfinite(value)):
                raise ConfigError(
                    f"instance type {instance_type.name}: {key}={value} is not possible; correct it or take "
                    "the instance type out"
                )
    for key, limit in (
        ("usd_per_hour", limits.usd_per_hour),
        ("interruptions_per_hour", limits.interruptions_per_hour),
        ("min_workers", limits.min_workers),
        ("max_workers", limits.max_workers),
    ):
        if limit is not None and not (math.isfinite(limit) and limit >= 0):
            raise ConfigError(f"{key}={limit}: not a limit; give a number of at least 0, or leave it out")
