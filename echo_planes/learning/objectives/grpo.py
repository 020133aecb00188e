"""GRPO: DeepSeekMath (2402.03300) eq. 3.

    J = mean over answers of 1/|o_i| sum over tokens of min(r A, clip(r, 1 - 0.2, 1 + 0.2) A)
    A = (R - mean) / (std + eps) within the group

All answers have equal weight, so a token of a long answer has less. Dual clip at 4.
"""

from __future__ import annotations

from echo_planes.learning.objectives.base import Clip, Objective, clipped_surrogate

GRPO = Objective(
    name="grpo",
    advantage="standardised",
    average="trajectory",
    level="token",
    clip=Clip(0.2, 0.2, 4.0),
    stale_clip=Clip(0.2, 0.28, 4.0),
    surrogate=clipped_surrogate,
)
