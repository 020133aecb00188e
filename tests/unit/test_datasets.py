"""Rows from files: every form gives the same rows, and what is wrong is named with file, row and field."""

from __future__ import annotations

import datetime as dt
import gzip
import json
import os
import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from echo_planes.data.tasks import datasets
from echo_planes.data.tasks.datasets import data_files, has_split, iter_rows, load_rows
from echo_planes.errors import DataError
from echo_planes.tasks.math.datasets import load_splits

ROWS = [
    {"question": f"What is {i}?", "level": i, "weight": i / 2, "tags": ["a"] * (i % 3)} for i in range(2500)
]
FIELDS = {"question": str, "level": int, "weight": float, "tags": list}


def write_json(path: Path, rows: list[dict[str, Any]]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=700)
    return path


def write_arrow(path: Path, rows: list[dict[str, Any]], *, stream: bool = False) -> Path:
    table = pa.Table.from_pylist(rows)
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with new(str(path), table.schema) as sink:
        sink.write_table(table, max_chunksize=900)
    return path


def save_to_disk(folder: Path, rows: list[dict[str, Any]], pieces: int = 2) -> Path:
    """The layout of Hugging Face's `save_to_disk`."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{pieces:05d}.arrow" for i in range(pieces)]
    size = -(-len(rows) // pieces)
    for i, name in enumerate(names):
        write_arrow(folder / name, rows[i * size : (i + 1) * size], stream=True)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def refusal(path: Path, fields: dict[str, Any] = FIELDS, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        load_rows(path, fields, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


# --- what is there -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("rows.jsonl", write_json),
        ("rows.jsonl.gz", write_json),
        ("rows.parquet", write_parquet),
        ("rows.arrow", write_arrow),
        ("stream.arrow", lambda path, rows: write_arrow(path, rows, stream=True)),
        ("saved", save_to_disk),
    ],
)
def test_every_form_gives_the_same_rows_in_order(
    tmp_path: Path, name: str, write: Callable[[Path, list[dict[str, Any]]], Path]
) -> None:
    path = write(tmp_path / name, ROWS)
    assert load_rows(path, FIELDS) == tuple(ROWS)
    assert load_rows(path, {"level": int}, max_rows=3) == ({"level": 0}, {"level": 1}, {"level": 2})


def test_max_rows_reads_no_further(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{broken\n')
    assert load_rows(path, {"a": int}, max_rows=1) == ({"a": 1},)
    assert load_rows(path, {"a": int}, max_rows=0) == ()
    assert "row 2" in refusal(path, {"a": int}, max_rows=2)


def test_places_count_blank_lines_too(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('\n{"a": 1}\n\n{"a": 2}\n')
    assert list(iter_rows(path, {"a": int})) == [(f"{path}: row 2", {"a": 1}), (f"{path}: row 4", {"a": 2})]


def test_pieces_of_a_split_are_one_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for i in (2, 0, 1):
        write_parquet(data / f"train-{i:05d}-of-00003.parquet", ROWS[i * 10 : i * 10 + 10])
    write_parquet(data / "test-00000-of-00001.parquet", ROWS[100:105])
    assert load_rows(tmp_path, FIELDS, split="train") == tuple(ROWS[:30])
    assert load_rows(tmp_path, FIELDS, split="test") == tuple(ROWS[100:105])
    assert has_split(tmp_path, "test")
    assert not has_split(tmp_path, "dev")
    message = refusal(tmp_path)
    assert "several parts (test, train)" in message
    assert "no part 'dev'; it has test, train" in refusal(tmp_path, split="dev")
    (data / "train-00001-of-00003.parquet").unlink()
    assert "'train' has 2 pieces" in refusal(tmp_path, split="train")


def test_a_saved_folder_of_splits(tmp_path: Path) -> None:
    for split in ("train", "test"):
        save_to_disk(tmp_path / split, [{"a": split}], pieces=1)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert load_rows(tmp_path, {"a": str}, split="test") == ({"a": "test"},)
    assert load_rows(tmp_path / "train", {"a": str}) == ({"a": "train"},)


def test_of_two_forms_of_a_split_one_is_read(tmp_path: Path) -> None:
    write_json(tmp_path / "train.jsonl", [{"a": 1}])
    write_json(tmp_path / "train.jsonl.gz", [{"a": 1}])
    assert data_files(tmp_path) == [tmp_path / "train.jsonl"]


# --- types ---------------------------------------------------------------------------------------


def test_a_whole_number_stands_for_a_float_and_true_for_no_int(tmp_path: Path) -> None:
    path = write_json(tmp_path / "rows.jsonl", [{"a": 2}])
    (row,) = load_rows(path, {"a": float})
    assert type(row["a"]) is float
    assert load_rows(path, {"a": (str, int)}) == ({"a": 2},)
    write_json(path, [{"a": True}])
    assert "field 'a' is true (bool), not int" in refusal(path, {"a": int})


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        (b'{"a": 1', ["row 2 is not a gsm8k row", "not JSON"]),
        (b"[1, 2]", ["row 2 is not a gsm8k row", "[1, 2] (list)", "not an object"]),
        (b"\xff\xfe", ["row 2 is not a gsm8k row", "not JSON", "decode"]),
        (b'{"b": 1, "c": 2}', ["row 2 is not a gsm8k row", "no field 'a'", "it has 'b', 'c'"]),
        (b"{}", ["row 2", "no field 'a'", "it has none"]),
        (b'{"a": "1"}', ["row 2", "field 'a'", '"1" (str)', "not int"]),
        (b'{"a": null}', ["row 2", "field 'a'", "null (NoneType)", "not int"]),
        (b"[" * 100_000, ["row 2", "not JSON"]),
    ],
)
def test_a_bad_line_is_named_with_row_and_field(tmp_path: Path, line: bytes, parts: list[str]) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"a": 1}\n' + line + b"\n")
    message = refusal(path, {"a": int}, what="gsm8k")
    for part in [str(path), *parts]:
        assert part in message, message


def test_a_mark_of_the_byte_order_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    for name in ("rows.jsonl", "rows.jsonl.gz"):
        data = b'\xef\xbb\xbf{"a": 1}\n{"a": 2}\n'
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        assert load_rows(tmp_path / name, {"a": int}) == ({"a": 1}, {"a": 2})


DATED = {
    "when": dt.datetime(2003, 2, 1, 12, 30),
    "day": dt.date(2003, 2, 1),
    "hour": dt.time(12, 30),
    "price": Decimal("1.50"),
    "list": [{"when": dt.datetime(2003, 2, 1), "price": Decimal("100")}],
}


@pytest.mark.parametrize("write", [write_parquet, write_arrow])
def test_dates_and_decimals_are_text_at_any_depth(
    tmp_path: Path, write: Callable[[Path, list[dict[str, Any]]], Path]
) -> None:
    path = write(tmp_path / ("rows.parquet" if write is write_parquet else "rows.arrow"), [DATED])
    (row,) = load_rows(path, dict.fromkeys(DATED, (str, list)))
    assert row == {
        "when": "2003-02-01T12:30:00",
        "day": "2003-02-01",
        "hour": "12:30:00",
        "price": "1.50",
        "list": [{"when": "2003-02-01T00:00:00", "price": "100"}],
    }
    assert json.loads(json.dumps(row)) == row


@pytest.mark.parametrize("value", [b"\x00", dt.timedelta(1)])
def test_what_json_cannot_hold_is_named_with_its_row(tmp_path: Path, value: object) -> None:
    path = write_parquet(tmp_path / "rows.parquet", [{"q": ["a"], "b": [None]}, {"q": ["b"], "b": [value]}])
    message = refusal(path, {"q": list, "b": list})
    assert "row 2 is not a usable row: field 'b' holds" in message
    assert "store it as text" in message


def test_a_date_that_python_cannot_hold_is_one_line(tmp_path: Path) -> None:
    table = pa.table({"a": pa.array([2**43], pa.timestamp("s"))})
    pq.write_table(table, tmp_path / "rows.parquet")
    assert "cannot be read after row 0" in refusal(tmp_path / "rows.parquet", {"a": str})


HALVES = [
    ({"q": "a \ud800 b"}, "field 'q' holds U+D800, half of a surrogate pair"),
    ({"q": ["ok", {"content": "\udfff"}]}, "field 'q' holds U+DFFF, half of a surrogate pair"),
    ({"q": {"\udc80": 1}}, "field 'q' holds U+DC80, half of a surrogate pair"),
    ({"\ud800": 1}, r"no field 'q'; it has '\ud800'"),
]


@pytest.mark.parametrize(("row", "told"), HALVES)
def test_text_that_is_no_text_is_refused_with_file_and_row(tmp_path: Path, row: object, told: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f'{{"q": "\\ud83d\\ude00"}}\n{json.dumps(row)}\n')  # the first is a pair, a character
    message = refusal(path, {"q": (str, list, dict)})
    assert message.startswith(f"{path}: row 2 is not a usable row: {told}")
    assert "\n" not in message
    message.encode()
    assert load_rows(path, {"q": str}, max_rows=1) == ({"q": "\U0001f600"},)


def test_a_column_of_text_that_is_no_utf_8_is_refused_with_its_row(tmp_path: Path) -> None:
    raw = pa.array([b"ok", b"\xed\xa0\x80"], pa.binary())
    table = pa.table({"q": pa.Array.from_buffers(pa.string(), 2, raw.buffers())})
    pq.write_table(table, tmp_path / "bad.parquet")
    with pa.ipc.new_file(str(tmp_path / "bad.arrow"), table.schema) as sink:
        sink.write_table(table)
    for name in ("bad.parquet", "bad.arrow"):
        message = refusal(tmp_path / name, {"q": str})
        assert "after row 0" in message
        assert "Invalid UTF8 sequence at string index 1" in message
        assert "\n" not in message


@pytest.mark.parametrize("write", [write_parquet, write_arrow])
def test_a_bad_column_is_named(tmp_path: Path, write: Callable[[Path, list[dict[str, Any]]], Path]) -> None:
    path = write(
        tmp_path / ("rows.parquet" if write is write_parquet else "rows.arrow"), [{"a": 1}, {"a": None}]
    )
    assert "no field 'b'; its fields are 'a'" in refusal(path, {"b": int})
    message = refusal(path, {"a": int})
    assert "row 2" in message
    assert "field 'a' is null" in message
    assert "field 'a' is 1 (int), not str" in refusal(path, {"a": str})


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.table([pa.array([1]), pa.array([2])], names=["a", "a"])
    with pa.ipc.new_file(str(tmp_path / "rows.arrow"), table.schema) as sink:
        sink.write_table(table)
    assert "2 columns called field 'a'" in refusal(tmp_path / "rows.arrow", {"a": int})


def test_extension_types_are_refused_before_rows_are_read(tmp_path: Path) -> None:
    """Known ones, ones that only the metadata names, ones inside others; also where nobody asks for them."""
    named = {"ARROW:extension:name": "some.pickle", "ARROW:extension:metadata": "x"}
    fields = [
        pa.field("b", pa.uuid()),
        pa.field("b", pa.int64(), metadata=named),
        pa.field("b", pa.list_(pa.field("item", pa.int64(), metadata=named))),
        pa.field("b", pa.struct([pa.field("inner", pa.int64(), metadata=named)])),
    ]
    for field in fields:
        schema = pa.schema([pa.field("a", pa.int64()), field])
        path = tmp_path / "rows.arrow"
        with pa.ipc.new_file(str(path), schema):
            pass  # no rows at all: only the schema can be what is refused
        message = refusal(path, {"a": int})
        assert "extension type" in message
        assert "column 'b" in message


# --- files ---------------------------------------------------------------------------------------


def test_files_and_folders_that_are_not_there_or_no_data(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "none.jsonl")
    assert "no data in this folder" in refusal(tmp_path)
    (tmp_path / "rows.csv").write_text("a\n1\n")
    assert "not a data file; give one that ends in .jsonl" in refusal(tmp_path / "rows.csv")
    (tmp_path / "empty.jsonl").write_text("")
    assert "no rows" in refusal(tmp_path / "empty.jsonl")


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.parquet", "rows.arrow"])
def test_damaged_files_are_data_errors(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    write = {"rows.jsonl.gz": write_json, "rows.parquet": write_parquet, "rows.arrow": write_arrow}[name]
    whole = write(path, ROWS).read_bytes()
    for damaged in (whole[: len(whole) // 2], b"no", b""):
        path.write_bytes(damaged)
        message = refusal(path)
        assert str(path) in message


def test_offsets_that_point_outside_are_not_followed(tmp_path: Path) -> None:
    path = write_arrow(tmp_path / "rows.arrow", [{"a": "x" * i} for i in range(4)])
    offsets = np.array([0, 0, 1, 3, 6], "<i4").tobytes()
    whole = path.read_bytes()
    assert whole.count(offsets) == 1
    path.write_bytes(whole.replace(offsets, np.array([0, 0, 2**30, 3, 6], "<i4").tobytes()))
    assert "cannot be read after row 0" in refusal(path, {"a": str})


def test_a_line_without_end_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "MAX_LINE_BYTES", 1 << 20)
    path = tmp_path / "bomb.jsonl.gz"
    path.write_bytes(gzip.compress(b"1" * (8 << 20)))
    assert "row 1 is longer than 1 MiB" in refusal(path)


@pytest.mark.parametrize("name", ["../outside.arrow", "/etc/passwd", 7])
def test_a_saved_folder_cannot_name_files_elsewhere(tmp_path: Path, name: object) -> None:
    folder = save_to_disk(tmp_path / "saved", [{"a": 1}])
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    assert "not a file of its folder" in refusal(folder, {"a": int})


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"_data_files": [1]}'])
def test_a_saved_folder_without_its_list(tmp_path: Path, text: str) -> None:
    folder = save_to_disk(tmp_path / "saved", [{"a": 1}])
    (folder / "state.json").write_text(text)
    assert re.search("does not list data files|is not JSON", refusal(folder, {"a": int}))


# --- as a task uses it ---------------------------------------------------------------------------


def test_the_math_task_reads_all_of_them(tmp_path: Path) -> None:
    rows = [{"question": f"What is {i}?", "answer": f"It is.\n#### {i}"} for i in range(40)]
    write_parquet(tmp_path / "train-00000-of-00001.parquet", rows[:30])
    training, evaluation = load_splits("gsm8k", str(tmp_path), None)  # one split: a part of it is held out
    assert [problem.answer for problem in evaluation] == ["7", "27"]
    assert len(training) == 28
    save_to_disk(tmp_path / "test", rows[30:])
    training, evaluation = load_splits("gsm8k", str(tmp_path), None)
    assert [problem.answer for problem in training] == [str(i) for i in range(30)]
    assert [problem.answer for problem in evaluation] == [str(i) for i in range(30, 40)]
    write_parquet(tmp_path / "train-00000-of-00001.parquet", [{"question": "q", "answer": "seven"}])
    with pytest.raises(DataError, match=r"row 1 is not a gsm8k row: .*####.*; set task\.data=PATH"):
        load_splits("gsm8k", str(tmp_path), None)


# --- what never ends -----------------------------------------------------------------------------


@pytest.mark.parametrize("ending", datasets.SUFFIXES)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_never_ends_is_not_read(tmp_path: Path, ending: str, inside: bool, kind: str) -> None:
    path = tmp_path / f"train{ending}"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    assert "it is a" in refusal(tmp_path if inside else path, {"a": int})


def test_a_list_of_saved_files_that_never_ends(tmp_path: Path) -> None:
    folder = save_to_disk(tmp_path / "saved", [{"a": 1}])
    (folder / "state.json").unlink()
    os.mkfifo(folder / "state.json")
    assert "state.json cannot be read: it is a named pipe" in refusal(folder, {"a": int})


@pytest.mark.parametrize("text", [b"\n", b'{"a": 1}\n', b'{"a": 1, "b": "' + b"x" * 1000 + b'"}\n'])
def test_gzip_that_unpacks_to_much_more_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bytes
) -> None:
    monkeypatch.setattr(datasets, "FREE_BYTES", 1 << 16)
    monkeypatch.setattr(datasets, "MOST_RATIO", 20)
    path = tmp_path / "bomb.jsonl.gz"
    path.write_bytes(gzip.compress(text * (2_000_000 // len(text))))
    assert "unpacks to" in refusal(path, {"a": int})


def test_gzip_of_repetitive_data_is_read(tmp_path: Path) -> None:
    path = write_json(tmp_path / "same.jsonl.gz", [{"a": 1}] * 50_000)
    assert len(load_rows(path, {"a": int})) == 50_000


def test_parquet_that_unpacks_to_much_more_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets, "FREE_BYTES", 1 << 16)
    table = pa.table({"a": ["x" * 20_000_000], "b": [1]})
    path = tmp_path / "bomb.parquet"
    pq.write_table(table, path, compression="zstd", use_dictionary=False)
    assert "unpacks to 19 MiB" in refusal(path, {"a": str})
    assert load_rows(path, {"b": int}) == ({"b": 1},)


def test_parquet_whose_values_are_written_once_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets, "FREE_BYTES", 1 << 16)
    path = tmp_path / "bomb.parquet"
    pq.write_table(pa.table({"a": ["x" * 1000] * 100_000}), path, compression="none", write_statistics=False)
    assert "unpacks to" in refusal(path, {"a": str})


def test_parquet_of_endless_rows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "FREE_ROWS", 1000)
    monkeypatch.setattr(datasets, "MOST_RATIO", 20)
    path = tmp_path / "bomb.parquet"
    pq.write_table(pa.table({"a": [1] * 1_000_000}), path)
    assert "says it has 1,000,000 rows" in refusal(path, {"a": int})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_packed_arrow_is_read_and_a_bomb_refused_before_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool, codec: str
) -> None:
    def written(name: str, table: pa.Table) -> Path:
        new = pa.ipc.new_stream if stream else pa.ipc.new_file
        options = pa.ipc.IpcWriteOptions(compression=codec)
        with new(str(tmp_path / name), table.schema, options=options) as sink:
            sink.write_table(table)
        return tmp_path / name

    words = pa.array(["yes", "no"] * 500).dictionary_encode()
    whole = written("whole.arrow", pa.table({"a": list(range(1000)), "w": words}))
    assert load_rows(whole, {"a": int, "w": str})[-1] == {"a": 999, "w": "no"}
    monkeypatch.setattr(datasets, "FREE_BYTES", 1 << 16)
    bomb = written("bomb.arrow", pa.table({"a": ["x" * 20_000_000]}))
    assert "unpacks to 19 MiB" in refusal(bomb, {"a": str})


@pytest.mark.parametrize("place", range(0, 400, 7))
def test_a_damaged_header_of_an_arrow_message_is_one_line(tmp_path: Path, place: int) -> None:
    path = tmp_path / "a.arrow"
    table = pa.table({"a": list(range(100))})
    with pa.ipc.new_stream(
        str(path), table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")
    ) as sink:
        sink.write_table(table)
    data = bytearray(path.read_bytes())
    data[place] ^= 0xFF
    path.write_bytes(data)
    try:
        load_rows(path, {"a": int})
    except DataError as error:
        assert_one_line(error)


def assert_one_line(error: DataError) -> None:
    assert str(error).isprintable()
