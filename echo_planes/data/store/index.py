"""Index of every group without its rows: numpy columns by sequence number, and buckets by version.

A group takes about 60 bytes in columns, 36 for its id plus the id's text (`ids.py`), and 8 in a bucket while
it is buffered; a message takes 37. The index holds no rows.
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
from echo_planes.data.store.ids import GroupIds
from echo_planes.data.store.message import Entries
from echo_planes.data.store.segment import GROUP_ENTRY
from echo_planes.data.store.sidecar import MESSAGE_ENTRY
from echo_planes.types import IntArray

Column = npt.NDArray[Any]
MessagePlace = tuple[int, int, int, int]  # offset, size in bytes, first sequence number, number of groups
_Appended = tuple[int, Sequence[MessagePlace], Entries]


class Fate(IntEnum):
    """Fate of a group. The numbers are on disk."""

    BUFFERED = 0  # still trainable; in the log: again, because a resume undid its training
    TRAINED = 1
    DROPPED = 2
    QUARANTINED = 3  # a resume, or a new run in the folder, excluded it from training
    REMOVED = 4  # retention removed it before it was trained
    LOST = 5  # damaged on disk before it had another fate; never written to the log
    ERASED = 6  # in the log only: retention removed the rows of a group that had a fate already
    UNINFORMATIVE = 7  # set aside without a gradient; another group takes its place in the batch


class MessageState(IntEnum):
    """State of a message's bytes, as far as this process has read them."""

    UNREAD = 0
    VERIFIED = 1
    DAMAGED = 2


@dataclass(frozen=True, slots=True)
class StoreCounts:
    """The ledger: accepted is the sum of the others, at every moment and after every crash."""

    accepted: int
    trained: int
    dropped: int
    uninformative: int
    quarantined: int
    removed: int
    lost: int  # acknowledged, later damaged; 0 unless the disk or another program changed the files
    buffered: int

    @property
    def missing(self) -> int:
        """Accepted groups without a fate. Always 0."""
        rest = self.trained + self.dropped + self.uninformative + self.quarantined + self.removed
        return self.accepted - rest - self.lost - self.buffered


class _Table:
    """Columns of equal length that grow together. Each field of a structured column is a column too."""

    def __init__(self, spec: dict[str, tuple[npt.DTypeLike, Any]]) -> None:
        self._spec = {name: (np.dtype(dtype), fill) for name, (dtype, fill) in spec.items()}
        self._columns = {name: np.full(1024, self._filler(name), d) for name, (d, _) in self._spec.items()}
        self._views: dict[str, Column] = {}
        self._capacity = 1024
        self.length = 0
        self._look()

    def __getitem__(self, name: str) -> Column:
        return self._views[name][: self.length]

    def grow_to(self, length: int) -> None:
        """Add rows with fill values up to `length`."""
        if length > self._capacity:
            self._capacity = max(length, 2 * self._capacity)
            for name, column in self._columns.items():
                larger = np.full(self._capacity, self._filler(name), column.dtype)
                larger[: self.length] = column[: self.length]
                self._columns[name] = larger
            self._look()
        self.length = max(length, self.length)

    def _filler(self, name: str) -> Any:
        dtype, fill = self._spec[name]
        return np.array(fill, dtype)

    def _look(self) -> None:
        self._views = dict(self._columns)
        for column in self._columns.values():
            self._views |= {field: column[field] for field in column.dtype.names or ()}


