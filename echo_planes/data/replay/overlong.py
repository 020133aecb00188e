"""Treatment of answers that reach their token limit: trained as they are, masked, or penalised by length.

In an answer of several turns the limit applies to each call of the policy, so the longest call counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import numpy as np

from echo_planes.config.schema import Config
from echo_planes.errors import ConfigError
from echo_planes.types import Episode, FloatArray, Trajectory

DEFAULT_SHARE = 5  # limit over default margin: DAPO has 20,480 tokens over 4,096


@dataclass(frozen=True, slots=True)
class Overlong:
    """Treatment of long answers."""

    treatment: Literal["keep", "mask", "penalty"] = "keep"
    limit: int = 1  # L_max, tokens of one call of the policy
    margin: int = 1  # L_cache: the penalty begins this many tokens before the limit
    context: int | None = None  # tokens of prompt and answer together, where that is less

    def is_masked(self, episode: Episode) -> bool:
        """Return whether no token of an episode is trained. Its reward still counts in its group's mean."""
        return self.treatment == "mask" and is_cut_off(episode)

    def penalty(self, trajectory: Trajectory) -> float:
        """Return the soft overlong punishment, -1 to 0 (DAPO, 2503.14476, section 3.4, eq. 13)."""
        episode = trajectory.episode
        if self.treatment != "penalty":
            return 0.0
        if is_cut_off(episode):
            return -1.0  # whatever cut it
        length = max((sum(1 for _ in run) for own, run in groupby(episode.response_mask) if own), default=0)
        room = self.limit if self.context is None else self.context - len(trajectory.prompt.token_ids)
        return max(-1.0, min(0.0, (min(self.limit, room) - self.margin - length) / self.margin))

    def trained_rewards(self, trajectories: Sequence[Trajectory]) -> FloatArray:
        """Return the rewards that are trained on: the task's reward plus the penalty, shape (n,)."""
        return np.array([one.reward.value + self.penalty(one) for one in trajectories], np.float32)


KEPT = Overlong()


def is_cut_off(episode: Episode) -> bool:
    """Return whether an answer, or an episode of several turns, ended at a limit."""
    return episode.finish_reason == "length"


def overlong_of(config: Config, task_limit: int | None) -> Overlong:
    """Return the treatment that a run's settings ask for.

    Args:
        config: the run's settings.
        task_limit: the task's own `max_new_tokens`; None: `sampling.max_new_tokens` applies.

    Raises:
        ConfigError: the margin is larger than the limit.
    """
    limit = task_limit or config.sampling.max_new_tokens
    margin = config.sampling.overlong_tokens or max(1, limit // DEFAULT_SHARE)
    if margin > limit:
        raise ConfigError(
            f"sampling.overlong_tokens={margin} is more than the {limit} tokens an answer may have, so that "
            "every answer would be punished; give fewer"
        )
    return Overlong(config.overlong, limit, margin, config.model.max_model_len)
