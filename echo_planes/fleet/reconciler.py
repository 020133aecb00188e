"""The life of every worker of a fleet that follows price and need: pure decisions, time passed in.

::

    asked --came--> booting --serving--> serving --notice, surplus, slow--> leaving --gone--> (forgotten)
      |                |  |                 ^  |                                                 ^
      |                |  +--> standby -----+  |    takes the place of one that is lost          |
      |                |          |            |                                                 |
      +--- boot limit, died, preempted --------+-------------------------------------------------+

How many workers of which offer there should be is the provisioner's to say; which of them, when, and what
happens to offers that do not keep their word, is decided here. An offer whose machines do not come, or whose
workers die young, is backed off for a growing time, and the provisioner takes the next cheapest meanwhile.

Standbys are workers beside the provisioner's fleet: they take every version and are leased nothing. They
count towards all limits, not towards the capacity. What the fleet lacks comes first: a standby takes the
place of a worker that is lost or slow, and where no fleet within the limits is enough all take part.

A slow worker (`health.py`) is replaced: a standby takes its place, or it stays until one that is launched for
it serves; only where the limits leave no room for that it goes first. Its offer is backed off as for a worker
that died young, shortly: one slow machine says little about the next one, several in a row do.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from echo_planes.errors import ConfigError
from echo_planes.fleet.capacity import Need
from echo_planes.fleet.estimates import CapacityModel, ThroughputSample
from echo_planes.fleet.greedy import DRIFT
from echo_planes.fleet.health import SpeedWatch, worst
from echo_planes.fleet.instance_record import FIRST_BACK_OFF_S, FIRST_WITHOUT_S, YOUNG_S, InstanceRecords
from echo_planes.fleet.instance_types import Offer, cheapest_beside, limits_beside
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

RELEASE_LIMIT_S = 60.0  # a worker that is no longer needed has so long to hand over what it has


class Reconciler:
    """Reconciler of the workers that there are with those that there should be.

    Args:
        offers: what can be had; `mu` and `interruptions_per_hour` are what is believed before anything is
            measured. `max_count` is the quota.
        first: workers of each offer to begin with, before anything is known of the need.
        provisioner: chooses the fleet.
        model: throughput and need, as measured.
        guesses: offers whose `mu` is not known: until it is measured they count as the others do.
        boot_limit_s: a worker that does not serve so long after its machine came is given up.
        ask_limit_s: a machine that has not come so long after it was asked for is given up.
        standby: workers beside the fleet that are kept ready, where the limits leave room for them.

    `limits` are those of the provisioner at first; replace them as money is spent.

    Raises:
        ConfigError: `first` names an unknown offer, or more than its quota.
    """

    def __init__(
        self,
        offers: Sequence[Offer],
        first: Mapping[str, int],
        *,
        provisioner: Provisioner,
        model: CapacityModel,
        boot_limit_s: float,
        ask_limit_s: float = 120.0,
        guesses: Collection[str] = (),
        standby: int = 0,
    ) -> None:
        self._offers = {offer.name: offer for offer in offers}
        for name, count in first.items():
            known = self._offers.get(name)
            if known is None or count > known.max_count:
                quota = known.max_count if known else 0
                raise ConfigError(f"fleet: {count} workers of {name} to begin with, and its quota is {quota}")
        self._first = dict(first)
        self._provisioner = provisioner
        self._model = model
        self._book = InstanceRecords(offers, model, guesses)
        self._boot_limit_s = boot_limit_s
        self._ask_limit_s = ask_limit_s
        self._standby = standby
        self._members = Members()
        self._speeds = SpeedWatch()
        self._vacant: list[str] = []  # who served and was lost since the last look
        self.limits = provisioner.limits
        self.decision: Decision | None = None  # the newest

    # --- what others may look at -----------------------------------------------------------------

    @property
    def counts(self) -> Mapping[str, int]:
        """Workers of each offer that are there or on their way, but for standbys and those that leave."""
        return self._members.counts

    @property
    def machines(self) -> Mapping[str, int]:
        """Machines of each offer to ask for, within its quota. One that announced its end goes by itself."""
        used = Counter(member.offer for member in self._members if not member.noticed)
        # A leaving worker and its successor may be one too many for the quota: then the latter waits.
        return {name: min(count, self._offers[name].max_count) for name, count in used.items()}

    @property
    def num_serving(self) -> int:
        """Workers that generate and are to stay."""
        return sum(member.state == "serving" for member in self._members)

    @property
    def num_standby(self) -> int:
        """Workers that are parked and ready."""
        return len(self._members.ready)

    def standing(self, now_s: float) -> Standing:
        """Return the standing of the fleet, with throughput as measured until now."""
        mu = {offer.name: offer.mu for offer in self.offers(now_s)}
        return Standing(
            Counter(m.state for m in self._members),
            math.fsum(mu[m.offer] for m in self._members if m.state == "serving"),
            math.fsum(self._offers[m.offer].usd_per_hour for m in self._members if m.state != "asked"),
        )

    def mu_first(self, now_s: float) -> float:
        """Trajectories/s of the fleet to begin with, by what was measured until now."""
        return math.fsum(offer.mu * self._first.get(offer.name, 0) for offer in self.offers(now_s))

    def offer_of(self, worker_id: str) -> Offer | None:
        """Return a worker's offer; None where it is not one of the fleet's."""
        member = self._members.get(worker_id)
        return self._offers[member.offer] if member else None

    def offers(self, now_s: float) -> tuple[Offer, ...]:
        """List the offers as they stand now, with what was measured of them."""
        return self._book.offers(self.counts, self._members.beside, now_s)

    # --- what happens ----------------------------------------------------------------------------

    def begin(self, now_s: float) -> list[FleetAction]:
        """The workers to begin with."""
        return [
            self._members.launch(name, now_s) for name, count in self._first.items() for _ in range(count)
        ]

    def came(self, worker_id: str, now_s: float) -> None:
        """A worker's machine is there; its engine is being built."""
        self._members.enter(worker_id, "booting", now_s)
        member = self._members.get(worker_id)
        if member is not None:
            member.seen_s = now_s

    def serving(self, worker_id: str, now_s: float) -> None:
        """A worker generates, or could: a standby."""
        member = self._members.get(worker_id)
        if member is not None and member.served_since_s is None:
            self._members.enter(worker_id, "standby" if member.spare else "serving", now_s)
            self._book.learn_hours(member, now_s)
            member.served_since_s = member.seen_s = now_s

    def measured(self, worker_id: str, sample: ThroughputSample, now_s: float) -> None:
        """A worker's counters, cumulative."""
        member = self._members.get(worker_id)
        if member is not None:
            self._model.observe_worker(worker_id, member.offer, sample, now_s)
            self._speeds.measured(worker_id, sample)

    def notice(self, worker_id: str, left_s: float, now_s: float) -> list[FleetAction]:
        """A worker's machine says that it will be taken in `left_s` seconds."""
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
        """A worker is no more. Its hours, and its interruption if it was one, are learnt.

        Clouds do not always say so first: a spot worker that died after it had been well counts as
        preempted, and one that was to leave anyway has left.
        """
        member = self._members.remove(worker_id)
        if member is None:
            return
        self._note_vacancy(worker_id, member)
        self._model.forget(worker_id)
        self._speeds.forget(worker_id)
        self._book.learn_hours(member, now_s)
        offer = self._offers[member.offer]
        young = member.served_since_s is None or now_s - member.served_since_s < YOUNG_S
        if cause == "died" and member.state == "leaving" and not member.noticed:
            cause = "left"
        elif cause == "died" and offer.market == "spot" and not young:
            cause = "preempted"
        if cause == "preempted" or member.noticed:
            self._book.interrupted(offer)
        if cause == "never came" or (cause != "left" and young):
            first_s = FIRST_WITHOUT_S if cause == "never came" else FIRST_BACK_OFF_S
            self._book.back_offs.begin(member.offer, first_s, now_s)

    def tick(
        self, now_s: float, need: Need | None, *, published: bool = True, useful: int | None = None
    ) -> list[FleetAction]:
        """Return the actions that are due now.

        Args:
            need: None while nothing is known of it: then the first fleet is kept.
            published: there is something to serve. Before, no worker can, whatever its health.
            useful: no more workers than that are to generate, whatever the limits (S = 0).
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
                reason = f"{member.offer} {what} within {limit_s:.0f} s"
                actions.append(Leave(worker_id, reason, RELEASE_LIMIT_S))
        actions += self._fill_vacancies(now_s)
        self._vacant.clear()  # what no standby fills is the provisioner's to fill
        actions += self._replace_slow(now_s)
        if need is None:
            return actions + self._keep_first(now_s) + self._keep_standbys(now_s, self._standby)
        offers = self.offers(now_s)
        self._provisioner.limits = limits_beside(self.limits, offers, self._members.beside, useful)
        self.decision = self._provisioner.decide(need, offers, self.counts, now_s)
        for name, count in self.decision.launch.items():
            actions += [self._add(name, now_s) for _ in range(count)]
        if not self.counts:
            # Even where the provisioner finds that no fleet is enough: without any the run never ends.
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
        """Replace what the first fleet lost of its throughput, where its offer is not backed off.

        Where it is, others stand in, the cheapest first, those that failed before last.
        """
        counts, held, first = Counter(self.counts), self._members.held, Counter(self._first)
        offers = sorted(self.offers(now_s), key=lambda offer: (offer.rho, offer.name))
        goals = [(offer, min(first[offer.name], offer.max_count)) for offer in offers]
        goals += [(o, o.max_count) for o in sorted(offers, key=lambda o: self._book.back_offs.failed(o.name))]
        wanted = self.mu_first(now_s)
        missing = wanted - math.fsum(counts[offer.name] * offer.mu for offer in offers)
        launches: list[FleetAction] = []
        for offer, goal in goals:
            while counts[offer.name] < goal:
                # A little is not worth a stand-in. In a large fleet a whole worker is little: it comes back.
                own_mu = offer.mu if counts[offer.name] < first[offer.name] else math.inf
                if missing <= min(own_mu / 2, DRIFT * wanted):
                    break
                held[offer.name] += 1
                # The first fleet was chosen; anything else is within the limits, stand-ins beside it too.
                if not held <= first and not self.limits.permit(offers, held):
                    held[offer.name] -= 1
                    break
                launches.append(self._members.launch(offer.name, now_s))
                counts[offer.name] += 1
                missing -= offer.mu
        return launches

    # --- standbys ---

    def _add(self, name: str, now_s: float) -> FleetAction:
        """One more worker of an offer: a standby of it that is ready, or a new one."""
        for worker_id in self._members.ready:
            if self._members[worker_id].offer == name:
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
        """Standbys take the places of those that were lost."""
        filled = list(zip(self._members.ready, self._vacant, strict=False))
        self._vacant = self._vacant[len(filled) :]
        return [self._activate(one, f"in place of {lost}, which goes", now_s) for one, lost in filled]

    def _keep_standbys(self, now_s: float, standby: int) -> list[FleetAction]:
        """So many, as far as the limits permit them beside the fleet; those that they do not permit go."""
        actions: list[FleetAction] = []
        spares = self._members.spares
        while spares and not self.limits.permit(self.offers(now_s), self._members.held):
            self._members.enter(spares[-1], "leaving", now_s)
            reason = "a standby for which the limits leave no room"
            actions.append(Leave(spares.pop(), reason, RELEASE_LIMIT_S))
        missing = 0 if actions else standby - len(spares)
        for _ in range(missing):
            offer = self._cheapest(now_s)
            if offer is None:
                break
            launch = self._members.launch(offer, now_s, spare=True)
            actions += [launch, Park(launch.worker_id)]
        return actions

    def _cheapest(self, now_s: float, prefer: str = "") -> str | None:
        """Of what offer one more is permitted beside all that are there: `prefer`, or the best rho."""
        return cheapest_beside(self.limits, self.offers(now_s), self.counts, self._members.held, prefer)

    def _usd_per_hour(self, counts: Mapping[str, int]) -> float:
        return math.fsum(self._offers[name].usd_per_hour * n for name, n in counts.items())

    # --- slow workers ---

    def _replace_slow(self, now_s: float) -> list[FleetAction]:
        """Let slow workers go whose place is taken, and see to it that others take the place of the next."""
        actions: list[FleetAction] = []
        serving: dict[str, list[str]] = {}  # by offer, those whose successor is not on its way
        for worker_id, member in self._members.items():
            if member.state != "serving":
                continue
            successor = self._members.get(member.successor)
            if successor is not None and successor.state == "serving":
                actions.append(self._let_go(worker_id, f"{member.slow}; {member.successor} serves", now_s))
            elif successor is None or successor.state == "leaving":
                member.successor = ""
                serving.setdefault(member.offer, []).append(worker_id)
        for name, workers in serving.items():
            # One at a time: what was asked for in another's place is awaited.
            mine = [member for member in self._members if member.offer == name]
            busy = any(m.successor or (m.counts and m.state in ("asked", "booting")) for m in mine)
            if busy or self._book.back_offs.holds(name, now_s):
                continue
            slow = self._speeds.slow(workers)
            chosen = worst(slow, len(workers))
            if chosen is not None:
                actions += self._succeed(chosen, slow[chosen].text, now_s)
        return actions

    def _succeed(self, worker_id: str, why: str, now_s: float) -> list[FleetAction]:
        """A slow worker is replaced: by a standby at once, else by one that is launched while it stays."""
        member = self._members[worker_id]
        if ready := self._members.ready:
            left = self._let_go(worker_id, f"{why}; {ready[0]} takes its place", now_s)
            return [self._activate(ready[0], f"in place of {worker_id}, which is slow", now_s), left]
        offer = self._cheapest(now_s, prefer=member.offer)
        if offer is not None:
            launch = self._members.launch(offer, now_s)
            member.successor, member.slow = launch.worker_id, why
            return [launch]
        if self.num_serving > 1:
            return [self._let_go(worker_id, f"{why}; the limits leave no room for another beside it", now_s)]
        return []

    def _let_go(self, worker_id: str, reason: str, now_s: float) -> Leave:
        self._book.back_offs.begin(self._members[worker_id].offer, FIRST_BACK_OFF_S, now_s)
        self._members.enter(worker_id, "leaving", now_s)
        return Leave(worker_id, reason, RELEASE_LIMIT_S)

    # --- who goes ---

    def _dispensable(self, release: Mapping[str, int], need: Need, now_s: float) -> list[str]:
        """Choose the workers that go, of the surplus of each offer.

        The provisioner counts workers on their way, which may never come. So one that serves stays while
        others are on their way and those that serve already are too few without it, and the last one stays
        anyway; but not where all of them together cost more than the limit.
        """
        limit, counts = self._provisioner.limits.usd_per_hour, self.counts
        if limit is not None and self._usd_per_hour(counts) > limit:
            return [one for name, n in release.items() for one in self._members.least_missed(name)[:n]]
        mu = {offer.name: offer.mu for offer in self.offers(now_s)}
        states = [(member.offer, member.state) for member in self._members if member.counts]
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
