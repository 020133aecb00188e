"""Rules by which a store removes rows: by age, version and size. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from echo_planes.data.store.index import Fate, GroupIndex
from echo_planes.types import IntArray


@dataclass(frozen=True, slots=True)
class Retention:
    """Limits on the rows that are kept. Rows beyond any one limit are removed."""

    max_age_s: float = math.inf  # since acceptance
    min_version: int = -1
    max_bytes: float = math.inf  # of all rows; the oldest are removed first, buffered groups last


def outdated(index: GroupIndex, retention: Retention, now_s: float) -> IntArray:
    """Return the groups whose rows are beyond a limit, in order of arrival.

    Args:
        index: index of the store.
        retention: the limits.
        now_s: present time on the clock of the groups' `created_s`, seconds.
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
    """Return the share of a segment's row bytes that was not removed, 0 to 1; 1 for an empty segment."""
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
