"""Table of offline records, `offline.arrow`: hands of a log as ECHO-2 appendix F.3-F.5 describes them.

One row is one hand from one seat: the states as text, the seat's actions, and its result. A record has no
snapshot and no logprobs, so it belongs in no replay buffer. pandas (`read_feather`), DuckDB and polars open
the file directly.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args

import pyarrow as pa

from echo_planes.errors import ClusterError, DataError

from .histories import OfflineRecord, Turn, records_of_play, records_of_replay
from .opponents import all_opponents
from .phh import read_replays
from .table import TableRules
from .text import Style

SCHEMA_VERSION = 1
MAX_FILE_BYTES = 2**30

_TURN = pa.struct(
    [
        ("state", pa.string()),  # the seat's view, as `text.state_text` writes it
        ("action", pa.string()),
        ("chips", pa.int64()),  # r_t, eq. 14: change of its stack until its next decision or the end
        ("is_legal", pa.bool_()),  # false: the table would refuse the action
    ]
)
SCHEMA = pa.schema(
    [
        ("source", pa.string()),  # file and hand, or the players
        ("style", pa.string()),  # of states and actions, one of `text.Style`
        ("seat", pa.int32()),
        ("big_blind", pa.int64()),  # chips
        ("group", pa.string()),  # initial-state tag: hands with equal tags are normalised together, eq. 21
        ("net_chips", pa.int64()),  # R, eq. 20: the sum of the turns' chips
        ("turns", pa.list_(_TURN)),
    ],
    metadata={"echo_planes.poker_offline_version": str(SCHEMA_VERSION)},
)


@dataclass(frozen=True, slots=True)
class OfflineTable:
    """Records of a file, whose states all have the same style."""

    style: Style
    records: tuple[OfflineRecord, ...]


def convert(
    logs: Sequence[Path], style: Style, *, hands: int, rules: TableRules, rng: random.Random
) -> Iterator[OfflineRecord]:
    """Yield the records of hand histories, in order, then those of rule-based play.

    Args:
        logs: PHH files.
        hands: number of hands of rule-based play; each draws new players from `all_opponents`.
        rules: table of the rule-based play.

    Raises:
        DataError: a file cannot be read, or a hand in it breaks the rules.
    """
    for path in logs:
        for replay in read_replays(path):
            yield from records_of_replay(replay, style)
    for number in range(hands):
        players = rng.choices(all_opponents(), k=len(rules.stacks))
        source = f"{'/'.join(player.name for player in players)} hand {number}"
        for record in records_of_play(players, rules, style, rng, hands=1):
            yield replace(record, source=source)


def write_records(path: Path, records: Iterable[OfflineRecord], style: Style) -> int:
    """Write records to one Arrow IPC file, which is complete and durable, or absent. Return their number.

    Raises:
        DataError: there are no records.
        ClusterError: the disk is full or cannot be written.
    """
    rows = [_row(record, style) for record in records]
    if not rows:
        raise DataError(f"{path}: no hand whose cards are known, so nothing is written; give other logs")
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as sink:
            with pa.ipc.new_file(sink, SCHEMA) as writer:
                writer.write_table(table.combine_chunks())
            sink.flush()
            os.fsync(sink.fileno())
        partial.replace(path)
    except OSError as error:
        raise ClusterError(
            f"{path} cannot be written: {error.strerror}; free some space or give another path"
        ) from error
    return len(rows)


def read_records(path: Path) -> OfflineTable:
    """Read the records of a file written by `write_records`, in order.

    Raises:
        DataError: the file cannot be read, is larger than `MAX_FILE_BYTES`, has another schema than `SCHEMA`,
            or holds values that no hand can have.
    """
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise DataError(f"{path}: {size} bytes, but at most {MAX_FILE_BYTES} are read: split it")
        with pa.OSFile(str(path), "rb") as source:
            reader = pa.ipc.open_file(source)
            # Compared before any row is read, because a schema can have extension types that run code.
            if not reader.schema.equals(SCHEMA, check_metadata=True):
                raise DataError(
                    f"{path}: another schema than version {SCHEMA_VERSION} of offline poker records; make "
                    "the table anew"
                )
            table = reader.read_all()
        table.validate(full=True)  # a damaged offset would read beyond its buffer and end the process
        rows: list[dict[str, Any]] = table.to_pylist()
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{path}: no readable table of records ({reason}); make it anew") from error
    styles = {row["style"] for row in rows}
    if len(styles) != 1 or not styles <= set(get_args(Style)):
        raise DataError(f"{path}: styles {styles}, but a table has one of {get_args(Style)}; make it anew")
    records = tuple(_record(row, f"{path}: row {number}") for number, row in enumerate(rows))
    return OfflineTable(cast(Style, styles.pop()), records)


def _row(record: OfflineRecord, style: Style) -> dict[str, Any]:
    return {
        "source": record.source,
        "style": style,
        "seat": record.seat,
        "big_blind": record.big_blind,
        "group": record.group,
        "net_chips": record.net_chips,
        "turns": [
            {"state": turn.state, "action": turn.action, "chips": turn.chips, "is_legal": turn.is_legal}
            for turn in record.turns
        ],
    }


def _record(row: dict[str, Any], place: str) -> OfflineRecord:
    if any(value is None for value in row.values()) or any(
        turn is None or any(value is None for value in turn.values()) for turn in row["turns"]
    ):
        raise DataError(f"{place}: a value is missing; make the table anew")
    turns = tuple(Turn(**turn) for turn in row["turns"])
    if not turns or row["big_blind"] < 1 or sum(turn.chips for turn in turns) != row["net_chips"]:
        raise DataError(
            f"{place}: {len(turns)} turns, big_blind={row['big_blind']}, net_chips={row['net_chips']}: no "
            "hand, or its turns do not add up; make the table anew"
        )
    return OfflineRecord(row["source"], row["seat"], row["big_blind"], turns, row["group"], row["net_chips"])
