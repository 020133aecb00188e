"""Workers that are slow: told from the others of their offer by what they make while they are full.

A worker is slow once it stayed below `SLOW_SHARE` of what its offer gives for `SLOW_S` seconds in which it
had no free place: time in which it waited for permits counts neither for it nor against it. What its offer
gives is the median of the other workers of it. One that is alone is held against itself: the median of what
it made before, in the last `WINDOW_S` seconds without a free place. What the settings believe of an offer is
no measure: a fleet file that promises too much would have every worker of it replaced, for ever.

Against noise: every one of the measures of these `SLOW_S` seconds must be below. One that is not, and the
worker is no longer slow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from echo_planes.rollout.estimates import ThroughputSample

SLOW_SHARE = 0.7  # of what its offer gives
SLOW_S = 60.0
MEASURE_S = 10.0  # of one measure; shorter ones are joined
WINDOW_S = 900.0
MIN_MEASURES = 6  # before them a worker that is alone has no past


@dataclass(frozen=True, slots=True)
class Slowness:
    """How slow a worker is."""

    tokens_per_s: float  # while it was full
    usual_tokens_per_s: float  # what its offer gives
    full_s: float  # how long that lasts, time without a free place
    alone: bool  # measured against its own past

    @property
    def share(self) -> float:
        return self.tokens_per_s / self.usual_tokens_per_s

    @property
    def text(self) -> str:
        whose = "it made before" if self.alone else "others of its kind make"
        return (
            f"{self.tokens_per_s:.0f} tokens/s in {self.full_s:.0f} s without a free place, "
            f"{self.share:.0%} of the {self.usual_tokens_per_s:.0f} that {whose}: below {SLOW_SHARE:.0%}"
        )


@dataclass(slots=True)
class _Pace:
    begin: ThroughputSample  # where the measure in the making begins
    fresh: list[tuple[float, float]] = field(default_factory=list)  # tokens and seconds, not judged yet
    # tokens/s while it was not slow, the newest last
    past: deque[float] = field(default_factory=lambda: deque(maxlen=round(WINDOW_S / MEASURE_S)))
    slow_s: float = 0.0  # how long it has been slow
    slow_tokens: float = 0.0  # made in that time
    usual: float = 0.0  # as judged last


class SpeedWatch:
    """Tells which workers are slow. Give every sample to `measured`, and ask `slowness` at every look."""

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
            pace.fresh.append((sample.saturated_tokens - pace.begin.saturated_tokens, full_s))
            pace.begin = sample

    def forget(self, worker_id: str) -> None:
        """The worker is gone."""
        self._paces.pop(worker_id, None)

    def slowness(self, worker_id: str, of_others: float | None) -> Slowness | None:
        """How slow a worker is; None: it is not, or not yet for long enough.

        Args:
            worker_id: who.
            of_others: tokens/s that the others of its offer make, the median; None: it is alone.
        """
        pace = self._paces.get(worker_id)
        if pace is None:
            return None
        for tokens, full_s in pace.fresh:
            usual = of_others
            if usual is None and len(pace.past) >= MIN_MEASURES:
                usual = median(pace.past)
            if usual is not None and tokens < SLOW_SHARE * usual * full_s:
                pace.slow_s, pace.slow_tokens = pace.slow_s + full_s, pace.slow_tokens + tokens
                pace.usual = usual
            else:
                pace.slow_s = pace.slow_tokens = 0.0
                pace.past.append(tokens / full_s)
        pace.fresh.clear()
        if pace.slow_s < SLOW_S:
            return None
        return Slowness(pace.slow_tokens / pace.slow_s, pace.usual, pace.slow_s, of_others is None)


def worst(slow: Mapping[str, Slowness], num_serving: int) -> str | None:
    """Which of the slow workers of one offer is to be replaced now, or none.

    One at a time, the slowest. Where most of several are slow, what is believed of the offer is wrong, not
    its workers.
    """
    if not slow or (num_serving > 1 and 2 * len(slow) > num_serving):
        return None
    return min(slow, key=lambda worker_id: (slow[worker_id].share, worker_id))
