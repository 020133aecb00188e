"""Measured properties of a fleet's instance types: throughput, boot times, interruptions and back-offs."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from echo_planes.fleet.estimates import CapacityModel, InterruptionRates
from echo_planes.fleet.instance_types import InstanceType
from echo_planes.fleet.workers import FleetWorker

FIRST_BACK_OFF_S = 10.0  # after a worker that died young or was slow
FIRST_WITHOUT_S = 60.0  # after a machine that did not come
MOST_BACK_OFF_S = 600.0  # spot capacity often returns within minutes, and asking again costs nothing
PRIOR_HOURS = 10.0  # weight of the configured interruption rate, in worker-hours
RECENT_BOOTS = 8  # boot times of an instance type that the median covers
YOUNG_S = 120.0  # a worker that ends sooner than this after it first served counts against its type


@dataclass
class _BackOff:
    next_s: float
    until_s: float = 0.0


class BackOffs:
    """Back-offs of failing instance types: times without new machines, doubled with each failure."""

    def __init__(self) -> None:
        self._of: dict[str, _BackOff] = {}

    def holds(self, instance_type: str, now_s: float) -> bool:
        """Return whether an instance type is backed off now."""
        return instance_type in self._of and now_s < self._of[instance_type].until_s

    def failed(self, instance_type: str) -> bool:
        """Return whether an instance type failed and has not been forgiven since."""
        return instance_type in self._of

    def begin(self, instance_type: str, first_s: float, now_s: float) -> None:
        """Back an instance type off after a failure. Failures during a back-off do not prolong it."""
        known = self._of.setdefault(instance_type, _BackOff(next_s=first_s))
        if now_s >= known.until_s:
            known.until_s = now_s + known.next_s
            known.next_s = min(2 * known.next_s, MOST_BACK_OFF_S)

    def refuse(self, instance_type: str) -> None:
        """Back an instance type off for good."""
        self._of[instance_type] = _BackOff(next_s=math.inf, until_s=math.inf)

    def forgive(self, instance_type: str, now_s: float) -> None:
        """Reset an instance type's back-off to its first length; no effect while a back-off lasts."""
        if not self.holds(instance_type, now_s):
            self._of.pop(instance_type, None)


class InstanceRecords:
    """Instance types of a fleet, as configured and as measured.

    Args:
        instance_types: as configured.
        model: measured throughput.
        guesses: names of the instance types whose configured `mu` is only a guess.
    """

    def __init__(
        self, instance_types: Sequence[InstanceType], model: CapacityModel, guesses: Collection[str]
    ) -> None:
        self.set_instance_types(instance_types)
        self._model = model
        self._guesses = frozenset(guesses)
        self._rates = {
            instance_type.name: InterruptionRates(
                instance_type.interruptions_per_hour * PRIOR_HOURS, PRIOR_HOURS
            )
            for instance_type in instance_types
        }
        self._boots: dict[str, deque[float]] = {}  # seconds from asking for workers until they served
        self.back_offs = BackOffs()

    def set_instance_types(self, instance_types: Sequence[InstanceType]) -> None:
        """Replace the configured instance types by the same ones at other prices."""
        self._instance_types = tuple(instance_types)
        self._by_name = {instance_type.name: instance_type for instance_type in instance_types}

    def instance_types(
        self, counts: Mapping[str, int], beside: Counter[str], now_s: float
    ) -> tuple[InstanceType, ...]:
        """Return the instance types with measured values and the quotas left.

        Args:
            counts: workers of each instance type; a type that is backed off has room for no more.
            beside: other workers, which reduce the quotas.
            now_s: the time.
        """
        measured = [
            self._model.mu_of_instance_type(instance_type.name, math.nan)
            for instance_type in self._instance_types
        ]
        known = [mu for mu in measured if not math.isnan(mu)]
        usual = median(known) if known else None
        boots = [boot_s for some in self._boots.values() for boot_s in some]
        boot_s = median(boots) if boots else 0.0
        return tuple(
            self._now(instance_type, usual, boot_s, counts, beside[instance_type.name], now_s)
            for instance_type in self._instance_types
        )

    def _now(
        self,
        instance_type: InstanceType,
        usual: float | None,
        usual_boot_s: float,
        counts: Mapping[str, int],
        beside: int,
        now_s: float,
    ) -> InstanceType:
        most = max(instance_type.max_count - beside, 0)
        if self.back_offs.holds(instance_type.name, now_s):
            most = min(most, counts.get(instance_type.name, 0))
        believed = usual if usual is not None and instance_type.name in self._guesses else instance_type.mu
        rates = self._rates[instance_type.name]
        own_boots = self._boots.get(instance_type.name)
        return replace(
            instance_type,
            mu=self._model.mu_of_instance_type(instance_type.name, believed),
            interruptions_per_hour=rates.per_hour(
                instance_type.sku, instance_type.region, instance_type.market
            ),
            max_count=most,
            min_count=min(instance_type.min_count, most),
            boot_s=instance_type.boot_s or (median(own_boots) if own_boots else usual_boot_s),
        )

    def interrupted(self, instance_type: InstanceType) -> None:
        """Record an interruption of a worker of this instance type."""
        self._rates[instance_type.name].observe_interruption(
            instance_type.sku, instance_type.region, instance_type.market
        )

    def learn_boot(self, member: FleetWorker, now_s: float) -> None:
        """Record a worker's boot time. The first ones of a run include the wait for its first weights."""
        self._boots.setdefault(member.instance_type, deque(maxlen=RECENT_BOOTS)).append(
            now_s - member.asked_s
        )

    def learn_hours(self, member: FleetWorker, now_s: float) -> None:
        """Add the time since `member.seen_s` to the worker-hours of the interruption rates."""
        if member.seen_s is not None:
            instance_type = self._by_name[member.instance_type]
            hours = (now_s - member.seen_s) / 3600.0
            self._rates[instance_type.name].observe_hours(
                instance_type.sku, instance_type.region, instance_type.market, hours
            )
            member.seen_s = now_s

    def prove(self, member: FleetWorker, now_s: float) -> None:
        """Forgive the instance type of a worker that is no longer young, once for each worker."""
        since_s = member.served_since_s
        if since_s is not None and not member.proved and now_s - since_s >= YOUNG_S:
            member.proved = True
            self.back_offs.forgive(member.instance_type, now_s)
