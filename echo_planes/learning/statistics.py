"""Figures of a step's scored tokens: distance of the learner from the sampling policies. numpy only.

log w = log pi_learner - log pi_sampler at the start of the step, nats. k3 = w - 1 - log w is Schulman's
estimate of KL(sampler || learner), never negative; its mean is steadier than that of -log w.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from echo_planes.types import FloatArray, IntArray, LagStats, Noise

LONGEST = 20.0  # nats: larger |log w| count as this in k3 and effective samples, which they would dominate
QUANTILES = (0.5, 0.99, 0.999, 1.0)


@dataclass(frozen=True, slots=True)
class WeightStats:
    """Figures of w over M tokens; all None where M is 0."""

    mean: float | None = None  # |log w|
    p99: float | None = None
    k3: float | None = None
    effective: float | None = None  # (sum w)^2 / (M sum w^2)
    quantiles: tuple[float, float, float, float] | None = None  # of |log w|: 50, 99, 99.9 %, largest


def weight_stats(log_weight: FloatArray) -> WeightStats:
    """Return the figures of `log_weight`, log w (M,)."""
    if not len(log_weight):
        return WeightStats()
    size = np.abs(log_weight)
    median, p99, p999, largest = np.quantile(size, QUANTILES).tolist()
    weight = np.exp(np.clip(log_weight, -LONGEST, LONGEST).astype(np.float64))
    return WeightStats(
        mean=float(size.mean()),
        p99=p99,
        k3=float(_k3(log_weight).mean()),
        effective=float(weight.sum() ** 2 / (len(weight) * (weight**2).sum())),
        quantiles=(median, p99, p999, largest),
    )


def lag_stats(log_weight: FloatArray, lags: IntArray, trained: FloatArray) -> tuple[LagStats, ...]:
    """Return the figures of each lag, ascending, without lags that have no scored token.

    Args:
        log_weight: log w of the scored tokens (M,).
        lags: lags of the same tokens (M,).
        trained: numbers of tokens trained, truncated, masked and clipped, per lag (num_lags, 4).
    """
    tokens = np.bincount(lags, minlength=len(trained))
    drift = np.bincount(lags, np.abs(log_weight), minlength=len(trained))
    k3 = np.bincount(lags, _k3(log_weight), minlength=len(trained))
    return tuple(
        LagStats(
            lag=lag,
            tokens=int(tokens[lag]),
            drift=float(drift[lag] / tokens[lag]),
            k3=float(k3[lag] / tokens[lag]),
            truncated=float(trained[lag, 1] / max(trained[lag, 0], 1.0)),
            masked=float(trained[lag, 2] / max(trained[lag, 0], 1.0)),
            clipped=float(trained[lag, 3] / max(trained[lag, 0], 1.0)),
        )
        for lag in np.flatnonzero(tokens).tolist()
    )


def noise_of(
    log_weight: FloatArray, lags: IntArray, trained: FloatArray, still: Sequence[int]
) -> Noise | None:
    """Return the figures of the tokens of some lags together; None: they have none. Arguments of `lag_stats`.

    Args:
        still: lags since which no update was made.
    """
    chosen = np.isin(lags, still)
    figures = weight_stats(log_weight[chosen])
    if figures.mean is None or figures.k3 is None or figures.effective is None or figures.quantiles is None:
        return None
    tokens, truncated = trained[list(still), :2].sum(0).tolist()
    share = truncated / max(tokens, 1.0)
    return Noise(figures.mean, figures.k3, figures.effective, share, figures.quantiles[2])


def _k3(log_weight: FloatArray) -> FloatArray:
    clipped = np.clip(log_weight, -LONGEST, LONGEST)
    return np.asarray(np.exp(clipped) - 1.0 - clipped, np.float32)
