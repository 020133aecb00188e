"""Fall of the reward from its best, and the test for a finished run that collapsed. Pure.

Rewards have no fixed zero. The unit of a fall is therefore the policy's gain since its start or, where that
is less, the spread of one step's rewards. Adding a constant to all rewards, or scaling them, changes nothing.

Steps are compared by all answers accepted for them: what a refill leaves in the batch becomes harder as easy
prompts are mastered. They are compared within one level of the task's curriculum: a harder one lowers the
reward.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from echo_planes.types import TrainBatch

COLLAPSED = 0.5  # share of the gain, or of the spread, that a collapsed run has lost
ENOUGH_STEPS = 20  # a shorter run is never called collapsed
SHORTEST_WINDOW = 5  # steps
# In units of the noise of a mean: without a fall, the best of many windows exceeds the last by up to 4.
SURE = 6.0


@dataclass(frozen=True, slots=True)
class LevelFigures:
    """Figures of the answers accepted for a step, of one level."""

    level: int  # of the task's curriculum; 0 without one
    reward: float  # mean, as the task gave it
    spread: float  # standard deviation of the rewards
    cut_off: float  # share of the answers that ended at their token limit


def level_figures(batch: TrainBatch) -> LevelFigures | None:
    """Return the figures of the level that most of a step's answers are of; None: it has no answers."""
    scores, cut_off, levels = batch.accepted_scores, batch.accepted_cut_off, batch.accepted_levels
    if not len(scores):
        scores, cut_off, levels = batch.task_rewards, batch.cut_off, np.zeros(len(batch.rewards), np.int64)
    if not len(scores):
        return None
    level = int(np.bincount(levels).argmax())
    own = levels == level
    return LevelFigures(
        level, float(scores[own].mean()), float(scores[own].std()), float(cut_off[own].mean())
    )


def fall_of(start: float, best: float, last: float, spread: float) -> float:
    """Return the fall of `last` below `best`, in units of the larger of gain since `start` and spread.

    Without a gain and a spread the result is 0.
    """
    scale = max(best - start, spread)
    return (best - last) / scale if scale > 0 else 0.0


def root_mean_square(values: Sequence[float]) -> float:
    """Return the mean spread of several steps; a median would be 0 where most steps have no reward at all."""
    return math.sqrt(sum(value * value for value in values) / max(len(values), 1))


def collapse_of(rewards: Sequence[float], spreads: Sequence[float], levels: Sequence[int] = ()) -> str:
    """Describe how a run's reward ended far below its best; "" if it did not.

    The mean of the last tenth of the steps is compared with the best mean of as many consecutive steps, all
    of the newest level with `ENOUGH_STEPS`. A difference that the noise from step to step explains does not
    count.

    Args:
        rewards: mean reward of every step.
        spreads: standard deviation of the rewards within a step.
        levels: level of every step; (): all are of one.
    """
    steps = list(zip(levels or [0] * len(rewards), rewards, spreads, strict=True))
    number = Counter(level for level, _, _ in steps)
    newest = next((level for level, _, _ in reversed(steps) if number[level] >= ENOUGH_STEPS), None)
    if newest is None:
        return ""
    rewards = [reward for level, reward, _ in steps if level == newest]
    spreads = [spread for level, _, spread in steps if level == newest]
    window = max(SHORTEST_WINDOW, len(rewards) // 10)
    means = [statistics.fmean(rewards[i : i + window]) for i in range(len(rewards) - window + 1)]
    start, best, last = means[0], max(means), means[-1]
    # The difference of two steps has twice the variance of a step; that of two means, 2 / window times it.
    noise = root_mean_square([b - a for a, b in pairwise(rewards)]) / window**0.5
    fall = fall_of(start, best, last, root_mean_square(spreads))
    if fall <= COLLAPSED or best - last <= SURE * noise:
        return ""
    where = f" of level {newest}" if len(number) > 1 else ""
    return (
        f"the reward fell to {last:.3g} in the last {window} steps{where} from {best:.3g} in the {window} "
        f"best: {fall:.2f} of what it had gained, or of its spread, where {COLLAPSED} is the limit; lower "
        "learner.lr, staleness.max_staleness or learner.drift_target"
    )
