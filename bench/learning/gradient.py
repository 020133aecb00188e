"""Gradient truth: a policy of three tokens, every group of answers enumerated, no sampling error.

The policy writes token 0 (the end), or 1 or 2 and then any token: seven answers of one or two tokens, and
7^4 groups of four. The expectation of an objective's gradient over the groups that a sampler draws is a sum,
so bias and variance are exact:

    bias      |E_sampler g - E_policy g| / |E_policy g|, the same objective on fresh data being the truth
    spread    sqrt(E |g - E g|^2) / |E_policy g|, of one group's gradient
    cosine    of E_sampler g and the gradient of the expected reward itself
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echo_planes.config.schema import ObjectiveConfig
from echo_planes.learning.advantages import compute_advantages
from echo_planes.learning.objectives import OBJECTIVES, Tokens, policy_loss, token_weights
from echo_planes.types import FloatArray

ANSWERS = [(0,), *itertools.product((1, 2), (0, 1, 2))]
REWARDS = [0.1, 1.0, 0.0, 0.3, 0.0, 0.7, 0.2]
GROUP = 4
STATES = 3  # the beginning, after a 1, after a 2
SAMPLERS = {"fresh": 0.0, "noisy": 0.02, "stale": 0.3, "very stale": 1.0}  # size of the logits' difference
CORRECTIONS: dict[str, dict[str, Any]] = {
    "none": {"anchor": "proximal", "tis_level": "none", "uncorrected": True},
    "token": {"anchor": "proximal", "tis_level": "token"},
    "sequence": {"anchor": "proximal", "tis_level": "sequence"},
    "sequence, uncapped": {"anchor": "proximal", "tis_level": "sequence", "tis_cap": 1e9},
    "geometric": {"anchor": "proximal", "tis_level": "geometric"},
    "sampler": {"anchor": "sampler"},
    "sampler, no clip": {"anchor": "sampler", "clip_low": 1.0, "clip_high": 1e9, "clip_delta": 0.0},
}


@dataclass(frozen=True, slots=True)
class Row:
    """One cell of the table."""

    objective: str
    sampler: str
    correction: str
    bias: float
    spread: float
    cosine: float


def table(seed: int = 0) -> Iterator[Row]:
    """Every objective, sampler and correction that go together."""
    rng = np.random.default_rng(seed)
    policy = torch.from_numpy(rng.normal(0.0, 0.7, (STATES, 3)))
    drift = torch.from_numpy(rng.normal(0.0, 1.0, (STATES, 3)))
    drift /= drift.abs().mean()
    truth = _flat(_reward_gradient(policy))
    for name in OBJECTIVES:
        for correction, settings in CORRECTIONS.items():
            if name == "cispo" and settings["anchor"] == "proximal":
                continue  # refused by the settings
            config = ObjectiveConfig.model_validate({"name": name, **settings})
            fresh, _ = _moments(policy, policy, config)
            for sampler, size in SAMPLERS.items():
                mean, square = _moments(policy, policy + size * drift, config)
                norm = fresh.norm()
                yield Row(
                    name,
                    sampler,
                    correction,
                    float((mean - fresh).norm() / norm),
                    float((square - mean.square().sum()).clamp(min=0).sqrt() / norm),
                    float(torch.nn.functional.cosine_similarity(mean, truth, dim=0)),
                )


def _moments(policy: Tensor, sampler: Tensor, config: ObjectiveConfig) -> tuple[Tensor, Tensor]:
    """E g (9,) and E |g|^2 of one group's gradient with respect to the policy's logits, uphill."""
    objective = OBJECTIVES[config.name]
    groups = list(itertools.product(range(len(ANSWERS)), repeat=GROUP))
    members = [answer for group in groups for answer in group]
    lengths = np.array([len(ANSWERS[answer]) for answer in members])
    rewards = np.array([REWARDS[answer] for answer in members], np.float32)
    index = np.repeat(np.arange(len(groups)), GROUP)
    given = np.full(len(members), np.nan, np.float32)
    advantages = torch.from_numpy(compute_advantages(objective.advantage, rewards, index, given)).double()
    weights = _weights(config.name)
    trajectory = torch.from_numpy(np.repeat(np.arange(len(members)), lengths))
    states, tokens = (torch.tensor(one) for one in zip(*_steps(members), strict=True))
    leaf = policy.log_softmax(-1)[states, tokens].detach().requires_grad_()
    loss = policy_loss(
        Tokens(
            logprobs=leaf,
            old_logprobs=leaf.detach(),
            sampler_logprobs=sampler.log_softmax(-1)[states, tokens],
            advantages=advantages[trajectory],
            weights=torch.from_numpy(weights)[trajectory].double(),
            trajectory=trajectory,
            num_trajectories=len(members),
        ),
        config,
        objective,
    )
    (uphill,) = torch.autograd.grad(-loss.loss, leaf)
    # d log pi(token | state) / d logits[state] = onehot(token) - pi(. | state)
    rows = torch.eye(3, dtype=torch.float64)[tokens] - policy.softmax(-1)[states]
    gradient = torch.zeros(len(groups), STATES, 3, dtype=torch.float64)
    group = torch.from_numpy(index)[trajectory]
    gradient.index_put_((group, states), uphill[:, None] * rows, accumulate=True)
    flat = gradient.reshape(len(groups), -1)
    chance = _chances(sampler)[torch.tensor(groups)].prod(1)
    return (chance[:, None] * flat).sum(0), (chance * flat.square().sum(1)).sum()


@cache
def _weights(name: str) -> FloatArray:
    """Weight of every token of each member of each group: groups are updates of their own."""
    lengths = [len(answer) for answer in ANSWERS]
    groups = itertools.product(lengths, repeat=GROUP)
    return np.concatenate([token_weights(OBJECTIVES[name], np.array(own), 2) for own in groups])


def _steps(members: list[int]) -> Iterator[tuple[int, int]]:
    """State and token of every token of the answers, in order."""
    for answer in members:
        state = 0
        for token in ANSWERS[answer]:
            yield state, token
            state = token


def _chances(logits: Tensor) -> Tensor:
    """Probability of every answer (7,)."""
    logprobs = logits.log_softmax(-1)
    sums = [sum(logprobs[state, token] for state, token in _steps([i])) for i in range(len(ANSWERS))]
    return torch.stack([torch.as_tensor(one) for one in sums]).exp()


def _reward_gradient(policy: Tensor) -> Tensor:
    """Gradient of the expected reward with respect to the logits (STATES, 3)."""
    leaf = policy.clone().requires_grad_()
    expected = (_chances(leaf) * torch.tensor(REWARDS, dtype=torch.float64)).sum()
    (gradient,) = torch.autograd.grad(expected, leaf)
    return gradient


def _flat(gradient: Tensor) -> Tensor:
    return gradient.reshape(-1)


def verdicts(rows: list[Row]) -> dict[str, bool]:
    """Claims of the theory, and whether the table bears each out."""
    cell = {(row.objective, row.sampler, row.correction): row for row in rows}
    fresh = [row for row in rows if row.sampler == "fresh"]
    stale = [row for row in rows if row.sampler == "very stale"]
    return {
        "fresh data: no correction biases any objective": max(row.bias for row in fresh) < 1e-9,
        "uncorrected stale data is biased, whatever the objective": all(
            row.bias > 0.05 for row in stale if row.correction == "none"
        ),
        "dr_grpo with the uncapped sequence weight is unbiased on stale data": cell[
            "dr_grpo", "very stale", "sequence, uncapped"
        ].bias
        < 1e-6,
        "and pays with spread": cell["dr_grpo", "very stale", "sequence, uncapped"].spread
        > cell["dr_grpo", "very stale", "none"].spread,
        "the ratio against the sampler has less bias than none (grpo, stale)": cell[
            "grpo", "stale", "sampler, no clip"
        ].bias
        < cell["grpo", "stale", "none"].bias,
    }
