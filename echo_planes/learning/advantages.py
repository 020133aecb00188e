"""Advantages: each trajectory's reward relative to its group. numpy only.

====================  ============================================  ==================================
kind                  advantage of trajectory i in a group of n     source
====================  ============================================  ==================================
standardised          (R_i - mean) / (std + EPS), population std    DeepSeekMath (2402.03300) 4.1.2
centred               R_i - mean                                    Dr. GRPO (2503.20783) 3.2
leave_one_out         R_i - mean of the other n - 1; 0 for n = 1    RLOO (2402.14740)
====================  ============================================  ==================================
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from echo_planes.types import BoolArray, FloatArray, IntArray

Advantage = Literal["standardised", "centred", "leave_one_out"]
EPS = 1e-6  # keeps the division finite; rewards that differ by less get advantages near 0


def compute_advantages(
    kind: Advantage, rewards: FloatArray, groups: IntArray, given: FloatArray
) -> FloatArray:
    """Return the advantages (N,) of `kind` for `rewards` (N,), normalised among equal `groups` (N,).

    Where `given` (N,) is not NaN, it is the advantage; the reward still counts in its group's mean.
    A group whose rewards are all equal gets exactly 0, but for given advantages.
    """
    _, index, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    values = rewards.astype(np.float64)
    n = sizes[index]
    mean = (np.bincount(index, values) / sizes)[index]
    centred = values - mean
    # A rounded mean of equal rewards can differ from them by an ulp, which the division would magnify.
    low = np.full(len(sizes), np.inf)
    high = np.full(len(sizes), -np.inf)
    np.minimum.at(low, index, values)
    np.maximum.at(high, index, values)
    centred[(low == high)[index]] = 0.0
    if kind == "centred":
        advantages = centred
    elif kind == "leave_one_out":
        advantages = centred * (n / np.maximum(n - 1, 1))
    else:
        std = np.sqrt(np.bincount(index, centred**2) / sizes)[index]
        advantages = centred / (std + EPS)
    return np.where(np.isnan(given), advantages, given).astype(np.float32)


def zero_groups(advantages: FloatArray, groups: IntArray) -> BoolArray:
    """Return True (N,) on trajectories of groups whose advantages are all 0, without a policy gradient."""
    _, index = np.unique(groups, return_inverse=True)
    empty: BoolArray = np.bincount(index, advantages != 0.0) == 0
    return empty[index]
