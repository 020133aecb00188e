"""Bounded staleness as arithmetic: who may be trained, and how much work may be handed out.

t counts the updates completed when a batch is formed, v the snapshot a trajectory was sampled under,
S the staleness budget, p the snapshot a worker serves (ECHO-2 section 4.1).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

_ROUNDING = 1e-9  # a quotient this close below a whole number is that number


def oldest_admissible(step: int, max_staleness: int) -> int:
    """The oldest version that may be in the batch formed at `step`: t - v <= S."""
    return step - max_staleness


def is_admissible(version: int, step: int, max_staleness: int) -> bool:
    """Whether a trajectory of `version` may be in the batch formed at `step`."""
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
    """Number of further groups that may be leased to a worker that serves `worker_version`.

    Work of version p can still be trained in the batches formed at t, t + 1, ..., p + S: that is
    (p + S - t + 1) batches, less what is already leased or buffered. `queue_batches` >= 1 lowers the
    ceiling further: beyond one batch, more work in the queue only makes it older. Of what is leased a share
    `uninformative` is expected to be replaced, which fills no queue; but all of it may count, and is within
    the bound then. At least one whole batch is always allowed to an admissible worker, so the learner can
    never be left waiting for permits.

    Args:
        worker_version: p.
        step: t.
        max_staleness: S.
        groups_per_step: groups in a batch.
        outstanding_groups: leased and buffered.
        queue_batches: of groups that are expected to count.
        leased_groups: of the outstanding ones.
        uninformative: below 1.
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
    """Number of the oldest buffered groups that the batch formed at `step` must have; None: hold the learner.

    Work of version v has its last chance at step v + S. After this batch, (v + S - t) batches are left for
    it, so whatever exceeds them must go now (earliest deadline first). Where some of that is still with a
    worker, forming the batch would condemn it: hold until the lease ends. `num_permits` keeps the excess
    of every version within one batch, so under `wait` nothing whose lease lives is ever too old. Under
    `drop` pass no leased versions: then only what is buffered is protected, and the result is never None.
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
