"""Objective for offline records: supervised steps on logged actions, weighted by their returns.

A log has no snapshot and no logprobs, so nothing here is a policy gradient: there is no ratio and no
importance weight, and offline records never mix with trajectories of the replay buffer. For trajectory i of
the table, with its return R_i normalised among the trajectories that share its initial state (ECHO-2 eq. 21):

=========  ===============================  ===================================================
objective  weight w_i                       source
=========  ===============================  ===================================================
awr        min(exp(A_i / beta), C)          advantage-weighted regression (1910.00177) eq. 10
filtered   1 where A_i > 0, else 0          cloning of actions above their group's mean
=========  ===============================  ===================================================

    A    = (R - mean) / (std + eps) within a group; 0 where all returns of the group are equal
    loss = - 1/M sum over a batch's M trained tokens of w_i log pi, after the w_i were scaled to mean 1 over
           the trained tokens of the whole table
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from echo_planes.errors import ConfigError, DataError, DivergedError
from echo_planes.learning.advantages import compute_advantages
from echo_planes.learning.policy_model import PolicyModel
from echo_planes.types import BoolArray, FloatArray, IntArray

BETAS, MAX_GRAD_NORM = (0.9, 0.98), 1.0
RECTANGLE_TOKENS = 4096  # put through the model at once, padding included


class OfflineExample(Protocol):
    """Logged trajectory as tokens."""

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def loss_mask(self) -> Sequence[bool]:
        """True on the tokens that are trained; as long as `token_ids`, and False for the first token."""
        ...

    @property
    def value(self) -> float:
        """The return R, in any unit that the group shares."""
        ...

    @property
    def group(self) -> str:
        """Initial-state tag: returns are normalised among trajectories with equal tags."""
        ...


@dataclass(frozen=True, slots=True)
class OfflineObjective:
    """Rule for the weights of an offline objective, and its constants.

    Raises:
        ConfigError: a constant is not a finite number above 0.
    """

    name: Literal["awr", "filtered"] = "awr"
    beta: float = 1.0  # temperature of awr, in standard deviations of the return
    cap: float = 20.0  # C, the largest weight before normalisation

    def __post_init__(self) -> None:
        for name, value in (("beta", self.beta), ("cap", self.cap)):
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name}={value}: give a finite number above 0")


def offline_weights(
    objective: OfflineObjective, returns: FloatArray, groups: Sequence[str], num_tokens: IntArray
) -> FloatArray:
    """Return the weight (N,) of each trajectory's tokens, scaled to mean 1 over all trained tokens.

    Args:
        returns: (N,), finite.
        groups: N initial-state tags.
        num_tokens: (N,) trained tokens.

    Raises:
        DataError: every weight is 0, or no token is trained, so that nothing would be learnt.
    """
    _, index = np.unique(np.array(groups), return_inverse=True)
    # The same normalisation as GRPO's, over the groups of a log.
    advantages = compute_advantages("standardised", returns, index, np.full(len(returns), np.nan)).astype(
        np.float64
    )
    if objective.name == "filtered":
        weights = (advantages > 0).astype(np.float64)
    else:
        weights = np.exp(np.minimum(advantages / objective.beta, math.log(objective.cap)))
    mean = float((weights * num_tokens).sum()) / max(int(num_tokens.sum()), 1)
    if mean == 0:
        raise DataError(
            f"objective={objective.name}: all {len(returns)} records have weight 0 (no return above its "
            "group's mean, or nothing to train); give more hands, or objective=awr"
        )
    return (weights / mean).astype(np.float32)


def offline_loss(logprobs: Tensor, weights: Tensor) -> Tensor:
    """Return the loss above for one batch: a scalar that carries the gradient.

    Args:
        logprobs: (M,) of the batch's trained tokens, with gradient.
        weights: (M,) of those tokens: trajectory weight x averaging weight (1 / M).
    """
    return -(weights * logprobs).sum()


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Examples side by side, padded on the right: causal attention then needs no mask. M: trained tokens."""

    token_ids: Tensor  # (rows, row_len) int64
    predictors: Tensor  # (M,) flat positions, each before the token it predicts
    targets: Tensor  # (M,)
    rows: Tensor  # (M,) the token's row


