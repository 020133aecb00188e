"""The learning rate of each update: warm-up, plateau and decay, times a factor that follows the drift.

Clips and masks remove gradient from stale tokens, but Adam divides by the gradient's size. The step keeps the
length that the rate sets, in the direction of momentum, for as many steps as the data is old. `DriftControl`
therefore makes the rate follow the drift that it causes. Related: the adaptive rate for a desired KL of PPO
in robotics (2109.11978), and rates divided by staleness in asynchronous SGD (1511.05950).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from echo_planes.types import LagStats, Noise

RELEASE = 0.1  # share of the gap to a lower value by which the estimate falls in one step
MOST_NOISE = 2.0  # of the target; of more noise than that, only so much is taken off the drift
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
class RateSchedule:
    """Plateau and decay over the steps of a run.

    A run whose `run.steps` was raised after its decay had begun, or at its end, gets both anew over the steps
    that are left. It would otherwise train on at the small rate that the decay had left.
    """

    first: float = 0.0  # steps before the plateau
    last: int = 0  # `run.steps`; 0: not known yet
    steps_done: int = 0  # of the run

    def left(self, decay: float, done: float, steps: int) -> float:
        """Return the share of the peak rate after `done` steps of the run.

        Args:
            decay: as for `decay_left`.
            done: steps of the run before the update.
            steps: `run.steps`.
        """
        if self.last and steps > self.last and self._left(decay, done) < 1.0:
            self.first = done
        self.last = steps
        return self._left(decay, done)

    def _left(self, decay: float, done: float) -> float:
        return decay_left(decay, (done - self.first) / (self.last - self.first))


@dataclass
class DriftControl:
    """Factor f on the learning rate that holds the movement of the policy under stale tokens near a target.

    The drift of tokens, d = mean |log pi_learner - log pi_sampler|, is movement m plus the noise d0 between
    engine and learner on equal weights, which adds as a square: m^2 = d^2 - d0^2. Tokens since which no
    update was made measure d0. With F the mean factor of the updates since the others were sampled, m / F is
    the movement that as many updates at the full rate would have caused, and f = target / (m / F), between
    the floor and 1. A step without an update says nothing about the length of a step, and counts neither way.
    The estimate of m / F rises at once and falls slowly, both by the share of the tokens that measured it: a
    factor that followed the drift alone would react late, and oscillate.

    Staleness then costs speed instead of the run. Where no token is stale, or rollouts are sparse, tokens of
    the last step, scored again after it, tell how far one step moves the policy.

    Example: engine and learner differ by 0.03 nats on equal weights. Tokens of three updates at the full rate
    drift by 0.085 nats, of which 0.08 are movement. The target is 0.1, so f stays 1.

    Args:
        target: nats; 0: f stays 1.
        floor: smallest f.
    """

    target: float
    floor: float
    at_full_rate: float = 0.0  # estimate of m / F, nats
    noise: Noise | None = None  # slow mean; None: not measured yet
    history: list[float] = field(default_factory=list)  # factors of the last steps, newest last; 0: no update

    @property
    def factor(self) -> float:
        """f of the next step."""
        if not self.target or not self.at_full_rate:
            return 1.0
        return min(max(self.target / self.at_full_rate, self.floor), 1.0)

    def is_still(self, lag: int) -> bool:
        """Return whether no update was made since tokens of this lag were sampled."""
        return not self._updates(lag)

    def observe(self, lags: Sequence[LagStats], noise: Noise | None = None) -> None:
        """Take in a step's tokens, measured before the step's update.

        Args:
            lags: of all tokens.
            noise: of those tokens whose lag `is_still`; None: there are none.
        """
        rows = [(one, self._updates(one.lag)) for one in lags if math.isfinite(one.drift)]
        total = sum(one.tokens for one, _ in rows)
        still = sum(one.tokens for one, updates in rows if not updates)
        if noise is not None and still and math.isfinite(noise.drift):
            self.noise = _between(self.noise or noise, noise, RELEASE * still / total)
        moved = [(one, updates) for one, updates in rows if updates]
        if tokens := sum(one.tokens for one, _ in moved):
            drift = sum(one.tokens * one.drift for one, _ in moved) / tokens
            known = min(self.noise.drift, MOST_NOISE * self.target) if self.noise else 0.0
            made = sum(one.tokens * len(updates) for one, updates in moved)
            went = sum(one.tokens * sum(updates) for one, updates in moved)
            self._learn(math.sqrt(max(0.0, drift**2 - known**2)) * made / went, tokens / total)

    def observe_own_step(self, movement: float) -> None:
        """Take in how far the newest step moved the policy, nats, measured by the learner alone."""
        if updates := self._updates(1):
            self._learn(movement / updates[0], 1.0)

    def stepped(self, factor: float) -> None:
        """Record the share of the scheduled rate of a finished step; 0 for a step without an update."""
        self.history = [*self.history[-LONGEST_LAG:], factor]

    def _updates(self, lag: int) -> list[float]:
        """Return the factors of those of the last `lag` steps that made an update."""
        return [factor for factor in self.history[-lag:] if factor] if lag else []

    def _learn(self, now: float, share: float) -> None:
        if math.isfinite(now):
            speed = 1.0 if now > self.at_full_rate else RELEASE
            self.at_full_rate += share * speed * (now - self.at_full_rate)


def _between(before: Noise, now: Noise, share: float) -> Noise:
    new = asdict(now)
    return Noise(**{name: value + share * (new[name] - value) for name, value in asdict(before).items()})
