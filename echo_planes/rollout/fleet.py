"""The life of every worker of a fleet that follows price and need: pure decisions, time passed in.

::

    asked --came--> booting --serving--> serving --notice, surplus--> leaving --gone--> (forgotten)
      |                |                    |                                              ^
      +--- boot limit, died, preempted -----+----------------------------------------------+

How many workers of which offer there should be is the provisioner's to say; which of them, when, and what
happens to offers that do not keep their word, is decided here. An offer whose machines do not come, or whose
workers die young, is backed off for a growing time, and the provisioner takes the next cheapest meanwhile.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

from echo_planes.errors import ConfigError
from echo_planes.rollout.estimates import CapacityModel, InterruptionRates, ThroughputSample
from echo_planes.rollout.offers import Need, Offer
from echo_planes.rollout.provisioner import Decision, Provisioner

FIRST_BACK_OFF_S = 10.0  # of workers that die young
FIRST_WITHOUT_S = 60.0  # of machines that do not come
MOST_BACK_OFF_S = 600.0  # spot capacity comes back within minutes, or for the night: asking costs nothing
PRIOR_HOURS = 10.0  # what is believed of interruptions counts as so many worker-hours of watching
YOUNG_S = 120.0  # who dies within this time of its first prompt was never well
RELEASE_LIMIT_S = 60.0  # a worker that is no longer needed has so long to hand over what it has

Cause = Literal["preempted", "died", "left", "never came"]


@dataclass(frozen=True, slots=True)
class Launch:
    """Get a worker of an offer."""

    worker_id: str
    offer: str


@dataclass(frozen=True, slots=True)
class Leave:
    """Have a worker hand over what it has and go, within `limit_s`."""

    worker_id: str
    reason: str
    limit_s: float


FleetAction = Launch | Leave


@dataclass
class _Member:
    offer: str
    since_s: float  # of its state
    state: Literal["asked", "booting", "serving", "leaving"] = "asked"
    noticed: bool = False  # its machine announced that it will go
    served_since_s: float | None = None
    proved: bool = False  # served for YOUNG_S
    seen_s: float | None = None  # until when its hours are in the interruption rates


@dataclass
class _BackOff:
    next_s: float
    until_s: float = 0.0


class Fleet:
    """Who there is, and who should be.

    Args:
        offers: what can be had; `mu` and `interruptions_per_hour` are what is believed before anything is
            measured. `max_count` is the quota.
        first: workers of each offer to begin with, before anything is known of the need.
        provisioner: chooses the fleet.
        model: throughput and need, as measured.
        guesses: offers whose `mu` nobody knows: until it is measured they count as the others do.
        boot_limit_s: a worker that does not serve by then is given up.

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
        self._rates = {
            offer.name: InterruptionRates(offer.interruptions_per_hour * PRIOR_HOURS, PRIOR_HOURS)
            for offer in offers
        }
        self._guesses = frozenset(guesses)
        self._boot_limit_s = boot_limit_s
        self._ask_limit_s = ask_limit_s
        self._members: dict[str, _Member] = {}
        self._back_offs: dict[str, _BackOff] = {}
        self._issued = 0
        self.decision: Decision | None = None  # the newest

    # --- what others may look at -----------------------------------------------------------------

    @property
    def counts(self) -> Mapping[str, int]:
        """Workers of each offer that are there or on their way, those that leave not counted."""
        return Counter(m.offer for m in self._members.values() if m.state != "leaving")

    @property
    def machines(self) -> Mapping[str, int]:
        """Machines of each offer to ask for, within its quota. One that announced its end goes by itself."""
        used = Counter(member.offer for member in self._members.values() if not member.noticed)
        # A leaving worker and its successor may be one too many for the quota: then the latter waits.
        return {name: min(count, self._offers[name].max_count) for name, count in used.items()}

    @property
    def num_serving(self) -> int:
        """Workers that generate and are to stay."""
        return sum(member.state == "serving" for member in self._members.values())

    def offer_of(self, worker_id: str) -> Offer | None:
        """What a worker is, if it is one of the fleet's."""
        member = self._members.get(worker_id)
        return self._offers[member.offer] if member else None

    def offers(self, now_s: float) -> tuple[Offer, ...]:
        """What can be had now, with what was measured of it."""
        counts = self.counts
        measured = [self._model.mu_of_offer(name, math.nan) for name in self._offers]
        known = [mu for mu in measured if not math.isnan(mu)]
        return tuple(
            replace(
                offer,
                mu=self._model.mu_of_offer(
                    offer.name, median(known) if known and offer.name in self._guesses else offer.mu
                ),
                interruptions_per_hour=self._rates[offer.name].per_hour(
                    offer.sku, offer.region, offer.market
                ),
                max_count=min(offer.max_count, counts.get(offer.name, 0))
                if self._is_backed_off(offer.name, now_s)
                else offer.max_count,
                min_count=min(offer.min_count, counts.get(offer.name, 0))
                if self._is_backed_off(offer.name, now_s)
                else offer.min_count,
            )
            for offer in self._offers.values()
        )

    # --- what happens ----------------------------------------------------------------------------

    def begin(self, now_s: float) -> list[FleetAction]:
        """The workers to begin with."""
        return [self._launch(name, now_s) for name, count in self._first.items() for _ in range(count)]

    def came(self, worker_id: str, now_s: float) -> None:
        """A worker's machine is there; its engine is being built."""
        self._enter(worker_id, "booting", now_s)
        member = self._members.get(worker_id)
        if member is not None:
            member.seen_s = now_s

    def serving(self, worker_id: str, now_s: float) -> None:
        """A worker generates."""
        member = self._members.get(worker_id)
        if member is not None and member.served_since_s is None:
            self._enter(worker_id, "serving", now_s)
            self._learn_hours(member, now_s)
            member.served_since_s = member.seen_s = now_s

    def measured(self, worker_id: str, sample: ThroughputSample, now_s: float) -> None:
        """A worker's counters, cumulative."""
        member = self._members.get(worker_id)
        if member is not None:
            self._model.observe_worker(worker_id, member.offer, sample, now_s)

    def notice(self, worker_id: str, left_s: float, now_s: float) -> list[FleetAction]:
        """A worker's machine says that it will be taken in `left_s` seconds."""
        member = self._members.get(worker_id)
        if member is None:
            return []
        member.noticed = True
        if member.state == "leaving":
            return []
        self._enter(worker_id, "leaving", now_s)
        return [Leave(worker_id, f"its machine goes in {left_s:.0f} s", left_s)]

    def gone(self, worker_id: str, cause: Cause, now_s: float) -> None:
        """A worker is no more. Its hours, and its interruption if it was one, are learnt.

        Clouds do not always say so first: a spot worker that died after it had been well counts as
        preempted, and one that was to leave anyway has left.
        """
        member = self._members.pop(worker_id, None)
        if member is None:
            return
        self._model.forget(worker_id)
        self._learn_hours(member, now_s)
        offer = self._offers[member.offer]
        young = member.served_since_s is None or now_s - member.served_since_s < YOUNG_S
        if cause == "died" and member.state == "leaving" and not member.noticed:
            cause = "left"
        elif cause == "died" and offer.market == "spot" and not young:
            cause = "preempted"
        if cause == "preempted" or member.noticed:
            self._rates[offer.name].observe_interruption(offer.sku, offer.region, offer.market)
        if cause == "never came" or (cause != "left" and young):
            first_s = FIRST_WITHOUT_S if cause == "never came" else FIRST_BACK_OFF_S
            self._back_off(member.offer, first_s, now_s)

    def tick(self, now_s: float, need: Need | None, *, published: bool = True) -> list[FleetAction]:
        """What to do now.

        Args:
            need: None while nothing is known of it: then the first fleet is kept.
            published: there is something to serve. Before, no worker can, whatever its health.
        """
        actions: list[FleetAction] = []
        for worker_id, member in list(self._members.items()):
            self._learn_hours(member, now_s)
            self._prove(member, now_s)
            if member.state == "booting" and not published:
                member.since_s = now_s
            limit_s = {"asked": self._ask_limit_s, "booting": self._boot_limit_s}.get(member.state)
            if limit_s is not None and now_s - member.since_s > limit_s:
                what = "did not come" if member.state == "asked" else "did not generate"
                self.gone(worker_id, "never came", now_s)
                reason = f"{member.offer} {what} within {limit_s:.0f} s"
                actions.append(Leave(worker_id, reason, RELEASE_LIMIT_S))
        if need is None:
            return actions + self._keep_first(now_s)
        self.decision = self._provisioner.decide(need, self.offers(now_s), self.counts, now_s)
        for name, count in self.decision.launch.items():
            actions += [self._launch(name, now_s) for _ in range(count)]
        if not self.counts:
            # Whatever the provisioner thinks of it (no fleet may be enough): without any the run never ends.
            actions += self._keep_first(now_s)
        for worker_id in self._dispensable(self.decision.release, need, now_s):
            self._enter(worker_id, "leaving", now_s)
            actions.append(Leave(worker_id, self.decision.reason, RELEASE_LIMIT_S))
        return actions

    # --- inside ----------------------------------------------------------------------------------

    def _keep_first(self, now_s: float) -> list[FleetAction]:
        """Replace what was lost of the first fleet, where its offer is not backed off.

        Where it is, the cheapest of the others stand in: before the need is known nobody else does.
        """
        counts, limits = Counter(self.counts), self._provisioner.limits
        offers = sorted(self.offers(now_s), key=lambda offer: (offer.rho, offer.name))
        goals = [(offer, min(self._first.get(offer.name, 0), offer.max_count)) for offer in offers]
        goals += [(offer, offer.max_count) for offer in offers]
        missing = sum(self._first.values()) - counts.total()
        usd_per_hour = math.fsum(self._offers[name].usd_per_hour * n for name, n in counts.items())
        launches: list[FleetAction] = []
        for offer, goal in goals:
            for _ in range(min(goal - counts[offer.name], missing - len(launches))):
                usd_per_hour += offer.usd_per_hour
                stands_in = counts[offer.name] >= self._first.get(offer.name, 0)
                if stands_in and limits.usd_per_hour is not None and usd_per_hour > limits.usd_per_hour:
                    return launches
                launches.append(self._launch(offer.name, now_s))
                counts[offer.name] += 1
        return launches

    def _launch(self, name: str, now_s: float) -> Launch:
        worker_id = f"w{self._issued}"
        self._issued += 1
        self._members[worker_id] = _Member(name, now_s)
        return Launch(worker_id, name)

    def _dispensable(self, release: Mapping[str, int], need: Need, now_s: float) -> list[str]:
        """Who goes, of as many as are too many.

        The provisioner counts what is on its way, which may never come. So who serves stays while others are
        on their way and those that serve already are too few without it, and the last one stays anyway; but
        not where all of them together cost more than the limit.
        """
        limit, counts = self._provisioner.limits.usd_per_hour, self.counts
        usd_per_hour = math.fsum(self._offers[name].usd_per_hour * n for name, n in counts.items())
        if limit is not None and usd_per_hour > limit:
            return [worker_id for name, n in release.items() for worker_id in self._least_missed(name)[:n]]
        mu = {offer.name: offer.mu for offer in self.offers(now_s)}
        states = [(member.offer, member.state) for member in self._members.values()]
        serving = [mu[name] for name, state in states if state == "serving"]
        num_left, mu_left = len(serving), math.fsum(serving)
        coming = any(state in ("asked", "booting") for _, state in states)
        least = (need.mu_min or 0.0) if coming and need.max_staleness > 0 else 0.0
        leaving = []
        for name, count in release.items():
            for worker_id in self._least_missed(name)[:count]:
                if self._members[worker_id].state == "serving":
                    if num_left == 1 or mu_left - mu[name] < least:
                        continue
                    num_left, mu_left = num_left - 1, mu_left - mu[name]
                leaving.append(worker_id)
        return leaving

    def _least_missed(self, name: str) -> list[str]:
        """Workers of an offer, those first that would be missed least: not serving yet, then the newest."""
        mine = [
            (member.state == "serving", -member.since_s, worker_id)
            for worker_id, member in self._members.items()
            if member.offer == name and member.state != "leaving"
        ]
        return [worker_id for _, _, worker_id in sorted(mine)]

    def _enter(self, worker_id: str, state: Literal["booting", "serving", "leaving"], now_s: float) -> None:
        member = self._members.get(worker_id)
        if member is not None and member.state != "leaving":
            member.state, member.since_s = state, now_s

    def _prove(self, member: _Member, now_s: float) -> None:
        """A worker that is no longer young shows that its offer keeps its word, once."""
        since_s = member.served_since_s
        if since_s is not None and not member.proved and now_s - since_s >= YOUNG_S:
            member.proved = True
            if not self._is_backed_off(member.offer, now_s):
                self._back_offs.pop(member.offer, None)

    def _learn_hours(self, member: _Member, now_s: float) -> None:
        if member.seen_s is not None:
            offer = self._offers[member.offer]
            hours = (now_s - member.seen_s) / 3600.0
            self._rates[offer.name].observe_hours(offer.sku, offer.region, offer.market, hours)
            member.seen_s = now_s

    def _is_backed_off(self, name: str, now_s: float) -> bool:
        return name in self._back_offs and now_s < self._back_offs[name].until_s

    def _back_off(self, name: str, first_s: float, now_s: float) -> None:
        known = self._back_offs.setdefault(name, _BackOff(next_s=first_s))
        if now_s >= known.until_s:  # several workers that failed together count once
            known.until_s = now_s + known.next_s
            known.next_s = min(2 * known.next_s, MOST_BACK_OFF_S)
