"""Arithmetic of bounded staleness: which groups may be trained, and how many may be leased.

t counts the updates completed when a batch is formed, v the snapshot a trajectory was sampled under,
S the staleness budget, p the snapshot a worker serves (ECHO-2 section 4.1).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

_ROUNDING = 1e-9  # a quotient this close below a whole number is that number


def oldest_admissible(step: int, max_staleness: int) -> int:
    """Return the oldest version that may be in the batch formed at `step`: t - v <= S."""
    return step - max_staleness


def is_admissible(version: int, step: int, max_staleness: int) -> bool:
    """Return whether a trajectory of `version` may be in the batch formed at `step`."""
    return version >= oldest_admissible(step, max_staleness)


def num_permits(
    *,
    worker_version: int,
    step: int,
    max_staleness: int,
    groups_per_step: int,
    outstanding_groups: int,
    queue_batches: float,
    leased_groups: int = 0,
    uninformative: float = 0.0,
) -> int:
    """Return how many further groups may be leased to a worker that serves `worker_version`.

    Work of version p can still be trained in the batches formed at t, t + 1, ..., p + S: that is
    (p + S - t + 1) batches, less the groups already leased or buffered. `queue_batches` lowers this limit:
    beyond one batch, a longer queue only makes its groups older. A share `uninformative` of the leased groups
    is expected to be set aside, and does not count as queued. The first limit still counts all of them. The
    total allowed for an admissible version is never below one batch, so the learner never waits for permits.

    Args:
        worker_version: p.
        step: t.
        max_staleness: S.
        groups_per_step: groups in a batch.
        outstanding_groups: groups leased or buffered.
        queue_batches: longest queue of groups expected to count, in batches; below 1 counts as 1.
        leased_groups: leased ones of the outstanding groups.
        uninformative: expected share of leased groups that are set aside, [0, 1).
    """
    batches_left = worker_version + max_staleness - step + 1
    if batches_left <= 0:
        return 0
    counting = outstanding_groups - uninformative * leased_groups
    queue = (max(queue_batches, 1.0) * groups_per_step - counting) / (1.0 - uninformative)
    return max(0, min(batches_left * groups_per_step - outstanding_groups, math.floor(queue + _ROUNDING)))


def num_urgent(
    *,
    buffered_versions: Iterable[int],
    leased_versions: Iterable[int],
    step: int,
    max_staleness: int,
    groups_per_step: int,
) -> int | None:
    """Return how many of the oldest groups the batch formed at `step` must contain; None: hold the learner.

    Step v + S is the last one that can train version v. After this batch, (v + S - t) batches are left for
    it, so groups in excess of these must be trained now (earliest deadline first). If part of the excess is
    still leased, forming the batch would make it too old, so the learner is held until the lease ends.
    `num_permits` keeps the excess of every version within one batch, so under `wait` and a constant S the
    work of a live lease never becomes too old. Under `drop` the caller passes no leased versions, and the
    result is never None.
    """
    buffered = Counter(buffered_versions)
    leased = Counter(leased_versions)
    have = total = urgent = 0
    for version in sorted(buffered.keys() | leased.keys()):
        have += buffered[version]
        total += buffered[version] + leased[version]
        excess = total - max(0, version + max_staleness - step) * groups_per_step
        if min(excess, groups_per_step) > have:
            return None
        urgent = max(urgent, min(excess, groups_per_step))
    return urgent
