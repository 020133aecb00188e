"""A fall of the reward from its best, and whether a run that is over had collapsed. Pure.

Rewards have no fixed zero, so a fall is told in what the policy had gained since its start or, where that is
less, in the spread of one step's rewards: adding a constant to all rewards, or scaling them, changes nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

COLLAPSED = 0.5  # share of the gain, or of the spread, that a collapsed run has lost
ENOUGH_STEPS = 20  # fewer say nothing
SHORTEST_WINDOW = 5
# Of the noise of a mean. The best of many windows and the last one differ by up to 4 without any fall.
SURE = 6.0


def fall_of(start: float, best: float, last: float, spread: float) -> float:
    """Fall of `last` below `best`, in units of the gain since `start`, or of the spread if that is larger.

    0 where there is neither a gain nor a spread.
    """
    scale = max(best - start, spread)
    return (best - last) / scale if scale > 0 else 0.0


def root_mean_square(values: Sequence[float]) -> float:
    """Mean spread of several steps: not the median, which is 0 where most steps have no reward at all."""
    return math.sqrt(sum(value * value for value in values) / max(len(values), 1))


def collapse_of(rewards: Sequence[float], spreads: Sequence[float]) -> str:
    """In words, how a run's reward ended far below its best; "" if it did not.

    The last tenth of the steps against the best of all stretches so long, if the two are further apart than
    the noise from step to step explains.

    Args:
        rewards: mean of every step.
        spreads: standard deviation of the rewards within a step.
    """
    if len(rewards) < ENOUGH_STEPS:
        return ""
    window = max(SHORTEST_WINDOW, len(rewards) // 10)
    means = [statistics.fmean(rewards[i : i + window]) for i in range(len(rewards) - window + 1)]
    start, best, last = means[0], max(means), means[-1]
    # The difference of two steps has twice the variance of one, that of two means 2 / window of it.
    noise = root_mean_square([b - a for a, b in pairwise(rewards)]) / window**0.5
    fall = fall_of(start, best, last, root_mean_square(spreads))
    if fall <= COLLAPSED or best - last <= SURE * noise:
        return ""
    return (
        f"the reward fell to {last:.3g} in the last {window} steps from {best:.3g} in the {window} best: "
        f"{fall:.2f} of what it had gained, or of its spread, where {COLLAPSED} is the limit; lower "
        "learner.lr, staleness.max_staleness or learner.drift_target"
    )
