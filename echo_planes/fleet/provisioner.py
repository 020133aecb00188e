"""Rule that adds and releases workers: ECHO-2's hysteresis (C.2.1) around the greedy fleet.

The provisioner adds workers when the fleet stays below its target by a margin. It releases those of the
highest rho when the fleet stays above by a margin. In between it changes nothing, so noise in the estimates
moves no machines. The table is the rule where overlap applies. At S = 0, an exceeded limit waits for the
release wait, a shortage for sustain_s, and every loss is answered at once. If T_bcast leaves no target, the
provisioner only keeps the minimums.

    below target - margin   for sustain_s       add the cheapest that fit beside the running workers; the
                                                margin is 5 %, or target - mu_min if that is less
    below mu_min by a loss  at once             the learner would wait, and a loss is not noise
    no fleet, or a minimum  at once             no risk of oscillation; a minimum without room waits until
                                                other workers have left
    above a limit           for sustain_s       release the highest rho among those that count towards it
    above target + margin   for release wait    release the highest rho, as far as the lowest ratio in that
                                                time permits; if the rest would still be too expensive, none
                                                that the cheapest fleet also has
    too expensive           for release wait    add the workers that only the cheapest fleet has, one type at
    by a margin                                 a time; after their boot, release those that it does not have

The provisioner adds no worker that would serve for less time than it boots before the run ends
(`Limits.stop`).

The release wait is constant. Spot capacity changes many times an hour, so a wait that doubled after each
regretted release would soon keep expensive workers for hours.

The provisioner plans the fleet anew only if the inputs drifted (`greedy.DRIFT`) or an action is due.
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
from echo_planes.fleet.instance_types import FleetPlan, InstanceType, Limits, Shortfall

__all__ = ["Advice", "Decision", "Provisioner", "advise", "greedy"]

_DEAD_BAND = 0.05  # of the target: a smaller shortage is tolerated if the learner does not wait for it


@dataclass(frozen=True, slots=True)
class Decision:
    """Decision to add or release workers now, with its reason."""

    plan: FleetPlan  # the fleet once `launch` and `release` are done
    launch: Mapping[str, int] = field(default_factory=dict)  # instance type name -> workers to ask for
    release: Mapping[str, int] = field(default_factory=dict)  # instance type name -> workers to release
    reason: str = ""
    best_usd_per_hour: float | None = None  # of the cheapest whole fleet; None: none is known
    shortfall: Shortfall | None = None  # set if no fleet within the limits is enough
    advice: tuple[Advice, ...] = ()


class Provisioner:
    """Hysteresis around the cheapest fleet. Call `decide` at every tick and carry out its decision.

    Args:
        limits: also an attribute; the caller replaces it as money is spent and time passes.
        sustain_s: seconds that a shortage lasts before workers are added.
        release_sustain_s: seconds that a surplus lasts before workers are released.
        release_margin: share of the target; a smaller surplus is kept.
        saving_margin: share of the fleet's price; a smaller saving is not worth a change.
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
        self._seen: dict[str, InstanceType] = {}
        self._since: dict[str, float] = {}  # lasting state -> its begin
        self._ratios: deque[tuple[float, float]] = deque()  # (time, throughput / target) during a surplus
        self._expected: dict[str, int] = {}  # workers that should run after the last decision
        self._settled_s = -math.inf  # time at which the workers launched last have booted
        self._whole: Plans | None = None  # cheapest fleet, regardless of the running workers
        self._advised: tuple[Need, Plans, tuple[Advice, ...]] | None = (
            None  # last advice, with its need and instance types
        )
        # Last attempt to add workers that changed nothing: the running workers, its plans and its advice.
        self._futile: tuple[Mapping[str, int], Plans, tuple[Advice, ...]] | None = None

    def decide(
        self, need: Need, instance_types: Sequence[InstanceType], running: Mapping[str, int], now_s: float
    ) -> Decision:
        """Decide at one tick.

        Args:
            need: the learner's need now.
            instance_types: with `mu` as estimated now. A type that is gone is kept while its workers run.
            running: workers by instance type name that are asked for, booting or serving, but not draining.
            now_s: any clock that does not go back.

        Raises:
            ConfigError: an instance type or a limit has an impossible value, or workers run of an unknown
                type.
        """
        running = {name: n for name, n in running.items() if n > 0}
        instance_types = self._known(instance_types, running)
        lost = any(running.get(name, 0) < n for name, n in self._expected.items())
        if need.max_staleness == 0:
            decision = self._synchronous(instance_types, running, lost, now_s)
        elif need.mu_target is None:
            decision = self._impossible(need, instance_types, running)
        else:
            decision = self._overlapping(need, need.mu_target, instance_types, running, lost, now_s)
        self._expected = dict(decision.plan.counts)
        if decision.launch:
            boots = (
                instance_type.boot_s
                for instance_type in instance_types
                if instance_type.name in decision.launch
            )
            self._settled_s = max(self._settled_s, now_s + max(boots))
        if decision.launch or decision.release:
            self._since.clear()
        return decision

    # -- the rules ------------------------------------------------------------------------------------------

    def _overlapping(
        self,
        need: Need,
        target: float,
        instance_types: Sequence[InstanceType],
        running: Mapping[str, int],
        lost: bool,
        now_s: float,
    ) -> Decision:
        """Decide under the overlap rule."""
        problem = fleet_problem(instance_types, target, self.limits, running)
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
        """Add the cheapest workers that fit beside the running ones; if that is not enough, replace some."""
        running = problem.plan(counts).counts
        fitting, in_the_way = with_minimums(problem, counts)
        if in_the_way:
            launch = more(problem.plan(fitting).counts, running)
            return self._decision(problem, counts, f"{asked}: room is made", launch, in_the_way)
        kept = [
            replace(instance_type, min_count=max(instance_type.min_count, n))
            for instance_type, n in zip(problem.instance_types, counts, strict=True)
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
            elif not need.assumed:  # an assumed T_bcast does not justify advice
                advice = advise(need, problem.instance_types, self.limits)
        fleet = best.best if isinstance(best, Shortfall) else best
        launch = more(fleet.counts, running)
        release = more(running, fleet.counts) if wanted is not None else {}
        self._futile = None if launch or release else (running, plans, advice)
        return self._decision(problem, counts, asked, launch, release, best, advice)

    def _shrink(self, problem: FleetProblem, counts: Sequence[int], asked: str, now_s: float) -> Decision:
        """Release a surplus, or swap to a cheaper fleet; the running fleet is enough."""
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
                [n - release.get(o.name, 0) for o, n in zip(problem.instance_types, counts, strict=True)]
            )
            if isinstance(best, FleetPlan) and self._is_dear(left, best):
                # The next step is a swap to the cheapest fleet, which would buy its own workers again.
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
        if release and now_s - self._since["surplus"] >= self._release_wait_s:
            return self._decision(problem, counts, f"{asked}, more than the margin", release=release)
        if "dear" in states:
            return self._swap(problem, counts, asked)
        return self._decision(problem, counts, f"{asked}: enough")

    def _is_dear(self, fleet: FleetPlan, best: FleetPlan) -> bool:
        return fleet.usd_per_hour - best.usd_per_hour > self._saving_margin * fleet.usd_per_hour

    def _swap(self, problem: FleetProblem, counts: Sequence[int], asked: str) -> Decision:
        """Move towards the cheapest fleet: first add workers within the limits, then release others.

        It adds one type at a time, the best rho first: if those machines do not come, the other types would
        not pay.
        """
        plans, pool = Plans.of(problem), problem.plan(counts)
        self._whole = plans
        if isinstance(plans.best, Shortfall) or not self._is_dear(pool, plans.best):
            return self._decision(problem, counts, f"{asked}: enough")
        running = pool.counts
        missing = more(plans.best.counts, running)
        asked += f", ${plans.best.usd_per_hour:.2f}/h would do"
        if not missing:
            free = {
                instance_type.name
                for instance_type in problem.instance_types
                if instance_type.usd_per_hour == 0
            }
            release = {name: n for name, n in more(running, plans.best.counts).items() if name not in free}
            return self._decision(problem, counts, asked, release=release)
        for position, instance_type in enumerate(problem.instance_types):
            n = min(problem.room(counts, position)[0], missing.get(instance_type.name, 0))
            if n > 0:
                return self._decision(problem, counts, asked, {instance_type.name: n})
        self._since.clear()  # wait again before the next attempt
        return self._decision(
            problem, counts, f"{asked}, but the limits leave no room for it beside what runs"
        )

    def _trim(self, problem: FleetProblem, counts: Sequence[int], wait_s: float, now_s: float) -> Decision:
        """Release workers above a limit, after `wait_s` seconds."""
        lasted_s = self._lasted(now_s, "over")
        said = f"over the limit of {' and of '.join(problem.broken(counts))} for {lasted_s:.0f} s"
        if lasted_s < wait_s:
            return self._decision(problem, counts, f"{said}: waiting until {wait_s:.0f} s")
        return self._decision(problem, counts, said, release=beyond_limits(problem, counts))

    def _synchronous(
        self, instance_types: Sequence[InstanceType], running: Mapping[str, int], lost: bool, now_s: float
    ) -> Decision:
        """Decide at S = 0: keep up to `limits.max_workers` workers, the best rho first."""
        self._whole, limits = None, self.limits
        if limits.max_workers is None:  # not known yet (see `useful_instances`): add only the minimums
            least = sum(max(running.get(o.name, 0), min(o.min_count, o.max_count)) for o in instance_types)
            limits = replace(limits, max_workers=max(least, limits.min_workers))
        beyond = 1.0 + 2 * math.fsum(o.mu * max(o.max_count, running.get(o.name, 0)) for o in instance_types)
        problem = fleet_problem(instance_types, beyond, limits, running)
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

    def _impossible(
        self, need: Need, instance_types: Sequence[InstanceType], running: Mapping[str, int]
    ) -> Decision:
        """Give advice and keep the minimums if kappa T_train <= T_bcast. Others stay if there is room."""
        self._since.clear()
        # The target is arbitrary: the problem only shows whether the instance types have changed.
        problem = fleet_problem(instance_types, need.gamma * need.sampled, self.limits, running)
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
            self._advised = need, Plans.of(problem), advise(need, instance_types, self.limits)
        advice, self._whole = self._advised[2], None
        counts = _counts(problem, running)
        launch: Mapping[str, int] = {}
        release: Mapping[str, int] = {}
        if not problem.keeps_minimums(counts):
            wanted, release = with_minimums(problem, counts)
            launch = more(problem.plan(wanted).counts, running)
        return self._decision(problem, counts, said, launch, release, advice=advice)

    # -- helpers --------------------------------------------------------------------------------------------

    def _known(
        self, instance_types: Sequence[InstanceType], running: Mapping[str, int]
    ) -> list[InstanceType]:
        """Return the instance types and those gone whose workers still run, the latter with a quota of 0."""
        kept = {name: instance_type for name, instance_type in self._seen.items() if name in running}
        self._seen = kept | {instance_type.name: instance_type for instance_type in instance_types}
        names = {instance_type.name for instance_type in instance_types}
        for name in running:
            if name not in self._seen:
                raise ConfigError(
                    f"type {name}: {running[name]} of its workers run, but no such type is known; add it"
                )
        gone = [o for name, o in self._seen.items() if name not in names]
        return [*instance_types, *(replace(o, max_count=0, min_count=0) for o in gone)]

    def _lasted(self, now_s: float, *states: str) -> float:
        """Return the seconds that the longest of these states has lasted, and forget all other states."""
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
        """Build the decision and complete its reason with changes, prices and advice."""
        launch, release = launch or {}, release or {}
        after = [
            n + launch.get(instance_type.name, 0) - release.get(instance_type.name, 0)
            for instance_type, n in zip(problem.instance_types, counts, strict=True)
        ]
        shortfall = best if isinstance(best, Shortfall) else None
        if shortfall is not None:
            reason += f"; no fleet within the limits is enough ({', '.join(shortfall.binding)})"
        changes = [
            f"{sign}{n} {instance_type.name} {_price(instance_type)}"
            for sign, some in (("+", launch), ("-", release))
            for instance_type in problem.instance_types
            if (n := some.get(instance_type.name, 0))
        ]
        reason += f": {', '.join(changes)}" if changes else ""
        best_usd_per_hour = None
        if self._whole is not None and isinstance(self._whole.best, FleetPlan):
            best_usd_per_hour = self._whole.best.usd_per_hour
            reason += f"; anew, by {self._whole.method}: ${best_usd_per_hour:.2f}/h"
        if advice:
            reason += f"; what would help: {'; or '.join(one.text for one in advice)}"
        return Decision(problem.plan(after), launch, release, reason, best_usd_per_hour, shortfall, advice)


def _price(instance_type: InstanceType) -> str:
    if instance_type.usd_per_hour == 0:
        return f"of no price ({instance_type.mu:.2g} trajectories/s each)"
    return f"at ${instance_type.usd_per_hour:.2f}/h (rho {instance_type.rho:.2g})"


def _counts(problem: FleetProblem, running: Mapping[str, int]) -> list[int]:
    return [running.get(instance_type.name, 0) for instance_type in problem.instance_types]
