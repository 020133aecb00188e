"""States of every worker of a fleet that follows price and need: pure decisions, time passed in.

::

    asked --came--> booting --serving--> serving --notice, surplus, slow--> leaving --gone--> (forgotten)
      |                |  |                 ^  |                                                 ^
      |                |  +--> standby -----+  |    takes the place of one that is lost          |
      |                |          |            |                                                 |
      +--- boot limit, died, preempted --------+-------------------------------------------------+

The provisioner decides the number of workers of each type. The reconciler decides which workers come and go,
when, and how to treat failing types. A type whose machines do not come, or whose workers die young, is backed
off for a growing time; meanwhile the provisioner takes the next cheapest type.

Standbys are workers beside the provisioner's fleet. They install every version and receive no leases. They
count towards all limits, but not towards the capacity. A standby takes the place of a worker that is lost or
slow. If no fleet within the limits is enough, all ready standbys join it.

A slow worker (`health.py`) is replaced by a standby, or by a new worker: then the slow one stays until its
successor serves. It leaves first only if the limits leave no room for both. Its type gets the short back-off
of a worker that died young: a single slow machine is weak evidence against its type, several in a row are
not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from echo_planes.errors import ConfigError
from echo_planes.fleet.capacity import Need
from echo_planes.fleet.estimates import CapacityModel, ThroughputSample
from echo_planes.fleet.greedy import DRIFT
from echo_planes.fleet.health import SpeedWatch, worst
from echo_planes.fleet.instance_record import FIRST_BACK_OFF_S, FIRST_WITHOUT_S, YOUNG_S, InstanceRecords
from echo_planes.fleet.instance_types import SAME, InstanceType, cheapest_beside, limits_beside
from echo_planes.fleet.provisioner import Decision, Provisioner
from echo_planes.fleet.workers import (
    Activate,
    Cause,
    FleetAction,
    FleetWorker,
    Leave,
    Members,
    Park,
    Standing,
)

RELEASE_LIMIT_S = 60.0  # time limit for a worker that is no longer needed to hand over its leases


class Reconciler:
    """Reconciler of the existing workers with the fleet that the provisioner chooses.

    Args:
        instance_types: types on offer; `mu` and `interruptions_per_hour` are the values before any
            measurement, `max_count` is the quota.
        first: workers of each instance type to begin with, before the need is known.
        provisioner: chooses the fleet.
        model: measured throughput and need.
        boot_limit_s: seconds after which a booting worker that does not serve is given up.
        ask_limit_s: seconds after which a machine that was asked for and did not come is given up.
        guesses: types of unknown `mu`; until a measurement they take the median of the measured types.
        standby: workers to keep ready beside the fleet, as far as the limits leave room.

    The attribute `limits` starts as the provisioner's; the caller replaces it as money and time are spent.

    Raises:
        ConfigError: `first` names an unknown instance type, or more than its quota.
    """

    def __init__(
        self,
        instance_types: Sequence[InstanceType],
        first: Mapping[str, int],
        *,
        provisioner: Provisioner,
        model: CapacityModel,
        boot_limit_s: float,
        ask_limit_s: float = 120.0,
        guesses: Collection[str] = (),
        standby: int = 0,
    ) -> None:
        self._instance_types = {instance_type.name: instance_type for instance_type in instance_types}
        for name, count in first.items():
            known = self._instance_types.get(name)
            if known is None or count > known.max_count:
                quota = known.max_count if known else 0
                raise ConfigError(f"fleet: {count} workers of {name} to begin with, and its quota is {quota}")
        self._first = dict(first)
        self._provisioner = provisioner
        self._model = model
        self._book = InstanceRecords(instance_types, model, guesses)
        self._boot_limit_s = boot_limit_s
        self._ask_limit_s = ask_limit_s
        self._standby = standby
        self._members = Members()
        self._speeds = SpeedWatch()
        self._vacant: list[str] = []  # serving workers that were lost since the last tick
        self.limits = provisioner.limits
        self.decision: Decision | None = None  # the newest

    # --- state for callers -----------------------------------------------------------------------

    @property
    def counts(self) -> Mapping[str, int]:
        """Workers of each type that are part of the capacity, without standbys and leaving workers."""
        return self._members.counts

    @property
    def machines(self) -> Mapping[str, int]:
        """Machines of each type to ask for, within its quota, without those that announced their end."""
        used = Counter(member.instance_type for member in self._members if not member.noticed)
        # A leaving worker and its successor together may exceed the quota: then the successor waits.
        return {name: min(count, self._instance_types[name].max_count) for name, count in used.items()}

    @property
    def num_serving(self) -> int:
        """Number of workers that serve and stay."""
        return sum(member.state == "serving" for member in self._members)

    @property
    def num_standby(self) -> int:
        """Number of standbys that are ready."""
        return len(self._members.ready)

    def standing(self, now_s: float) -> Standing:
        """Return the standing of the fleet, with the throughput measured until now."""
        mu = {instance_type.name: instance_type.mu for instance_type in self.instance_types(now_s)}
        return Standing(
            Counter(m.state for m in self._members),
            math.fsum(mu[m.instance_type] for m in self._members if m.state == "serving"),
            math.fsum(
                self._instance_types[m.instance_type].usd_per_hour
                for m in self._members
                if m.state != "asked"
            ),
        )

    def mu_first(self, now_s: float) -> float:
        """Return the trajectories/s of the first fleet, with the throughput measured until now."""
        return math.fsum(
            instance_type.mu * self._first.get(instance_type.name, 0)
            for instance_type in self.instance_types(now_s)
        )

    def instance_type_of(self, worker_id: str) -> InstanceType | None:
        """Return a worker's instance type; None if the worker is not of this fleet."""
        member = self._members.get(worker_id)
        return self._instance_types[member.instance_type] if member else None

    def instance_types(self, now_s: float) -> tuple[InstanceType, ...]:
        """Return the instance types with their measured values and the quotas left."""
        return self._book.instance_types(self.counts, self._members.beside, now_s)

    # --- events ----------------------------------------------------------------------------------

    def reprice(self, usd_per_hour: Mapping[str, float]) -> None:
        """Set the prices of these instance types from now on."""
        self._instance_types |= {
            name: replace(self._instance_types[name], usd_per_hour=usd) for name, usd in usd_per_hour.items()
        }
        self._book.set_instance_types(tuple(self._instance_types.values()))

    def begin(self, now_s: float) -> list[FleetAction]:
        """Launch the first fleet."""
        return [
            self._members.launch(name, now_s) for name, count in self._first.items() for _ in range(count)
        ]

    def came(self, worker_id: str, now_s: float) -> None:
        """Record that a worker's machine has come and boots."""
        self._members.enter(worker_id, "booting", now_s)
        member = self._members.get(worker_id)
        if member is not None:
            member.seen_s = now_s

    def serving(self, worker_id: str, now_s: float) -> None:
        """Record that a worker serves for the first time, or is ready as a standby."""
        member = self._members.get(worker_id)
        if member is not None and member.served_since_s is None:
            self._members.enter(worker_id, "standby" if member.spare else "serving", now_s)
            self._book.learn_hours(member, now_s)
            self._book.learn_boot(member, now_s)
            member.served_since_s = member.seen_s = now_s

    def measured(self, worker_id: str, sample: ThroughputSample, now_s: float) -> None:
        """Record a worker's cumulative counters."""
        member = self._members.get(worker_id)
        if member is not None:
            self._model.observe_worker(worker_id, member.instance_type, sample, now_s)
            self._speeds.measured(worker_id, sample)

    def notice(self, worker_id: str, left_s: float, now_s: float) -> list[FleetAction]:
        """Record that a worker's machine will be taken in `left_s` seconds, and return the actions due."""
        member = self._members.get(worker_id)
        if member is None:
            return []
        member.noticed = True
        if member.state == "leaving":
            return []
        self._note_vacancy(worker_id, member)
        self._members.enter(worker_id, "leaving", now_s)
        return [Leave(worker_id, f"its machine goes in {left_s:.0f} s", left_s), *self._fill_vacancies(now_s)]

    def gone(self, worker_id: str, cause: Cause, now_s: float) -> None:
        """Forget a worker that has ended; record its hours and, if it was interrupted, its interruption.

        Clouds do not always announce an interruption. So a spot worker that died and was not young counts as
        preempted, and a worker that died while it was leaving counts as left.
        """
        member = self._members.remove(worker_id)
        if member is None:
            return
        self._note_vacancy(worker_id, member)
        self._model.forget(worker_id)
        self._speeds.forget(worker_id)
        self._book.learn_hours(member, now_s)
        instance_type = self._instance_types[member.instance_type]
        young = member.served_since_s is None or now_s - member.served_since_s < YOUNG_S
        if cause == "died" and member.state == "leaving" and not member.noticed:
            cause = "left"
        elif cause == "died" and instance_type.market == "spot" and not young:
            cause = "preempted"
        if cause == "preempted" or member.noticed:
            self._book.interrupted(instance_type)
        if cause == "never came" or (cause != "left" and young):
            first_s = FIRST_WITHOUT_S if cause == "never came" else FIRST_BACK_OFF_S
            self._book.back_offs.begin(member.instance_type, first_s, now_s)

    def refuse(self, instance_type: str) -> None:
        """Buy no machine of an instance type any more: workers on it cannot serve."""
        self._book.back_offs.refuse(instance_type)

    def tick(
        self, now_s: float, need: Need | None, *, published: bool = True, useful: int | None = None
    ) -> list[FleetAction]:
        """Return the actions that are due now.

        Args:
            now_s: the time.
            need: the learner's need; None while it is not known: then the first fleet is kept.
            published: whether a version exists to serve; before, the boot limit does not run.
            useful: most workers in the fleet besides the limits (S = 0); None: no such bound.
        """
        actions: list[FleetAction] = []
        for worker_id, member in self._members.items():
            self._book.learn_hours(member, now_s)
            self._book.prove(member, now_s)
            if member.state == "booting" and not published:
                member.since_s = now_s
            limit_s = {"asked": self._ask_limit_s, "booting": self._boot_limit_s}.get(member.state)
            if limit_s is not None and now_s - member.since_s > limit_s:
                what = "did not come" if member.state == "asked" else "did not generate"
                self.gone(worker_id, "never came", now_s)
                reason = f"{member.instance_type} {what} within {limit_s:.0f} s"
                actions.append(Leave(worker_id, reason, RELEASE_LIMIT_S))
        actions += self._fill_vacancies(now_s)
        self._vacant.clear()  # the provisioner fills the places that no standby took
        actions += self._replace_slow(now_s)
        if need is None:
            return actions + self._keep_first(now_s) + self._keep_standbys(now_s, self._standby)
        instance_types = self.instance_types(now_s)
        limits = limits_beside(self.limits, instance_types, self._members.beside, useful)
        # Without a worker the run never ends, so a short rest of the run must not forbid the first one.
        self._provisioner.limits = limits if self.counts else replace(limits, seconds_left=None)
        self.decision = self._provisioner.decide(need, instance_types, self.counts, now_s)
        for name, count in self.decision.launch.items():
            actions += [self._add(name, now_s) for _ in range(count)]
        if not self.counts:
            # The run needs a worker to end, even if the provisioner finds that no fleet is enough.
            actions += self._keep_first(now_s)
        for worker_id in self._dispensable(self.decision.release, need, now_s):
            self._members.enter(worker_id, "leaving", now_s)
            actions.append(Leave(worker_id, self.decision.reason, RELEASE_LIMIT_S))
        if self.decision.shortfall is None:
            return actions + self._keep_standbys(now_s, self._standby)
        actions += [self._activate(one, "what runs is not enough", now_s) for one in self._members.ready]
        return actions + self._keep_standbys(now_s, 0)

    # --- inside ----------------------------------------------------------------------------------

    def _keep_first(self, now_s: float) -> list[FleetAction]:
        """Restore the throughput of the first fleet after losses.

        If an instance type is backed off, others stand in: the lowest rho first, types that failed last.
        """
        counts, held, first = Counter(self.counts), self._members.held, Counter(self._first)
        instance_types = sorted(
            self.instance_types(now_s), key=lambda instance_type: (instance_type.rho, instance_type.name)
        )
        goals = [
            (instance_type, min(first[instance_type.name], instance_type.max_count))
            for instance_type in instance_types
        ]
        goals += [
            (o, o.max_count)
            for o in sorted(instance_types, key=lambda o: self._book.back_offs.failed(o.name))
        ]
        wanted = self.mu_first(now_s)
        missing = wanted - math.fsum(
            counts[instance_type.name] * instance_type.mu for instance_type in instance_types
        )
        launches: list[FleetAction] = []
        for instance_type, goal in goals:
            while counts[instance_type.name] < goal:
                # A stand-in must replace more than `DRIFT` of the throughput. A lost worker of the first
                # fleet can be less than that: its own type is launched again for half a missing worker.
                own_mu = (
                    instance_type.mu if counts[instance_type.name] < first[instance_type.name] else math.inf
                )
                if missing <= min(own_mu / 2, DRIFT * wanted):
                    break
                held[instance_type.name] += 1
                # The user chose the first fleet, so only counts beyond it must keep the limits.
                if not held <= first and not self.limits.permit(instance_types, held):
                    held[instance_type.name] -= 1
                    break
                launches.append(self._members.launch(instance_type.name, now_s))
                counts[instance_type.name] += 1
                missing -= instance_type.mu
        return launches

    # --- standbys ---

    def _add(self, name: str, now_s: float) -> FleetAction:
        """Add a worker of an instance type: a ready standby of that type, or a new worker."""
        for worker_id in self._members.ready:
            if self._members[worker_id].instance_type == name:
                return self._activate(worker_id, "one more is needed", now_s)
        return self._members.launch(name, now_s)

    def _activate(self, worker_id: str, reason: str, now_s: float) -> Activate:
        self._members[worker_id].spare = False
        self._members.enter(worker_id, "serving", now_s)
        return Activate(worker_id, reason)

    def _note_vacancy(self, worker_id: str, member: FleetWorker) -> None:
        if member.state == "serving" and member.counts:
            self._vacant.append(worker_id)

    def _fill_vacancies(self, now_s: float) -> list[FleetAction]:
        """Activate ready standbys in the places of lost workers."""
        filled = list(zip(self._members.ready, self._vacant, strict=False))
        self._vacant = self._vacant[len(filled) :]
        return [self._activate(one, f"in place of {lost}, which goes", now_s) for one, lost in filled]

    def _keep_standbys(self, now_s: float, standby: int) -> list[FleetAction]:
        """Keep `standby` standbys as far as the limits permit them beside the fleet; release the others."""
        actions: list[FleetAction] = []
        spares = self._members.spares
        while spares and not self.limits.permit(self.instance_types(now_s), self._members.held):
            self._members.enter(spares[-1], "leaving", now_s)
            reason = "a standby for which the limits leave no room"
            actions.append(Leave(spares.pop(), reason, RELEASE_LIMIT_S))
        missing = 0 if actions else standby - len(spares)
        for _ in range(missing):
            instance_type = self._cheapest(now_s)
            if instance_type is None:
                break
            launch = self._members.launch(instance_type, now_s, spare=True)
            actions += [launch, Park(launch.worker_id)]
        return actions

    def _cheapest(self, now_s: float, prefer: str = "") -> str | None:
        """Return the type of which one more worker is permitted: `prefer`, else the lowest rho."""
        return cheapest_beside(
            self.limits, self.instance_types(now_s), self.counts, self._members.held, prefer
        )

    def _usd_per_hour(self, counts: Mapping[str, int]) -> float:
        return math.fsum(self._instance_types[name].usd_per_hour * n for name, n in counts.items())

    # --- slow workers ---

    def _replace_slow(self, now_s: float) -> list[FleetAction]:
        """Release slow workers whose successor serves, and replace the next slow worker of each type."""
        actions: list[FleetAction] = []
        serving: dict[str, list[str]] = {}  # instance type -> workers without a successor on its way
        for worker_id, member in self._members.items():
            if member.state != "serving":
                continue
            successor = self._members.get(member.successor)
            if successor is not None and successor.state == "serving":
                actions.append(self._let_go(worker_id, f"{member.slow}; {member.successor} serves", now_s))
            elif successor is None or successor.state == "leaving":
                member.successor = ""
                serving.setdefault(member.instance_type, []).append(worker_id)
        for name, workers in serving.items():
            # Replace one worker of a type at a time: wait for a successor that is on its way.
            mine = [member for member in self._members if member.instance_type == name]
            busy = any(m.successor or (m.counts and m.state in ("asked", "booting")) for m in mine)
            if busy or self._book.back_offs.holds(name, now_s):
                continue
            slow = self._speeds.slow(workers)
            chosen = worst(slow, len(workers))
            if chosen is not None:
                actions += self._succeed(chosen, slow[chosen].text, now_s)
        return actions

    def _succeed(self, worker_id: str, why: str, now_s: float) -> list[FleetAction]:
        """Replace a slow worker: by a standby at once, else by a new worker while the slow one stays."""
        member = self._members[worker_id]
        if ready := self._members.ready:
            left = self._let_go(worker_id, f"{why}; {ready[0]} takes its place", now_s)
            return [self._activate(ready[0], f"in place of {worker_id}, which is slow", now_s), left]
        instance_type = self._cheapest(now_s, prefer=member.instance_type)
        if instance_type is not None:
            launch = self._members.launch(instance_type, now_s)
            member.successor, member.slow = launch.worker_id, why
            return [launch]
        is_late = any(self.limits.stop(one) == "seconds_left" for one in self.instance_types(now_s))
        if self.num_serving > 1 and not is_late:  # near the end of the run a slow worker is better than none
            return [self._let_go(worker_id, f"{why}; the limits leave no room for another beside it", now_s)]
        return []

    def _let_go(self, worker_id: str, reason: str, now_s: float) -> Leave:
        self._book.back_offs.begin(self._members[worker_id].instance_type, FIRST_BACK_OFF_S, now_s)
        self._members.enter(worker_id, "leaving", now_s)
        return Leave(worker_id, reason, RELEASE_LIMIT_S)

    # --- choice of the workers that leave ---

    def _dispensable(self, release: Mapping[str, int], need: Need, now_s: float) -> list[str]:
        """Choose the workers that leave, from the surplus of each instance type.

        The provisioner counts workers on their way, which may never come. So while some are on their way and
        S > 0, a serving worker stays if the others that serve give less than mu_min. The last serving worker
        always stays. Neither rule applies while the fleet costs more than its limit.
        """
        limit, counts = self._provisioner.limits.usd_per_hour, self.counts
        if limit is not None and self._usd_per_hour(counts) > limit + SAME:
            return [one for name, n in release.items() for one in self._members.least_missed(name)[:n]]
        mu = {instance_type.name: instance_type.mu for instance_type in self.instance_types(now_s)}
        states = [(member.instance_type, member.state) for member in self._members if member.counts]
        serving = [mu[name] for name, state in states if state == "serving"]
        num_left, mu_left = len(serving), math.fsum(serving)
        coming = any(state in ("asked", "booting") for _, state in states)
        least = (need.mu_min or 0.0) if coming and need.max_staleness > 0 else 0.0
        leaving = []
        for name, count in release.items():
            for worker_id in self._members.least_missed(name)[:count]:
                if self._members[worker_id].state == "serving":
                    if num_left == 1 or mu_left - mu[name] < least:
                        continue
                    num_left, mu_left = num_left - 1, mu_left - mu[name]
                leaving.append(worker_id)
        return leaving
