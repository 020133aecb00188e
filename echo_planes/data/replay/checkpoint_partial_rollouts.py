"""Partial rollouts of a checkpoint as an Arrow file: millions of tokens, exact to the last bit of a logprob.

The file is an Arrow IPC stream of `SCHEMA`, one row per partial rollout. A prompt's rows stand together, in
the order of their calls. The checkpoint state holds the file's size and xxh3-128 (`PartialsRecord`), which
are checked before Arrow reads any byte. As in the replay store, the hash detects damage but is no defence
against a deliberately forged checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from echo_planes.data.replay.partial_rollouts import num_tokens
from echo_planes.data.store.files import map_file
from echo_planes.errors import DataError
from echo_planes.types import PartialRollout, Sample, Span, is_whole

FORMAT = 2  # format of the file; 1, without schedules, is read too
_FIELDS_1 = (
    ("prompt_index", pa.int64()),
    ("context", pa.list_(pa.int32())),  # null: equal to that of the row before, which has the same prompt
    ("token_ids", pa.list_(pa.int32())),
    ("logprobs", pa.list_(pa.float64())),  # of each token, after temperature and top-p
    ("span_stops", pa.list_(pa.int32())),
    ("span_versions", pa.list_(pa.int64())),
    ("span_digests", pa.list_(pa.string())),
    ("finish_reason", pa.string()),
    ("top_ids", pa.list_(pa.list_(pa.int32()))),  # per token, k alternatives; empty unless asked for
    ("top_logprobs", pa.list_(pa.list_(pa.float64()))),
)


def _schema(fields: Sequence[tuple[str, pa.DataType]], version: int) -> pa.Schema:
    return pa.schema(fields, metadata={"echo_planes.drafts_format": str(version)})


SCHEMAS = {
    1: _schema(_FIELDS_1, 1),
    2: _schema((*_FIELDS_1, ("span_schedules", pa.list_(pa.int64()))), 2),  # -1: dense attention
}
SCHEMA = SCHEMAS[FORMAT]
BATCH_TOKENS = 2**20  # approximate tokens in an Arrow batch; bounds the memory that writing takes

PartialsByPrompt = Mapping[int, tuple[PartialRollout, ...]]  # by prompt index
# Prompt index, partial rollout, whether its context equals that of the row before.
_Row = tuple[int, PartialRollout, bool]


@dataclass(frozen=True, slots=True)
class PartialsRecord:
    """Record in a checkpoint state of the file of partial rollouts beside it."""

    format: int
    size_bytes: int
    xxh3_128: str  # of the whole file, hex
    num_tokens: int


def write_partials(path: Path, partials: PartialsByPrompt) -> PartialsRecord:
    """Write a new file; return the record that the checkpoint state must hold.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    with path.open("wb") as sink, pa.ipc.new_stream(sink, SCHEMA) as writer:
        for rows in _batches(partials):
            writer.write_batch(_to_batch(rows))
    data = map_file(path)
    total = sum(num_tokens(mine) for mine in partials.values())
    return PartialsRecord(FORMAT, len(data), xxhash.xxh3_128_hexdigest(data), total)


def read_partials(path: Path, record: PartialsRecord) -> dict[int, tuple[PartialRollout, ...]]:
    """Read the partial rollouts of a file; the exact inverse of `write_partials`.

    Raises:
        DataError: the file is missing, of another format, or differs from the one that was written.
    """
    if record.format not in SCHEMAS:
        raise DataError(
            f"{path} is of format {record.format}, this program reads up to {FORMAT}; update echo_planes"
        )
    try:
        data = map_file(path)
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing; restore it") from error
    if len(data) != record.size_bytes:
        raise DataError(f"{path} has {len(data)} bytes, not the {record.size_bytes} written; restore it")
    if xxhash.xxh3_128_hexdigest(data) != record.xxh3_128:
        raise DataError(f"{path} is not what was written: its hash is another one; restore it")
    partials: dict[int, list[PartialRollout]] = {}
    try:
        with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
            if not reader.schema.equals(SCHEMAS[record.format], check_metadata=True):
                raise DataError(f"{path} has another schema than this program writes; restore it")
            for batch in reader:
                batch.validate(full=True)
                _enter(batch, partials)
    except (pa.ArrowException, LookupError, TypeError, ValueError) as error:
        raise DataError(f"{path} holds no partial rollouts ({error}); restore it") from error
    return {index: tuple(mine) for index, mine in partials.items()}


