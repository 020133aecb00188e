"""What is known of every group without its rows: numpy columns by sequence number, and buckets by version.

About 60 bytes per group and 37 per message in columns, 8 in a bucket, and some 170 for a group's id (text,
list and dict entry): a million rows in groups of 16 take about 17 MB,
and 55 MB of the process right after opening, what was needed for that included. Rows are never held here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from echo_planes.data.store.buckets import Buckets
from echo_planes.data.store.message import Entries
from echo_planes.data.store.segment import GROUP_ENTRY
from echo_planes.data.store.sidecar import MESSAGE_ENTRY
from echo_planes.types import IntArray

Column = npt.NDArray[Any]


class Fate(IntEnum):
    """What became of a group. The numbers are on disk."""

    BUFFERED = 0  # still trainable
    TRAINED = 1
    DROPPED = 2
    QUARANTINED = 3  # set aside by a resume
    REMOVED = 4  # by retention, before it was trained
    LOST = 5  # damaged on disk before it had another fate; never written to the log
    ERASED = 6  # in the log only: the rows of a group that has a fate already may go


class MessageState(IntEnum):
    """What this process knows of a message's bytes."""

    UNREAD = 0
    VERIFIED = 1
    DAMAGED = 2


@dataclass(frozen=True, slots=True)
class StoreCounts:
    """The ledger: accepted is the sum of the others, at every moment and after every crash."""

    accepted: int
    trained: int
    dropped: int
    quarantined: int
    removed: int
    lost: int  # acknowledged, then damaged by others; 0 unless the disk or a person changed the files
    buffered: int

    @property
    def missing(self) -> int:
        """Accepted but nowhere. Always 0."""
        rest = self.trained + self.dropped + self.quarantined + self.removed + self.lost + self.buffered
        return self.accepted - rest


class _Table:
    """Columns of equal length that grow together. The fields of a structured one are columns, too."""

    def __init__(self, spec: dict[str, tuple[npt.DTypeLike, Any]]) -> None:
        self._spec = {name: (np.dtype(dtype), fill) for name, (dtype, fill) in spec.items()}
        self._columns = {name: np.full(1024, self._filler(name), d) for name, (d, _) in self._spec.items()}
        self._views: dict[str, Column] = {}
        self.length = 0
        self._look()

    def __getitem__(self, name: str) -> Column:
        return self._views[name][: self.length]

    def grow_to(self, length: int) -> None:
        """Add rows that say nothing yet."""
        if length <= self.length:
            return
        capacity = len(next(iter(self._columns.values())))
        if length > capacity:
            for name, column in self._columns.items():
                larger = np.full(max(length, 2 * capacity), self._filler(name), column.dtype)
                larger[: self.length] = column[: self.length]
                self._columns[name] = larger
            self._look()
        self.length = length

    def _filler(self, name: str) -> Any:
        dtype, fill = self._spec[name]
        return np.array(fill, dtype)

    def _look(self) -> None:
        self._views = dict(self._columns)
        for column in self._columns.values():
            self._views |= {field: column[field] for field in column.dtype.names or ()}


