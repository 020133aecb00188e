"""CISPO: MiniMax-M1 (2506.13585) eq. 4-5.

    J = 1/T sum over all tokens of the batch of sg(min(r, 1 + high)) A log pi
    A = (R - mean) / (std + eps) within the group

The weight is cut and carries no gradient, so no token loses its gradient. Tokens that PPO's clip would leave
out (rare tokens that change an answer) are still learnt, with a bounded weight. There is no lower end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from echo_planes.learning.objectives.base import Clip, Objective


def weighted_logprob(
    ratio: Tensor, advantages: Tensor, logprobs: Tensor, clip: Clip
) -> tuple[Tensor, Tensor]:
    """Return sg(min(r, 1 + high)) A log pi (M,), and a mask that is False for every token."""
    weight = ratio.detach().clamp(max=1.0 + clip.high)
    return weight * advantages * logprobs, torch.zeros_like(weight, dtype=torch.bool)


CISPO = Objective(
    name="cispo",
    advantage="standardised",
    average="tokens",
    level="token",
    clip=Clip(1.0, 0.2),
    stale_clip=Clip(1.0, 0.2),
    surrogate=weighted_logprob,
    cuts_weight=True,
)
