"""Rewriting of a sealed segment without the rows that retention removed.

The new file replaces the old one in one step. Its header has the next generation number, which shows that an
old sidecar beside it is outdated. Groups without rows keep their entries: their ids stay taken, and the
ledger still adds up.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from echo_planes.data.store.files import Files, Piece, on_disk, stage, write_whole
from echo_planes.data.store.index import GroupIndex, MessageState
from echo_planes.data.store.message import Entries, Kind, Place, encode, size_of
from echo_planes.data.store.reader import RowReader
from echo_planes.data.store.recovery import Segment, segment_index, sidecar_path
from echo_planes.data.store.schema import SCHEMA
from echo_planes.data.store.segment import encode_header, segment_path
from echo_planes.data.store.sidecar import MESSAGE_ENTRY, encode_sidecar

MERGED_BYTES, MERGED_GROUPS = 1 << 20, 4096  # limits of a merged message: bytes, groups
_EMPTY = pa.RecordBatch.from_pylist([], schema=SCHEMA)


class Compactor:
    """Compaction of the segments of one store.

    Args:
        folder: folder of the segments.
        files: the disk.
        store_id: id of the store.
        index: index of the store; changed as soon as a new file is in place.
        reader: row reader of the store.
    """

    def __init__(
        self, folder: Path, files: Files, store_id: bytes, index: GroupIndex, reader: RowReader
    ) -> None:
        self._folder = folder
        self._files = files
        self._store_id = store_id
        self._index = index
        self._reader = reader
        self._entries: list[Entries] = []
        self._places: list[tuple[int, int, int, int]] = []  # `sidecar.MESSAGE_ENTRY` of each message

    def rewrite(self, segment: Segment) -> int:
        """Rewrite a sealed segment; return the bytes freed.

        Raises:
            DataError: a message that is still needed is damaged; the segment stays as it is.
            ClusterError: the disk is full or cannot be written; nothing was lost.
        """
        path = segment_path(self._folder, segment.number)
        rows = np.flatnonzero(self._index.messages["segment"] == segment.number)
        self._entries, self._places = [], []
        partial = stage(path, self._files, self._messages(segment, rows.tolist()))
        with on_disk(path):
            self._files.replace(partial, path)
        # From here on readers find the new file, even if a step below fails.
        offset, size_bytes, _, _ = self._places[-1]
        freed = segment.size_bytes - offset - size_bytes
        segment.generation += 1
        segment.older = None
        segment.size_bytes = offset + size_bytes
        table = self._index.messages
        kept, merged = rows[: len(self._places)], rows[len(self._places) :]
        table["entry"][kept] = np.array(self._places, MESSAGE_ENTRY)
        table["state"][kept] = MessageState.UNREAD
        table["entry"][merged], table["segment"][merged] = 0, -1
        for row, entries in zip(kept.tolist(), self._entries, strict=True):
            first = int(table["sequence"][row])
            self._index.groups["entry"][first : first + len(entries)] = entries
            self._index.groups["message"][first : first + len(entries)] = row
        self._reader.forget(segment.number)
        with on_disk(path):
            self._files.sync_folder(path.parent)
        sidecar = encode_sidecar(segment_index(self._index, segment), self._store_id, segment.number)
        write_whole(sidecar_path(path), self._files, [sidecar])
        return freed

    def _messages(self, segment: Segment, rows: list[int]) -> Iterator[list[Piece]]:
        """Yield the new file's messages one at a time, so that a segment need not fit into memory."""
        generation = segment.generation + 1
        first = int(self._index.messages["sequence"][rows[0]])
        header = encode_header(
            SCHEMA, Place(self._store_id, Kind.HEADER, segment.number, generation, 0), first
        )
        yield header
        offset = size_of(header)
        for sequence, batch, entries in self._merged(rows):
            end = sequence + len(entries)
            arrow = batch.serialize()
            if batch.num_rows:
                share = arrow.size * entries["num_rows"].astype(np.int64) // batch.num_rows
                entries["num_bytes"] = np.where(entries["row_start"] < 0, 0, share)
            place = Place(self._store_id, Kind.ROWS, segment.number, generation, offset)
            texts = "".join(self._index.ids[sequence:end]).encode()
            pieces = encode(arrow, place, sequence=sequence, entries=entries, texts=texts)
            self._entries.append(entries)
            self._places.append((offset, size_of(pieces), sequence, len(entries)))
            yield pieces
            offset += size_of(pieces)

    def _merged(self, rows: list[int]) -> Iterator[tuple[int, pa.RecordBatch, Entries]]:
        """Yield the contents of the new messages: first sequence number, rows, entries.

        Neighbours are merged: an Arrow message without rows takes a kilobyte, and a store that keeps few
        versions would consist mostly of such messages.
        """
        first, batches, parts = 0, list[pa.RecordBatch](), list[Entries]()
        size_bytes = num_rows = num_groups = 0
        for row in rows:
            sequence = int(self._index.messages["sequence"][row])
            groups = slice(sequence, sequence + int(self._index.messages["num_groups"][row]))
            batch, entries = self._kept(row, groups)
            fits = size_bytes + batch.nbytes <= MERGED_BYTES and num_groups + len(entries) <= MERGED_GROUPS
            if parts and not (fits and sequence == first + num_groups):
                yield first, pa.concat_batches(batches), np.concatenate(parts)
                batches, parts, size_bytes, num_rows, num_groups = [], [], 0, 0, 0
            if not parts:
                first = sequence
            entries["row_start"] += np.where(entries["row_start"] < 0, 0, num_rows)
            batches.append(batch)
            parts.append(entries)
            size_bytes, num_rows = size_bytes + batch.nbytes, num_rows + batch.num_rows
            num_groups += len(entries)
        if parts:
            yield first, pa.concat_batches(batches), np.concatenate(parts)

    def _kept(self, message: int, groups: slice) -> tuple[pa.RecordBatch, Entries]:
        """Return the remaining rows of a message, and its updated entries."""
        entries = self._index.groups["entry"][groups].copy()
        erased = self._index.groups["erased"][groups]
        parts = []
        start = 0
        for place in range(len(entries)):
            count, old_start = int(entries["num_rows"][place]), int(entries["row_start"][place])
            if erased[place]:
                entries["row_start"][place], entries["num_bytes"][place] = -1, 0
                continue
            parts.append(self._reader.batch(message).slice(old_start, count))
            entries["row_start"][place] = start
            start += count
        return pa.concat_batches(parts) if parts else _EMPTY, entries