class GroupIndex:
    """All groups of a store, buffered or not. Group `s` is the one with sequence number s."""

    def __init__(self) -> None:
        self.groups = _Table(
            {
                "entry": (GROUP_ENTRY, (-1, np.nan, np.nan, 0, -1, 0, 0)),
                "message": ("i4", -1),  # row of `messages`; -1: unknown, its message is damaged
                "fate": ("u1", Fate.LOST),
                "step": ("i8", -1),  # of the batch it was trained in
                "erased": ("?", False),
                "reuse_count": ("u4", 0),  # times gathered by this process
            }
        )
        self.messages = _Table(
            {
                "entry": (MESSAGE_ENTRY, 0),
                "segment": ("i4", 0),
                "state": ("u1", MessageState.UNREAD),
            }
        )
        self.ids: list[str] = []
        self.by_id: dict[str, int] = {}
        self.buckets = Buckets()
        self.reward_low, self.reward_high = math.inf, -math.inf  # of all finite mean rewards

    # --- filling ---------------------------------------------------------------------------------

    def add(self, segment: int, messages: Entries, groups: Entries, ids: Sequence[str]) -> None:
        """Enter messages with their groups, which are not choosable before `open_buckets`.

        Args:
            segment: number of the file they lie in.
            messages: (M,) `sidecar.MESSAGE_ENTRY`.
            groups: (G,) `segment.GROUP_ENTRY`, in the order of the messages.
            ids: G group ids.
        """
        first_message = self._add_messages(segment, messages)
        counts = messages["num_groups"]
        starts = np.cumsum(counts) - counts
        sequences: IntArray = np.repeat(messages["sequence"] - starts, counts) + np.arange(len(groups))
        self.grow_to(int(sequences.max(initial=-1)) + 1)
        self.groups["entry"][sequences] = groups
        self.groups["message"][sequences] = np.repeat(np.arange(first_message, self.messages.length), counts)
        erased = groups["row_start"] < 0
        self.groups["erased"][sequences] = erased
        self.groups["fate"][sequences] = np.where(erased, Fate.REMOVED, Fate.BUFFERED)
        for sequence, group_id in zip(sequences.tolist(), ids, strict=True):
            self.ids[sequence] = group_id
            self.by_id[group_id] = sequence
        self._see_rewards(groups["reward_mean"].tolist())

    def add_new(self, segment: int, messages: Entries, groups: Entries, ids: Sequence[str]) -> IntArray:
        """Enter messages that were just appended; their groups are choosable at once.

        The same as `add`, for the next sequence numbers only, and quicker for a few. Returns them.
        """
        message = self._add_messages(segment, messages)
        first = at = self.groups.length
        self.ids.extend(ids)
        self.groups.grow_to(first + len(groups))
        self.groups["entry"][first:] = groups
        self.groups["fate"][first:] = Fate.BUFFERED
        for count in messages["num_groups"].tolist():
            self.groups["message"][at : at + count] = message
            message, at = message + 1, at + count
        sequences = np.arange(first, at)
        versions: list[int] = groups["version"].tolist()
        start = 0
        for stop, group_id in enumerate(ids, 1):
            self.by_id[group_id] = first + stop - 1
            if stop == len(ids) or versions[stop] != versions[start]:
                self.buckets.add(versions[start], sequences[start:stop])
                start = stop
        self._see_rewards(groups["reward_mean"].tolist())
        return sequences

    def _add_messages(self, segment: int, messages: Entries) -> int:
        """Returns the row of the first."""
        first = self.messages.length
        self.messages.grow_to(first + len(messages))
        self.messages["entry"][first:] = messages
        self.messages["segment"][first:] = segment
        return first

    def _see_rewards(self, rewards: list[float]) -> None:
        for reward in rewards:
            if -math.inf < reward < self.reward_low:
                self.reward_low = reward
            if self.reward_high < reward < math.inf:
                self.reward_high = reward

    def grow_to(self, length: int) -> None:
        """Make room for groups up to `length`; those nobody enters are lost."""
        self.ids.extend([""] * (length - self.groups.length))
        self.groups.grow_to(length)

    def load_fates(self, sequences: IntArray, fates: IntArray, steps: IntArray) -> None:
        """Enter a part of the log, before the buckets are opened: the last fate of a group counts."""
        self.grow_to(int(sequences.max(initial=-1)) + 1)
        erased = fates == Fate.ERASED
        self.groups["erased"][sequences[erased | (fates == Fate.REMOVED)]] = True
        self.groups["fate"][sequences[~erased]] = fates[~erased]
        self.groups["step"][sequences[~erased]] = steps[~erased]

    def open_buckets(self) -> None:
        """Make all buffered groups choosable, once everything was loaded."""
        sequences = np.flatnonzero(self.groups["fate"] == Fate.BUFFERED)
        versions = self.groups["version"][sequences]
        order = np.argsort(versions, kind="stable")
        found, starts = np.unique(versions[order], return_index=True)
        stops = np.append(starts[1:], len(order))[: len(found)]
        for version, start, stop in zip(found, starts, stops, strict=True):
            self.buckets.add(int(version), sequences[order[start:stop]])

    # --- changes ---------------------------------------------------------------------------------

    def settle(self, sequences: IntArray, fate: Fate, step: int) -> None:
        """Give groups a fate; those that were buffered are no longer choosable."""
        fates = self.groups["fate"]
        leaving = sequences[fates[sequences] == Fate.BUFFERED]
        fates[sequences] = fate
        self.groups["step"][sequences] = step
        if fate == Fate.REMOVED:
            self.groups["erased"][sequences] = True
        if not self.buckets.members:  # the store is being opened
            return
        is_buffered = fates == Fate.BUFFERED
        for version, count in Counter(self.groups["version"][leaving].tolist()).items():
            self.buckets.leave(version, count, is_buffered)

    def mark_damaged(self, message: int) -> None:
        """A message is not what was written: its buffered groups are lost."""
        self.messages["state"][message] = MessageState.DAMAGED
        first = int(self.messages["sequence"][message])
        members = np.arange(first, first + int(self.messages["num_groups"][message]))
        buffered = members[self.groups["fate"][members] == Fate.BUFFERED]
        self.settle(buffered, Fate.LOST, -1)

    # --- looking ---------------------------------------------------------------------------------

    def num_buffered(self, min_version: int) -> int:
        """How many groups of at least this version may be chosen."""
        return int(self.buckets.live[self.buckets.first_of(min_version) :].sum())

    def arrivals(self, min_version: int) -> Iterator[IntArray]:
        """Buffered groups of at least `min_version` in order of arrival, in pieces."""
        fates, versions = self.groups["fate"], self.groups["version"]
        # No bucket holds anything before the first of its list, which may have left.
        start = self.buckets.firsts[self.buckets.first_of(min_version) :].min(initial=self.groups.length)
        for at in range(int(start), self.groups.length, _PIECE):
            end = at + _PIECE
            yield at + np.flatnonzero((fates[at:end] == Fate.BUFFERED) & (versions[at:end] >= min_version))

    def counts(self, weights: Column | None = None) -> StoreCounts:
        """The ledger in groups, or in `weights` (shape (groups.length,)) of them."""
        totals = np.bincount(self.groups["fate"], weights, minlength=len(Fate)).astype(int).tolist()
        return StoreCounts(
            accepted=sum(totals),
            trained=totals[Fate.TRAINED],
            dropped=totals[Fate.DROPPED],
            quarantined=totals[Fate.QUARANTINED],
            removed=totals[Fate.REMOVED],
            lost=totals[Fate.LOST],
            buffered=totals[Fate.BUFFERED],
        )


_PIECE = 1024
