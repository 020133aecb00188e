"""RLOO: 2402.14740, with PPO's clip.

    J = 1/T sum over all tokens of the batch of min(r A, clip(r, 1 - 0.2, 1 + 0.2) A)
    A = R - mean of the other n - 1 rewards of the group

The mean leaves the answer itself out, so the gradient is unbiased. Dual clip at 4.
"""

from __future__ import annotations

from echo_planes.learning.objectives.base import Clip, Objective, clipped_surrogate

RLOO = Objective(
    name="rloo",
    advantage="leave_one_out",
    average="tokens",
    level="token",
    clip=Clip(0.2, 0.2, 4.0),
    stale_clip=Clip(0.2, 0.28, 4.0),
    surrogate=clipped_surrogate,
)
