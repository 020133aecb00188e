"""Acceptance of tokens: how far the sampler's distribution is from that of dense attention (Sparrow, eq. 1).

    alpha = sum over the vocabulary of min(p_dense, q_sparse) = 1 - |p - q| / 2

Engines return the likeliest tokens of each distribution, so alpha is bounded from both sides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from echo_planes.errors import TaskError

Top = Sequence[tuple[int, float]]  # token ids with their logprobs
CELLS = 1000  # of a histogram over [0, 1]
TAIL = 0.05  # Sparrow 3.1: the percentile that tells


def acceptance_bounds(dense: Top, sparse: Top) -> tuple[float, float]:
    """Return bounds of alpha from the likeliest tokens of both distributions; equal if these are all tokens.

    Tokens that one list alone names have, in the other, no more than the rest beyond its list. What is left
    of the two rests may be of the same tokens. (That a token beyond a list is no likelier than its last is
    not used.)

    Raises:
        TaskError: a list is empty.
    """
    if not dense or not sparse:
        raise TaskError("acceptance: no top log-probabilities; set sampling.top_logprobs")
    p, q = ({token: math.exp(logprob) for token, logprob in one} for one in (dense, sparse))
    rest_p, rest_q = (max(0.0, 1.0 - math.fsum(one.values())) for one in (p, q))
    common = math.fsum(min(p[token], q[token]) for token in p.keys() & q.keys())
    p_alone = min(math.fsum(p[token] for token in p.keys() - q.keys()), rest_q)
    q_alone = min(math.fsum(q[token] for token in q.keys() - p.keys()), rest_p)
    neither = min(rest_q - p_alone, rest_p - q_alone)
    return min(1.0, common), min(1.0, common + p_alone + q_alone + neither)


@dataclass(slots=True)
class Histogram:
    """Counts of alpha by bin of sequence length."""

    cells: dict[int, npt.NDArray[np.int64]] = field(default_factory=dict)  # bin -> (CELLS,)

    def add(self, bins: Sequence[int], alphas: Sequence[float]) -> None:
        """Count tokens: the bin and the acceptance of each."""
        place, alpha = np.asarray(bins, np.int64), np.asarray(alphas, np.float64)
        cell = np.clip((alpha * CELLS).astype(np.int64), 0, CELLS - 1)
        for one in np.unique(place).tolist():
            counts = np.bincount(cell[place == one], minlength=CELLS)
            self.cells[one] = self.cells.get(one, np.zeros(CELLS, np.int64)) + counts

    def tail(self, place: int) -> float:
        """Return the 5th percentile of alpha in a bin, rounded down to a cell; NaN without tokens."""
        counts = self.cells.get(place)
        if counts is None:
            return math.nan
        return int(np.searchsorted(np.cumsum(counts), TAIL * counts.sum(), side="right")) / CELLS

    def mean(self, place: int) -> float:
        """Return the mean of alpha in a bin, to half a cell; NaN without tokens."""
        counts = self.cells.get(place)
        if counts is None:
            return math.nan
        return float((counts * (np.arange(CELLS) + 0.5)).sum() / counts.sum() / CELLS)
