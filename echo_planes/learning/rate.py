"""The learning rate of each update: warm-up, plateau and decay, times a factor that follows the drift.

Clips and masks remove gradient from stale tokens, but Adam divides by the gradient's size. The step keeps the
length that the rate sets, in the direction of momentum, for as many steps as the data is old. `DriftControl`
therefore makes the rate follow the drift that it causes. Related: the adaptive rate for a desired KL of PPO
in robotics (2109.11978), and rates divided by staleness in asynchronous SGD (1511.05950).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from echo_planes.types import LagStats

RELEASE = 0.1  # share of the gap to a lower value by which the estimate of drift falls in one step
LONGEST_LAG = 256  # the factors of this many steps and the newest are kept


def warm_up(warmup_updates: int, updates: int) -> float:
    """Return the share of the peak rate after `updates` optimizer updates: linear, then 1."""
    return min(1.0, (updates + 1) / max(warmup_updates, 1))


def decay_left(decay: float, done: float) -> float:
    """Return the share of the peak rate that the decay leaves: 1, then linear to 0 at the end of the run.

    Args:
        decay: share of the run, at its end, over which the rate falls; 0: no decay.
        done: share of the run's steps before the update, 0 to 1. However many updates a step makes, the rate
            reaches 0 only at the end of the run.
    """
    return min(1.0, (1.0 - done) / decay) if decay else 1.0


@dataclass
class DriftControl:
    """Factor f on the learning rate that holds the drift of the trained tokens near a target.

    Drift d: mean |log pi_learner - log pi_sampler| over a step's tokens, nats. It grows with the distance
    that the weights moved since the tokens were sampled. With F the mean factor over the tokens' lags, d / F
    is the drift that the full rate would have caused, and f = target / (d / F), between the floor and 1. The
    estimate rises at once and falls slowly: a factor that followed d alone would react late, and oscillate.

    Staleness then costs speed instead of the run. Where no token is stale, or rollouts are sparse, tokens of
    the last step, scored again after it, stand for tokens of lag 1. A single step then moves the policy no
    further than the target.

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
        """Take in the drift of a step's tokens, measured before the step's update."""
        stale = sum(one.tokens * one.lag for one in lags)
        travelled = sum(one.tokens * sum(self.history[-one.lag :]) for one in lags if one.lag)
        drift = sum(one.tokens * one.drift for one in lags)
        if travelled and math.isfinite(drift):
            now = drift / sum(one.tokens for one in lags) * stale / travelled
            self.at_full_rate = max(now, self.at_full_rate + RELEASE * (now - self.at_full_rate))

    def stepped(self, factor: float) -> None:
        """Record the share of the scheduled rate of a finished step; 0 for a step without an update."""
        self.history = [*self.history[-LONGEST_LAG:], factor]
