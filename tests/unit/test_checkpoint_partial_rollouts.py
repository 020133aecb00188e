"""The partial rollouts of a cut on disk: exact to the last bit, read whole or not at all."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import xxhash

from echo_planes.data.replay import checkpoint_partial_rollouts as checkpoint_partial_rollouts
from echo_planes.data.replay.checkpoint_partial_rollouts import (
    FORMAT,
    SCHEMA,
    SCHEMAS,
    PartialsRecord,
    read_partials,
    write_partials,
)
from echo_planes.errors import DataError
from echo_planes.types import PartialRollout, Sample, Span

CONTEXT = (1, 2, 3)
HARD = (-0.1, -1.0 / 3.0, -0.0, 5e-324, float("-inf"), -1.7976931348623157e308)  # not to be rounded


def partial(context: tuple[int, ...], *tokens: int, finish: str = "", **more: Any) -> PartialRollout:
    middle = len(tokens) // 2
    spans = [Span(0, middle, 3, "d3"), Span(middle, len(tokens), 4, "d4", schedule=2)]
    logprobs = tuple(HARD[token % len(HARD)] for token in tokens)
    return PartialRollout(context, Sample(tokens, logprobs, tuple(spans[middle == 0 :]), finish, **more))  # type: ignore[arg-type]


def partials() -> dict[int, tuple[PartialRollout, ...]]:
    top = (((7, -0.25), (9, -0.1)), ((8, -0.5), (2, -0.0)))
    return {
        12: (partial(CONTEXT, 5, 6, 7), partial(CONTEXT, 8, finish="stop"), partial((4,), *range(40))),
        3: (
            partial(CONTEXT, 1, 2, top_logprobs=top),
            partial((*CONTEXT, 1, 2), 2**31 - 1, 0, finish="length"),
        ),
        2**40: (partial((0,), 9),),
    }


def bits(sample: Sample) -> bytes:
    tops = [logprob for top in sample.top_logprobs for _, logprob in top]
    return struct.pack(f"<{len(sample.logprobs) + len(tops)}d", *sample.logprobs, *tops)


@pytest.mark.parametrize("batch_tokens", [1, 10, 2**20])
def test_what_is_written_is_read_again_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_tokens: int
) -> None:
    monkeypatch.setattr(checkpoint_partial_rollouts, "BATCH_TOKENS", batch_tokens)
    record = write_partials(tmp_path / "drafts.arrows", partials())
    assert record.num_tokens == 3 + 1 + 40 + 2 + 2 + 1
    found = read_partials(tmp_path / "drafts.arrows", record)
    assert found == partials()
    assert list(found) == list(partials())
    for index, mine in partials().items():
        assert [bits(one.sample) for one in found[index]] == [bits(one.sample) for one in mine]


def test_samples_that_share_a_context_have_it_once(tmp_path: Path) -> None:
    context = tuple(range(10_000))
    eight = {0: tuple(partial(context, token) for token in range(8))}
    record = write_partials(tmp_path / "drafts.arrows", eight)
    assert record.size_bytes < 2 * 4 * len(context)
    found = read_partials(tmp_path / "drafts.arrows", record)
    assert found == eight
    assert len({id(one.context) for one in found[0]}) == 1


@pytest.mark.parametrize("harm", ["flip", "cut", "longer", "missing", "empty", "format"])
def test_a_file_that_is_not_what_was_written_is_not_read(tmp_path: Path, harm: str) -> None:
    path = tmp_path / "drafts.arrows"
    record = write_partials(path, partials())
    content = bytearray(path.read_bytes())
    if harm == "flip":
        content[len(content) // 2] ^= 1
    elif harm == "cut":
        del content[-9:]
    elif harm == "longer":
        content += b"\0"
    elif harm == "empty":
        content.clear()
    path.write_bytes(content)
    if harm == "missing":
        path.unlink()
    if harm == "format":
        record = replace(record, format=3)
    with pytest.raises(DataError, match=r"drafts\.arrows"):
        read_partials(path, record)


def test_a_file_of_the_first_format_is_of_dense_attention(tmp_path: Path) -> None:
    record = write_partials(tmp_path / "drafts.arrows", partials())
    old = SCHEMAS[1]
    with pa.ipc.open_stream(tmp_path.joinpath("drafts.arrows").read_bytes()) as reader:
        rows = reader.read_all().select(old.names)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, old) as writer:
        writer.write_table(rows.cast(old))
    written = of_bytes(tmp_path / "old.arrows", sink.getvalue().to_pybytes())
    found = read_partials(tmp_path / "old.arrows", replace(written, format=1))
    assert {span.schedule for mine in found.values() for one in mine for span in one.sample.spans} == {-1}
    assert [[one.sample.token_ids for one in mine] for mine in found.values()] == [
        [one.sample.token_ids for one in mine] for mine in partials().values()
    ]
    assert record.format == FORMAT


def of_bytes(path: Path, content: bytes) -> PartialsRecord:
    path.write_bytes(content)
    return PartialsRecord(FORMAT, len(content), xxhash.xxh3_128_hexdigest(content), 1)


@pytest.mark.parametrize(
    "row",
    [
        {"logprobs": [-0.5]},
        {"span_stops": [1]},
        {"span_digests": []},
        {
            "token_ids": [],
            "logprobs": [],
            "span_stops": [],
            "span_versions": [],
            "span_digests": [],
            "span_schedules": [],
        },
        {"context": None},  # of the row before, and there is none
        {"top_ids": [[1]], "top_logprobs": [[]]},
    ],
)
def test_rows_that_are_no_partials_are_refused_whatever_their_hash(
    tmp_path: Path, row: dict[str, Any]
) -> None:
    good = {
        "prompt_index": 0,
        "context": [1],
        "token_ids": [5, 6],
        "logprobs": [-0.5, -0.5],
        "span_stops": [2],
        "span_versions": [0],
        "span_digests": ["d0"],
        "span_schedules": [7],
        "finish_reason": "",
        "top_ids": [],
        "top_logprobs": [],
    }
    for one, is_good in ((good, True), (good | row, False)):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, SCHEMA) as writer:
            writer.write_batch(pa.RecordBatch.from_pylist([one], schema=SCHEMA))
        record = of_bytes(tmp_path / "drafts.arrows", sink.getvalue().to_pybytes())
        if is_good:
            assert list(read_partials(tmp_path / "drafts.arrows", record)) == [0]
        else:
            with pytest.raises(DataError, match="holds no partial rollouts"):
                read_partials(tmp_path / "drafts.arrows", record)


def test_another_file_with_the_right_hash_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "drafts.arrows"
    with pytest.raises(DataError, match="holds no partial rollouts"):
        read_partials(path, of_bytes(path, b"something else"))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA.remove_metadata()):
        pass
    with pytest.raises(DataError, match="another schema"):
        read_partials(path, of_bytes(path, sink.getvalue().to_pybytes()))
