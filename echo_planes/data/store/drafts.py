"""From a batch of rows to what the store keeps of it: whole groups that are new, and their entries. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from echo_planes.data.schema import SCHEMA
from echo_planes.data.store.message import Entries
from echo_planes.data.store.segment import GROUP_ENTRY
from echo_planes.errors import DataError

_GROUP_ID, _VERSION, _REWARD = (SCHEMA.get_field_index(name) for name in ("group_id", "version", "reward"))


@dataclass(frozen=True, slots=True)
class Draft:
    """A batch about to be written: whole groups that are not in the store."""

    batch: pa.RecordBatch
    entries: Entries  # GROUP_ENTRY, num_bytes not yet filled
    ids: list[str]


def make_draft(
    batch: pa.RecordBatch,
    created_s: float,
    is_known: Callable[[str], bool],
    taken: set[str],
    duplicates: list[str],
) -> Draft | None:
    """What of a batch is new; None if nothing is.

    Args:
        batch: rows of `schema.SCHEMA`, each group's rows together.
        created_s: time of acceptance, seconds.
        is_known: whether a group id is in the store.
        taken: ids of this append so far; added to.
        duplicates: those of them that are known; added to.

    Raises:
        DataError: the batch has another schema, is not whole, has a null where there must be none, or a
            group in two places.
    """
    _check(batch)
    ids, starts = _groups_of(batch)
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
        ids, starts = _groups_of(batch)
    # In lists: for the few rows of a group they are quicker than arrays.
    versions: list[int] = batch.column(_VERSION).to_numpy().tolist()
    rewards: list[float] = batch.column(_REWARD).to_numpy().tolist()
    entries = [
        (
            min(versions[start:stop]),
            sum(rewards[start:stop]) / (stop - start),
            created_s,
            stop - start,
            start,
            len(group_id.encode()),
            0,
        )
        for group_id, start, stop in zip(ids, starts, [*starts[1:], batch.num_rows], strict=True)
    ]
    return Draft(batch, np.array(entries, GROUP_ENTRY), ids)


def _check(batch: pa.RecordBatch) -> None:
    if not batch.schema.equals(SCHEMA, check_metadata=True):
        raise DataError("the batch has another schema than schema.SCHEMA; nothing was written")
    try:
        batch.validate()
    except pa.ArrowInvalid as error:
        raise DataError(f"the batch is not whole ({error}); nothing was written") from error
    for place in (_GROUP_ID, _VERSION, _REWARD):
        if batch.column(place).null_count:
            raise DataError(f"column {SCHEMA.names[place]} of the batch has nulls; nothing was written")


def _groups_of(batch: pa.RecordBatch) -> tuple[list[str], list[int]]:
    """Ids of a batch's groups and their first rows."""
    rows: list[str] = batch.column(_GROUP_ID).to_pylist()
    starts = [row for row, group_id in enumerate(rows) if row == 0 or group_id != rows[row - 1]]
    return [rows[row] for row in starts], starts
