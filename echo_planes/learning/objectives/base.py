"""Parts shared by the objectives, from tokens to a partial loss. Pure functions of tensors.

For every trained token, with A its advantage, w_s = pi / pi_sampler and r the ratio that is clipped:

    loss = sum of weight * m * (c beta KL - c' surrogate(r, A))

=========  ==================  ===========================  ==========================================
anchor     ratio r             c, the KL's weight           c', the surrogate's weight
=========  ==================  ===========================  ==========================================
sampler    pi / pi_sampler     min(w_s, C), detached        1: the ratio corrects by itself
proximal   pi / pi_old         min(pi_old / pi_sampler, C)  the same: ECHO-2 eq. 24 weights both
=========  ==================  ===========================  ==========================================

pi_old is the policy at the start of the step. With one update a step pi / pi_old is 1 and its clip has no
effect: then only `anchor=sampler` bounds the effect of stale tokens. m is 0 where a mask leaves a token out.
Weights come from the whole update, so a micro-batch's loss is a plain partial sum. The split of a batch into
micro-batches and ranks therefore never changes the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from echo_planes.config.fields import Interval
from echo_planes.config.schema import ObjectiveConfig
from echo_planes.learning.advantages import Advantage

OUTLIER_TOKENS = (0.5, 2.0)  # smallest and largest ratio of a token
OUTLIER_ANSWERS = (0.8, 1.25)  # smallest and largest geometric mean of an answer's ratios

Level = Literal["token", "sequence", "geometric", "none"]
# From ratio (M,), advantages (M,), logprobs (M,) and clip to the surrogate (M,), which carries the gradient,
# and a mask (M,) that is True where the surrogate has no gradient.
Surrogate = Callable[[Tensor, Tensor, Tensor, "Clip"], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Clip:
    """Ends of the trust region of a ratio."""

    low: float  # ratio >= 1 - low
    high: float  # ratio <= 1 + high
    delta: float = 0.0  # where the advantage is negative, ratio <= delta; 0: none


@dataclass(frozen=True, slots=True)
class Objective:
    """Parts that the name of an objective stands for."""

    name: str
    advantage: Advantage
    average: Literal["trajectory", "tokens", "constant"]  # see `token_weights`
    level: Level  # of its ratio and, by default, of the importance weight: token or geometric
    clip: Clip
    stale_clip: Clip  # with anchor=sampler, where the ratio includes all drift since the token was sampled
    surrogate: Surrogate
    cuts_weight: bool = False  # its ratio is a weight without a gradient, cut at the clip's upper end


@dataclass(frozen=True, slots=True)
class Tokens:
    """M trained tokens of whole trajectories. All tensors are (M,) float32 unless noted."""

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
    """Partial loss and its parts, token by token."""

    loss: Tensor  # scalar, carries the gradient
    clipped: Tensor  # (M,) bool: the surrogate has no gradient here
    masked: Tensor  # (M,) bool: left out by a mask
    truncated: Tensor  # (M,) bool: its importance weight was cut
    tis: Tensor  # (M,) importance weight as it was used, cut; 1 where the loss has none
    kl: Tensor  # (M,) estimate of the KL to the reference, 0 without one

    @property
    def num_tokens(self) -> Tensor:
        """M, a scalar beside the loss."""
        return self.loss.new_tensor(len(self.tis))


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, logprobs: Tensor, clip: Clip
) -> tuple[Tensor, Tensor]:
    """Compute PPO's clip (1707.06347 eq. 7) with the dual clip (1912.09729): at least delta A where A < 0."""
    plain = ratio * advantages
    bounded = ratio.clamp(1.0 - clip.low, 1.0 + clip.high) * advantages
    surrogate = torch.minimum(plain, bounded)
    flat = bounded.detach() < plain.detach()
    if clip.delta:
        floor = clip.delta * advantages
        beyond = (advantages < 0) & (surrogate.detach() < floor)
        surrogate = torch.where(beyond, floor, surrogate)
        flat = flat | beyond
    return surrogate, flat


