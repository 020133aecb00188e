"""Which admissible groups go into a batch first."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

from echo_planes.types import Group

SelectorName = Literal["fifo", "freshest", "uniform"]


def select(
    groups: Sequence[Group], count: int, *, name: SelectorName, urgent: int, rng: random.Random
) -> list[Group]:
    """Choose `count` of `groups` (given in order of arrival).

    The `urgent` oldest versions always go first (see `limiter.num_urgent`); among the others `fifo` takes
    the oldest arrivals, `freshest` the newest versions (ties: newest arrivals) and `uniform` draws without
    replacement from `rng`.

    Raises:
        ValueError: fewer than `count` groups, more urgent ones than `count`, or an unknown selector.
    """
    if len(groups) < count or urgent > count:
        raise ValueError(f"cannot select {count} of {len(groups)} groups with {urgent} urgent ones")
    by_age = sorted(range(len(groups)), key=lambda i: (groups[i].version, i))
    first = by_age[:urgent]
    others = sorted(by_age[urgent:])
    if name == "freshest":
        others.sort(key=lambda i: (-groups[i].version, -i))
    elif name == "uniform":
        rng.shuffle(others)
    elif name != "fifo":
        raise ValueError(f"unknown selector '{name}'")
    return [groups[i] for i in (first + others)[:count]]
