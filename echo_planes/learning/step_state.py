"""State of a learner's step in progress, whole or in parts."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from echo_planes.learning import packing
from echo_planes.learning.packing import Inputs, joined_batch
from echo_planes.types import BoolArray, TrainBatch


@dataclass(slots=True)
class Step:
    """State of a step in progress; sums are over tokens put through a training forward."""

    advantages: Tensor  # (N,)
    sampler_logprobs: Tensor  # (T,)
    lags: Tensor  # (T,) int64, t - v of each token's version; 0 outside the response
    seen: Tensor  # (2, T) logprobs at the start of the step and entropies, nats; 0 where not computed
    mine: Tensor  # (2, T) like `seen`, of this rank's training forwards alone, before ranks are summed
    old: Tensor | None  # (T,) logprobs of a first pass; None: the step makes a single update
    per_lag: Tensor  # (lags, 4): tokens trained, truncated, masked, clipped
    # (4,) loss, importance weights, KL and number of tokens of the micro-batches of the present update
    sums: Tensor
    factor: float | None = None  # on the scheduled rate, of drift control and guard; None: not known yet
    drift_factor: float = 1.0  # of drift control alone
    tokens_forward: int = 0
    tokens_trained: int = 0  # of them, through training forwards
    losses: list[float] = field(default_factory=list)  # per update
    grad_norms: list[float] = field(default_factory=list)
    learning_rate: float | None = None
    tis: float = 0.0
    kl: float = 0.0
    tokens_updated: float = 0.0  # tokens of the updates made, which `tis` and `kl` are sums over
    skipped: int = 0  # updates without a finite gradient


@dataclass(frozen=True, slots=True)
class Part:
    """Part of a step, or the whole of it. N: its trajectories."""

    batch: TrainBatch
    step: Step
    trained: BoolArray  # (N,) of a group that goes through a training forward
    scored: BoolArray  # (N,) of a group that goes through the model
    empty: BoolArray  # (N,) of a group without a gradient
    seconds: float = 0.0  # spent on it

    @property
    def inputs(self) -> Inputs:
        return packing.find_inputs(self.batch, self.trained)


def joined_parts(parts: list[Part]) -> Part:
    """Return the parts of a step as one, in their order."""
    steps = [part.step for part in parts]
    most = max(len(step.per_lag) for step in steps)
    per_lag = [torch.nn.functional.pad(step.per_lag, (0, 0, 0, most - len(step.per_lag))) for step in steps]
    step = Step(
        advantages=torch.cat([step.advantages for step in steps]),
        sampler_logprobs=torch.cat([step.sampler_logprobs for step in steps]),
        lags=torch.cat([step.lags for step in steps]),
        seen=torch.cat([step.seen for step in steps], dim=1),
        mine=torch.cat([step.mine for step in steps], dim=1),
        old=None,
        per_lag=torch.stack(per_lag).sum(0),
        sums=torch.stack([step.sums for step in steps]).sum(0),
        tokens_forward=sum(step.tokens_forward for step in steps),
        tokens_trained=sum(step.tokens_trained for step in steps),
    )
    return Part(
        joined_batch([part.batch for part in parts]),
        step,
        np.concatenate([part.trained for part in parts]),
        np.concatenate([part.scored for part in parts]),
        np.concatenate([part.empty for part in parts]),
        sum(part.seconds for part in parts),
    )
