"""Dr. GRPO: 2503.20783 section 3.2.

    J = mean over answers of 1/L sum over tokens of min(r A, clip(r, 1 - 0.2, 1 + 0.2) A)
    A = R - mean within the group

L, the most tokens that an answer may have, is a constant. A token's weight therefore depends neither on its
answer's length nor on the spread of its group's rewards. Dual clip at 4.
"""

from __future__ import annotations

from echo_planes.learning.objectives.base import Clip, Objective, clipped_surrogate

DR_GRPO = Objective(
    name="dr_grpo",
    advantage="centred",
    average="constant",
    level="token",
    clip=Clip(0.2, 0.2, 4.0),
    stale_clip=Clip(0.2, 0.28, 4.0),
    surrogate=clipped_surrogate,
)
