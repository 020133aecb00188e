"""Reduction of a batch of rows to the groups that are new to the store, with their index entries. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from echo_planes.data.store.message import Entries
from echo_planes.data.store.schema import SCHEMA
from echo_planes.data.store.segment import GROUP_ENTRY
from echo_planes.errors import DataError

_COLUMNS = tuple(SCHEMA.get_field_index(name) for name in ("group_id", "version", "reward"))


@dataclass(frozen=True, slots=True)
class WriteBatch:
    """Batch to be written: whole groups that are not in the store."""

    arrow: pa.Buffer  # as an encapsulated Arrow message
    entries: Entries  # (G,) GROUP_ENTRY
    ids: list[str]


def make_write_batch(
    batch: pa.RecordBatch,
    created_s: float,
    is_known: Callable[[str], bool],
    taken: set[str],
    duplicates: list[str],
) -> WriteBatch | None:
    """Make the write batch of a batch's new groups; return None if none is new.

    Args:
        batch: rows of `schema.SCHEMA`, each group's rows together.
        created_s: time of acceptance, seconds.
        is_known: whether a group id is in the store.
        taken: ids of this append so far; this batch's ids are added.
        duplicates: ids of `taken` that are in the store; this batch's are added.

    Raises:
        DataError: the batch has another schema, is not whole, has a null where there must be none, or a
            group in two places.
    """
    group_ids, versions, rewards = _columns_of(batch)
    ids, starts = _groups_of(group_ids)
    new = []
    for row, group_id in enumerate(ids):
        if group_id in taken:
            raise DataError(f"the rows of group {group_id} are not together; send each group once, whole")
        taken.add(group_id)
        if is_known(group_id):
            duplicates.append(group_id)
        else:
            new.append(row)
    if not new:
        return None
    if len(new) < len(ids):
        stops = [*starts[1:], batch.num_rows]
        batch = pa.concat_batches([batch.slice(starts[row], stops[row] - starts[row]) for row in new])
        group_ids, versions, rewards = _columns_of(batch)
        ids, starts = _groups_of(group_ids)
    arrow = batch.serialize()
    num_rows = batch.num_rows
    entries = [
        (
            min(versions[start:stop]),
            sum(rewards[start:stop]) / (stop - start),
            created_s,
            stop - start,
            start,
            len(group_id.encode()),
            arrow.size * (stop - start) // num_rows,
        )
        for group_id, start, stop in zip(ids, starts, [*starts[1:], num_rows], strict=True)
    ]
    return WriteBatch(arrow, np.array(entries, GROUP_ENTRY), ids)


def _columns_of(batch: pa.RecordBatch) -> tuple[list[str], list[int], list[float]]:
    """Check a batch; return its group ids, versions and rewards as lists, which are faster for few rows."""
    if not batch.schema.equals(SCHEMA, check_metadata=True):
        raise DataError("the batch has another schema than schema.SCHEMA; nothing was written")
    try:
        batch.validate()
    except pa.ArrowInvalid as error:
        raise DataError(f"the batch is not whole ({error}); nothing was written") from error
    # Fetch each column only once: that costs more than reading its few values.
    group_ids, versions, rewards = columns = [batch.column(place) for place in _COLUMNS]
    for place, column in zip(_COLUMNS, columns, strict=True):
        if column.null_count:
            raise DataError(f"column {SCHEMA.names[place]} of the batch has nulls; nothing was written")
    return group_ids.to_pylist(), versions.to_numpy().tolist(), rewards.to_numpy().tolist()


def _groups_of(rows: list[str]) -> tuple[list[str], list[int]]:
    """Return the ids of a batch's groups, and the first row of each."""
    starts = [row for row, group_id in enumerate(rows) if row == 0 or group_id != rows[row - 1]]
    return [rows[row] for row in starts], starts