def rectangle(examples: Sequence[OfflineExample]) -> Rectangle:
    """Lay examples out for `PolicyModel.forward`.

    Raises:
        DataError: an example has no tokens, a mask of another length, or a trained first token.
    """
    shape = (len(examples), max(len(example.token_ids) for example in examples))
    ids, mask = np.zeros(shape, np.int64), np.zeros(shape, np.bool_)
    for row, example in enumerate(examples):
        length = len(example.token_ids)
        if len(example.loss_mask) != length or not length or example.loss_mask[0]:
            raise DataError(
                f"an example of {length} tokens has {len(example.loss_mask)} mask entries, or trains its "
                "first token, which nothing predicts; correct whatever reads the table"
            )
        ids[row, :length] = example.token_ids
        mask[row, :length] = example.loss_mask
    rows, columns = np.nonzero(mask)
    flat = rows * shape[1] + columns
    return Rectangle(
        torch.from_numpy(ids),
        torch.from_numpy(flat - 1),
        torch.from_numpy(ids.reshape(-1)[flat]),
        torch.from_numpy(rows),
    )


def warm_start(
    model: PolicyModel,
    examples: Sequence[OfflineExample],
    objective: OfflineObjective,
    *,
    steps: int,
    rows_per_step: int,
    learning_rate: float,
    rng: np.random.Generator,
    on_step: Callable[[int, float], None],
) -> list[float]:
    """Train `model` in place on a table, in this process, with AdamW; the rate falls linearly to 0.

    Every pass over the table takes the trajectories of weight above 0 in a new random order, each at most
    once. A remainder too small for a batch is left out of that pass.

    Args:
        on_step: called with each step's number, from 1, and its loss, nats per token.

    Returns:
        The loss of every step.

    Raises:
        ConfigError: `steps`, `rows_per_step` or `learning_rate` is not a finite number above 0.
        DataError: there is nothing to learn from the table, or an example is invalid (see `rectangle`).
        DivergedError: the loss or the gradient is not finite.
    """
    if steps < 1 or rows_per_step < 1 or not 0 < learning_rate < math.inf:
        raise ConfigError(
            f"steps={steps}, batch={rows_per_step}, lr={learning_rate}: each must be a number above 0"
        )
    counts = np.array([sum(example.loss_mask) for example in examples], np.int64)
    returns = np.array([example.value for example in examples], np.float32)
    weights = offline_weights(objective, returns, [example.group for example in examples], counts)
    batches = _batches((weights > 0) & (counts > 0), rows_per_step, rng)
    optimizer = torch.optim.AdamW(model.parameters(), betas=BETAS, weight_decay=0.0)
    model.train()
    losses = []
    for step in range(steps):
        picked = next(batches)
        optimizer.zero_grad()
        losses.append(_backward(model, [examples[i] for i in picked], weights[picked], counts[picked]))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        if not (math.isfinite(losses[-1]) and bool(torch.isfinite(norm))):
            raise DivergedError(
                f"warm start step {step + 1}: loss {losses[-1]}, gradient norm {norm.item()}; lower the "
                "learning rate"
            )
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * (1 - step / steps)
        optimizer.step()
        on_step(step + 1, losses[-1])
    model.eval()
    return losses


def _backward(
    model: PolicyModel, examples: Sequence[OfflineExample], weights: FloatArray, counts: IntArray
) -> float:
    """Accumulate the gradients of one batch, rectangle by rectangle, and return its loss."""
    device = next(model.parameters()).device
    per_token = weights / max(int(counts.sum()), 1)
    total = 0.0
    for rows in _rectangles([len(example.token_ids) for example in examples]):
        batch = rectangle([examples[row] for row in rows])
        logprobs, _ = model(
            batch.token_ids.to(device), None, None, batch.predictors.to(device), batch.targets.to(device)
        )
        loss = offline_loss(logprobs, torch.from_numpy(per_token[rows])[batch.rows].to(device))
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total


def _rectangles(lengths: Sequence[int]) -> list[list[int]]:
    """Group indices of similar lengths into rectangles of at most `RECTANGLE_TOKENS`, or of one row."""
    parts: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if not parts or (len(parts[-1]) + 1) * lengths[parts[-1][0]] > RECTANGLE_TOKENS:
            parts.append([])
        parts[-1].append(index)
    return parts


def _batches(usable: BoolArray, size: int, rng: np.random.Generator) -> Iterator[IntArray]:
    """Yield batches of `size` indices (of all, if they are fewer) without end, in a new order each pass."""
    pool = np.flatnonzero(usable)
    size = min(size, len(pool))
    while True:
        order = rng.permutation(pool)
        for first in range(0, len(order) - size + 1, size):
            yield order[first : first + size]
