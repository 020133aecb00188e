"""Changes that publications have made to a stager's shadow since the engine's version, with the old bits.

If several publications changed an element, the oldest of them holds its bits in the engine's version. So a
merge of their positions keeps the old bits from that publication.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from echo_planes.weights.codec.entry import Change, IndexArray, apply, index_dtype
from echo_planes.weights.digest import BitArray, BitTensor
from echo_planes.weights.receiver import Installed

_RUN_ELEMENTS = 1 << 17  # compared at once
_BLOCK = 1 << 16  # range of positions merged at once


@dataclass(frozen=True, slots=True, eq=False)
class Touched:
    """Changed elements of one tensor, and their old bits. Both of shape (changes,)."""

    indices: IndexArray  # flat, strictly rising
    old: BitArray

    @property
    def nbytes(self) -> int:
        return self.indices.nbytes + self.old.nbytes


@dataclass(slots=True)
class Step:
    """One publication applied to the shadow since the engine's version."""

    reached: Installed
    dense_bytes: int  # size of the state: a patch of this size or more is no smaller than a full file
    touched: dict[str, list[Touched]] = field(default_factory=dict)  # by tensor, in the order of writing
    nbytes: int = 0  # size of `touched`, and of a file with these positions and their new bits
    forgotten: bool = False  # its changes are freed: only an engine at its version or later can get a patch

    def add(self, name: str, part: Touched) -> None:
        """Add one more changed part of a tensor."""
        if self.forgotten or not part.indices.size:
            return
        self.touched.setdefault(name, []).append(part)
        self.nbytes += part.nbytes
        if self.nbytes >= self.dense_bytes:
            self.forget()

    def forget(self) -> None:
        """Free the step's changes."""
        self.touched.clear()
        self.nbytes, self.forgotten = 0, True


def touched_since(steps: Sequence[Step], state: Mapping[str, BitTensor]) -> dict[str, Touched] | None:
    """Return the elements that the steps changed, by tensor in order of names, with the bits before them all.

    Args:
        steps: oldest first.
        state: the state after the last of them.

    Returns:
        None where a patch of these elements is as large as the state.
    """
    merged: dict[str, Touched] = {}
    size_bytes, dense_bytes = 0, sum(tensor.nbytes for tensor in state.values())
    for name in sorted({name for step in steps for name in step.touched}):
        merged[name] = merge([part for step in steps for part in step.touched.get(name, ())])
        size_bytes += merged[name].nbytes
        if size_bytes >= dense_bytes:
            return None
    return merged


def merge(parts: Sequence[Touched]) -> Touched:
    """Merge the positions of one tensor: in order, each once, with its old bits from the oldest part.

    Needs as much memory as all parts together, and one block.

    Args:
        parts: at least one, none empty, oldest first.
    """
    if len(parts) == 1:
        return parts[0]
    if all(a.indices[-1] < b.indices[0] for a, b in itertools.pairwise(parts)):
        return Touched(np.concatenate([p.indices for p in parts]), np.concatenate([p.old for p in parts]))
    num = sum(part.indices.size for part in parts)
    indices, old = np.empty(num, parts[0].indices.dtype), np.empty(num, parts[0].old.dtype)
    waiting = deque(sorted(enumerate(parts), key=lambda item: int(item[1].indices[0])))
    begun: dict[int, Touched] = {}  # by age (0: oldest): the rest of each part that reaches into the block
    count = 0
    while waiting or begun:
        heads = [*begun.values(), *(part for _, part in itertools.islice(waiting, 1))]
        low = min(int(part.indices[0]) for part in heads)
        # In the positions' own type: otherwise `searchsorted` would convert all of them.
        stop = indices.dtype.type(min(low + _BLOCK, np.iinfo(indices.dtype).max))
        while waiting and waiting[0][1].indices[0] < stop:
            age, part = waiting.popleft()
            begun[age] = part
        ages = sorted(begun)
        cuts = [int(np.searchsorted(begun[age].indices, stop)) for age in ages]
        where = np.concatenate([begun[age].indices[:cut] for age, cut in zip(ages, cuts, strict=True)])
        bits = np.concatenate([begun[age].old[:cut] for age, cut in zip(ages, cuts, strict=True)])
        block, first = np.unique(where, return_index=True)  # `first` points into the oldest part
        indices[count : count + block.size], old[count : count + block.size] = block, bits[first]
        count += block.size
        begun = {
            age: Touched(begun[age].indices[cut:], begun[age].old[cut:])
            for age, cut in zip(ages, cuts, strict=True)
            if cut < begun[age].indices.size
        }
    return Touched(indices[:count], old[:count])


def putting_back(name: str, where: IndexArray, old: BitArray, bits: BitArray) -> Change:
    """Return the change that puts old bits back: as positions or as a run, whichever is smaller."""
    if not where.size:
        return Change(name, 0, where, old)
    first, stop = int(where[0]), int(where[-1]) + 1
    if old.nbytes + where.nbytes <= (stop - first) * bits.itemsize:
        return Change(name, first, where, old)
    run = bits[first:stop].copy()
    run[where - first] = old
    return Change(name, first, None, run)


def write_run(bits: BitArray, run: Change, replaced: list[Change], step: Step) -> None:
    """Write a run of elements; record only those that change, in `replaced` (to undo) and in `step`."""
    for low in range(0, run.values.size, _RUN_ELEMENTS):
        new = run.values[low : low + _RUN_ELEMENTS]
        start = run.start + low
        where = (np.flatnonzero(bits[start : start + new.size] != new) + start).astype(index_dtype(bits.size))
        old = bits[where]
        replaced.append(putting_back(run.name, where, old, bits))
        apply(Change(run.name, start, None, new), bits)
        step.add(run.name, Touched(where, old))


def undo_all(replaced: Sequence[Change], state: Mapping[str, BitTensor]) -> None:
    """Put the replaced bits back, newest change first."""
    for change in reversed(replaced):
        apply(change, state[change.name].bits)
