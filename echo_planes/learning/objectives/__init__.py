"""Objectives by name: one short file each, with source, formula and defaults; `base.py` has the shared parts.

An objective also fixes how tokens are averaged. N: trajectories with at least one trained token; |o_i|:
trained tokens of trajectory i; T: trained tokens of the update; L: the most tokens that an answer may have.

==========  ===================  ==================
average     weight of a token    objectives
==========  ===================  ==================
trajectory  1 / (N |o_i|)        grpo, gspo
tokens      1 / T                dapo, rloo, cispo
constant    1 / (N L)            dr_grpo
==========  ===================  ==================

A new objective needs a file here, an entry in `OBJECTIVES` and its name in `ObjectiveConfig.name`.
"""

from __future__ import annotations

import numpy as np

from echo_planes.errors import ConfigError
from echo_planes.learning.objectives.base import Loss, Objective, Tokens, outlier_masks, policy_loss
from echo_planes.learning.objectives.cispo import CISPO
from echo_planes.learning.objectives.dapo import DAPO
from echo_planes.learning.objectives.dr_grpo import DR_GRPO
from echo_planes.learning.objectives.grpo import GRPO
from echo_planes.learning.objectives.gspo import GSPO
from echo_planes.learning.objectives.rloo import RLOO
from echo_planes.types import FloatArray, IntArray

OBJECTIVES: dict[str, Objective] = {one.name: one for one in (GRPO, DAPO, DR_GRPO, RLOO, GSPO, CISPO)}

__all__ = [
    "OBJECTIVES",
    "Loss",
    "Objective",
    "Tokens",
    "check_parts",
    "outlier_masks",
    "policy_loss",
    "token_weights",
]


def token_weights(
    objective: Objective, num_tokens: IntArray, max_tokens: int, step_trajectories: int = 0
) -> FloatArray:
    """Return the weight (N,) of each trained token of trajectory i, by the table above.

    Args:
        num_tokens: trained tokens per trajectory (N,), for all trajectories of one optimizer update.
        max_tokens: L, tokens.
        step_trajectories: trajectories of the whole step, if these are a part of it. Then it takes the place
            of N, which is not known before the last part; 1 / T is unknown too (`check_parts`).
    """
    counted = step_trajectories or max(int((num_tokens > 0).sum()), 1)
    if objective.average == "tokens":
        weights = np.full(len(num_tokens), 1.0 / max(int(num_tokens.sum()), 1))
    elif objective.average == "constant":
        weights = np.full(len(num_tokens), 1.0 / (counted * max_tokens))
    else:
        weights = 1.0 / (counted * np.maximum(num_tokens, 1))
    return weights.astype(np.float32)


def check_parts(objective: Objective) -> None:
    """Check that a step of this objective can be trained in parts, before all its answers are there.

    Raises:
        ConfigError: its average is over the tokens of the whole step.
    """
    if objective.average == "tokens":
        raise ConfigError(
            f"learner.micro_batch_groups: objective.name={objective.name} divides by the tokens of the whole "
            "step, which are not known before its last answer; leave micro_batch_groups out, or choose an "
            "objective that divides by answers (grpo, gspo, dr_grpo)"
        )
