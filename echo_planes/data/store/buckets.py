"""Buffered groups by version, so that choosing groups needs no pass over all of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from echo_planes.types import BoolArray, IntArray


class Bucket:
    """Sequence numbers of one version's groups in order of arrival; some may not be buffered any more.

    `item(place)` returns one of them as an int.
    """

    __slots__ = ("_sequences", "item", "size")

    def __init__(self) -> None:
        self._sequences: IntArray = np.empty(16, np.int64)
        self.item: Callable[[int], int] = self._sequences.item
        self.size = 0

    @property
    def sequences(self) -> IntArray:
        """Shape (size,)."""
        return self._sequences[: self.size]

    def add(self, sequences: IntArray) -> None:
        end = self.size + len(sequences)
        if end > len(self._sequences):
            larger: IntArray = np.empty(max(end, 2 * len(self._sequences)), np.int64)
            larger[: self.size] = self.sequences
            self._sequences = larger
            self.item = larger.item
        self._sequences[self.size : end] = sequences
        self.size = end

    def keep(self, buffered: BoolArray) -> None:
        """Keep only the groups where `buffered`, shape (size,), is true."""
        kept = self.sequences[buffered]
        self._sequences[: len(kept)] = kept
        self.size = len(kept)


class Buckets:
    """Buckets, one for each version that has buffered groups; at least half of every bucket is buffered.

    Row i of `versions`, `firsts`, `sizes`, `live` (shape (V,)) and `members` is one version; the versions are
    sorted.
    """

    def __init__(self) -> None:
        self.versions: IntArray = np.empty(0, np.int64)
        self.firsts: IntArray = np.empty(0, np.int64)  # first sequence number of each bucket
        self.sizes: IntArray = np.empty(0, np.int64)
        self.live: IntArray = np.empty(0, np.int64)  # number of buffered groups in each bucket
        self.members: list[Bucket] = []

    def first_of(self, min_version: int) -> int:
        """Return the first row whose version is at least `min_version`."""
        return int(self.versions.searchsorted(min_version))

    def add(self, version: int, sequences: IntArray) -> None:
        """Enter groups that became buffered, in order of arrival."""
        row = self.first_of(version)
        if row == len(self.members) or self.versions.item(row) != version:
            self.versions = np.insert(self.versions, row, version)
            self.firsts = np.insert(self.firsts, row, sequences[0])
            self.sizes = np.insert(self.sizes, row, 0)
            self.live = np.insert(self.live, row, 0)
            self.members.insert(row, Bucket())
        self.members[row].add(sequences)
        self.sizes[row] += len(sequences)
        self.live[row] += len(sequences)

    def leave(self, version: int, count: int, is_buffered: npt.NDArray[np.bool_]) -> None:
        """Note that `count` groups of a version left the buffer. `is_buffered`: mask by sequence number."""
        row = self.first_of(version)
        self.live[row] -= count
        if self.live[row] == 0:
            self.versions, self.firsts, self.sizes, self.live = (
                np.delete(column, row) for column in (self.versions, self.firsts, self.sizes, self.live)
            )
            del self.members[row]
        elif 2 * self.live[row] < self.sizes[row]:
            bucket = self.members[row]
            bucket.keep(is_buffered[bucket.sequences])
            self.sizes[row] = bucket.size
            self.firsts[row] = bucket.item(0)
