"""The durable replay store: trajectory groups on disk, acknowledged once they are durable.

::

    store.json               format and id of the store
    LOCK                     the writing process
    segments/00000000.arrows Arrow IPC streams of `schema.SCHEMA`, one message per batch of whole groups
    segments/00000000.index  sidecar: index of a sealed segment
    fates.arrows             fates of the groups: trained, dropped, uninformative, quarantined, removed

Groups have sequence numbers in order of acceptance. Rows on disk keep the fate "buffered"; the fate log has
the later ones. So accepted = trained + dropped + uninformative + quarantined + removed + lost + buffered can
be counted from the files at any time. Not safe for use by several threads at once; `service.py` owns it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from echo_planes.data.store.choose import Selector, choose
from echo_planes.data.store.compaction import Compactor
from echo_planes.data.store.fates import FATE_ENTRY, FateLog
from echo_planes.data.store.files import LOCK_NAME, Files, Lock, LogFile, Piece, on_disk, write_whole
from echo_planes.data.store.index import Fate, GroupIndex, MessageState, StoreCounts
from echo_planes.data.store.message import Kind, Place, encode, size_of
from echo_planes.data.store.reader import RowReader
from echo_planes.data.store.recovery import (
    SEGMENTS_NAME,
    Loader,
    Recovery,
    Segment,
    open_store_id,
    segment_index,
    sidecar_path,
)
from echo_planes.data.store.retention import Retention, live_share, outdated
from echo_planes.data.store.rollback import plan
from echo_planes.data.store.schema import SCHEMA, to_batch, to_groups
from echo_planes.data.store.segment import encode_header, segment_path
from echo_planes.data.store.sidecar import encode_sidecar
from echo_planes.data.store.write_batch import make_write_batch
from echo_planes.errors import DataError, RefusedError
from echo_planes.types import Group, IntArray

SEGMENT_BYTES = 128 * 2**20
MAX_MAPS = 16
_NOT_GIVEN = (Fate.BUFFERED, Fate.LOST, Fate.ERASED)  # fates that `settle` refuses


@dataclass(frozen=True, slots=True)
class Appended:
    """Receipt of the store for accepted groups, which are durable."""

    sequences: IntArray  # of the accepted groups, in order
    duplicates: tuple[str, ...]  # ids that the store had already; nothing was written for them


class ReplayStore:
    """One store, open for writing.

    Args:
        folder: folder of the store; made if it does not exist.
        holder: name of the run, for the error message of a process that finds the store locked.
        segment_bytes: a segment is sealed once it is at least this long.
        max_maps: segments kept mapped for reading.
        files: the disk.

    Raises:
        ClusterError: another process has the store open, or the disk is full or cannot be written.
        DataError: the folder is no replay store, of a newer format, or of another schema.
    """

    def __init__(
        self,
        folder: Path,
        *,
        holder: str,
        segment_bytes: int = SEGMENT_BYTES,
        max_maps: int = MAX_MAPS,
        files: Files | None = None,
    ) -> None:
        self._files = files or Files()
        self._segment_bytes = segment_bytes
        with on_disk(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._lock = Lock(folder / LOCK_NAME, holder)
        try:
            self._store_id = open_store_id(folder, self._files)
            self._folder = folder / SEGMENTS_NAME
            self.index = GroupIndex()
            loader = Loader(self._folder, self._files, self._store_id, self.index)
            loader.load()
            self._fates = FateLog(folder, self._files, self._store_id)
        except BaseException:
            self._lock.release()
            raise
        self._segments = loader.segments
        loaded = self._fates.loaded
        entries = loaded.entries
        self.index.load_fates(entries["sequence"], entries["fate"], entries["step"])
        self.index.open_buckets()
        self.recovery = Recovery(
            (*loader.damage, *loaded.damage), loaded.lost, rebuilt_sidecars=loader.rebuilt_sidecars
        )
        older = {segment.number: segment.older for segment in self._segments.values() if segment.older}
        self._reader = RowReader(self._folder, self._store_id, self.index, max_maps, older)
        self._tail: LogFile | None = None
        self._closed = False

    # --- writing ---------------------------------------------------------------------------------

    def append(self, *batches: pa.RecordBatch, created_s: float) -> Appended:
        """Accept whole groups, except those already in the store; they are durable when this returns.

        Args:
            batches: rows of `schema.SCHEMA`, each group's rows together; one sync for all of them.
            created_s: time of acceptance, seconds, for retention by age.

        Raises:
            DataError: a batch has another schema, a null where there must be none, or a group in two places.
            ClusterError: the disk is full or cannot be written; nothing was accepted; the store stays usable.
        """
        duplicates: list[str] = []
        taken: set[str] = set()
        write_batches = [
            write_batch
            for batch in batches
            if (write_batch := make_write_batch(batch, created_s, self._is_known, taken, duplicates))
            is not None
        ]
        if not write_batches:
            return Appended(np.empty(0, np.int64), tuple(duplicates))
        segment, tail = self._writable()
        messages: list[list[Piece]] = []
        table = []
        offset, sequence = tail.size_bytes, self.index.num_groups
        for write_batch in write_batches:
            place = Place(self._store_id, Kind.ROWS, segment.number, segment.generation, offset)
            texts = "".join(write_batch.ids).encode()
            pieces = encode(
                write_batch.arrow, place, sequence=sequence, entries=write_batch.entries, texts=texts
            )
            size_bytes = size_of(pieces)
            messages.append(pieces)
            table.append((offset, size_bytes, sequence, len(write_batch.ids)))
            offset += size_bytes
            sequence += len(write_batch.ids)
        tail.append(messages)
        segment.size_bytes = tail.size_bytes
        entries = (
            write_batches[0].entries
            if len(write_batches) == 1
            else np.concatenate([d.entries for d in write_batches])
        )
        ids = [group_id for write_batch in write_batches for group_id in write_batch.ids]
        added = self.index.add_new(segment.number, table, entries, ids)
        return Appended(added, tuple(duplicates))

    def append_groups(self, groups: Iterable[Group], *, created_s: float) -> Appended:
        """Accept groups; see `append`."""
        return self.append(to_batch(groups, created_s=created_s), created_s=created_s)

    def settle(self, sequences: IntArray, fate: Fate, *, step: int = -1) -> None:
        """Give groups their fate, durable when this returns. The same call again changes nothing.

        Args:
            sequences: shape (n,), each once.
            fate: `TRAINED`, `DROPPED`, `UNINFORMATIVE` or `REMOVED` for buffered groups, `QUARANTINED` for
                those and for trained, dropped or uninformative ones.
            step: t of the batch they were trained in or set aside for; at a resume, t of the checkpoint.

        Raises:
            RefusedError: a group is unknown, or has another fate already.
            ClusterError: the disk is full or cannot be written; nothing was changed.
        """
        if fate in _NOT_GIVEN:
            raise ValueError(f"{fate.name} is not given to groups")
        if len(sequences) and not 0 <= sequences.min() <= sequences.max() < self.index.groups.length:
            raise RefusedError(f"groups {sequences.tolist()} are not all in the store; nothing was settled")
        fates = self.index.groups["fate"][sequences]
        same = (fates == fate) & (self.index.groups["step"][sequences] == step)
        allowed = fates == Fate.BUFFERED
        if fate == Fate.QUARANTINED:
            allowed |= np.isin(fates, (Fate.TRAINED, Fate.DROPPED, Fate.UNINFORMATIVE))
        if not (same | allowed).all():
            wrong = int(sequences[~(same | allowed)][0])
            is_now = Fate(int(self.index.groups["fate"][wrong])).name.lower()
            raise RefusedError(
                f"group {self.index.ids[wrong]} cannot become {fate.name.lower()}: it is {is_now} already"
            )
        changing = sequences[~same]
        if len(changing):
            self._fates.append(changing, self.ids(changing), fate, step)
            self.index.settle(changing, fate, step)

    def roll_back(self, step: int) -> IntArray:
        """Take the store back to before batch `step` was formed; see `rollback.plan`.

        The same call again changes nothing. Return the groups that are buffered now.

        Raises:
            ClusterError: the disk is full or cannot be written; none or part of the changes were made.
        """
        undo = plan(self.index, step, self._newest_version)
        self.settle(undo.quarantined, Fate.QUARANTINED, step=step)
        if len(undo.returned):
            self._fates.append(undo.returned, self.ids(undo.returned), Fate.BUFFERED, -1)
            self.index.return_to_buffer(undo.returned)
        return np.flatnonzero(self.index.groups["fate"] == Fate.BUFFERED)

    def expect(self, num_groups: int) -> None:
        """Count as lost those of the first `num_groups` accepted groups that the store does not have."""
        self.index.grow_to(num_groups)

    def retain(self, retention: Retention, *, now_s: float) -> int:
        """Remove the rows that `retention` does not keep; return the number of groups.

        Buffered groups get the fate `REMOVED`; the others keep theirs. The store serves the rows no longer;
        `compact` frees their space.

        Raises:
            ClusterError: the disk is full or cannot be written; some of the rows may be removed already.
        """
        going = outdated(self.index, retention, now_s)
        buffered = self.index.groups["fate"][going] == Fate.BUFFERED
        self.settle(going[buffered], Fate.REMOVED)
        settled = going[~buffered]
        if len(settled):
            self._fates.append(settled, self.ids(settled), Fate.ERASED, -1)
            self.index.groups["erased"][settled] = True
        return len(going)

    def compact(self, max_live_share: float = 0.5) -> int:
        """Rewrite sealed segments with at most this share of live rows, and the fate log; return bytes freed.

        Damaged segments are not rewritten, so that a person can still examine them.

        Raises:
            ClusterError: the disk is full or cannot be written; nothing was lost.
        """
        compactor = Compactor(self._folder, self._files, self._store_id, self.index, self._reader)
        freed = 0
        for segment in self._segments.values():
            if (
                not segment.sealed
                or segment.damaged
                or live_share(self.index, segment.number) > max_live_share
            ):
                continue
            try:
                freed += compactor.rewrite(segment)
            except DataError:
                segment.damaged = True  # the reader has counted the damage
        return freed + self._shorten_fates()

    def _shorten_fates(self) -> int:
        groups = self.index.groups
        known = np.flatnonzero(~np.isin(groups["fate"], (Fate.BUFFERED, Fate.LOST)))
        # Groups whose rows compaction has dropped need no log entry: their index entry has row_start = -1.
        erased = np.flatnonzero(
            groups["erased"] & (groups["row_start"] >= 0) & (groups["fate"] != Fate.REMOVED)
        )
        # If rows are removed soon after training, the log has two entries per group but needs only one.
        if 3 * (len(known) + len(erased)) > 2 * self._fates.num_entries:
            return 0  # a rewrite would save less than a third
        entries = np.empty(len(known) + len(erased), FATE_ENTRY)
        entries["sequence"] = np.concatenate([known, erased])
        entries["step"] = groups["step"][entries["sequence"]]
        entries["fate"][: len(known)] = groups["fate"][known]
        entries["fate"][len(known) :] = Fate.ERASED
        return self._fates.rewrite(entries, self.ids(entries["sequence"]))

    # --- reading ---------------------------------------------------------------------------------

    def choose(
        self,
        count: int,
        *,
        selector: Selector,
        min_version: int,
        rng: np.random.Generator,
        urgent: int = 0,
    ) -> IntArray:
        """Choose buffered groups; see `choose.choose`. They stay buffered until they are settled."""
        return choose(self.index, count, selector=selector, min_version=min_version, rng=rng, urgent=urgent)

    def gather(self, sequences: IntArray) -> pa.Table:
        """Return the rows of groups, in order, without copying: the table refers to the mapped files.

        Raises:
            DataError: a group's rows were removed, or are damaged. Damage makes the buffered groups of the
                message lost, so that they are not chosen again; the error names file and offset.
        """
        groups = self.index.groups
        messages = groups["message"][sequences].tolist()
        starts = np.where(groups["erased"][sequences], -1, groups["row_start"][sequences]).tolist()
        counts = groups["num_rows"][sequences].tolist()
        batches: dict[int, pa.RecordBatch] = {}
        slices = []
        for sequence, message, start, count in zip(sequences.tolist(), messages, starts, counts, strict=True):
            if message < 0 or start < 0:
                raise DataError(f"the rows of group {sequence} ({self.index.ids[sequence]}) are gone")
            if message not in batches:
                batches[message] = self._reader.batch(message)
            slices.append(batches[message].slice(start, count))
        groups["reuse_count"][sequences] += 1
        return pa.Table.from_batches(slices, SCHEMA)

    def gather_groups(self, sequences: IntArray) -> list[Group]:
        """Return groups with their trajectories, in order; see `gather`."""
        return to_groups(self.gather(sequences))

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows of all messages that are not damaged, in order of acceptance."""
        for message in range(self.index.messages.length):
            try:
                yield self._reader.batch(message)
            except DataError:
                if self.index.messages["state"][message] != MessageState.DAMAGED:
                    raise

    def ids(self, sequences: IntArray) -> list[str]:
        """Return the ids of groups."""
        return [self.index.ids[sequence] for sequence in sequences.tolist()]

    def counts(self) -> StoreCounts:
        """Return the ledger, in groups."""
        return self.index.counts()

    def trajectory_counts(self) -> StoreCounts:
        """Return the ledger, in trajectories; a lost group whose entry is damaged too counts as 0."""
        return self.index.counts(self.index.groups["num_rows"])

    @property
    def num_damaged(self) -> int:
        """Number of messages that were found damaged when read."""
        return int((self.index.messages["state"] == MessageState.DAMAGED).sum())

    def close(self) -> None:
        """Close the files and release the lock. Everything acknowledged is durable already."""
        if self._closed:
            return
        self._closed = True
        self._reader.close()
        self._fates.close()
        if self._tail is not None:
            self._tail.close()
        self._lock.release()

    # --- inside ----------------------------------------------------------------------------------

    def _newest_version(self, sequence: int) -> int | None:
        """Return the newest version that any token of a group was sampled under; None: damaged rows."""
        try:
            rows = self._reader.batch(int(self.index.groups["message"][sequence]))
        except DataError:  # the reader has counted the damage
            return None
        first, count = (int(self.index.groups[name][sequence]) for name in ("row_start", "num_rows"))
        return int(pc.max(pc.list_flatten(rows.column("span_versions").slice(first, count))).as_py())

    def _is_known(self, group_id: str) -> bool:
        """Return whether the store has a group; a lost one may be appended again."""
        known = self.index.ids.find(group_id)
        return known is not None and self.index.groups["fate"][known] != Fate.LOST

    def _writable(self) -> tuple[Segment, LogFile]:
        """Return the segment that takes the next message, and its file. Seal a full segment first."""
        number = max(self._segments, default=-1)
        segment = self._segments.get(number)
        is_open = segment is not None and not segment.sealed
        if segment and is_open and (segment.older or segment.size_bytes >= self._segment_bytes):
            self._seal(segment)
        if segment is None or segment.sealed:
            segment = self._create(number + 1)
        if self._tail is None:
            path = segment_path(self._folder, segment.number)
            self._tail = LogFile(path, self._files, segment.size_bytes)
        return segment, self._tail

    def _seal(self, segment: Segment) -> None:
        path = sidecar_path(segment_path(self._folder, segment.number))
        index = segment_index(self.index, segment)
        write_whole(path, self._files, [encode_sidecar(index, self._store_id, segment.number)])
        segment.sealed = True
        if self._tail is not None:
            self._tail.close()
            self._tail = None

    def _create(self, number: int) -> Segment:
        place = Place(self._store_id, Kind.HEADER, number, 0, 0)
        header = encode_header(SCHEMA, place, self.index.groups.length)
        write_whole(segment_path(self._folder, number), self._files, [header])
        self._segments[number] = Segment(number, 0, size_of(header), sealed=False)
        return self._segments[number]
