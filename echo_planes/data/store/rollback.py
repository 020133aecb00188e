"""Rollback of a store at a resume from a checkpoint. Pure.

The learner continues from the weights of step s, so whatever it trained since is not trained, and whatever
was sampled under a later version comes from weights that no longer exist. Everything else stays accepted.
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
    returned: IntArray  # trained beyond the checkpoint, and good to be trained again


def plan(index: GroupIndex, step: int, newest_version: Callable[[int], int | None]) -> Undo:
    """Changes of fate that make the store as it was when `step` updates were completed.

    Groups that were accepted later stay, where every token was sampled under a version up to `step`: their
    work need not be done again. Groups that were dropped stay dropped, those that were set aside as
    uninformative stay that.

    Args:
        index: of the store.
        step: t of the checkpoint.
        newest_version: of a group's tokens, None where its rows are damaged.
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
    open_ &= groups["fate"] != Fate.LOST  # some were found damaged just now
    return Undo(np.flatnonzero(open_ & later), np.flatnonzero(undone & ~later))