def _batches(partials: PartialsByPrompt) -> Iterator[list[_Row]]:
    """Yield rows in pieces of about `BATCH_TOKENS` tokens; the rows of a prompt stay in one piece."""
    rows: list[_Row] = []
    size = 0
    for index, mine in partials.items():
        before: tuple[int, ...] = ()
        for partial in mine:
            is_same = partial.context == before
            rows.append((index, partial, is_same))
            size += len(partial.sample.token_ids) + (0 if is_same else len(partial.context))
            before = partial.context
        if size >= BATCH_TOKENS:
            yield rows
            rows, size = [], 0
    if rows:
        yield rows


def _to_batch(rows: Sequence[_Row]) -> pa.RecordBatch:
    samples = [partial.sample for _, partial, _ in rows]
    contexts = _column([() if is_same else partial.context for _, partial, is_same in rows], np.int32)
    is_same_context = pa.array([is_same for _, _, is_same in rows], pa.bool_())
    columns = [
        pa.array([index for index, _, _ in rows], pa.int64()),
        pa.ListArray.from_arrays(contexts.offsets, contexts.values, mask=is_same_context),
        _column([sample.token_ids for sample in samples], np.int32),
        _column([sample.logprobs for sample in samples], np.float64),
        _column([[span.stop for span in sample.spans] for sample in samples], np.int32),
        _column([[span.version for span in sample.spans] for sample in samples], np.int64),
        pa.array([[span.digest for span in sample.spans] for sample in samples], pa.list_(pa.string())),
        pa.array([sample.finish_reason for sample in samples], pa.string()),
        pa.array(
            [[[i for i, _ in top] for top in sample.top_logprobs] for sample in samples],
            pa.list_(pa.list_(pa.int32())),
        ),
        pa.array(
            [[[p for _, p in top] for top in sample.top_logprobs] for sample in samples],
            pa.list_(pa.list_(pa.float64())),
        ),
        _column([[span.schedule for span in sample.spans] for sample in samples], np.int64),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _column(lists: Sequence[Sequence[Any]], dtype: npt.DTypeLike) -> pa.ListArray:
    """Turn lists of numbers into a column; several times faster than `pa.array`."""
    offsets = np.zeros(len(lists) + 1, np.int32)
    np.cumsum([len(one) for one in lists], out=offsets[1:])
    values = np.fromiter(chain.from_iterable(lists), dtype, count=int(offsets[-1]))
    return pa.ListArray.from_arrays(offsets, pa.array(values))


def _enter(batch: pa.RecordBatch, partials: dict[int, list[PartialRollout]]) -> None:
    """Enter the rows of a batch.

    Raises:
        ValueError: a row is not a whole partial rollout.
    """
    column = batch.column
    ids, logprobs = _tuples(column("token_ids")), _tuples(column("logprobs"))
    is_same_context = column("context").is_null().to_pylist()
    contexts = _tuples(column("context"))
    stops = _tuples(column("span_stops"))
    has_schedules = "span_schedules" in batch.schema.names
    spans = zip(
        stops,
        _tuples(column("span_versions")),
        column("span_digests").to_pylist(),
        _tuples(column("span_schedules")) if has_schedules else [(-1,) * len(one) for one in stops],
        strict=True,
    )
    tops = zip(column("top_ids").to_pylist(), column("top_logprobs").to_pylist(), strict=True)
    reasons = column("finish_reason").to_pylist()
    for row, (index, of_spans, top) in enumerate(
        zip(column("prompt_index").to_pylist(), spans, tops, strict=True)
    ):
        sample = Sample(
            token_ids=ids[row],
            logprobs=logprobs[row],
            spans=_spans(*of_spans),
            finish_reason=reasons[row],
            top_logprobs=tuple(tuple(zip(*pair, strict=True)) for pair in zip(*top, strict=True)),
        )
        mine = partials.setdefault(index, [])
        context = mine[-1].context if is_same_context[row] and mine else contexts[row]
        if not context or not sample.token_ids or not is_whole(sample):
            raise ValueError(f"a partial rollout of prompt {index} is not whole")
        mine.append(PartialRollout(context, sample))


def _tuples(column: pa.ListArray) -> list[tuple[Any, ...]]:
    """Return a column's lists as tuples, () for a null; the inverse of `_column`."""
    values = column.flatten().to_numpy(zero_copy_only=False).tolist()
    stops = np.cumsum(column.value_lengths().fill_null(0).to_numpy()).tolist()
    return [tuple(values[start:stop]) for start, stop in zip([0, *stops], stops, strict=False)]


def _spans(
    stops: Sequence[int], versions: Sequence[int], digests: Iterable[str], schedules: Sequence[int]
) -> tuple[Span, ...]:
    starts = [0, *stops][: len(stops)]
    return tuple(Span(*fields) for fields in zip(starts, stops, versions, digests, schedules, strict=True))
