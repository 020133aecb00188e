"""Estimates measured during a run: the learner's times, each worker's rate, the rate of spot interruptions.

Medians over sliding windows, so that one odd step, broadcast or heartbeat moves nothing.

Trust: the data plane knows the tokens and trajectories that were accepted; only the worker knows for how long
it was saturated. So its rate is believed within two bounds, and the excess is cut: at most LIE_FACTOR times
the tokens that were accepted of it, and at most LIE_FACTOR times the median of the other workers of its
offer. A worker that is alone in its offer has the first bound only. A worker of which nothing was accepted
yet has no estimate: the prior holds.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from operator import attrgetter, lt
from statistics import median

from echo_planes.errors import RefusedError
from echo_planes.fleet.capacity import Need
from echo_planes.types import Market

LIE_FACTOR = 3.0
LEARNER_WINDOW = 16  # learner steps
BROADCAST_WINDOW = 8
RATE_WINDOW = 24  # rates of one worker
MIN_RATES = 3  # before them one outlier would be the estimate
MIN_SATURATED_S = 1.0  # of one rate; shorter ones are joined


@dataclass(frozen=True, slots=True)
class ThroughputSample:
    """Cumulative counters of one incarnation of a worker.

    Saturated: no place was free, so a worker that waits for permits never looks slow.
    """

    saturated_tokens: int  # sampled while saturated, by the worker's own account
    saturated_s: float
    tokens: int  # sampled tokens in accepted trajectories
    trajectories: int  # accepted


_counters = attrgetter(*ThroughputSample.__slots__)  # `astuple` would copy every number with `deepcopy`


@dataclass(slots=True)
class _Worker:
    offer_name: str
    begin: ThroughputSample  # where the rate in the making begins
    newest: ThroughputSample
    # (now_s, tokens/s while saturated, the counters where it begins)
    rates: deque[tuple[float, float, ThroughputSample]] = field(default_factory=deque)
    rate: float | None = None  # tokens/s


class CapacityModel:
    """The online estimates of T_train, T_bcast and every mu_i.

    Args:
        window_s: rates of a worker that are older than this, counted from its newest, are forgotten.
    """

    def __init__(self, window_s: float = 900.0) -> None:
        self._window_s = window_s
        self._t_train_s: deque[float] = deque(maxlen=LEARNER_WINDOW)
        self._t_bcast_s: deque[float] = deque(maxlen=BROADCAST_WINDOW)
        self._workers: dict[str, _Worker] = {}
        self._of_offer: dict[str, set[str]] = {}
        self._sorted: dict[str, list[float]] = {}  # offer -> rates in ascending order, as long as they hold
        self._last_mu: dict[str, float] = {}  # offer -> its median when its last worker went
        self._length: float | None = None  # tokens per trajectory, as long as it holds

    def observe_step(self, t_train_s: float) -> None:
        """One learner step, seconds of training alone.

        Raises:
            RefusedError: not a positive number. Nothing is changed.
        """
        self._t_train_s.append(_possible("t_train_s", t_train_s, above=0.0))

    def observe_broadcast(self, t_bcast_s: float) -> None:
        """One publication, seconds until enough workers served it.

        Raises:
            RefusedError: not a number of at least 0. Nothing is changed.
        """
        self._t_bcast_s.append(_possible("t_bcast_s", t_bcast_s))

    def observe_worker(self, worker_id: str, offer_name: str, stats: ThroughputSample, now_s: float) -> None:
        """Counters of one worker. Counters that went back are of a new incarnation: it begins anew.

        Raises:
            RefusedError: a counter is negative or not a number. Nothing is changed.
        """
        counters = _counters(stats)
        if min(counters) < 0 or not math.isfinite(sum(counters)):  # some is not possible: which
            for name, value in zip(ThroughputSample.__slots__, counters, strict=True):
                _possible(f"worker {worker_id}: {name}", value)
        worker = self._workers.get(worker_id)
        if worker is not None and worker.offer_name != offer_name:
            self.forget(worker_id)
            worker = None
        if worker is None:
            zero = ThroughputSample(0, 0.0, 0, 0)
            worker = self._workers[worker_id] = _Worker(offer_name, zero, zero)
            self._of_offer.setdefault(offer_name, set()).add(worker_id)
        restarted = any(map(lt, counters, _counters(worker.newest)))
        if restarted:
            worker.begin = ThroughputSample(0, 0.0, 0, 0)
            worker.rates.clear()
        worker.newest = stats
        self._length = None
        saturated_s = stats.saturated_s - worker.begin.saturated_s
        if saturated_s >= MIN_SATURATED_S:
            tokens = stats.saturated_tokens - worker.begin.saturated_tokens
            worker.rates.append((now_s, tokens / saturated_s, worker.begin))
            worker.begin = stats
            while len(worker.rates) > RATE_WINDOW or worker.rates[0][0] < now_s - self._window_s:
                worker.rates.popleft()
        believed = self._believed(worker)
        if believed is not None or restarted:  # else what it was measured at stands: it is hardly ever full
            worker.rate = believed
        self._sorted.pop(offer_name, None)

    def forget(self, worker_id: str) -> None:
        """The worker is gone. What its offer was measured at is kept for when the offer comes back."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        mu = self.mu_of_offer(worker.offer_name, math.nan)
        del self._workers[worker_id]
        left = self._of_offer[worker.offer_name]
        left.remove(worker_id)
        self._sorted.pop(worker.offer_name, None)
        self._length = None
        if not left:
            del self._of_offer[worker.offer_name]
            if not math.isnan(mu):
                self._last_mu[worker.offer_name] = mu

    def need(
        self,
        max_staleness: int,
        kappa: int,
        per_step: int,
        gamma: float = 1.1,
        *,
        mu_first: float,
        uninformative: float = 0.0,
        rate_factor: float = 1.0,
    ) -> Need | None:
        """Return the learner's need now; None until a step was seen, and a broadcast or a worker's rate.

        The first broadcast that counts comes many steps late. Until then the choice of the first fleet is
        trusted: T_bcast is the longest with which that fleet reaches its target. Where it does not reach
        it even with none, T_train alone says that it is too small.

        Args:
            mu_first: trajectories/s of the first fleet.
            uninformative: u, share of what is sampled that refill replaces.
            rate_factor: share of the learning rate that drift control leaves.
        """
        is_measured = bool(self._last_mu) or any(self._rates(name) for name in self._of_offer)
        if not self._t_train_s or not (self._t_bcast_s or is_measured):
            return None
        t_train_s = median(self._t_train_s)
        if self._t_bcast_s:
            t_bcast_s = median(self._t_bcast_s)
        else:
            sampling_s = (
                gamma * kappa * per_step / (1.0 - uninformative) / mu_first if mu_first > 0 else math.inf
            )
            t_bcast_s = max(0.0, kappa * t_train_s - sampling_s)
        assumed = not self._t_bcast_s
        return Need(
            max_staleness, kappa, per_step, t_train_s, t_bcast_s, gamma, assumed, uninformative, rate_factor
        )

    def mu(self, worker_id: str, prior: float) -> float:
        """Trajectories/s of one worker when it never waits; `prior` where too little was measured."""
        worker, length = self._workers.get(worker_id), self._tokens_per_trajectory()
        if worker is None or worker.rate is None or length is None:
            return prior
        return self._bounded(worker.rate, self._rates(worker.offer_name)) / length

    def mu_of_offer(self, offer_name: str, prior: float) -> float:
        """The median of its workers, trajectories/s; what it last was where it has none; else `prior`."""
        rates, length = self._rates(offer_name), self._tokens_per_trajectory()
        if not rates or length is None:
            return self._last_mu.get(offer_name, prior)
        # A rate that the bound cuts stays above the others: the middle one or two are the same as before.
        middle = rates[(len(rates) - 1) // 2 : len(rates) // 2 + 1]
        return median(self._bounded(rate, rates) for rate in middle) / length

    def _believed(self, worker: _Worker) -> float | None:
        """Median rate, tokens/s, cut to what was accepted; None where that cannot be said yet."""
        newest = worker.newest
        if len(worker.rates) < MIN_RATES or newest.trajectories == 0 or newest.tokens == 0:
            return None
        claimed = median(rate for _, rate, _ in worker.rates)
        share = min(1.0, LIE_FACTOR * newest.tokens / max(newest.saturated_tokens, 1))
        return claimed * share or None

    def _rates(self, offer_name: str) -> list[float]:
        """Tokens/s of the workers of one offer, ascending."""
        if offer_name not in self._sorted:
            rates = (self._workers[name].rate for name in self._of_offer.get(offer_name, ()))
            self._sorted[offer_name] = sorted(rate for rate in rates if rate is not None)
        return self._sorted[offer_name]

    @staticmethod
    def _bounded(rate: float, of_offer: list[float]) -> float:
        """A worker's rate, at most LIE_FACTOR times the median of the others of its offer."""
        others = len(of_offer) - 1
        if others < 1:
            return rate
        own = bisect_left(of_offer, rate)
        low, high = ((others - 1) // 2, others // 2)  # the middle of the list without its own place
        middle = (of_offer[low + (low >= own)] + of_offer[high + (high >= own)]) / 2
        return min(rate, LIE_FACTOR * middle)

    def _tokens_per_trajectory(self) -> float | None:
        """Of what was accepted within the windows: the median over workers, so none can move it alone."""
        if self._length is None:
            lengths = []
            for worker in self._workers.values():
                newest, oldest = worker.newest, worker.rates[0][2] if worker.rates else worker.begin
                if (count := newest.trajectories - oldest.trajectories) > 0 and newest.tokens > oldest.tokens:
                    lengths.append((newest.tokens - oldest.tokens) / count)
            self._length = median(lengths) if lengths else None
        return self._length


class InterruptionRates:
    """Rates at which workers of a SKU, region and market are interrupted: Gamma-Poisson.

    A prior of `prior_events` in `prior_hours` worker-hours, to which what happens is added.
    """

    def __init__(self, prior_events: float, prior_hours: float) -> None:
        self._prior_events = _possible("prior_events", prior_events)
        self._prior_hours = _possible("prior_hours", prior_hours, above=0.0)
        self._events: dict[tuple[str, str, Market], float] = {}
        self._hours: dict[tuple[str, str, Market], float] = {}

    def observe_hours(self, sku: str, region: str, market: Market, hours: float) -> None:
        """Worker-hours that were served.

        Raises:
            RefusedError: not a number of at least 0.
        """
        key = (sku, region, market)
        self._hours[key] = self._hours.get(key, 0.0) + _possible("hours", hours)

    def observe_interruption(self, sku: str, region: str, market: Market) -> None:
        key = (sku, region, market)
        self._events[key] = self._events.get(key, 0.0) + 1

    def per_hour(self, sku: str, region: str, market: Market) -> float:
        """Expected interruptions an hour of one worker."""
        key = (sku, region, market)
        events = self._prior_events + self._events.get(key, 0.0)
        return events / (self._prior_hours + self._hours.get(key, 0.0))


def _possible(name: str, value: float, above: float | None = None) -> float:
    if not math.isfinite(value) or value < 0 or (above is not None and value <= above):
        least = "at least 0" if above is None else f"above {above:g}"
        raise RefusedError(f"{name}={value}: must be a number {least}; this measurement is not used")
    return value
