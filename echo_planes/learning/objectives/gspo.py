"""GSPO: 2507.18071 eq. 5-7.

    J = mean over answers of min(s A, clip(s, 1 - 3e-4, 1 + 4e-4) A), s = exp(mean of log r over its tokens)
    A = (R - mean) / (std + eps) within the group

Each answer has one ratio, and one importance weight of the same geometric kind. The ends are those of the
paper (section 5.1), for a ratio within one step. With anchor=sampler the ratio also holds the drift of
several versions, and those ends would clip almost every answer. There both ends are 0.03, which learns at
lags 3 and 6 with drift control (bench/LOG.md).
"""

from __future__ import annotations

from echo_planes.learning.objectives.base import Clip, Objective, clipped_surrogate

GSPO = Objective(
    name="gspo",
    advantage="standardised",
    average="trajectory",
    level="geometric",
    clip=Clip(3e-4, 4e-4),
    stale_clip=Clip(0.03, 0.03),
    surrogate=clipped_surrogate,
)
