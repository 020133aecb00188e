"""Reading of rows. A message's hash is checked before Arrow reads it; for mapped files once per process."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from echo_planes.data.store.files import map_file, read_part
from echo_planes.data.store.index import GroupIndex, MessageState
from echo_planes.data.store.message import Kind, Place, decode
from echo_planes.data.store.schema import SCHEMA, OlderSchema
from echo_planes.data.store.segment import GROUP_ENTRY, segment_path
from echo_planes.errors import DataError


class RowReader:
    """Reader of the record batches of a store's messages; it does not copy mapped bytes.

    Args:
        folder: folder of the segments.
        store_id: id of the store.
        index: index with the messages' places; the reader marks damaged messages there.
        max_maps: segments kept mapped; a batch in use keeps its own map alive. 0: bytes are copied and
            checked at each read, because another process owns the files and may cut or replace them.
        older: segments written in an older schema; their rows are upgraded to SCHEMA when read.
    """

    def __init__(
        self,
        folder: Path,
        store_id: bytes,
        index: GroupIndex,
        max_maps: int,
        older: Mapping[int, OlderSchema],
    ) -> None:
        self._folder = folder
        self._store_id = store_id
        self._index = index
        self._max_maps = max_maps
        self._older = dict(older)
        self._maps: OrderedDict[int, memoryview] = OrderedDict()

    def batch(self, message: int) -> pa.RecordBatch:
        """Return the rows of one message of the index.

        Raises:
            DataError: the message is damaged or gone; the error names file and offset.
        """
        index = self._index
        segment = int(index.messages["segment"][message])
        offset = int(index.messages["offset"][message])
        size_bytes = int(index.messages["size_bytes"][message])
        state = int(index.messages["state"][message])
        data = self._bytes(segment, offset, size_bytes)
        place = Place(self._store_id, Kind.ROWS, segment, 0, offset)
        if state == MessageState.VERIFIED and self._max_maps:
            return self._rows(segment, data)
        if state != MessageState.DAMAGED:
            found = decode(data, place, GROUP_ENTRY.itemsize, offset)
            expected = (size_bytes, int(index.messages["sequence"][message]))
            if found is not None and (found.size_bytes, found.sequence) == expected:
                return self._first_read(message, segment, data)
            self._index.mark_damaged(message)
        raise self._damaged(message)

    def forget(self, segment: int) -> None:
        """Forget the map of a segment that was rewritten in SCHEMA; the next read maps it again."""
        self._maps.pop(segment, None)
        self._older.pop(segment, None)

    def close(self) -> None:
        self._maps.clear()

    def _rows(self, segment: int, data: memoryview, *, first: bool = False) -> pa.RecordBatch:
        older = self._older.get(segment)
        batch = pa.ipc.read_record_batch(pa.py_buffer(data), older.schema if older else SCHEMA)
        if first:
            batch.validate(full=True)
        return older.upgrade(batch) if older else batch

    def _first_read(self, message: int, segment: int, data: memoryview) -> pa.RecordBatch:
        """Read a message for the first time, with Arrow's full validation.

        The hash is no signature, and an invalid Arrow structure could crash the process.
        """
        try:
            batch = self._rows(segment, data, first=True)
        except (OSError, pa.ArrowException) as error:
            self._index.mark_damaged(message)
            raise self._damaged(message) from error
        self._index.messages["state"][message] = MessageState.VERIFIED
        return batch

    def _damaged(self, message: int) -> DataError:
        segment, offset, size_bytes, sequence, num_groups = (
            int(self._index.messages[name][message])
            for name in ("segment", "offset", "size_bytes", "sequence", "num_groups")
        )
        ids: Sequence[str] = self._index.ids[sequence : sequence + num_groups]
        return DataError(
            f"{segment_path(self._folder, segment)} is damaged at offset {offset} ({size_bytes} bytes, "
            f"groups {', '.join(ids)}); they are not served, restore the file from a copy or go on without"
        )

    def _bytes(self, segment: int, offset: int, size_bytes: int) -> memoryview:
        """Return a part of a segment, shorter if the file ends early."""
        if self._max_maps:
            return self._map(segment, offset + size_bytes)[offset : offset + size_bytes]
        try:
            return read_part(segment_path(self._folder, segment), offset, size_bytes)
        except FileNotFoundError:
            return memoryview(b"")

    def _map(self, segment: int, need_bytes: int) -> memoryview:
        """Return a map of a segment that covers `need_bytes`, or the whole file if it is shorter."""
        data = self._maps.pop(segment, None)
        if data is None or len(data) < need_bytes:
            try:
                data = map_file(segment_path(self._folder, segment))
            except FileNotFoundError:
                data = memoryview(b"")  # gone: every message of it is damaged
        self._maps[segment] = data
        while len(self._maps) > self._max_maps:
            self._maps.popitem(last=False)
        return data
