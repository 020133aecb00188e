"""Acceptance of tokens: how far the sampler's distribution is from that of dense attention (Sparrow, eq. 1).

    alpha = sum over the vocabulary of min(p_dense, q_sparse) = 1 - |p - q| / 2

Engines return the likeliest tokens of each distribution, so alpha is bounded from both sides. Between the
bounds the estimate has the tokens that neither list names agree as well as the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from echo_planes.errors import TaskError

Top = Sequence[tuple[int, float]]  # token ids with their logprobs
LARGEST = 2**62  # number of a schedule, version or token
CELLS = 1000  # of a histogram over [0, 1]
TAIL = 0.05  # Sparrow 3.1: the percentile that tells


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance of a token: bounds of alpha, equal if all tokens are known, and an estimate between them."""

    lower: float
    likely: float
    upper: float


def acceptance(dense: Top, sparse: Top) -> Acceptance:
    """Return alpha from the likeliest tokens of both distributions.

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
    open_share = p_alone + q_alone + neither
    agreeing = common / max(common, 1.0 - min(rest_p, rest_q))
    return Acceptance(
        min(1.0, common), min(1.0, common + agreeing * open_share), min(1.0, common + open_share)
    )


@dataclass(frozen=True, slots=True)
class Audit:
    """Comparison of one answer, decoded whole under one version and one schedule, with dense attention.

    Not of its first token, which the pass over the prompt samples, densely. The token behind alpha number i
    was decoded where the sequence had context_tokens + 1 + i tokens.
    """

    schedule: int  # its number
    version: int
    context_tokens: int  # before the first token of the answer
    alphas: tuple[float, ...]  # `Acceptance.likely` of each token after the first
    drift: float  # mean |log p_dense - log q_sparse| of the tokens, nats


def audit_fault(audit: object) -> str:
    """Return why a worker's message cannot be an audit; "": it can."""
    if not isinstance(audit, Audit) or not isinstance(audit.alphas, tuple):
        return "it is no audit"
    counts = (audit.schedule, audit.version, audit.context_tokens)
    if any(type(one) is not int or not -1 <= one <= LARGEST for one in counts) or audit.context_tokens < 0:
        return "its schedule, version or length is none"
    if not audit.alphas or any(type(one) is not float or not 0.0 <= one <= 1.0 for one in audit.alphas):
        return "its acceptance is not between 0 and 1"
    if type(audit.drift) is not float or not 0.0 <= audit.drift < math.inf:
        return "its drift is no number"
    return ""


def share_bounds(answers: Sequence[tuple[int, int]], deviations: float) -> tuple[float, float]:
    """Return bounds of the share of tokens that are below a limit, from whole answers.

    The tokens of one answer go together, so the answers are the sample: the estimate is a ratio of two sums,
    and its error that of the linearised residuals.

    Args:
        answers: tokens of each answer, and those of them below the limit. At least two.
        deviations: half width of the interval, in standard errors.
    """
    tokens, below = np.array(answers, np.float64).T
    share = below.sum() / tokens.sum()
    count = len(answers)
    residuals = below - share * tokens
    error = math.sqrt((residuals**2).sum() * count / (count - 1)) / tokens.sum()
    return share - deviations * error, share + deviations * error


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
