"""Detection of slow workers: each worker's throughput while full, compared with its instance type's.

A worker is slow if, over its last `SLOW_S` seconds without a free place, it made less than `SLOW_SHARE` of
the usual throughput. Time in which it waited for permits does not count. The usual throughput is the median
of the other workers of the instance type, each over as long a time. A worker without a measured peer is
compared with its own throughput over the `PAST_S` full seconds before. The configured throughput of a type is
no reference: a value that is too high would have every worker of that type replaced for ever.

The window is long because a full worker decodes little while it waits for the longest answers of its groups.
With two groups of 16 at once, its throughput varies by 23 % over 60 s, 8 % over 240 s and 5 % over 480 s
(simulated, lognormal lengths; the least of 10,000 stretches of 240 s was 70 % of the mean). A worker that
falls to half its speed is below the limit after 192 s. Fewer and longer answers vary more. So the watch
measures the noise between consecutive stretches of each worker; a worker within `NOISE_SIGMAS` is not slow.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from echo_planes.fleet.estimates import ThroughputSample

SLOW_SHARE = 0.6  # of the usual throughput
SLOW_S = 240.0  # seconds without a free place
PAST_S = 900.0  # full seconds of a worker's own past
MEASURE_S = 10.0  # full seconds of one measure at least; shorter periods are merged
NOISE_SIGMAS = 4.0  # eight workers make about 3,000 stretches a day, so few exceed this by chance
ENOUGH_CHANGES = (
    8  # changes between stretches, over all workers of a type; with fewer, no worker counts as slow
)
RECENT_CHANGES = 16  # changes kept of a worker
# Standard deviation of normal noise divided by its median absolute change.
_SIGMA_PER_CHANGE = 1 / (0.6745 * math.sqrt(2))


@dataclass(frozen=True, slots=True)
class Slowness:
    """Measured throughput of a slow worker and the usual one."""

    tokens_per_s: float  # while the worker was full
    usual_tokens_per_s: float  # of its instance type, or of its own past
    alone: bool  # compared with its own past

    @property
    def share(self) -> float:
        return self.tokens_per_s / self.usual_tokens_per_s

    @property
    def text(self) -> str:
        whose = "it made before" if self.alone else "others of its kind make"
        return (
            f"{self.tokens_per_s:.0f} tokens/s over {SLOW_S:.0f} s without a free place, {self.share:.0%} of "
            f"the {self.usual_tokens_per_s:.0f} that {whose}"
        )


@dataclass(slots=True)
class _Stretch:
    """Newest measures that add up to at least `most_s` full seconds."""

    most_s: float
    measures: deque[tuple[float, float]] = field(default_factory=deque)  # tokens, seconds
    tokens: float = 0.0
    full_s: float = 0.0

    def add(self, tokens: float, full_s: float) -> list[tuple[float, float]]:
        """Add a measure and return the oldest measures, which leave the stretch."""
        self.measures.append((tokens, full_s))
        self.tokens, self.full_s = self.tokens + tokens, self.full_s + full_s
        out = []
        while self.full_s - self.measures[0][1] >= self.most_s:
            out.append(self.measures.popleft())
            self.tokens, self.full_s = self.tokens - out[-1][0], self.full_s - out[-1][1]
        return out

    @property
    def tokens_per_s(self) -> float | None:
        """Mean throughput; None until the stretch is `most_s` seconds long."""
        return self.tokens / self.full_s if self.full_s >= self.most_s else None


@dataclass(slots=True)
class _Pace:
    begin: ThroughputSample  # counters at the start of the next measure
    now: _Stretch = field(default_factory=lambda: _Stretch(SLOW_S))
    past: _Stretch = field(default_factory=lambda: _Stretch(PAST_S))  # before `now`
    whole: _Stretch = field(default_factory=lambda: _Stretch(SLOW_S))  # consecutive, without overlap
    last: float | None = None  # speed of the previous whole stretch
    changes: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_CHANGES))  # relative

    def add(self, tokens: float, full_s: float) -> None:
        """Add a measure."""
        for measure in self.now.add(tokens, full_s):
            self.past.add(*measure)
        self.whole.add(tokens, full_s)
        speed = self.whole.tokens_per_s
        if speed is None:
            return
        if self.last is not None and speed + self.last > 0:
            self.changes.append(abs(speed - self.last) / (0.5 * (speed + self.last)))
        self.whole, self.last = _Stretch(SLOW_S), speed


class SpeedWatch:
    """Watch for slow workers: `measured` takes every sample, `slow` returns the slow workers."""

    def __init__(self) -> None:
        self._paces: dict[str, _Pace] = {}

    def measured(self, worker_id: str, sample: ThroughputSample) -> None:
        """Take the cumulative counters of a worker. If its saturated time fell, the worker starts anew."""
        pace = self._paces.get(worker_id)
        if pace is None or sample.saturated_s < pace.begin.saturated_s:
            self._paces[worker_id] = _Pace(sample)
            return
        full_s = sample.saturated_s - pace.begin.saturated_s
        if full_s >= MEASURE_S:
            pace.add(sample.saturated_tokens - pace.begin.saturated_tokens, full_s)
            pace.begin = sample

    def forget(self, worker_id: str) -> None:
        """Forget a worker."""
        self._paces.pop(worker_id, None)

    def slow(self, workers: Sequence[str]) -> dict[str, Slowness]:
        """Return the slow ones among `workers`, which are of one instance type, by worker id."""
        known = {name: speed for name in workers if (speed := self._speed(name)) is not None}
        if len(known) == 1:
            ((name, speed),) = known.items()
            before = self._paces[name].past.tokens_per_s
            if before is None or speed >= SLOW_SHARE * before or speed >= self._limit(workers) * before:
                return {}
            return {name: Slowness(speed, before, alone=True)}
        found, most = {}, max(known.values(), default=0.0)
        for name, speed in known.items():
            if speed >= SLOW_SHARE * most:
                continue
            usual = median(other for one, other in known.items() if one != name)
            # The noise of many workers is slow to compute, so only a candidate's is computed.
            if speed < SLOW_SHARE * usual and speed < self._limit(workers) * usual:
                found[name] = Slowness(speed, usual, alone=False)
        return found

    def _limit(self, workers: Sequence[str]) -> float:
        """Return the share of the usual speed below which a worker is slow; 0 until the noise is known."""
        paces = [self._paces[name] for name in workers if name in self._paces]
        changes = [change for pace in paces for change in pace.changes]
        if len(changes) < ENOUGH_CHANGES:
            return 0.0
        return min(SLOW_SHARE, 1 - NOISE_SIGMAS * _SIGMA_PER_CHANGE * median(changes))

    def _speed(self, worker_id: str) -> float | None:
        pace = self._paces.get(worker_id)
        return None if pace is None else pace.now.tokens_per_s


def worst(slow: Mapping[str, Slowness], num_serving: int) -> str | None:
    """Return the slowest worker of one instance type, the one to replace now, or None.

    If more than half of several workers are slow, the usual throughput is wrong, not the workers: None.
    """
    if not slow or (num_serving > 1 and 2 * len(slow) > num_serving):
        return None
    return min(slow, key=lambda worker_id: (slow[worker_id].share, worker_id))
