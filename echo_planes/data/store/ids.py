"""Ids of all groups of a store, by sequence number and back, in 36 bytes per group plus the id's text.

A list and a dict of strings take about 170 bytes. Ids of groups whose rows were removed stay taken, so even a
run that keeps few rows has many ids.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np

_FEW = 16  # ids of an append, for which the general way takes longer
_FEWEST_RECENT = 4096
_RECENT_SHARE = 8  # at most 1 / 8 of all ids are in the dict


class GroupIds:
    """Ids in order of acceptance. If two groups have one id, because the first was lost, the later counts.

    A dict finds the newest ids. A sorted array of hashes finds the others, and their texts confirm them.
    Python salts its hash in each process, so a worker cannot send ids chosen to collide.
    """

    def __init__(self) -> None:
        self._texts = bytearray()
        self._starts, self._sizes = array("Q"), array("I")
        self._recent: dict[str, int] = {}
        self._hashes = np.empty(0, np.int64)  # sorted
        self._sequences = np.empty(0, np.int64)  # sequence number of each hash

    def __len__(self) -> int:
        """Sequence number of the next group."""
        return len(self._starts)

    def __iter__(self) -> Iterator[str]:
        return (self[sequence] for sequence in range(len(self)))

    @overload
    def __getitem__(self, place: int) -> str: ...

    @overload
    def __getitem__(self, place: slice) -> list[str]: ...

    def __getitem__(self, place: int | slice) -> str | list[str]:
        if isinstance(place, slice):
            return [self[sequence] for sequence in range(*place.indices(len(self)))]
        start = self._starts[place]
        return self._texts[start : start + self._sizes[place]].decode()

    def extend(self, ids: Sequence[str]) -> None:
        """Enter the ids of the next groups."""
        # Before any change: a text that cannot be encoded raises here.
        texts = [group_id.encode() for group_id in ids]
        first, start = len(self._starts), len(self._texts)
        if len(ids) <= _FEW:
            for sequence, (group_id, text) in enumerate(zip(ids, texts, strict=True), first):
                self._recent[group_id] = sequence
                self._starts.append(len(self._texts))
                self._sizes.append(len(text))
                self._texts += text
        else:
            sizes = array("I", map(len, texts))
            self._recent.update(zip(ids, range(first, first + len(ids)), strict=True))
            self._starts.extend(itertools.islice(itertools.accumulate(sizes, initial=start), len(ids)))
            self._sizes.extend(sizes)
            self._texts += b"".join(texts)
        if len(self._recent) > max(_FEWEST_RECENT, len(self._hashes) // _RECENT_SHARE):
            self._sort_recent()

    def put(self, sequence: int, group_id: str) -> None:
        """Enter the id of the group `sequence`; unknown ids before it are empty."""
        if sequence == len(self):
            self.extend([group_id])
            return
        self.grow_to(sequence + 1)
        text = group_id.encode()
        self._starts[sequence], self._sizes[sequence] = len(self._texts), len(text)
        self._texts += text
        self._recent[group_id] = sequence

    def grow_to(self, length: int) -> None:
        """Make room for groups up to `length`, with empty ids."""
        missing = max(0, length - len(self))
        self._starts.extend(array("Q", [len(self._texts)]) * missing)
        self._sizes.extend(array("I", [0]) * missing)

    def find(self, group_id: str) -> int | None:
        """Return the sequence number of the group with that id; None if there is none."""
        if (recent := self._recent.get(group_id)) is not None:
            return recent
        if not len(self._hashes):
            return None
        value = hash(group_id)
        first = int(self._hashes.searchsorted(value))
        stop = first
        while stop < len(self._hashes) and self._hashes.item(stop) == value:
            stop += 1
        same = (self._sequences.item(place) for place in range(stop - 1, first - 1, -1))
        return next((sequence for sequence in same if self[sequence] == group_id), None)

    def sequence(self, group_id: str) -> int:
        """Return the sequence number of the group with that id.

        Raises:
            KeyError: there is none.
        """
        found = self.find(group_id)
        if found is None:
            raise KeyError(group_id)
        return found

    def _sort_recent(self) -> None:
        count = len(self._recent)
        hashes = np.concatenate([self._hashes, np.fromiter(map(hash, self._recent), np.int64, count)])
        sequences = np.concatenate([self._sequences, np.fromiter(self._recent.values(), np.int64, count)])
        order = np.argsort(hashes, kind="stable")  # equal hashes stay in order of entry
        self._hashes, self._sequences = hashes[order], sequences[order]
        self._recent = {}
