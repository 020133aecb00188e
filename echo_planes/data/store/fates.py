"""Log of the groups' fates: an append-only file `fates.arrows`, written in the format of the segments.

Any Arrow reader opens it as a table of group, fate and step, which joins the rows on `group_id`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from echo_planes.data.store.files import Files, LogFile, Piece, map_file, on_disk, stage, write_whole
from echo_planes.data.store.index import Fate
from echo_planes.data.store.message import Entries, Kind, Place, encode, size_of
from echo_planes.data.store.segment import Damage, Walk, encode_header, walk
from echo_planes.errors import ClusterError
from echo_planes.types import IntArray

FATES_NAME = "fates.arrows"
FATES_SCHEMA = pa.schema(
    [
        ("sequence", pa.int64()),  # of the group in the store
        ("group_id", pa.string()),
        ("fate", pa.string()),  # the last one of a group counts, except "erased"
        ("step", pa.int64()),  # t of the batch it was trained in, or set aside for; -1: neither
    ],
    metadata={"echo_planes.fates_version": "1"},
)
FATE_ENTRY = np.dtype([("sequence", "<i8"), ("step", "<i8"), ("fate", "<i8")])
_ROWS_PER_MESSAGE = 65536  # in a rewritten log
_NAMES = pa.array([fate.name.lower() for fate in Fate], pa.string())  # by number, which starts at 0


@dataclass(frozen=True, slots=True)
class LoadedFates:
    """Contents of the log when it was opened."""

    entries: Entries  # FATE_ENTRY, in order
    damage: tuple[Damage, ...]
    lost: int  # entries in damaged messages; their groups count as buffered again


class FateLog:
    """Fate log of one store.

    Args:
        folder: folder of the store.
        files: the disk.
        store_id: id of the store.

    Raises:
        DataError: the log is of a newer format, or does not belong to this store.
        ClusterError: the disk is full or cannot be written.
    """

    def __init__(self, folder: Path, files: Files, store_id: bytes) -> None:
        self._path = folder / FATES_NAME
        self._files = files
        self._store_id = store_id
        self.generation = 0
        self.num_entries = 0
        self._name_is_durable = True
        header = encode_header(FATES_SCHEMA, self._place(0, Kind.HEADER), 0)
        found = self._walk() if self._path.exists() else None
        if found is None or found.is_unused:
            write_whole(self._path, files, [header])
            found = self._walk()
        entries = np.frombuffer(b"".join(m.entries for m in found.messages), FATE_ENTRY)
        self.num_entries = max((m.sequence + m.num_entries for m in found.messages), default=0)
        if found.header:
            self.generation = found.header.generation
        self.loaded = LoadedFates(entries, found.damage, self.num_entries - len(entries))
        self._log = LogFile(self._path, files, found.size_bytes)

    def append(self, sequences: IntArray, group_ids: Sequence[str], fate: Fate, step: int) -> None:
        """Enter one fate for several groups; the entries are durable when this returns.

        Raises:
            ClusterError: the disk is full or cannot be written; nothing was entered.
        """
        self._make_name_durable()
        entries = np.empty(len(sequences), FATE_ENTRY)
        entries["sequence"], entries["step"], entries["fate"] = sequences, step, fate
        self._log.append([self._encode(entries, group_ids, self._log.size_bytes, self.num_entries)])
        self.num_entries += len(entries)

    def rewrite(self, entries: Entries, group_ids: Sequence[str]) -> int:
        """Replace the log by a shorter one, atomically; return the bytes freed.

        Args:
            entries: FATE_ENTRY; must give every group the same fate as the present log.
            group_ids: one per entry.

        Raises:
            ClusterError: the disk is full or cannot be written; the old log stays.
        """
        self.generation += 1
        messages = [encode_header(FATES_SCHEMA, self._place(0, Kind.HEADER), 0)]
        size_bytes = size_of(messages[0])
        for start in range(0, len(entries), _ROWS_PER_MESSAGE):
            part = slice(start, start + _ROWS_PER_MESSAGE)
            messages.append(self._encode(entries[part], group_ids[part], size_bytes, start))
            size_bytes += size_of(messages[-1])
        partial = stage(self._path, self._files, messages)
        freed = self._log.size_bytes - size_bytes
        log = LogFile(partial, self._files, size_bytes)  # before the rename: the old log stays if it fails
        try:
            with on_disk(self._path):
                self._files.replace(partial, self._path)
        except ClusterError:
            log.close()
            raise
        # From here on the new file is the log, even if a step below fails.
        self._log.close()
        self._log = log
        self._log.path = self._path
        self.num_entries = len(entries)
        self._name_is_durable = False
        self._make_name_durable()
        return freed

    def close(self) -> None:
        self._log.close()

    def _make_name_durable(self) -> None:
        """Make the rename of a rewritten log durable before an append; otherwise the old log could return."""
        if not self._name_is_durable:
            with on_disk(self._path):
                self._files.sync_folder(self._path.parent)
            self._name_is_durable = True

    def _walk(self) -> Walk:
        return walk(map_file(self._path), self._path, self._place(0), FATES_SCHEMA, FATE_ENTRY.itemsize)

    def _encode(self, entries: Entries, group_ids: Sequence[str], offset: int, sequence: int) -> list[Piece]:
        batch = pa.record_batch(
            [
                pa.array(entries["sequence"]),
                pa.array(group_ids, pa.string()),
                _NAMES.take(pa.array(entries["fate"])),
                pa.array(entries["step"]),
            ],
            schema=FATES_SCHEMA,
        )
        place = self._place(offset)
        return encode(batch.serialize(), place, sequence=sequence, entries=entries, texts=b"")

    def _place(self, offset: int, kind: Kind = Kind.FATES) -> Place:
        return Place(self._store_id, kind, 0, self.generation, offset)
