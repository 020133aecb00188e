"""Objectives: log-probabilities and advantages in, one loss out. Pure functions of tensors.

The way tokens are averaged is part of an objective's name. N: trajectories with at least one trained token;
|o_i|: trained tokens of trajectory i; T: trained tokens of the batch; L: `max_tokens`, a constant.

=========  =================  ======================  =============================================
objective  importance ratio   weight of a token       source
=========  =================  ======================  =============================================
grpo       per token          1 / (N |o_i|)           DeepSeekMath (2402.03300) eq. 3
dapo       per token          1 / T                   DAPO (2503.14476) eq. 8
dr_grpo    per token          1 / (N L)               Dr. GRPO (2503.20783) section 3.2
rloo       per token          1 / T                   RLOO (2402.14740), with token-count averaging
gspo       per sequence       1 / (N |o_i|)           GSPO (2507.18071) eq. 5-7
=========  =================  ======================  =============================================

For every token, with r its ratio against the policy at the start of the step and A its advantage:

    surrogate = min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)      PPO (1707.06347) eq. 7
    surrogate = max(surrogate, clip_delta A)            where A < 0   dual clip (1912.09729)
    loss      = sum of weight * (beta KL - w surrogate)

    w  = min(pi_old / pi_sampler, C), detached: truncated importance sampling, ECHO-2 eq. 24-25
    KL = exp(q - p) - (q - p) - 1, p the policy's and q the reference's logprob (k3, DeepSeekMath eq. 4)

Weights come from the whole batch, so a micro-batch's loss is a plain partial sum: how a batch is split into
micro-batches and ranks never changes the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from echo_planes.config import ObjectiveConfig
from echo_planes.types import FloatArray, IntArray


def token_weights(name: str, num_tokens: IntArray, max_tokens: int) -> FloatArray:
    """Weight (N,) of each trained token of trajectory i: the table's third column.

    Args:
        num_tokens: trained tokens per trajectory (N,), of everything one optimizer update is made of.
        max_tokens: L of dr_grpo, tokens.
    """
    counted = max(int((num_tokens > 0).sum()), 1)
    if name in ("dapo", "rloo"):
        weights = np.full(len(num_tokens), 1.0 / max(int(num_tokens.sum()), 1))
    elif name == "dr_grpo":
        weights = np.full(len(num_tokens), 1.0 / (counted * max_tokens))
    else:
        weights = 1.0 / (counted * np.maximum(num_tokens, 1))
    return weights.astype(np.float32)


@dataclass(frozen=True, slots=True)
class Tokens:
    """M trained tokens of whole trajectories. All tensors are (M,) float32 unless said."""

    logprobs: Tensor  # of the policy being trained; carries the gradient
    old_logprobs: Tensor  # of the policy at the start of the step; detached
    sampler_logprobs: Tensor  # of the policy that sampled them
    advantages: Tensor
    weights: Tensor  # see `token_weights`
    trajectory: Tensor  # (M,) int64, 0 .. num_trajectories - 1
    num_trajectories: int
    reference_logprobs: Tensor | None = None  # needed when kl_beta > 0


@dataclass(frozen=True, slots=True)
class Loss:
    """A partial loss and what it was made of, token by token."""

    loss: Tensor  # scalar, carries the gradient
    clipped: Tensor  # (M,) bool: the surrogate has no gradient here
    tis: Tensor  # (M,) truncated importance weight
    kl: Tensor  # (M,) estimate of the KL to the reference, 0 without one


def policy_loss(tokens: Tokens, config: ObjectiveConfig) -> Loss:
    """The loss above, summed over these tokens."""
    log_ratio = tokens.logprobs - tokens.old_logprobs
    if config.name == "gspo":
        log_ratio = _trajectory_sum(log_ratio, tokens, mean=True)
    ratio = log_ratio.exp()
    advantages = tokens.advantages
    plain = ratio * advantages
    low = 0.2 if config.clip_low is None else config.clip_low
    high = 0.2 if config.clip_high is None else config.clip_high
    bounded = ratio.clamp(1.0 - low, 1.0 + high) * advantages
    surrogate = torch.minimum(plain, bounded)
    clipped = bounded.detach() < plain.detach()
    if config.clip_delta is not None:
        floor = config.clip_delta * advantages
        beyond = (advantages < 0) & (surrogate.detach() < floor)
        surrogate = torch.where(beyond, floor, surrogate)
        clipped = clipped | beyond
    tis = _importance_weights(tokens, config)
    per_token = -tis * surrogate
    kl = torch.zeros_like(per_token)
    if config.kl_beta > 0 and tokens.reference_logprobs is not None:
        difference = tokens.reference_logprobs - tokens.logprobs
        kl = difference.exp() - difference - 1.0
        per_token = per_token + config.kl_beta * kl
    return Loss((tokens.weights * per_token).sum(), clipped, tis, kl.detach())


def _importance_weights(tokens: Tokens, config: ObjectiveConfig) -> Tensor:
    """min(pi_old / pi_sampler, C) per token, or the product over the trajectory, truncated (M,)."""
    if config.tis_level == "none":
        return torch.ones_like(tokens.old_logprobs)
    log_weight = tokens.old_logprobs - tokens.sampler_logprobs
    if config.tis_level == "sequence":
        log_weight = _trajectory_sum(log_weight, tokens, mean=False)
    return log_weight.exp().clamp(max=config.tis_cap)


def _trajectory_sum(values: Tensor, tokens: Tokens, *, mean: bool) -> Tensor:
    """Sum or mean of `values` (M,) over each token's trajectory, given back to each token (M,)."""
    zeros = values.new_zeros(tokens.num_trajectories)
    total = zeros.index_add(0, tokens.trajectory, values)
    if mean:
        counts = zeros.index_add(0, tokens.trajectory, torch.ones_like(values))
        total = total / counts.clamp(min=1.0)
    return total[tokens.trajectory]
