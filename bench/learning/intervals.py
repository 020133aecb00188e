"""Intervals of means of few runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

# Of Student's t, by degrees of freedom from 1.
T_975 = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228]
T_975 += [2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093]


class Interval(NamedTuple):
    """A mean and half the width of its 95 % interval."""

    mean: float
    half: float

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    @property
    def holds_zero(self) -> bool:
        return self.low <= 0.0 <= self.high

    def __str__(self) -> str:
        return f"{self.mean:.4g} +- {self.half:.2g}"


def interval(values: Sequence[float]) -> Interval:
    """Student's t interval of the mean; infinite for one value, NaN for none."""
    n = len(values)
    if n < 2:
        return Interval(values[0] if values else math.nan, math.inf)
    return Interval(fmean(values), _t(n - 1) * stdev(values) / math.sqrt(n))


def difference(first: Sequence[float], second: Sequence[float]) -> Interval:
    """Student's t interval of mean(first) - mean(second), independent samples of one variance.

    One of the two may be a single value; infinite where both are.
    """
    means, free = (fmean(first), fmean(second)), len(first) + len(second) - 2
    if free < 1:
        return Interval(means[0] - means[1], math.inf)
    squares = sum((x - mean) ** 2 for xs, mean in zip((first, second), means, strict=True) for x in xs)
    error = math.sqrt(squares / free * (1 / len(first) + 1 / len(second)))
    return Interval(means[0] - means[1], _t(free) * error)


def _t(free: int) -> float:
    return T_975[free - 1] if free <= len(T_975) else 1.96
