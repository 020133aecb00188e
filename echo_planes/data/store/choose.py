"""Choice of the buffered groups for a batch. Pure: randomness is passed in, nothing is changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np
import numpy.typing as npt

from echo_planes.data.store.buckets import Bucket
from echo_planes.data.store.index import Fate, GroupIndex
from echo_planes.types import IntArray

Selector = Literal["fifo", "freshest", "uniform", "staleness", "reward"]
Weights = npt.NDArray[np.float64]

STALENESS_DECAY = 0.5  # a group one version older is half as likely
REWARD_FLOOR = 0.1  # weight of the lowest reward; the highest has 1
_ROUNDS = 5  # rounds of rejection sampling before the exact draw


def choose(
    index: GroupIndex,
    count: int,
    *,
    selector: Selector,
    min_version: int,
    rng: np.random.Generator,
    urgent: int = 0,
) -> IntArray:
    """Choose `count` buffered groups of at least `min_version`; return sequence numbers, shape (count,).

    First come `urgent` groups of the oldest versions (see `staleness.num_urgent`). Among the others, `fifo`
    takes the oldest arrivals, `freshest` the newest versions (ties: newest arrivals). The other selectors
    draw from `rng` without replacement: `uniform`; `staleness`, each version half as likely as the next;
    `reward`, in proportion to the group's mean reward, scaled to [0.1, 1] over the store's rewards.

    Raises:
        ValueError: fewer than `count` groups, more urgent ones than `count`, or an unknown selector.
    """
    available = index.num_buffered(min_version)
    if available < count or urgent > count:
        raise ValueError(f"cannot choose {count} of {available} groups with {urgent} urgent ones")
    chosen = _oldest_versions(index, min_version, urgent)
    if selector == "fifo":
        _extend(chosen, count, index.arrivals(min_version))
    elif selector == "freshest":
        _extend(chosen, count, _newest_versions(index, min_version))
    elif selector in ("uniform", "staleness", "reward"):
        _draw(index, chosen, count, selector, min_version, rng)
    else:
        raise ValueError(f"unknown selector '{selector}'")
    return np.fromiter(chosen, np.int64, count)


# Set of sequence numbers; a dict, because it keeps the order in which groups were chosen.
Chosen = dict[int, None]


def _live(index: GroupIndex, bucket: Bucket) -> IntArray:
    members = bucket.sequences
    kept: IntArray = members[index.groups["fate"][members] == Fate.BUFFERED]
    return kept


def _oldest_versions(index: GroupIndex, min_version: int, count: int) -> Chosen:
    chosen: Chosen = {}
    if count:
        members = index.buckets.members[index.buckets.first_of(min_version) :]
        _extend(chosen, count, (_live(index, bucket) for bucket in members))
    return chosen


def _newest_versions(index: GroupIndex, min_version: int) -> Iterator[IntArray]:
    for row in range(len(index.buckets.members) - 1, index.buckets.first_of(min_version) - 1, -1):
        yield _live(index, index.buckets.members[row])[::-1]


def _extend(chosen: Chosen, count: int, pieces: Iterable[IntArray]) -> None:
    """Add groups in the order of `pieces` until there are `count`."""
    for piece in pieces:
        # A piece gives at most `count` new groups, and holds at most len(chosen) that are chosen already.
        for sequence in piece[: count + len(chosen)].tolist():
            if len(chosen) == count:
                return
            chosen[sequence] = None
        if len(chosen) == count:
            return


def _draw(
    index: GroupIndex,
    chosen: Chosen,
    count: int,
    selector: Selector,
    min_version: int,
    rng: np.random.Generator,
) -> None:
    """Draw one group after another, each in proportion to its weight among those left.

    Rejection sampling: draw a place in a bucket, and reject it if its group has left or is chosen already,
    or, with a probability, if its reward is low. That needs no pass over the candidates. If `_ROUNDS` rounds
    do not suffice, the rest is drawn exactly from all candidates.
    """
    buckets = index.buckets
    first = buckets.first_of(min_version)
    sizes = buckets.sizes[first:]
    weights = np.ones(len(sizes))
    if selector == "staleness" and len(sizes):
        ages = buckets.versions[-1] - buckets.versions[first:]
        weights = np.maximum(STALENESS_DECAY**ages, 1e-300)  # weights of very old versions must not reach 0
    ends = np.cumsum(weights * sizes)
    draws_each = 3 if selector == "reward" else 2  # draws per missing group, of which usually one is kept
    fates, rewards, members = index.groups["fate"], index.groups["reward_mean"], buckets.members
    for _ in range(_ROUNDS):
        draws = draws_each * (count - len(chosen))
        if not draws:
            return
        uniform = rng.random((3, draws))
        rows = np.minimum(ends.searchsorted(uniform[0] * ends[-1], side="right"), len(sizes) - 1)
        places = (uniform[1] * sizes[rows]).astype(np.int64)
        pairs = zip((rows + first).tolist(), places.tolist(), strict=True)
        drawn = np.array([members[row].item(place) for row, place in pairs])
        kept = fates[drawn] == Fate.BUFFERED
        if selector == "reward":
            kept &= uniform[2] < _reward_weights(index, rewards[drawn])
        for sequence in drawn[kept].tolist():
            chosen[sequence] = None
            if len(chosen) == count:
                return
    _draw_exactly(index, chosen, count, selector, first, weights, rng)


def _draw_exactly(
    index: GroupIndex,
    chosen: Chosen,
    count: int,
    selector: Selector,
    first: int,
    per_version: Weights,
    rng: np.random.Generator,
) -> None:
    """Draw from all candidates: those with the smallest exponential variables; the weights are the rates."""
    members = [_live(index, bucket) for bucket in index.buckets.members[first:]]
    candidates = np.concatenate(members)
    weights = np.repeat(per_version, [len(m) for m in members])
    if selector == "reward":
        weights = weights * _reward_weights(index, index.groups["reward_mean"][candidates])
    # Logarithms, because division by the smallest weights would overflow.
    keys = np.log(np.maximum(rng.standard_exponential(len(candidates)), 1e-300)) - np.log(weights)
    keys[np.isin(candidates, list(chosen))] = np.inf
    missing = count - len(chosen)
    for sequence in candidates[np.argsort(keys, kind="stable")[:missing]].tolist():
        chosen[sequence] = None


def _reward_weights(index: GroupIndex, rewards: Weights) -> Weights:
    """Return weights in [REWARD_FLOOR, 1]; a NaN reward gets the lowest."""
    low, high = index.reward_range
    span = high - low
    if span <= 0:
        return np.ones_like(rewards)
    # fmax turns NaN into the lowest weight.
    weights: Weights = (rewards - low) / (span / (1.0 - REWARD_FLOOR)) + REWARD_FLOOR
    bounded: Weights = np.fmin(np.fmax(weights, REWARD_FLOOR), 1.0)
    return bounded
