"""Rollback of a store at a resume from a checkpoint. Pure.

The learner continues from the weights of step s. So groups trained since count as not trained, and tokens
sampled under a later version come from weights that no longer exist. All other groups keep their fates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from echo_planes.data.store.index import Fate, GroupIndex
from echo_planes.types import IntArray


@dataclass(frozen=True, slots=True)
class Undo:
    """Groups whose fate changes, each in order of arrival."""

    quarantined: IntArray  # a token was sampled under a version beyond the checkpoint, or the rows are gone
    returned: IntArray  # trained after the checkpoint, and may be trained again


def plan(index: GroupIndex, step: int, newest_version: Callable[[int], int | None]) -> Undo:
    """Return the changes of fate that take the store back to when `step` updates were completed.

    Groups accepted later stay if every token was sampled under a version up to `step`, so their work is not
    done again. Dropped groups stay dropped. Groups set aside as uninformative since then stay set aside,
    unless a token was sampled under a later version.

    Args:
        index: index of the store.
        step: t of the checkpoint.
        newest_version: returns the newest version of a group's tokens, None if its rows are damaged.
    """
    groups = index.groups
    undone = (groups["fate"] == Fate.TRAINED) & (groups["step"] >= step)
    open_ = undone | (groups["fate"] == Fate.BUFFERED)
    open_ |= (groups["fate"] == Fate.UNINFORMATIVE) & (groups["step"] >= step)
    gone = groups["erased"] | (groups["message"] < 0)
    later = (groups["version"] > step) | gone
    for sequence in np.flatnonzero(open_ & ~later & ~gone).tolist():
        newest = newest_version(sequence)
        later[sequence] = newest is None or newest > step
    open_ &= groups["fate"] != Fate.LOST  # `newest_version` may just have found damaged groups
    return Undo(np.flatnonzero(open_ & later), np.flatnonzero(undone & ~later))
