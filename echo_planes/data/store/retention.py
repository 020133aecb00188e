"""Rule by which a store may let rows go: by age, version and size. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from echo_planes.data.store.index import Fate, GroupIndex
from echo_planes.types import IntArray


@dataclass(frozen=True, slots=True)
class Retention:
    """Limits on the rows that are kept. Those beyond any one limit go."""

    max_age_s: float = math.inf  # since acceptance
    min_version: int = -1
    max_bytes: float = math.inf  # of all rows; the oldest go first, those that can still be trained last


def outdated(index: GroupIndex, retention: Retention, now_s: float) -> IntArray:
    """Groups whose rows shall go, in order of arrival.

    Args:
        index: of the store.
        retention: the limits.
        now_s: on the clock of the groups' `created_s`.
    """
    groups = index.groups
    present = ~groups["erased"] & (groups["message"] >= 0)
    going = present & (groups["created_s"] < now_s - retention.max_age_s)
    going |= present & (groups["version"] < retention.min_version)
    staying = np.flatnonzero(present & ~going)
    excess = int(groups["num_bytes"][staying].sum()) - retention.max_bytes
    if excess > 0:
        trainable = groups["fate"][staying] == Fate.BUFFERED
        queue = np.concatenate([staying[~trainable], staying[trainable]])
        freed = np.cumsum(groups["num_bytes"][queue])
        going[queue[: int(freed.searchsorted(excess)) + 1]] = True
    return np.flatnonzero(going)


def live_share(index: GroupIndex, segment: int) -> float:
    """The part of a segment's rows, in bytes, that has not been let go; 1 where nothing was."""
    messages = np.flatnonzero(index.messages["segment"] == segment)
    groups = index.groups
    if not len(messages):
        return 1.0
    # The groups of one segment are neighbours.
    first = int(index.messages["sequence"][messages[0]])
    end = int(index.messages["sequence"][messages[-1]] + index.messages["num_groups"][messages[-1]])
    sizes = groups["num_bytes"][first:end].astype(np.int64)
    total = int(sizes.sum())
    return int(sizes[~groups["erased"][first:end]].sum()) / total if total else 1.0
