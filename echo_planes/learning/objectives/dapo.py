"""DAPO: 2503.14476 eq. 8, with its four parts.

    J = 1/T sum over all tokens of the batch of min(r A, clip(r, 1 - 0.2, 1 + 0.28) A)
    A = (R - mean) / (std + eps) within the group

The token mean and the higher upper end (sections 3.3, 3.1) are set here. The objective also switches on
`sampling.refill`, which replaces groups without signal (3.2), and `sampling.overlong`, by which answers near
the limit lose reward (3.4). Dual clip at 4.
"""

from __future__ import annotations

from echo_planes.learning.objectives.base import Clip, Objective, clipped_surrogate

DAPO = Objective(
    name="dapo",
    advantage="standardised",
    average="tokens",
    level="token",
    clip=Clip(0.2, 0.28, 4.0),
    stale_clip=Clip(0.2, 0.28, 4.0),
    surrogate=clipped_surrogate,
)
