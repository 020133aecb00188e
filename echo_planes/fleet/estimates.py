"""Estimates measured during a run: the learner's times, each worker's rate, the rate of spot interruptions.

Estimates are medians over sliding windows, so one outlier among steps, broadcasts or samples changes little.

Trust: the data plane counts the accepted tokens and trajectories itself, but only the worker can report how
long it was saturated. So the model cuts a reported rate to two bounds: LIE_FACTOR times the accepted tokens,
and LIE_FACTOR times the median of the other workers of the instance type. The only worker of an instance type
has the first bound alone. A worker without accepted trajectories has no estimate: its prior applies.
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
MIN_RATES = 3  # with fewer, one outlier would decide the estimate
MIN_SATURATED_S = 1.0  # saturated seconds that one rate covers at least; shorter periods are merged


@dataclass(frozen=True, slots=True)
class ThroughputSample:
    """Cumulative counters of one incarnation of a worker.

    A worker is saturated while it has no free place. Its rate counts saturated time only, so waiting for
    permits does not lower it.
    """

    saturated_tokens: int  # sampled while saturated, as the worker reports
    saturated_s: float
    tokens: int  # sampled tokens in accepted trajectories
    trajectories: int  # accepted


_counters = attrgetter(*ThroughputSample.__slots__)  # `astuple` would copy every number with `deepcopy`


@dataclass(slots=True)
class _Worker:
    instance_type_name: str
    begin: ThroughputSample  # counters at the start of the next rate
    newest: ThroughputSample
    # (now_s, tokens/s while saturated, counters at the start of the rate)
    rates: deque[tuple[float, float, ThroughputSample]] = field(default_factory=deque)
    rate: float | None = None  # tokens/s


class CapacityModel:
    """Online estimates of T_train, T_bcast and every mu_i.

    Args:
        window_s: seconds; the model drops a worker's rates that are older than this at its newest rate.
    """

    def __init__(self, window_s: float = 900.0) -> None:
        self._window_s = window_s
        self._t_train_s: deque[float] = deque(maxlen=LEARNER_WINDOW)
        self._t_bcast_s: deque[float] = deque(maxlen=BROADCAST_WINDOW)
        self._workers: dict[str, _Worker] = {}
        self._of_instance_type: dict[str, set[str]] = {}
        self._sorted: dict[str, list[float]] = {}  # cache: instance type -> rates in ascending order
        self._last_mu: dict[str, float] = {}  # instance type -> its median when its last worker ended
        self._length: float | None = None  # cache: tokens per trajectory

    def observe_step(self, t_train_s: float) -> None:
        """Record one learner step, in seconds of training alone.

        Raises:
            RefusedError: not a positive number. The model stays unchanged.
        """
        self._t_train_s.append(_possible("t_train_s", t_train_s, above=0.0))

    def observe_broadcast(self, t_bcast_s: float) -> None:
        """Record one publication, in seconds until enough workers served it.

        Raises:
            RefusedError: not a number of at least 0. The model stays unchanged.
        """
        self._t_bcast_s.append(_possible("t_bcast_s", t_bcast_s))

    def observe_worker(
        self, worker_id: str, instance_type_name: str, stats: ThroughputSample, now_s: float
    ) -> None:
        """Record the counters of one worker. A counter that fell marks a new incarnation, without rates.

        Raises:
            RefusedError: a counter is negative or not a number. The model stays unchanged.
        """
        counters = _counters(stats)
        if min(counters) < 0 or not math.isfinite(sum(counters)):  # find the impossible counter
            for name, value in zip(ThroughputSample.__slots__, counters, strict=True):
                _possible(f"worker {worker_id}: {name}", value)
        worker = self._workers.get(worker_id)
        if worker is not None and worker.instance_type_name != instance_type_name:
            self.forget(worker_id)
            worker = None
        if worker is None:
            zero = ThroughputSample(0, 0.0, 0, 0)
            worker = self._workers[worker_id] = _Worker(instance_type_name, zero, zero)
            self._of_instance_type.setdefault(instance_type_name, set()).add(worker_id)
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
        if believed is not None or restarted:  # otherwise keep the old rate of a worker that is seldom full
            worker.rate = believed
        self._sorted.pop(instance_type_name, None)

    def forget(self, worker_id: str) -> None:
        """Forget a worker. If it was the last of its instance type, keep the type's mu for later workers."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        mu = self.mu_of_instance_type(worker.instance_type_name, math.nan)
        del self._workers[worker_id]
        left = self._of_instance_type[worker.instance_type_name]
        left.remove(worker_id)
        self._sorted.pop(worker.instance_type_name, None)
        self._length = None
        if not left:
            del self._of_instance_type[worker.instance_type_name]
            if not math.isnan(mu):
                self._last_mu[worker.instance_type_name] = mu

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
        """Return the learner's need now; None before a step and either a broadcast or a rate are recorded.

        The first broadcast that counts comes many steps after the start. Until then the model takes T_bcast
        as the longest with which the first fleet reaches its target, or 0 if that fleet never reaches it.

        Args:
            max_staleness: S.
            kappa: learner steps between publications.
            per_step: R, trajectories a step.
            gamma: redundancy of the fleet.
            mu_first: trajectories/s of the first fleet.
            uninformative: u, share of the sampled trajectories that refill replaces.
            rate_factor: share of the learning rate that drift control leaves.
        """
        is_measured = bool(self._last_mu) or any(self._rates(name) for name in self._of_instance_type)
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
        """Return the trajectories/s of one worker that never waits; `prior` if too little is measured."""
        worker, length = self._workers.get(worker_id), self._tokens_per_trajectory()
        if worker is None or worker.rate is None or length is None:
            return prior
        return self._bounded(worker.rate, self._rates(worker.instance_type_name)) / length

    def mu_of_instance_type(self, instance_type_name: str, prior: float) -> float:
        """Return the median trajectories/s of a type's workers, else its last known median, else `prior`."""
        rates, length = self._rates(instance_type_name), self._tokens_per_trajectory()
        if not rates or length is None:
            return self._last_mu.get(instance_type_name, prior)
        # A cut rate stays above the median of the others, so the cut does not change which rates are middle.
        middle = rates[(len(rates) - 1) // 2 : len(rates) // 2 + 1]
        return median(self._bounded(rate, rates) for rate in middle) / length

    def _believed(self, worker: _Worker) -> float | None:
        """Return the worker's median rate, tokens/s, cut by its accepted tokens; None if data is missing."""
        newest = worker.newest
        if len(worker.rates) < MIN_RATES or newest.trajectories == 0 or newest.tokens == 0:
            return None
        claimed = median(rate for _, rate, _ in worker.rates)
        share = min(1.0, LIE_FACTOR * newest.tokens / max(newest.saturated_tokens, 1))
        return claimed * share or None

    def _rates(self, instance_type_name: str) -> list[float]:
        """Return the tokens/s of the workers of one instance type, ascending."""
        if instance_type_name not in self._sorted:
            rates = (self._workers[name].rate for name in self._of_instance_type.get(instance_type_name, ()))
            self._sorted[instance_type_name] = sorted(rate for rate in rates if rate is not None)
        return self._sorted[instance_type_name]

    @staticmethod
    def _bounded(rate: float, of_instance_type: list[float]) -> float:
        """Return a worker's rate, cut to LIE_FACTOR times the median of the others of its instance type."""
        others = len(of_instance_type) - 1
        if others < 1:
            return rate
        own = bisect_left(of_instance_type, rate)
        low, high = ((others - 1) // 2, others // 2)  # middle of the list without the worker itself
        middle = (of_instance_type[low + (low >= own)] + of_instance_type[high + (high >= own)]) / 2
        return min(rate, LIE_FACTOR * middle)

    def _tokens_per_trajectory(self) -> float | None:
        """Return accepted tokens per trajectory: the median over workers, which no single one decides."""
        if self._length is None:
            lengths = []
            for worker in self._workers.values():
                newest, oldest = worker.newest, worker.rates[0][2] if worker.rates else worker.begin
                if (count := newest.trajectories - oldest.trajectories) > 0 and newest.tokens > oldest.tokens:
                    lengths.append((newest.tokens - oldest.tokens) / count)
            self._length = median(lengths) if lengths else None
        return self._length


class InterruptionRates:
    """Interruption rates by SKU, region and market, Gamma-Poisson.

    Args:
        prior_events: interruptions that the prior counts.
        prior_hours: worker-hours that the prior counts, above 0.
    """

    def __init__(self, prior_events: float, prior_hours: float) -> None:
        self._prior_events = _possible("prior_events", prior_events)
        self._prior_hours = _possible("prior_hours", prior_hours, above=0.0)
        self._events: dict[tuple[str, str, Market], float] = {}
        self._hours: dict[tuple[str, str, Market], float] = {}

    def observe_hours(self, sku: str, region: str, market: Market, hours: float) -> None:
        """Add worker-hours.

        Raises:
            RefusedError: not a number of at least 0.
        """
        key = (sku, region, market)
        self._hours[key] = self._hours.get(key, 0.0) + _possible("hours", hours)

    def observe_interruption(self, sku: str, region: str, market: Market) -> None:
        key = (sku, region, market)
        self._events[key] = self._events.get(key, 0.0) + 1

    def per_hour(self, sku: str, region: str, market: Market) -> float:
        """Return the expected interruptions per worker-hour."""
        key = (sku, region, market)
        events = self._prior_events + self._events.get(key, 0.0)
        return events / (self._prior_hours + self._hours.get(key, 0.0))


def _possible(name: str, value: float, above: float | None = None) -> float:
    if not math.isfinite(value) or value < 0 or (above is not None and value <= above):
        least = "at least 0" if above is None else f"above {above:g}"
        raise RefusedError(f"{name}={value}: must be a number {least}; this measurement is not used")
    return value
