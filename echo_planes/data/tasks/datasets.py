"""Rows of plain data from files: JSON lines, Parquet, Arrow, and folders of them.

Reading takes only pyarrow and the standard library. A folder may come from Hugging Face's `save_to_disk`
(Arrow streams, listed in `state.json`). Or it holds one file, or numbered pieces, for each split:
`train.jsonl`, `train-00000-of-00002.parquet`, `train/`, or any of these below `data/`.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import date, time
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from echo_planes.config.files import MIB, MODEL_JSON_BYTES, check_regular, open_regular, read_json
from echo_planes.data.store.arrow_sizes import unpacked_bytes
from echo_planes.errors import DataError

FieldType = type | tuple[type, ...]
Row = dict[str, Any]

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet", ".arrow")
MAX_LINE_BYTES = 64 * MIB
MAX_FILE_BYTES = 1 << 40
# Limits on unpacked files. A file beyond them would be little but repetition, and could fill the memory.
FREE_BYTES, FREE_ROWS = 16 * MIB, 1_000_000  # allowed for a file of any size
MOST_RATIO = 200  # further unpacked bytes, and rows, per byte of the file
MOST_DECODED = 16 * MOST_RATIO  # bytes per byte after decoding; columns may store equal values once
_BATCH_ROWS = 1024
_CHECK_BYTES = 1 << 16
_PIECE = re.compile(r"(?P<split>.+?)-\d+(-of-(?P<total>\d+))?")
_SAVED = "state.json"
_INDEXED, _INDEXED_BYTES = (
    b"ARROW1",
    8,
)  # magic of an Arrow file with an index, and the offset of the stream in it
_EXTENSION = b"ARROW:extension:name"


def load_rows(
    path: Path,
    fields: Mapping[str, FieldType],
    *,
    split: str | None = None,
    max_rows: int | None = None,
    what: str = "usable",
) -> tuple[Row, ...]:
    """Read the rows of a file or folder, in order; each holds exactly the keys of `fields`.

    Args:
        path: a file with one of `SUFFIXES`, or a folder of them (see the module's text).
        fields: required field -> its Python type, or several that are allowed. Where float is allowed, an
            int becomes a float; True is no int.
        split: part of a folder to read, for example "train"; needed only if the folder holds several.
        max_rows: most rows to read; None: all.
        what: kind of rows expected, for messages.

    Raises:
        DataError: the data is missing, unreadable or empty, or a row lacks a field of its type; the message
            names file, row and field.
    """
    found = iter_rows(path, fields, split=split, what=what)
    rows = tuple(row for _place, row in islice(found, max_rows))
    if not rows and max_rows != 0:
        raise DataError(f"{path}: no rows; give a file that holds some")
    return rows


def iter_rows(
    path: Path, fields: Mapping[str, FieldType], *, split: str | None = None, what: str = "usable"
) -> Iterator[tuple[str, Row]]:
    """Yield rows one at a time, each with its place in words ("train.jsonl: row 7"); see `load_rows`.

    Rows count from 1; in JSON lines a row's number is its line number, so blank lines count too.
    """
    for file in data_files(path, split):
        check_regular(file, MAX_FILE_BYTES, advice=f"give one that ends in {', '.join(SUFFIXES)}")
        read = _json_rows if file.name.endswith((".jsonl", ".jsonl.gz")) else _column_rows
        number = 0
        try:
            for number, row in read(file, list(fields)):
                place = f"{file}: row {number}"
                try:
                    typed = {name: _typed(row, name, kind) for name, kind in fields.items()}
                except (ValueError, RecursionError) as error:
                    raise DataError(f"{place} is not a {what} row: {error}") from error
                yield place, typed
        # ValueError and OverflowError: a date that Python cannot hold.
        except (OSError, EOFError, zlib.error, pa.ArrowException, ValueError, OverflowError) as error:
            why = getattr(error, "strerror", None) or str(error).partition("\n")[0]
            raise DataError(f"{file}: cannot be read after row {number}: {why}") from error


def data_files(path: Path, split: str | None = None) -> list[Path]:
    """Return the data files at `path`, in the order of their rows.

    Raises:
        DataError: there are none, or they belong to several splits and `split` names none of them.
    """
    if not path.exists():
        raise DataError(f"{path}: No such file or folder; check the spelling of task.data")
    if not path.is_dir():
        if _ending(path) is None:
            raise DataError(f"{path}: not a data file; give one that ends in {', '.join(SUFFIXES)}")
        return [path]
    if (path / _SAVED).exists():
        return _saved_files(path)
    found = _splits(path)
    if split is None and len(found) == 1:
        split = next(iter(found))
    if split in found:
        return [file for entry in found[split] for file in data_files(entry)]
    if not found:
        raise DataError(f"{path}: no data in this folder; give one with files in {', '.join(SUFFIXES)}")
    if split is None:
        raise DataError(f"{path}: it holds several parts ({', '.join(sorted(found))}); give one of them")
    raise DataError(f"{path}: it has no part '{split}'; it has {', '.join(sorted(found))}")


def has_split(path: Path, split: str) -> bool:
    """Return whether `path` is a folder with a part of that name."""
    return path.is_dir() and split in _splits(path)


# --- folders -------------------------------------------------------------------------------------


def _splits(folder: Path) -> dict[str, list[Path]]:
    """Return the files, or the one folder, of each split, by names alone.

    Of several forms of a split, one counts: files before a folder, suffixes in the order of `SUFFIXES`, a
    single file before numbered pieces.
    """
    forms: dict[str, dict[tuple[int, bool], list[Path]]] = {}
    found: dict[str, list[Path]] = {}
    for entry in sorted(folder.iterdir()):
        ending = _ending(entry)
        if not entry.is_dir() and ending is not None:
            stem = entry.name.removesuffix(SUFFIXES[ending])
            piece = _PIECE.fullmatch(stem)
            split = piece["split"] if piece else stem
            forms.setdefault(split, {}).setdefault((ending, bool(piece)), []).append(entry)
        elif entry.is_dir() and any(_ending(inner) is not None for inner in entry.iterdir()):
            found.update(_splits(entry) if entry.name == "data" else {entry.name: [entry]})
    for split, kinds in forms.items():
        files = found[split] = kinds[min(kinds)]
        total = _PIECE.fullmatch(files[0].name.removesuffix(SUFFIXES[min(kinds)[0]]))
        if total and total["total"] and int(total["total"]) != len(files):
            raise DataError(
                f"{folder}: '{split}' has {len(files)} pieces, but {files[0].name} says "
                f"{int(total['total'])}; fetch the others"
            )
    return found


def _ending(file: Path) -> int | None:
    return next((i for i, ending in enumerate(SUFFIXES) if file.name.endswith(ending)), None)


def _saved_files(folder: Path) -> list[Path]:
    """Return the Arrow files that `save_to_disk` listed."""
    path = folder / _SAVED
    try:
        state = read_json(path, MODEL_JSON_BYTES, advice="save the data set again")
        names = [entry["filename"] for entry in state["_data_files"]]
    except (KeyError, TypeError) as error:
        raise DataError(f"{path}: does not list data files ({error}); save the data set again") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise DataError(f"{path}: lists '{name}', which is not a file of its folder; save it again")
    if state.get("_indices_data_files"):
        raise DataError(f"{folder}: its rows were selected by an index; save it again with a newer library")
    return [folder / name for name in names]


# --- JSON lines ----------------------------------------------------------------------------------


def _json_rows(path: Path, names: Sequence[str]) -> Iterator[tuple[int, object]]:
    """Yield line numbers and parsed lines; a line that is not valid JSON yields its exception instead."""
    with ExitStack() as stack:
        packed = stack.enter_context(open_regular(path, MAX_FILE_BYTES))
        file = stack.enter_context(gzip.open(packed, "rb")) if path.suffix == ".gz" else packed
        number = num_bytes = checked_bytes = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            num_bytes += len(line)
            if num_bytes - checked_bytes >= _CHECK_BYTES:
                _check_unpacked(path, num_bytes, packed.tell())
                checked_bytes = num_bytes
            if len(line) > MAX_LINE_BYTES:
                raise DataError(f"{path}: row {number} is longer than {MAX_LINE_BYTES >> 20} MiB; cut it")
            if not line.strip():
                continue
            try:
                yield number, json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except (ValueError, RecursionError) as error:
                yield number, error


def _check_unpacked(path: Path, num_bytes: int, packed_bytes: int, ratio: int = MOST_RATIO) -> None:
    """Refuse data that unpacks to far more bytes than the file has, before it fills the memory."""
    if num_bytes > FREE_BYTES + ratio * packed_bytes:
        raise DataError(
            f"{path}: unpacks to {num_bytes >> 20:,} MiB from {packed_bytes:,} bytes, more than data do; "
            "give it unpacked"
        )


# --- columns -------------------------------------------------------------------------------------


def _column_rows(path: Path, names: Sequence[str]) -> Iterator[tuple[int, object]]:
    batches = _parquet_batches if path.suffix == ".parquet" else _arrow_batches
    number = num_bytes = 0
    for batch in batches(path, names):
        num_bytes += batch.nbytes
        _check_unpacked(path, num_bytes, os.stat(path).st_size, MOST_DECODED)
        for start in range(0, batch.num_rows, _BATCH_ROWS):
            for row in batch.slice(start, _BATCH_ROWS).to_pylist():
                number += 1
                yield number, row


def _parquet_batches(path: Path, names: Sequence[str]) -> Iterator[Any]:
    with pq.ParquetFile(path) as file:
        _check_schema(path, file.schema_arrow, names)
        _check_footer(path, file.metadata, names)
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=names):
            batch.validate(full=True)  # finds damaged offsets and invalid UTF-8
            yield batch


def _check_footer(path: Path, footer: Any, names: Sequence[str]) -> None:
    """Check the sizes that a Parquet file declares, before memory of these sizes is allocated."""
    size_bytes, unpacked = os.stat(path).st_size, 0
    for i in range(footer.num_row_groups):
        group = footer.row_group(i)
        for j in range(group.num_columns):
            column = group.column(j)
            if column.path_in_schema.partition(".")[0] in names:
                unpacked += max(column.total_uncompressed_size, 0)
    _check_unpacked(path, unpacked, size_bytes)
    if footer.num_rows > FREE_ROWS + MOST_RATIO * size_bytes:
        raise DataError(
            f"{path}: says it has {footer.num_rows:,} rows in {size_bytes:,} bytes, more than data have; "
            "write it anew"
        )


def _arrow_batches(path: Path, names: Sequence[str]) -> Iterator[Any]:
    """Yield the batches of an Arrow stream, as `save_to_disk` writes it, or of an Arrow file.

    An Arrow file is a stream with an index at its end.
    """
    with pa.memory_map(str(path)) as source:
        begin = _INDEXED_BYTES if source.read(len(_INDEXED)) == _INDEXED else 0
        source.seek(begin)
        unpacked = 0
        for message in pa.ipc.MessageReader.open_stream(source):
            unpacked += unpacked_bytes(message)
            _check_unpacked(path, unpacked, source.size())
        source.seek(begin)
        reader = pa.ipc.open_stream(source)
        _check_schema(path, reader.schema, names)
        for batch in reader:
            batch.validate(full=True)  # damaged offsets could point outside the buffers
            yield batch.select(names)


def _check_schema(path: Path, schema: Any, names: Sequence[str]) -> None:
    """Check that every requested column exists exactly once, and that all columns are of plain types."""
    for field in schema:
        _check_plain(path, field.name, field)
    for name in names:
        count = schema.names.count(name)
        if count != 1:
            has = "no" if count == 0 else f"{count} columns called"
            raise DataError(
                f"{path}: {has} field '{name}'; its fields are {_listed(schema.names)}; rename the column"
            )


def _check_plain(path: Path, name: str, field: Any) -> None:
    kind = field.type
    extension = (field.metadata or {}).get(_EXTENSION)
    if extension is not None or isinstance(kind, pa.BaseExtensionType):
        called = extension.decode(errors="replace") if extension is not None else kind.extension_name
        raise DataError(
            f"{path}: column '{name}' has the extension type '{called:.60}', whose reading can run code; "
            "save it as a plain type"
        )
    for i in range(kind.num_fields):
        _check_plain(path, f"{name}.{kind.field(i).name}", kind.field(i))
    if pa.types.is_dictionary(kind):
        _check_plain(path, name, pa.field(name, kind.value_type))


# --- fields --------------------------------------------------------------------------------------


def _typed(row: object, name: str, kind: FieldType) -> Any:
    """Return a field's value.

    Raises:
        ValueError: there is none, or it is not of the type asked for.
    """
    if isinstance(row, Exception):
        raise ValueError(f"it is not JSON ({row})")
    if not isinstance(row, dict):
        raise ValueError(f"it is {_shown(row)}, not an object with fields")
    if name not in row:
        raise ValueError(f"no field '{name}'; it has {_listed(list(row))}")
    value = _plain(name, row[name])
    _check_text(name, value)
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if type(value) in kinds:
        return value
    if float in kinds and type(value) is int:
        return float(value)
    wanted = " or ".join(one.__name__ for one in kinds)
    raise ValueError(f"field '{name}' is {_shown(value)}, not {wanted}")


def _plain(name: str, value: object) -> Any:
    """Return a value as JSON holds it: dates and times as ISO text, decimals as their digits, at any depth.

    Raises:
        ValueError: JSON has no form for it.
    """
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_plain(name, one) for one in value]
    if isinstance(value, dict):
        return {key: _plain(name, one) for key, one in value.items()}
    if isinstance(value, date | time):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, Decimal):
        return f"{value:f}"
    raise ValueError(f"field '{name}' holds {_shown(value)}, which is no plain data; store it as text")


def _check_text(name: str, value: object) -> None:
    """Refuse text that cannot be encoded, because it holds half of a surrogate pair, at any depth.

    Raises:
        ValueError: there is such text.
    """
    texts = value if isinstance(value, str) else ""
    if isinstance(value, list | dict):
        texts = json.dumps(value, ensure_ascii=False, default=str)
    try:
        texts.encode()
    except UnicodeEncodeError as error:
        unit = ord(error.object[error.start])
        raise ValueError(
            f"field '{name}' holds U+{unit:04X}, half of a surrogate pair, which is no character; replace it"
        ) from error


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return f"{text[:57]}..." if len(text) > 60 else f"{text} ({type(value).__name__})"


def _listed(names: Sequence[str]) -> str:
    plain = (name.encode(errors="backslashreplace").decode() for name in names[:12])
    shown = ", ".join(f"'{name:.40}'" for name in plain)
    return (shown + (", ..." if len(names) > 12 else "")) or "none"
