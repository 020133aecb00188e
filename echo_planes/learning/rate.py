"""The learning rate of each update: warm-up, plateau and decay, times a factor that follows the drift.

Clips and masks remove gradient from stale tokens, but Adam divides by the gradient's size: the step stays as
long as the rate says, in the direction of momentum, for as many steps as the data is old. So the rate itself
follows what it causes (`DriftControl`). Related: the adaptive rate for a desired KL of PPO in robotics
(2109.11978), and rates divided by staleness in asynchronous SGD (1511.05950).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from echo_planes.types import LagStats

RELEASE = 0.1  # share of the way that the estimate of drift falls in one step
LONGEST_LAG = 256  # steps whose factors are kept


def warm_up(warmup_updates: int, updates: int) -> float:
    """Share of the peak rate after so many optimizer updates: linear, then 1."""
    return min(1.0, (updates + 1) / max(warmup_updates, 1))


def decay_left(decay: float, done: float) -> float:
    """Share of the peak rate that the decay leaves: 1, then linear to 0 over the last `decay` of the run.

    Args:
        done: share of the run's steps behind the update, 0 to 1. However many updates a step makes, the
            decay ends with the run, and is not 0 before.
    """
    return min(1.0, (1.0 - done) / decay) if decay else 1.0


@dataclass
class DriftControl:
    """A factor f on the learning rate that holds the drift of the trained tokens near a target.

    Drift d: mean |log pi_learner - log pi_sampler| over a step's tokens, nats. It grows with what the weights
    travelled since the tokens were sampled, so with F the mean factor over the tokens' lags, d / F is what
    they would have drifted at the full rate, and f = target / (d / F), between the floor and 1. The estimate
    rises at once and falls slowly: a factor that follows d alone answers `lag` steps late, and swings.

    Staleness then costs speed, not the run. Where no token is stale the tokens of the last step, scored again
    after it, stand for ones of lag 1: no single step may move the policy further than the target.

    Args:
        target: nats; 0: f stays 1.
        floor: smallest f.
    """

    target: float
    floor: float
    at_full_rate: float = 0.0  # estimate of d / F, nats
    history: list[float] = field(default_factory=list)  # factors of the last steps, newest last

    @property
    def factor(self) -> float:
        """f of the next step."""
        if not self.target or not self.at_full_rate:
            return 1.0
        return min(max(self.target / self.at_full_rate, self.floor), 1.0)

    def observe(self, lags: Sequence[LagStats]) -> None:
        """Take in what a step's tokens had drifted, before its update."""
        stale = sum(one.tokens * one.lag for one in lags)
        travelled = sum(one.tokens * sum(self.history[-one.lag :]) for one in lags if one.lag)
        drift = sum(one.tokens * one.drift for one in lags)
        if travelled and math.isfinite(drift):
            now = drift / sum(one.tokens for one in lags) * stale / travelled
            self.at_full_rate = max(now, self.at_full_rate + RELEASE * (now - self.at_full_rate))

    def stepped(self, factor: float) -> None:
        """A step ended: the share of the scheduled rate that it was made with, 0 where it made no update."""
        self.history = [*self.history[-LONGEST_LAG:], factor]
