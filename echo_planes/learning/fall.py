"""Fall of the reward from its best, and the test for a finished run that collapsed. Pure.

Rewards have no fixed zero. The unit of a fall is therefore the policy's gain since its start or, where that
is less, the spread of one step's rewards. Adding a constant to all rewards, or scaling them, changes nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

COLLAPSED = 0.5  # share of the gain, or of the spread, that a collapsed run has lost
ENOUGH_STEPS = 20  # a shorter run is never called collapsed
SHORTEST_WINDOW = 5  # steps
# In units of the noise of a mean: without a fall, the best of many windows exceeds the last by up to 4.
SURE = 6.0


def fall_of(start: float, best: float, last: float, spread: float) -> float:
    """Return the fall of `last` below `best`, in units of the larger of gain since `start` and spread.

    Without a gain and a spread the result is 0.
    """
    scale = max(best - start, spread)
    return (best - last) / scale if scale > 0 else 0.0


def root_mean_square(values: Sequence[float]) -> float:
    """Return the mean spread of several steps; a median would be 0 where most steps have no reward at all."""
    return math.sqrt(sum(value * value for value in values) / max(len(values), 1))


def collapse_of(rewards: Sequence[float], spreads: Sequence[float]) -> str:
    """Describe how a run's reward ended far below its best; "" if it did not.

    The mean of the last tenth of the steps is compared with the best mean of as many consecutive steps. A
    difference that the noise from step to step explains does not count.

    Args:
        rewards: mean reward of every step.
        spreads: standard deviation of the rewards within a step.
    """
    if len(rewards) < ENOUGH_STEPS:
        return ""
    window = max(SHORTEST_WINDOW, len(rewards) // 10)
    means = [statistics.fmean(rewards[i : i + window]) for i in range(len(rewards) - window + 1)]
    start, best, last = means[0], max(means), means[-1]
    # The difference of two steps has twice the variance of a step; that of two means, 2 / window times it.
    noise = root_mean_square([b - a for a, b in pairwise(rewards)]) / window**0.5
    fall = fall_of(start, best, last, root_mean_square(spreads))
    if fall <= COLLAPSED or best - last <= SURE * noise:
        return ""
    return (
        f"the reward fell to {last:.3g} in the last {window} steps from {best:.3g} in the {window} best: "
        f"{fall:.2f} of what it had gained, or of its spread, where {COLLAPSED} is the limit; lower "
        "learner.lr, staleness.max_staleness or learner.drift_target"
    )
