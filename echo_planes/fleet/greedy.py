"""ECHO-2's greedy fleet, the optimum where that misses the target, and workers a fleet can do without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from echo_planes.fleet.exact import FleetProblem, fleet_problem, solve
from echo_planes.fleet.instance_types import FleetPlan, Limits, Offer, Shortfall

DRIFT = 0.05  # of a throughput, the target or an interruption rate; beyond it plans are made again


def greedy(
    offers: Sequence[Offer], mu_target: float, limits: Limits, held: Mapping[str, int]
) -> FleetPlan | Shortfall:
    """ECHO-2's choice: minimums first, then offers by rho until `mu_target`, trajectories/s, is reached.

    In whole workers, and as many of each as the limits permit. Ties go by name. A fleet too small in number
    is filled up with the cheapest. Where no limit binds it costs at most one worker more than the relaxed
    optimum; where one does it may miss a fleet that exists, which `exact` does not.

    Args:
        held: workers that run. They may stay above a quota, or when no money is left.

    Raises:
        ConfigError: an offer, the target or a limit is not possible.
    """
    problem = fleet_problem(offers, mu_target, limits, held)
    counts = _greedy(problem)
    return problem.plan(counts) if _is_fleet(problem, counts) else problem.shortfall(counts)


@dataclass(frozen=True, slots=True)
class Plans:
    """The fleet for one set of inputs: greedy's, and where that misses the target, the optimum."""

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
        """Whether the inputs are the same but for noise: prices, counts and limits equal, the rest close."""
        mine = self.problem
        if len(mine.offers) != len(other.offers) or not is_close(mine.mu_target, other.mu_target):
            return False
        limits = ("budget", "allowance", "min_workers", "max_workers")
        if any(getattr(mine, name) != getattr(other, name) for name in limits):
            return False
        places = {offer.name: place for place, offer in enumerate(mine.offers)}
        return all(
            offer.name in places and _is_same(mine, places[offer.name], other, place)
            for place, offer in enumerate(other.offers)
        )


def more(wanted: Mapping[str, int], there: Mapping[str, int]) -> dict[str, int]:
    """Number of workers wanted of each offer beyond those that are there; offers with none are left out."""
    return {name: n - there.get(name, 0) for name, n in wanted.items() if n > there.get(name, 0)}


def spare(
    problem: FleetProblem, counts: Sequence[int], mu_spare: float, kept: Mapping[str, int]
) -> dict[str, int]:
    """Workers to do without for at most `mu_spare` trajectories/s, the dearest by rho first.

    Minimums stay, and so do machines that cost nothing, and as many of each offer as `kept` says.
    """
    release: dict[str, int] = {}
    workers = sum(counts) - problem.min_workers
    for position in reversed(range(len(counts))):
        offer = problem.offers[position]
        least = max(problem.floors[position], kept.get(offer.name, 0))
        n = min(counts[position] - least, workers, int(mu_spare / offer.mu))
        if n > 0 and offer.usd_per_hour > 0:
            release[offer.name] = n
            mu_spare, workers = mu_spare - n * offer.mu, workers - n
    return release


def beyond_limits(problem: FleetProblem, counts: Sequence[int]) -> dict[str, int]:
    """Workers to do without so that the limits hold: the dearest by rho of those that count towards a broken
    one. Minimums stay, so some limits may stay broken."""
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
    return {o.name: a - b for o, a, b in zip(problem.offers, counts, left, strict=True) if a > b}


def with_minimums(problem: FleetProblem, counts: Sequence[int]) -> tuple[list[int], dict[str, int]]:
    """These workers and the minimums they lack, as far as limits leave room, and who must go for the rest.

    Minimums that break a limit by themselves are kept all the same, once no other worker is there.
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
    old, new = a.offers[i], b.offers[j]
    return (
        old.usd_per_hour == new.usd_per_hour
        and (a.caps[i], a.floors[i]) == (b.caps[j], b.floors[j])
        and is_close(old.mu, new.mu)
        and is_close(old.interruptions_per_hour, new.interruptions_per_hour)
    )


def is_close(old: float, new: float) -> bool:
    """Whether a measured value moved by less than what matters."""
    return abs(new - old) <= DRIFT * old