class GroupIndex:
    """Index of all groups of a store, buffered or not. Row s describes the group with sequence number s.

    The id of an appended group is known at once. Its columns are filled at the next access to the columns:
    filling them for many appends takes hardly longer than for one.
    """

    def __init__(self) -> None:
        self._groups = _Table(
            {
                "entry": (GROUP_ENTRY, (-1, np.nan, np.nan, 0, -1, 0, 0)),
                "message": ("i4", -1),  # row of `messages`; -1: unknown, its message is damaged
                "fate": ("u1", Fate.LOST),
                "step": ("i8", -1),  # t of the batch it was trained in or set aside for; -1: none
                "erased": ("?", False),  # whether its rows were removed
                "reuse_count": ("u4", 0),  # times that this process has gathered it
            }
        )
        self._messages = _Table(
            {
                "entry": (MESSAGE_ENTRY, 0),
                "segment": ("i4", 0),
                "state": ("u1", MessageState.UNREAD),
            }
        )
        self.ids = GroupIds()
        self._buckets = Buckets()
        self._rewards = (math.inf, -math.inf)
        self._appended: list[_Appended] = []

    # --- columns ---------------------------------------------------------------------------------

    @property
    def groups(self) -> _Table:
        """One row per group."""
        if self._appended:
            self._enter_appended()
        return self._groups

    @property
    def messages(self) -> _Table:
        """One row per message."""
        if self._appended:
            self._enter_appended()
        return self._messages

    @property
    def buckets(self) -> Buckets:
        """The buffered groups by version."""
        if self._appended:
            self._enter_appended()
        return self._buckets

    @property
    def reward_range(self) -> tuple[float, float]:
        """Lowest and highest finite mean reward of all groups; (inf, -inf) if there is none."""
        if self._appended:
            self._enter_appended()
        return self._rewards

    @property
    def num_groups(self) -> int:
        """Number of groups, which is the sequence number of the next one."""
        return len(self.ids)

    # --- filling ---------------------------------------------------------------------------------

    def add(self, segment: int, messages: Entries, groups: Entries, ids: Sequence[str]) -> None:
        """Enter messages with their groups, which can be chosen only after `open_buckets`.

        Args:
            segment: number of the messages' file.
            messages: (M,) `sidecar.MESSAGE_ENTRY`.
            groups: (G,) `segment.GROUP_ENTRY`, in the order of the messages.
            ids: G group ids.
        """
        sequences = self._enter(np.full(len(messages), segment), messages, groups)
        first = self.num_groups
        if np.array_equal(sequences, np.arange(first, first + len(ids))):  # the usual case
            self.ids.extend(ids)
        else:
            for sequence, group_id in zip(sequences.tolist(), ids, strict=True):
                self.ids.put(sequence, group_id)
        self.ids.grow_to(self._groups.length)

    def add_new(
        self, segment: int, messages: Sequence[MessagePlace], groups: Entries, ids: Sequence[str]
    ) -> IntArray:
        """Enter messages that were just appended; their groups can be chosen at once.

        Args:
            segment: number of the messages' file.
            messages: the fields of `sidecar.MESSAGE_ENTRY` for each message.
            groups: (G,) `segment.GROUP_ENTRY`, in the order of the messages.
            ids: G group ids.

        Returns:
            The groups' sequence numbers, shape (G,): those that follow the last group's.
        """
        first = self.num_groups
        self.ids.extend(ids)
        self._appended.append((segment, messages, groups))
        if len(self._appended) == _MAX_APPENDED:
            self._enter_appended()
        return np.arange(first, self.num_groups)

    def _enter_appended(self) -> None:
        appended, self._appended = self._appended, []
        segments = np.array([segment for segment, messages, _ in appended for _ in messages])
        table = np.array([message for _, messages, _ in appended for message in messages], MESSAGE_ENTRY)
        # The explicit dtype saves numpy from computing a common type of all parts.
        groups = np.concatenate([entries for _, _, entries in appended], dtype=GROUP_ENTRY)
        self._open(self._enter(segments, table, groups))

    def _enter(self, segments: IntArray, messages: Entries, groups: Entries) -> IntArray:
        """Fill the columns; return the sequence numbers of `groups`."""
        first_message = self._messages.length
        self._messages.grow_to(first_message + len(messages))
        self._messages["entry"][first_message:] = messages
        self._messages["segment"][first_message:] = segments
        counts = messages["num_groups"]
        starts = np.cumsum(counts) - counts
        sequences: IntArray = np.repeat(messages["sequence"] - starts, counts) + np.arange(len(groups))
        self._groups.grow_to(int(sequences.max(initial=-1)) + 1)
        self._groups["entry"][sequences] = groups
        rows = np.arange(first_message, self._messages.length)
        self._groups["message"][sequences] = np.repeat(rows, counts)
        erased = groups["row_start"] < 0
        self._groups["erased"][sequences] = erased
        self._groups["fate"][sequences] = np.where(erased, Fate.REMOVED, Fate.BUFFERED)
        rewards = groups["reward_mean"][np.isfinite(groups["reward_mean"])]
        low, high = self._rewards
        self._rewards = (float(rewards.min(initial=low)), float(rewards.max(initial=high)))
        return sequences

    def grow_to(self, length: int) -> None:
        """Make room for groups up to `length`; groups that are not entered later count as lost."""
        self.ids.grow_to(length)
        self._groups.grow_to(length)

    def load_fates(self, sequences: IntArray, fates: IntArray, steps: IntArray) -> None:
        """Enter a part of the fate log, before the buckets are opened. The last fate of a group counts."""
        self.grow_to(int(sequences.max(initial=-1)) + 1)
        erased = fates == Fate.ERASED
        self.groups["erased"][sequences[erased | (fates == Fate.REMOVED)]] = True
        self.groups["fate"][sequences[~erased]] = fates[~erased]
        self.groups["step"][sequences[~erased]] = steps[~erased]

    def open_buckets(self) -> None:
        """Put all buffered groups into buckets, so that they can be chosen. Call it once all is loaded."""
        self._open(np.flatnonzero(self.groups["fate"] == Fate.BUFFERED))

    def _open(self, sequences: IntArray) -> None:
        versions = self._groups["version"][sequences]
        order = np.argsort(versions, kind="stable")
        found, starts = np.unique(versions[order], return_index=True)
        stops = np.append(starts[1:], len(order))[: len(found)]
        for version, start, stop in zip(found, starts, stops, strict=True):
            self._buckets.add(int(version), sequences[order[start:stop]])

    # --- changes ---------------------------------------------------------------------------------

    def settle(self, sequences: IntArray, fate: Fate, step: int) -> None:
        """Give groups a fate; those that were buffered cannot be chosen any more."""
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

    def return_to_buffer(self, sequences: IntArray) -> None:
        """Put groups that had a fate back into the buffer, so that they can be chosen again."""
        self.groups["fate"][sequences] = Fate.BUFFERED
        self.groups["step"][sequences] = -1
        self._buckets = Buckets()  # rebuilt, because a bucket takes groups in order of arrival only
        self.open_buckets()

    def mark_damaged(self, message: int) -> None:
        """Mark a message as damaged; its buffered groups are lost."""
        self.messages["state"][message] = MessageState.DAMAGED
        first = int(self.messages["sequence"][message])
        members = np.arange(first, first + int(self.messages["num_groups"][message]))
        buffered = members[self.groups["fate"][members] == Fate.BUFFERED]
        self.settle(buffered, Fate.LOST, -1)

    # --- queries ---------------------------------------------------------------------------------

    def num_buffered(self, min_version: int) -> int:
        """Return the number of buffered groups of at least `min_version`."""
        return int(self.buckets.live[self.buckets.first_of(min_version) :].sum())

    def arrivals(self, min_version: int) -> Iterator[IntArray]:
        """Yield the buffered groups of at least `min_version` in order of arrival, in pieces."""
        fates, versions = self.groups["fate"], self.groups["version"]
        # No buffered group comes before the first entry of its bucket, which may itself have left.
        start = self.buckets.firsts[self.buckets.first_of(min_version) :].min(initial=self.groups.length)
        for at in range(int(start), self.groups.length, _PIECE):
            end = at + _PIECE
            yield at + np.flatnonzero((fates[at:end] == Fate.BUFFERED) & (versions[at:end] >= min_version))

    def counts(self, weights: Column | None = None) -> StoreCounts:
        """Return the ledger in groups, or in their `weights`, shape (groups.length,)."""
        totals = np.bincount(self.groups["fate"], weights, minlength=len(Fate)).astype(int).tolist()
        return StoreCounts(
            accepted=sum(totals),
            trained=totals[Fate.TRAINED],
            dropped=totals[Fate.DROPPED],
            uninformative=totals[Fate.UNINFORMATIVE],
            quarantined=totals[Fate.QUARANTINED],
            removed=totals[Fate.REMOVED],
            lost=totals[Fate.LOST],
            buffered=totals[Fate.BUFFERED],
        )


_PIECE = 1024
_MAX_APPENDED = 64  # most appends whose columns are not filled yet
