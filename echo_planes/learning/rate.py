"""The learning rate of each update: warm-up, plateau and decay, times a factor that follows the drift.

Clips and masks remove gradient from stale tokens, but Adam divides by the gradient's size: the step stays as
long as the rate says, in the direction of momentum, for as many steps as the data is old. So the rate itself
follows what it causes (`DriftControl`). Related: the adaptive rate for a desired KL of PPO in robotics
(2109.11978), and rates divided by staleness in asynchronous SGD (1511.05950).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SHRINK, GROW = 0.5, 1.5  # of the factor in one step, at most


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


@dataclass(slots=True)
class DriftControl:
    """A factor f on the learning rate that holds the drift of the trained tokens near a target.

    Drift d: mean |log pi_learner - log pi_sampler| over a step's tokens, nats. After each step
    f <- clamp(f clamp(target / d, 0.5, 1.5), floor, 1): staleness then costs speed, not the run.

    Args:
        target: nats; 0: f stays 1.
        floor: smallest f.
        factor: f to begin with, of a checkpoint.
    """

    target: float
    floor: float
    factor: float = 1.0

    def observe(self, drift: float | None) -> None:
        """Take a step's drift in; None where it scored no token leaves f as it is."""
        if self.target and drift and math.isfinite(drift):
            change = min(max(self.target / drift, SHRINK), GROW)
            self.factor = min(max(self.factor * change, self.floor), 1.0)
