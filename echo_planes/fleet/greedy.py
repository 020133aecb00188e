"""ECHO-2's greedy fleet, the optimum where greedy misses the target, and the workers a fleet can release."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from echo_planes.fleet.exact import TOLERANCE, FleetProblem, fleet_problem, solve
from echo_planes.fleet.instance_types import FleetPlan, InstanceType, Limits, Shortfall

DRIFT = 0.05  # relative change of a throughput, target or interruption rate that calls for a new plan


def greedy(
    instance_types: Sequence[InstanceType], mu_target: float, limits: Limits, held: Mapping[str, int]
) -> FleetPlan | Shortfall:
    """Return ECHO-2's choice: the minimums, then types by rho until `mu_target`, trajectories/s, is reached.

    It takes whole workers, as many of each type as the limits permit, and breaks ties by name. It then adds
    the cheapest workers up to `min_workers`. If no limit binds, the fleet costs at most one worker more than
    the relaxed optimum. If one binds, `greedy` may miss a fleet that `exact` finds.

    Args:
        instance_types: types to choose from.
        mu_target: trajectories/s, above 0.
        limits: of the fleet.
        held: running workers. They may stay above a quota, or with no money left.

    Raises:
        ConfigError: an instance type, the target or a limit has an impossible value.
    """
    problem = fleet_problem(instance_types, mu_target, limits, held)
    counts = _greedy(problem)
    return problem.plan(counts) if _is_fleet(problem, counts) else problem.shortfall(counts)


@dataclass(frozen=True, slots=True)
class Plans:
    """Fleet for one set of inputs: greedy's, or the optimum if greedy misses the target."""

    problem: FleetProblem
    best: FleetPlan | Shortfall
    method: Literal["greedy", "optimum"]

    @classmethod
    def of(cls, problem: FleetProblem) -> Plans:
        counts = _greedy(problem)
        if _is_fleet(problem, counts):
            return cls(problem, problem.plan(counts), "greedy")
        return cls(problem, solve(problem), "optimum")

    def holds_for(self, other: FleetProblem) -> bool:
        """Return whether prices, counts and limits are equal and the measured inputs are close."""
        mine = self.problem
        if len(mine.instance_types) != len(other.instance_types) or not is_close(
            mine.mu_target, other.mu_target
        ):
            return False
        limits = ("budget", "allowance", "min_workers", "max_workers")
        if any(getattr(mine, name) != getattr(other, name) for name in limits):
            return False
        places = {instance_type.name: place for place, instance_type in enumerate(mine.instance_types)}
        return all(
            instance_type.name in places and _is_same(mine, places[instance_type.name], other, place)
            for place, instance_type in enumerate(other.instance_types)
        )


def more(wanted: Mapping[str, int], there: Mapping[str, int]) -> dict[str, int]:
    """Return the workers of each type that are wanted beyond `there`; types with none are absent."""
    return {name: n - there.get(name, 0) for name, n in wanted.items() if n > there.get(name, 0)}


def spare(
    problem: FleetProblem, counts: Sequence[int], mu_spare: float, kept: Mapping[str, int]
) -> dict[str, int]:
    """Choose workers to release that give at most `mu_spare` trajectories/s, the highest rho first.

    The minimums, machines without a price and `kept` workers of each instance type stay.
    """
    release: dict[str, int] = {}
    workers = sum(counts) - problem.min_workers
    for position in reversed(range(len(counts))):
        instance_type = problem.instance_types[position]
        least = max(problem.floors[position], kept.get(instance_type.name, 0))
        fitting = int(mu_spare / instance_type.mu * (1 + TOLERANCE))  # a rounding error keeps no whole worker
        n = min(counts[position] - least, workers, fitting)
        if n > 0 and instance_type.usd_per_hour > 0:
            release[instance_type.name] = n
            mu_spare, workers = mu_spare - n * instance_type.mu, workers - n
    return release


def beyond_limits(problem: FleetProblem, counts: Sequence[int]) -> dict[str, int]:
    """Choose workers to release until the limits hold, the highest rho first under each exceeded limit.

    The minimums stay, so some limits may remain exceeded.
    """
    left = list(counts)
    for name, limit, values in (
        ("max_workers", problem.max_workers, (1,) * len(left)),
        ("usd_per_hour", problem.budget, problem.costs),
        ("interruptions", problem.allowance, problem.risks),
    ):
        for position in reversed(range(len(left))):
            if limit is None or name not in problem.broken(left):
                break
            if values[position] > 0:
                over = problem.total(values, left) - limit
                left[position] -= min(left[position] - problem.floors[position], -(-over // values[position]))
    return {o.name: a - b for o, a, b in zip(problem.instance_types, counts, left, strict=True) if a > b}


def with_minimums(problem: FleetProblem, counts: Sequence[int]) -> tuple[list[int], dict[str, int]]:
    """Return the counts raised to the minimums as far as limits leave room, and the workers in the way.

    Minimums that exceed a limit by themselves are kept as soon as no other worker is in the way.
    """
    wanted = [max(n, floor) for n, floor in zip(counts, problem.floors, strict=True)]
    release = beyond_limits(problem, wanted)
    if release:
        wanted = list(counts)
        for position, floor in enumerate(problem.floors):
            wanted[position] += max(0, min(floor - wanted[position], problem.room(wanted, position)[0]))
    return wanted, release


def _greedy(problem: FleetProblem) -> list[int]:
    counts = list(problem.floors)
    if not problem.broken(counts):
        positions = range(len(counts))
        problem.fill(counts, positions, enough=problem.target)
        for position in sorted(positions, key=lambda j: (problem.costs[j], j)):
            lacking = problem.min_workers - sum(counts)
            if lacking <= 0:
                break
            counts[position] += min(lacking, problem.room(counts, position)[0])
    return counts


def _is_fleet(problem: FleetProblem, counts: Sequence[int]) -> bool:
    return problem.reaches(counts) and not problem.broken(counts)


def _is_same(a: FleetProblem, i: int, b: FleetProblem, j: int) -> bool:
    old, new = a.instance_types[i], b.instance_types[j]
    return (
        old.usd_per_hour == new.usd_per_hour
        and (a.caps[i], a.floors[i]) == (b.caps[j], b.floors[j])
        and is_close(old.mu, new.mu)
        and is_close(old.interruptions_per_hour, new.interruptions_per_hour)
    )


def is_close(old: float, new: float) -> bool:
    """Return whether a measured value changed by at most `DRIFT` of the old one."""
    return abs(new - old) <= DRIFT * old