def policy_loss(tokens: Tokens, config: ObjectiveConfig, objective: Objective) -> Loss:
    """Return the loss above, summed over these tokens."""
    sampled = tokens.sampler_logprobs
    stale = config.ratio_anchor == "sampler"
    log_ratio = tokens.logprobs - (sampled if stale else tokens.old_logprobs)
    ratio = _at_level(log_ratio, objective.level, tokens).exp()
    clip = clip_of(config, objective)
    surrogate, clipped = objective.surrogate(ratio, tokens.advantages, tokens.logprobs, clip)

    level = objective.level if config.tis_level is None else config.tis_level
    drift = log_ratio.detach() if stale else tokens.old_logprobs - sampled
    weight, cap = _at_level(drift, level, tokens).exp(), config.tis_cap
    tis = weight.clamp(max=cap)
    if not stale:
        surrogate = tis * surrogate

    masked = _masked(tokens.old_logprobs - sampled, tokens, config)
    per_token = -surrogate
    kl = torch.zeros_like(per_token)
    if config.kl_beta > 0 and tokens.reference_logprobs is not None:
        kl = kl_estimate(tokens.logprobs - tokens.reference_logprobs, config)
        per_token = per_token + config.kl_beta * tis * kl
    if objective.cuts_weight:
        weight, cap = ratio.detach(), 1.0 + clip.high
    elif stale and config.kl_beta == 0:
        weight = torch.ones_like(weight)  # the ratio corrects by itself, and nothing cuts it at C
    loss = (tokens.weights * per_token.masked_fill(masked, 0.0)).sum()
    return Loss(loss, clipped & ~masked, masked, weight > cap, weight.clamp(max=cap), kl.detach())


def clip_of(config: ObjectiveConfig, objective: Objective) -> Clip:
    """Return the clip of the settings; ends that they leave out are the objective's own."""
    own = objective.stale_clip if config.ratio_anchor == "sampler" else objective.clip
    return Clip(
        own.low if config.clip_low is None else config.clip_low,
        own.high if config.clip_high is None else config.clip_high,
        own.delta if config.clip_delta is None else config.clip_delta,
    )


def outlier_masks(config: ObjectiveConfig) -> dict[str, Interval]:
    """Return the mask setting with which the guard excludes outliers; a mask that is set already stays."""
    if config.name == "gspo":
        return {"sequence_mask": config.sequence_mask or OUTLIER_ANSWERS}
    return {"token_mask": config.token_mask or OUTLIER_TOKENS}


def kl_estimate(log_ratio: Tensor, config: ObjectiveConfig) -> Tensor:
    """Estimate the KL of policy to reference (M,) from log(pi / pi_reference) (M,), clamped at `kl_clamp`.

    With d the log ratio: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d (Schulman, "Approximating KL
    divergence"; k3 is DeepSeekMath 2402.03300 eq. 4). k1 is unbiased but its gradient is that of the
    logprob alone, which is 0 on average; k2's gradient is that of the KL; k3 is unbiased and never negative.
    """
    d = log_ratio.clamp(-config.kl_clamp, config.kl_clamp)
    if config.kl_estimator == "k1":
        return d
    if config.kl_estimator == "k2":
        return 0.5 * d * d
    return torch.exp(-d) - 1.0 + d


def _masked(drift: Tensor, tokens: Tokens, config: ObjectiveConfig) -> Tensor:
    """Return True (M,) where a token's ratio, or its answer's geometric mean ratio, is outside its mask."""
    masked = torch.zeros_like(drift, dtype=torch.bool)
    for ends, level in ((config.token_mask, "token"), (config.sequence_mask, "geometric")):
        if ends is not None:
            ratio = _at_level(drift, level, tokens).exp()
            masked = masked | (ratio < ends[0]) | (ratio > ends[1])
    return masked


def _at_level(log_ratio: Tensor, level: str, tokens: Tokens) -> Tensor:
    """Return, for each token (M,), its log ratio, the sum or the mean over its answer, or 0, by `level`."""
    if level == "token":
        return log_ratio
    if level == "none":
        return torch.zeros_like(log_ratio)
    zeros = log_ratio.new_zeros(tokens.num_trajectories)
    total = zeros.index_add(0, tokens.trajectory, log_ratio)
    if level == "geometric":
        counts = zeros.index_add(0, tokens.trajectory, torch.ones_like(log_ratio))
        total = total / counts.clamp(min=1.0)
    return total[tokens.trajectory]
