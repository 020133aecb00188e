"""Workers that are slow: told from the others of their offer by what they make while they are full.

A worker is slow if, over the last `SLOW_S` seconds in which it had no free place, it made less than
`SLOW_SHARE` of what its offer gives. Time in which it waited for permits counts neither for it nor against
it. What its offer gives is the median over the other workers of it, each over as long a time. One that is
alone is held against itself: what it made in the `PAST_S` seconds before that, likewise full. What the
settings believe of an offer is no measure: a fleet file that promises too much would have every worker of it
replaced, for ever.

Why so long: a full worker waits for the longest answers of its groups, and makes little meanwhile. With two
groups of 16 at once, what it makes varies by 23 % over 60 s, by 8 % over 240 s and by 5 % over 480 s
(simulated, lognormal lengths; the least of 10,000 stretches of 240 s was 70 % of the mean). A worker that
falls to half its speed is below after 192 s. Fewer and longer answers vary more. So the noise is measured,
from one stretch of each worker to its next, and who is within `NOISE_SIGMAS` of it is not slow.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from echo_planes.fleet.estimates import ThroughputSample

SLOW_SHARE = 0.6  # of what its offer gives
SLOW_S = 240.0  # without a free place
PAST_S = 900.0  # of a worker that is alone
MEASURE_S = 10.0  # of one measure; shorter ones are joined
NOISE_SIGMAS = 4.0  # eight workers for a day are 3,000 stretches
ENOUGH_CHANGES = 8  # from one stretch to the next, of all workers of an offer; before, none is called slow
RECENT_CHANGES = 16  # of a worker
# Of normal noise: its standard deviation by the median change.
_SIGMA_PER_CHANGE = 1 / (0.6745 * math.sqrt(2))


@dataclass(frozen=True, slots=True)
class Slowness:
    """Slowness of a worker: its measured throughput beside the usual one."""

    tokens_per_s: float  # while it was full
    usual_tokens_per_s: float  # what its offer gives
    alone: bool  # measured against its own past

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
    """The newest measures that come to so many seconds."""

    most_s: float
    measures: deque[tuple[float, float]] = field(default_factory=deque)  # tokens, seconds
    tokens: float = 0.0
    full_s: float = 0.0

    def add(self, tokens: float, full_s: float) -> list[tuple[float, float]]:
        """One more measure; returns the oldest, which are no longer of it."""
        self.measures.append((tokens, full_s))
        self.tokens, self.full_s = self.tokens + tokens, self.full_s + full_s
        out = []
        while self.full_s - self.measures[0][1] >= self.most_s:
            out.append(self.measures.popleft())
            self.tokens, self.full_s = self.tokens - out[-1][0], self.full_s - out[-1][1]
        return out

    @property
    def tokens_per_s(self) -> float | None:
        """None: it is not long enough yet."""
        return self.tokens / self.full_s if self.full_s >= self.most_s else None


@dataclass(slots=True)
class _Pace:
    begin: ThroughputSample  # where the measure in the making begins
    now: _Stretch = field(default_factory=lambda: _Stretch(SLOW_S))
    past: _Stretch = field(default_factory=lambda: _Stretch(PAST_S))  # before that
    whole: _Stretch = field(default_factory=lambda: _Stretch(SLOW_S))  # one that begins where the last ended
    last: float | None = None  # speed in the one before
    changes: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_CHANGES))  # relative

    def add(self, tokens: float, full_s: float) -> None:
        """One more measure."""
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
    """Tells which workers are slow. Give every sample to `measured`, and ask `slow` at every look."""

    def __init__(self) -> None:
        self._paces: dict[str, _Pace] = {}

    def measured(self, worker_id: str, sample: ThroughputSample) -> None:
        """Counters of a worker, cumulative. Where they went back it begins anew."""
        pace = self._paces.get(worker_id)
        if pace is None or sample.saturated_s < pace.begin.saturated_s:
            self._paces[worker_id] = _Pace(sample)
            return
        full_s = sample.saturated_s - pace.begin.saturated_s
        if full_s >= MEASURE_S:
            pace.add(sample.saturated_tokens - pace.begin.saturated_tokens, full_s)
            pace.begin = sample

    def forget(self, worker_id: str) -> None:
        """The worker is gone."""
        self._paces.pop(worker_id, None)

    def slow(self, workers: Sequence[str]) -> dict[str, Slowness]:
        """Slowness of each worker of one offer that is slow, by worker id."""
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
            # The noise of many workers takes long to tell: only where a worker may be slow.
            if speed < SLOW_SHARE * usual and speed < self._limit(workers) * usual:
                found[name] = Slowness(speed, usual, alone=False)
        return found

    def _limit(self, workers: Sequence[str]) -> float:
        """Share of the usual speed below which a worker is slow; 0 where the noise is not known yet."""
        paces = [self._paces[name] for name in workers if name in self._paces]
        changes = [change for pace in paces for change in pace.changes]
        if len(changes) < ENOUGH_CHANGES:
            return 0.0
        return min(SLOW_SHARE, 1 - NOISE_SIGMAS * _SIGMA_PER_CHANGE * median(changes))

    def _speed(self, worker_id: str) -> float | None:
        pace = self._paces.get(worker_id)
        return None if pace is None else pace.now.tokens_per_s


def worst(slow: Mapping[str, Slowness], num_serving: int) -> str | None:
    """Return the slow worker of one offer that is to be replaced now, or None.

    One at a time, the slowest. Where most of several are slow, what is believed of the offer is wrong, not
    its workers.
    """
    if not slow or (num_serving > 1 and 2 * len(slow) > num_serving):
        return None
    return min(slow, key=lambda worker_id: (slow[worker_id].share, worker_id))
