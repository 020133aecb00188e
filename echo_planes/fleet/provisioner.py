"""Rule by which workers are added and released, and when: ECHO-2's (C.2.1) with the greedy fleet.

Workers are added when the fleet stays below its target by a margin; the dearest go when it stays above by
one. In between nothing changes, so little noise in the estimates moves no machines. So it is where the rule
of overlap holds; at S = 0 a limit is waited for as a surplus is, a minimum as a shortage, and every loss is
answered at once; where T_bcast leaves no target, only minimums are kept.

    below target - margin   for sustain_s       add the cheapest that fit beside what runs; the margin is 5 %,
                                                or what lies between target and mu_min if that is less
    below mu_min by a loss  at once             the learner would wait, and a loss is no noise
    no fleet, or a minimum  at once             there is nothing to flap; a minimum that has no room waits
                                                until others have gone
    above a limit           for sustain_s       let go the dearest that count towards it
    above target + margin   for release wait    let go the dearest by rho, as far as the lowest ratio of that
                                                time permits; where the rest would still be dearer by a margin
                                                none that the cheapest fleet also has
    dearer by a margin      for release wait    add what the cheapest fleet has more, one offer at a time;
                                                when that has booted, let go what it has less

The release wait does not grow with releases that were regretted: spot capacity comes and goes many times an
hour, and a wait that doubles each time soon keeps dear workers for hours.

The fleet is planned anew only where the inputs drifted (`greedy.DRIFT`) or something is to be done.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from echo_planes.errors import ConfigError
from echo_planes.fleet.advice import Advice, advise
from echo_planes.fleet.capacity import Need
from echo_planes.fleet.exact import FleetProblem, fleet_problem
from echo_planes.fleet.greedy import Plans, beyond_limits, greedy, is_close, more, spare, with_minimums
from echo_planes.fleet.instance_types import FleetPlan, Limits, Offer, Shortfall

__all__ = ["Advice", "Decision", "Provisioner", "advise", "greedy"]

_DEAD_BAND = 0.05  # of the target: a smaller shortage is borne if the learner does not wait for it


@dataclass(frozen=True, slots=True)
class Decision:
    """Decision to add or release workers now, with its reason."""

    plan: FleetPlan  # the fleet once `launch` and `release` are done
    launch: Mapping[str, int] = field(default_factory=dict)  # offer name -> workers to ask for
    release: Mapping[str, int] = field(default_factory=dict)  # offer name -> workers to let go
    reason: str = ""
    best_usd_per_hour: float | None = None  # of the fleet that would be bought anew; None: there is none
    shortfall: Shortfall | None = None  # set where no fleet within the limits is enough
    advice: tuple[Advice, ...] = ()


class Provisioner:
    """Hysteresis around the fleet that would be bought anew. Give every tick to `decide`, do what it says.

    Args:
        limits: an attribute: replace it as money is spent.
        sustain_s: how long a shortage lasts before it is answered.
        release_sustain_s: the same of a surplus.
        release_margin: of the target; a smaller surplus is kept.
        saving_margin: of the fleet's price; a smaller saving is not worth a change.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        sustain_s: float = 30.0,
        release_sustain_s: float = 300.0,
        release_margin: float = 0.05,
        saving_margin: float = 0.05,
    ) -> None:
        self.limits = limits
        self._sustain_s = sustain_s
        self._release_wait_s = release_sustain_s
        self._release_margin, self._saving_margin = release_margin, saving_margin
        self._seen: dict[str, Offer] = {}
        self._since: dict[str, float] = {}  # what lasts, and since when
        self._ratios: deque[tuple[float, float]] = deque()  # of throughput to target in a surplus, and when
        self._expected: dict[str, int] = {}  # what should run after the last decision
        self._settled_s = -math.inf  # when what was launched last has booted
        self._whole: Plans | None = None  # the cheapest whole fleets
        self._advised: tuple[Need, Plans, tuple[Advice, ...]] | None = None  # for which need and offers
        # An addition that found nothing, and beside which workers.
        self._futile: tuple[Mapping[str, int], Plans, tuple[Advice, ...]] | None = None

    def decide(
        self, need: Need, offers: Sequence[Offer], running: Mapping[str, int], now_s: float
    ) -> Decision:
        """One tick.

        Args:
            offers: with `mu` as estimated now. One that is gone is remembered while its workers run.
            running: workers by offer name that are asked for, booting or serving; not those draining.
            now_s: any clock that does not go back.

        Raises:
            ConfigError: an offer or a limit is not possible, or workers run of an offer never named.
        """
        running = {name: n for name, n in running.items() if n > 0}
        offers = self._known(offers, running)
        lost = any(running.get(name, 0) < n for name, n in self._expected.items())
        if need.max_staleness == 0:
            decision = self._synchronous(offers, running, lost, now_s)
        elif need.mu_target is None:
            decision = self._impossible(need, offers, running)
        else:
            decision = self._overlapping(need, need.mu_target, offers, running, lost, now_s)
        self._expected = dict(decision.plan.counts)
        if decision.launch:
            boots = (offer.boot_s for offer in offers if offer.name in decision.launch)
            self._settled_s = max(self._settled_s, now_s + max(boots))
        if decision.launch or decision.release:
            self._since.clear()
        return decision

    # -- the rules ------------------------------------------------------------------------------------------

    def _overlapping(
        self,
        need: Need,
        target: float,
        offers: Sequence[Offer],
        running: Mapping[str, int],
        lost: bool,
        now_s: float,
    ) -> Decision:
        """A tick under the overlap rule."""
        problem = fleet_problem(offers, target, self.limits, running)
        if self._whole is None or not self._whole.holds_for(problem):
            self._whole = Plans.of(problem)
        counts = _counts(problem, running)
        if problem.broken(counts) and beyond_limits(problem, counts):
            return self._trim(problem, counts, self._sustain_s, now_s)
        mu, mu_min = problem.plan(counts).mu, target / need.gamma
        asked = (
            f"{target:.2f} trajectories/s are needed (mu_min {mu_min:.2f} x gamma {need.gamma:.2f}), "
            f"{mu:.2f} are there"
        )
        if need.assumed:
            asked = f"as the first fleet was chosen, before a broadcast was measured: {asked}"
        below_floor = not problem.keeps_minimums(counts)
        is_near = mu >= max(mu_min, (1 - _DEAD_BAND) * target) and sum(counts) >= problem.min_workers
        if (is_near or problem.reaches(counts)) and not below_floor:
            return self._shrink(problem, counts, asked, now_s)
        lasted_s = self._lasted(now_s, "short")
        asked += f" for {lasted_s:.0f} s"
        if not running:
            asked += ", nothing runs yet"
        elif below_floor:
            asked += ", a minimum is not kept"
        elif lost and mu < mu_min:
            asked += ", a worker was lost and the learner would wait (at once)"
        elif lasted_s < self._sustain_s:
            return self._decision(problem, counts, f"{asked}: waiting until {self._sustain_s:.0f} s")
        return self._grow(need, problem, counts, asked)

    def _grow(self, need: Need, problem: FleetProblem, counts: Sequence[int], asked: str) -> Decision:
        """Adds the cheapest that fit beside what runs; where that is not enough, changes the rest too."""
        running = problem.plan(counts).counts
        fitting, in_the_way = with_minimums(problem, counts)
        if in_the_way:
            launch = more(problem.plan(fitting).counts, running)
            return self._decision(problem, counts, f"{asked}: room is made", launch, in_the_way)
        kept = [
            replace(offer, min_count=max(offer.min_count, n))
            for offer, n in zip(problem.offers, counts, strict=True)
        ]
        addition = fleet_problem(kept, problem.mu_target, self.limits, running)
        if self._futile is not None and self._futile[0] == running and self._futile[1].holds_for(addition):
            _, plans, advice = self._futile
            return self._decision(problem, counts, asked, best=plans.best, advice=advice)
        plans, advice, wanted = Plans.of(addition), (), None
        best = plans.best
        if isinstance(best, Shortfall):
            self._whole = Plans.of(problem)
            if isinstance(self._whole.best, FleetPlan):
                best = wanted = self._whole.best
            elif not need.assumed:  # what was not measured is no ground for advice
                advice = advise(need, problem.offers, self.limits)
        fleet = best.best if isinstance(best, Shortfall) else best
        launch = more(fleet.counts, running)
        release = more(running, fleet.counts) if wanted is not None else {}
        self._futile = None if launch or release else (running, plans, advice)
        return self._decision(problem, counts, asked, launch, release, best, advice)

    def _shrink(self, problem: FleetProblem, counts: Sequence[int], asked: str, now_s: float) -> Decision:
        """Enough is there: lets go what is too much, or goes over to a cheaper fleet."""
        pool = problem.plan(counts)
        ratio = pool.mu / problem.mu_target
        if "surplus" not in self._since:
            self._ratios.clear()
        self._ratios.append((now_s, ratio))
        while self._ratios[0][0] < now_s - self._release_wait_s:
            self._ratios.popleft()
        best = self._whole.best if self._whole is not None else None
        release = {}
        if ratio > 1 + self._release_margin:
            lowest = min(one for _, one in self._ratios)
            mu_spare = (lowest - 1) * problem.mu_target
            release = spare(problem, counts, mu_spare, {})
            left = problem.plan(
                [n - release.get(o.name, 0) for o, n in zip(problem.offers, counts, strict=True)]
            )
            if isinstance(best, FleetPlan) and self._is_dear(left, best):
                # The cheapest fleet will be gone over to: what it has too would only be bought again.
                release = spare(problem, counts, mu_spare, best.counts)
        states = ["surplus"] if release else []
        if isinstance(best, FleetPlan) and self._is_dear(pool, best):
            states.append("dear")
        lasted_s = self._lasted(now_s, *states)
        if not states:
            return self._decision(problem, counts, f"{asked}: enough")
        if lasted_s < self._release_wait_s or now_s < self._settled_s:
            waits_s = max(self._release_wait_s - lasted_s, self._settled_s - now_s)
            said = f"{asked}: {' and '.join(states)} for {lasted_s:.0f} s, waiting {waits_s:.0f} s more"
            return self._decision(problem, counts, said)
        if now_s - self._since.get("surplus", now_s) >= self._release_wait_s:
            return self._decision(problem, counts, f"{asked}, more than the margin", release=release)
        if "dear" in states:
            return self._swap(problem, counts, asked)
        return self._decision(problem, counts, f"{asked}: enough")

    def _is_dear(self, fleet: FleetPlan, best: FleetPlan) -> bool:
        return fleet.usd_per_hour - best.usd_per_hour > self._saving_margin * fleet.usd_per_hour

    def _swap(self, problem: FleetProblem, counts: Sequence[int], asked: str) -> Decision:
        """Towards the cheapest fleet: first what it has more, within the limits, later what it has less.

        One offer at a time, the best rho first: where its machines do not come, the others would not pay.
        """
        plans = self._whole = Plans.of(problem)
        if isinstance(plans.best, Shortfall):
            return self._decision(problem, counts, f"{asked}: enough")
        running = problem.plan(counts).counts
        missing = more(plans.best.counts, running)
        asked += f", ${plans.best.usd_per_hour:.2f}/h would do"
        if not missing:
            free = {offer.name for offer in problem.offers if offer.usd_per_hour == 0}
            release = {name: n for name, n in more(running, plans.best.counts).items() if name not in free}
            return self._decision(problem, counts, asked, release=release)
        for position, offer in enumerate(problem.offers):
            n = min(problem.room(counts, position)[0], missing.get(offer.name, 0))
            if n > 0:
                return self._decision(problem, counts, asked, {offer.name: n})
        self._since.clear()  # not again at every tick
        return self._decision(
            problem, counts, f"{asked}, but the limits leave no room for it beside what runs"
        )

    def _trim(self, problem: FleetProblem, counts: Sequence[int], wait_s: float, now_s: float) -> Decision:
        """More runs than a limit permits."""
        lasted_s = self._lasted(now_s, "over")
        said = f"over the limit of {' and of '.join(problem.broken(counts))} for {lasted_s:.0f} s"
        if lasted_s < wait_s:
            return self._decision(problem, counts, f"{said}: waiting until {wait_s:.0f} s")
        return self._decision(problem, counts, said, release=beyond_limits(problem, counts))

    def _synchronous(
        self, offers: Sequence[Offer], running: Mapping[str, int], lost: bool, now_s: float
    ) -> Decision:
        """A tick at S = 0: as many workers as `limits.max_workers` calls useful, the best rho first."""
        self._whole, limits = None, self.limits
        if limits.max_workers is None:  # not known yet (see `useful_instances`): no more than must be
            least = sum(min(offer.min_count, offer.max_count) for offer in offers)
            limits = replace(limits, max_workers=max(least, limits.min_workers, sum(running.values())))
        beyond = 1.0 + 2 * math.fsum(o.mu * max(o.max_count, running.get(o.name, 0)) for o in offers)
        problem = fleet_problem(offers, beyond, limits, running)
        counts = _counts(problem, running)
        said = f"S = 0: {sum(counts)} workers are there, {limits.max_workers} are useful"
        if problem.broken(counts) and beyond_limits(problem, counts):
            return self._trim(problem, counts, self._release_wait_s, now_s)
        wanted, release = with_minimums(problem, counts)
        if not release and not problem.broken(wanted):
            problem.fill(wanted, range(len(wanted)), enough=None)
        launch = more(problem.plan(wanted).counts, problem.plan(counts).counts)
        if not launch and not release:
            self._since.clear()
            return self._decision(problem, counts, said)
        lasted_s = self._lasted(now_s, "short")
        if running and not lost and lasted_s < self._sustain_s:
            return self._decision(problem, counts, f"{said} for {lasted_s:.0f} s: waiting")
        return self._decision(problem, counts, said, launch, release)

    def _impossible(self, need: Need, offers: Sequence[Offer], running: Mapping[str, int]) -> Decision:
        """kappa T_train <= T_bcast: advice, and the minimums. What else runs stays where there is room."""
        self._since.clear()
        # Any target: the problem is there to say when the offers have changed.
        problem = fleet_problem(offers, need.gamma * need.sampled, self.limits, running)
        said = (
            f"no fleet is enough: kappa T_train = {need.kappa} x {need.t_train_s:.1f} s is not longer than "
            f"T_bcast = {need.t_bcast_s:.1f} s"
        )
        if (
            self._advised is None
            or self._advised[0].kappa != need.kappa
            or not is_close(self._advised[0].t_train_s, need.t_train_s)
            or not is_close(self._advised[0].t_bcast_s, need.t_bcast_s)
            or not self._advised[1].holds_for(problem)
        ):
            self._advised = need, Plans.of(problem), advise(need, offers, self.limits)
        advice, self._whole = self._advised[2], None
        counts = _counts(problem, running)
        launch: Mapping[str, int] = {}
        release: Mapping[str, int] = {}
        if not problem.keeps_minimums(counts):
            wanted, release = with_minimums(problem, counts)
            launch = more(problem.plan(wanted).counts, running)
        return self._decision(problem, counts, said, launch, release, advice=advice)

    # -- what they share ------------------------------------------------------------------------------------

    def _known(self, offers: Sequence[Offer], running: Mapping[str, int]) -> list[Offer]:
        """The offers, and those that are gone but whose workers run: none of these may be added."""
        kept = {name: offer for name, offer in self._seen.items() if name in running}
        self._seen = kept | {offer.name: offer for offer in offers}
        names = {offer.name for offer in offers}
        for name in running:
            if name not in self._seen:
                raise ConfigError(
                    f"offer {name}: {running[name]} of its workers run, but no such offer is known; add it"
                )
        gone = [o for name, o in self._seen.items() if name not in names]
        return [*offers, *(replace(o, max_count=0, min_count=0) for o in gone)]

    def _lasted(self, now_s: float, *states: str) -> float:
        """Seconds that the longest of these states has lasted. All others are over."""
        self._since = {state: self._since.get(state, now_s) for state in states}
        return max((now_s - since for since in self._since.values()), default=0.0)

    def _decision(
        self,
        problem: FleetProblem,
        counts: Sequence[int],
        reason: str,
        launch: Mapping[str, int] | None = None,
        release: Mapping[str, int] | None = None,
        best: FleetPlan | Shortfall | None = None,
        advice: tuple[Advice, ...] = (),
    ) -> Decision:
        """The decision with its price tags and the rest of its reason."""
        launch, release = launch or {}, release or {}
        after = [
            n + launch.get(offer.name, 0) - release.get(offer.name, 0)
            for offer, n in zip(problem.offers, counts, strict=True)
        ]
        shortfall = best if isinstance(best, Shortfall) else None
        if shortfall is not None:
            reason += f"; no fleet within the limits is enough ({', '.join(shortfall.binding)})"
        changes = [
            f"{sign}{n} {offer.name} at ${offer.usd_per_hour:.2f}/h (rho {offer.rho:.2g})"
            for sign, some in (("+", launch), ("-", release))
            for offer in problem.offers
            if (n := some.get(offer.name, 0))
        ]
        reason += f": {', '.join(changes)}" if changes else ""
        best_usd_per_hour = None
        if self._whole is not None and isinstance(self._whole.best, FleetPlan):
            best_usd_per_hour = self._whole.best.usd_per_hour
            reason += f"; anew, by {self._whole.method}: ${best_usd_per_hour:.2f}/h"
        if advice:
            reason += f"; what would help: {'; or '.join(one.text for one in advice)}"
        return Decision(problem.plan(after), launch, release, reason, best_usd_per_hour, shortfall, advice)


def _counts(problem: FleetProblem, running: Mapping[str, int]) -> list[int]:
    return [running.get(offer.name, 0) for offer in problem.offers]
