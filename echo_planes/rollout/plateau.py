"""Batch size at which an engine's throughput levels off, measured while it works (RLBoost, section 4.2.1).

A decode step gives every running request one token. Its time grows with the batch size and with the context
of its requests, whose keys and values it reads each time. RLBoost records a table of throughput by batch size
online and calibrates it for the present context length; a fit over both at once was worse. `BatchProfile`
therefore keeps a table of medians by batch size, and one slope moves each median to the present context.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from echo_planes.errors import ConfigError

MAX_BATCH = 2**16  # requests at once; more than any engine runs
BUCKETS_PER_DOUBLING = 4  # of the batch size
RECENT_SAMPLES = 32  # of a bucket; older ones were taken under other contexts
MIN_SAMPLES = 3  # of a bucket: with fewer its median may be an outlier
MIN_BUCKETS = 3  # fewer show no shape of the curve
_CONTEXT_SPREAD = 1.4  # smallest ratio of two samples' contexts from which a slope is computed

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Sample:
    running: float  # requests executing, mean over the sample
    step_s: float  # seconds of a decode step: running / (tokens/s)
    context_tokens: float  # mean over the requests


@dataclass(slots=True)
class _Bucket:
    samples: deque[_Sample] = field(default_factory=lambda: deque(maxlen=RECENT_SAMPLES))

    def middle(self) -> _Sample:
        """Return the median of each field, taken separately."""
        return _Sample(
            statistics.median(sample.running for sample in self.samples),
            statistics.median(sample.step_s for sample in self.samples),
            statistics.median(sample.context_tokens for sample in self.samples),
        )


class BatchProfile:
    """Throughput by batch size of one kind of engine.

    Args:
        max_batch: requests that the engine can execute at once, 1 to `MAX_BATCH`.
        share: share of the best throughput that the plateau must reach, above 0 and at most 1.

    Raises:
        ConfigError: a value is outside its range.
    """

    def __init__(self, max_batch: int, *, share: float = 0.9) -> None:
        if not 1 <= max_batch <= MAX_BATCH:
            raise ConfigError(f"batch profile: max_batch is {max_batch}; take 1 to {MAX_BATCH} requests")
        if not 0 < share <= 1:
            raise ConfigError(f"batch profile: share is {share}; take a share above 0, at most 1")
        self._max_batch = max_batch
        self._share = share
        self._buckets: dict[int, _Bucket] = {}
        self._contexts: deque[float] = deque(maxlen=RECENT_SAMPLES)

    def observe(self, running: float, tokens: int, seconds: float, context_tokens: float = 0.0) -> bool:
        """Record one interval of decoding; return whether it was usable.

        Args:
            running: requests executing, mean over the interval; usable from 1 to `max_batch`.
            tokens: tokens sampled in the interval, over all requests.
            seconds: length of the interval.
            context_tokens: mean length of prompt and answer so far. Always 0: no calibration.
        """
        numbers = (running, tokens, seconds, context_tokens)
        if not all(map(math.isfinite, numbers)) or min(numbers) < 0:
            return False
        if not 1 <= running <= self._max_batch or tokens == 0 or seconds == 0:
            return False
        sample = _Sample(running, running * seconds / tokens, context_tokens)
        number = round(math.log2(running) * BUCKETS_PER_DOUBLING)
        self._buckets.setdefault(number, _Bucket()).samples.append(sample)
        self._contexts.append(context_tokens)
        return True

    def tokens_per_s(self, context_tokens: float | None = None) -> Floats | None:
        """Return tokens per second at batch 1, 2, ..., `max_batch`, shape (max_batch,).

        Between the observed batch sizes the step time is interpolated. Below them it is that of the smallest.
        Above them it grows at the rate of the larger half of the observed sizes. None while fewer than
        `MIN_BUCKETS` buckets have `MIN_SAMPLES` samples.

        Args:
            context_tokens: mean context to calibrate for; None: the median of the recent samples.
        """
        known = [bucket for bucket in self._buckets.values() if len(bucket.samples) >= MIN_SAMPLES]
        if len(known) < MIN_BUCKETS:
            return None
        if context_tokens is None:
            context_tokens = statistics.median(self._contexts)
        slope = _context_slope(known)
        table = sorted((bucket.middle() for bucket in known), key=lambda middle: middle.running)
        batches = np.array([middle.running for middle in table])
        step_s = np.array([m.step_s + slope * m.running * (context_tokens - m.context_tokens) for m in table])
        # Far from the observed contexts the line could fall below zero.
        step_s = np.maximum(step_s, 0.1 * np.array([middle.step_s for middle in table]))
        every = np.arange(1, self._max_batch + 1, dtype=np.float64)
        curve = np.interp(every, batches, step_s)
        growth_s = _growth(batches, step_s)
        curve += growth_s * np.maximum(0.0, every - batches[-1])
        throughput: Floats = every / curve
        return throughput

    def plateau(self, context_tokens: float | None = None) -> int | None:
        """Return the smallest batch with at least `share` of the best throughput, observed or extrapolated.

        None while `tokens_per_s` is.
        """
        throughput = self.tokens_per_s(context_tokens)
        if throughput is None:
            return None
        return 1 + int(np.argmax(throughput >= self._share * throughput.max()))


def _context_slope(buckets: list[_Bucket]) -> float:
    """Return the seconds that one more token of context adds to a step, per request; 0 where unknown.

    Only samples of one bucket are compared, pair by pair, so the batch size has little influence. The median
    of all pairs tolerates a few outliers.
    """
    slopes = [np.zeros(0)]
    for bucket in buckets:
        running = np.array([sample.running for sample in bucket.samples])
        step_s = np.array([sample.step_s for sample in bucket.samples])
        # A mean below one token counts as one: differences near 0 would divide to infinity.
        context = np.maximum([sample.context_tokens for sample in bucket.samples], 1.0)
        low, high = np.nonzero(context[:, None] * _CONTEXT_SPREAD < context[None, :])
        # Tokens that one step read more than the other; above 0, since a bucket is narrower than the spread.
        more = running[high] * context[high] - running[low] * context[low]
        slopes.append((step_s[high] - step_s[low]) / more)
    slope = np.concatenate(slopes)
    return max(0.0, float(np.median(slope))) if len(slope) else 0.0


def _growth(batches: Floats, step_s: Floats) -> float:
    """Return the seconds that one more request adds to a step: median of pairs in the table's larger half."""
    half = min(len(batches) // 2, len(batches) - MIN_BUCKETS)
    batches, step_s = batches[half:], step_s[half:]
    low, high = np.triu_indices(len(batches), 1)
    return max(0.0, float(np.median((step_s[high] - step_s[low]) / (batches[high] - batches[low]))))
