"""Record of what a fleet has learnt of its offers: throughput, interruption rates and back-offs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from echo_planes.fleet.estimates import CapacityModel, InterruptionRates
from echo_planes.fleet.instance_types import Offer
from echo_planes.fleet.workers import FleetWorker

FIRST_BACK_OFF_S = 10.0  # of workers that die young, or are slow
FIRST_WITHOUT_S = 60.0  # of machines that do not come
MOST_BACK_OFF_S = 600.0  # spot capacity comes back within minutes, or for the night: asking costs nothing
PRIOR_HOURS = 10.0  # what is believed of interruptions counts as so many worker-hours of watching
YOUNG_S = 120.0  # who dies within this time of its first prompt was never well


@dataclass
class _BackOff:
    next_s: float
    until_s: float = 0.0


class BackOffs:
    """Offers that did not keep their word: nothing more is asked of them for a growing time."""

    def __init__(self) -> None:
        self._of: dict[str, _BackOff] = {}

    def holds(self, offer: str, now_s: float) -> bool:
        """Whether an offer is backed off now."""
        return offer in self._of and now_s < self._of[offer].until_s

    def failed(self, offer: str) -> bool:
        """Whether an offer did not keep its word, and has not shown since that it does."""
        return offer in self._of

    def begin(self, offer: str, first_s: float, now_s: float) -> None:
        """Something of an offer failed. Several that fail together count once."""
        known = self._of.setdefault(offer, _BackOff(next_s=first_s))
        if now_s >= known.until_s:
            known.until_s = now_s + known.next_s
            known.next_s = min(2 * known.next_s, MOST_BACK_OFF_S)

    def forgive(self, offer: str, now_s: float) -> None:
        """An offer has shown that it keeps its word: the next back-off is a first one, once this is over."""
        if not self.holds(offer, now_s):
            self._of.pop(offer, None)


class InstanceRecords:
    """The offers of a fleet, as believed at first and as measured since.

    Args:
        offers: as believed.
        model: throughput, as measured.
        guesses: offers whose `mu` is not known.
    """

    def __init__(self, offers: Sequence[Offer], model: CapacityModel, guesses: Collection[str]) -> None:
        self._offers = tuple(offers)
        self._by_name = {offer.name: offer for offer in offers}
        self._model = model
        self._guesses = frozenset(guesses)
        self._rates = {
            offer.name: InterruptionRates(offer.interruptions_per_hour * PRIOR_HOURS, PRIOR_HOURS)
            for offer in offers
        }
        self.back_offs = BackOffs()

    def offers(self, counts: Mapping[str, int], beside: Counter[str], now_s: float) -> tuple[Offer, ...]:
        """List the offers as they stand now.

        Args:
            counts: workers of each offer: one that is backed off has room for no more.
            beside: other workers, which take of the quotas.
            now_s: the time.
        """
        measured = [self._model.mu_of_offer(offer.name, math.nan) for offer in self._offers]
        known = [mu for mu in measured if not math.isnan(mu)]
        usual = median(known) if known else None
        return tuple(self._now(offer, usual, counts, beside[offer.name], now_s) for offer in self._offers)

    def _now(
        self, offer: Offer, usual: float | None, counts: Mapping[str, int], beside: int, now_s: float
    ) -> Offer:
        most = max(offer.max_count - beside, 0)
        if self.back_offs.holds(offer.name, now_s):
            most = min(most, counts.get(offer.name, 0))
        believed = usual if usual is not None and offer.name in self._guesses else offer.mu
        rates = self._rates[offer.name]
        return replace(
            offer,
            mu=self._model.mu_of_offer(offer.name, believed),
            interruptions_per_hour=rates.per_hour(offer.sku, offer.region, offer.market),
            max_count=most,
            min_count=min(offer.min_count, most),
        )

    def interrupted(self, offer: Offer) -> None:
        """A worker of an offer was taken away."""
        self._rates[offer.name].observe_interruption(offer.sku, offer.region, offer.market)

    def learn_hours(self, member: FleetWorker, now_s: float) -> None:
        """A worker has been there until now."""
        if member.seen_s is not None:
            offer = self._by_name[member.offer]
            hours = (now_s - member.seen_s) / 3600.0
            self._rates[offer.name].observe_hours(offer.sku, offer.region, offer.market, hours)
            member.seen_s = now_s

    def prove(self, member: FleetWorker, now_s: float) -> None:
        """A worker that is no longer young shows that its offer keeps its word, once."""
        since_s = member.served_since_s
        if since_s is not None and not member.proved and now_s - since_s >= YOUNG_S:
            member.proved = True
            self.back_offs.forgive(member.offer, now_s)
