"""Other proposals against stale data, to hold the defaults against: losses and rate controls.

m2po          second-moment constraint, M2PO (2510.01161): of the tokens that move further away those with the
              largest (log w)^2 stay out until the mean of the rest is 0.04
sat           clip ends contracted where the sampled log ratio is large, SAT (2607.18722), in our words:
              0.2 and 0.28 over 1 + |log w| / 0.1
gac           cosine of a gradient with the one before held at 0.1 by taking out what lies along that one,
              after GAC (2603.01501), in our words and with our limit
rate/(1+lag)  learning rate divided by 1 + lag, staleness-aware SGD (1511.05950)
kl-adaptive   rate / 1.5 where the mean k2 is above twice 0.01, x 1.5 where it is below half of it, PPO in
              robotics (2109.11978)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from bench.learning.harness import Setup
from echo_planes.learning.learner import Learner
from echo_planes.learning.objectives import Loss, Tokens
from echo_planes.learning.rate import DriftControl
from echo_planes.types import LagStats, Noise

NAMES = ("m2po", "sat", "gac", "rate/(1+lag)", "kl-adaptive")
M2_LIMIT = 0.04
SAT_SCALE = 0.1
MOST_ALIGNED = 0.1
KL_TARGET = 0.01


def change(learner: Learner, setup: Setup) -> None:
    """Make a learner the setup's variant."""
    match setup.variant:
        case "m2po":
            learner.loss = m2po
        case "sat":
            learner.loss = sat
        case "gac":
            _hold_alignment(learner)
        case "rate/(1+lag)":
            learner.drift = _Fixed(1.0 / (1.0 + setup.lag))
        case "integral":
            learner.drift = Integral(0.1)
        case "kl-adaptive":
            learner.drift = _KlAdaptive()


def _hold_alignment(learner: Learner) -> None:
    """Change gradients that lie along the one before; needs ZeRO stage 0 in fp32, where they are whole."""
    engine, before = learner._engine, torch.zeros(0)
    update, parameters = engine.step, list(engine._engine.module.parameters())

    def step(learning_rate: float) -> float:
        nonlocal before
        whole = torch.cat([one.grad.flatten() for one in parameters])
        norms = whole.norm() * before.norm()
        if len(before) and norms > 0 and whole @ before > MOST_ALIGNED * norms:
            along = before / before.norm()
            across = whole - (whole @ along) * along
            held = across + MOST_ALIGNED / math.sqrt(1 - MOST_ALIGNED**2) * across.norm() * along
            for one, part in zip(parameters, held.split([p.numel() for p in parameters]), strict=True):
                one.grad.copy_(part.view_as(one.grad))
        before = whole
        return update(learning_rate)

    engine.step = step  # type: ignore[method-assign]


class _Fixed(DriftControl):
    """A factor that follows nothing."""

    def __init__(self, factor: float) -> None:
        super().__init__(0.0, 0.02)
        self._factor = factor

    @property
    def factor(self) -> float:
        return self._factor


class _KlAdaptive(_Fixed):
    """Follows the mean k2 = (log w)^2 / 2, for which pi / 2 times the square of the mean |log w| stands."""

    def __init__(self) -> None:
        super().__init__(1.0)

    def observe(self, lags: Sequence[LagStats], noise: Noise | None = None) -> None:
        drift = sum(one.tokens * one.drift for one in lags) / sum(one.tokens for one in lags)
        kl = 0.5 * (math.pi / 2) * drift**2
        change = 1 / 1.5 if kl > 2 * KL_TARGET else 1.5 if kl < KL_TARGET / 2 else 1.0
        self._factor = min(max(self._factor * change, self.floor), 1.0)


class Integral(_Fixed):
    """f <- clamp(f clamp(target / d, 0.5, 1.5), floor, 1): follows the drift alone."""

    def __init__(self, target: float) -> None:
        super().__init__(1.0)
        self._goal = target

    def observe(self, lags: Sequence[LagStats], noise: Noise | None = None) -> None:
        drift = sum(one.tokens * one.drift for one in lags) / sum(one.tokens for one in lags)
        if drift and math.isfinite(drift):
            change = min(max(self._goal / drift, 0.5), 1.5)
            self._factor = min(max(self._factor * change, self.floor), 1.0)


def m2po(tokens: Tokens) -> Loss:
    """M2PO with a token ratio against the sampler and no other clip."""
    drift = tokens.old_logprobs - tokens.sampler_logprobs
    moment = drift**2
    away = tokens.advantages * drift > 0
    order = torch.argsort(torch.where(away, moment, torch.full_like(moment, -1.0)), descending=True)
    left = moment.sum() - torch.cumsum(moment[order], 0)
    kept = len(order) - 1 - torch.arange(len(order))
    needed = torch.cat([moment.sum()[None] / len(order), left[:-1] / kept[:-1].clamp(min=1)]) > M2_LIMIT
    masked = torch.zeros_like(away)
    masked[order] = torch.cumprod(needed.int(), 0).bool()
    masked &= away
    ratio = (tokens.logprobs - tokens.sampler_logprobs).exp()
    return _loss(tokens, (ratio * tokens.advantages).masked_fill(masked, 0.0), masked=masked)


def sat(tokens: Tokens) -> Loss:
    """Clip ends that shrink where the sampled log ratio is large."""
    shrink = 1.0 + (tokens.old_logprobs - tokens.sampler_logprobs).abs() / SAT_SCALE
    ratio = (tokens.logprobs - tokens.sampler_logprobs).exp()
    plain = ratio * tokens.advantages
    bounded = torch.clamp(ratio, 1.0 - 0.2 / shrink, 1.0 + 0.28 / shrink) * tokens.advantages
    return _loss(tokens, torch.minimum(plain, bounded), clipped=bounded.detach() < plain.detach())


def _loss(
    tokens: Tokens,
    surrogate: torch.Tensor,
    *,
    clipped: torch.Tensor | None = None,
    masked: torch.Tensor | None = None,
) -> Loss:
    none = torch.zeros_like(tokens.advantages, dtype=torch.bool)
    one = torch.ones_like(tokens.advantages)
    return Loss(
        -(tokens.weights * surrogate).sum(),
        none if clipped is None else clipped,
        none if masked is None else masked,
        none,
        one,
        torch.zeros_like(one),
    )
