"""The table of offline records: what is written is read back equal, anything else is not read at all."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.feather
import pytest

from echo_planes.data.store.schema import SCHEMA as TRAJECTORIES
from echo_planes.errors import ClusterError, DataError
from echo_planes.tasks.poker import records
from echo_planes.tasks.poker.__main__ import main
from echo_planes.tasks.poker.histories import OfflineRecord, Turn
from echo_planes.tasks.poker.records import SCHEMA, convert, read_records, write_records
from echo_planes.tasks.poker.table import TableRules

LOG = """variant = 'NT'
antes = [0, 0]
blinds_or_straddles = [1, 2]
min_bet = 2
starting_stacks = [20, 20]
actions = ['d dh p1 AhKd', 'd dh p2 2c2d', 'p2 cbr 6', 'p1 f']
"""


def some(seed: int, hands: int = 6) -> list[OfflineRecord]:
    rules = TableRules((20, 20, 20))
    return list(convert([], "compact", hands=hands, rules=rules, rng=random.Random(seed)))


def write(path: Path, rows: list[dict[str, object]], schema: pa.Schema = SCHEMA) -> Path:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_table(pa.Table.from_pylist(rows, schema=schema))
    return path


def row(**changes: object) -> dict[str, object]:
    turn = {"state": "AhKd ...:", "action": "f", "chips": -1, "is_legal": True}
    fields = {"source": "log", "style": "compact", "seat": 0, "big_blind": 2, "group": "AKo"}
    return {**fields, "net_chips": -1, "turns": [turn], **changes}


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    written = some(1)
    assert write_records(tmp_path / "offline.arrow", written, "compact") == len(written)
    table = read_records(tmp_path / "offline.arrow")
    assert (table.style, list(table.records)) == ("compact", written)
    assert [path.name for path in tmp_path.iterdir()] == ["offline.arrow"]


def test_logs_come_first_then_play_by_players_drawn_for_every_hand(tmp_path: Path) -> None:
    (tmp_path / "hand.phh").write_text(LOG)
    rules = TableRules((20, 20))
    first, second, *played = convert(
        [tmp_path / "hand.phh"], "plain", hands=30, rules=rules, rng=random.Random(2)
    )
    assert (first.seat, first.net_chips, first.group) == (0, -2, "AKo")
    assert (second.seat, second.net_chips, [turn.action for turn in second.turns]) == (1, 2, ["raise to 6"])
    assert len({record.source.partition(" ")[0] for record in played}) > 3
    assert len({(record.source, record.seat) for record in played}) == len(played)
    assert some(1) == some(1) != some(2)


def test_the_file_opens_as_feather(tmp_path: Path) -> None:
    write_records(tmp_path / "offline.arrow", some(1), "compact")
    assert pa.feather.read_table(tmp_path / "offline.arrow").column("group").to_pylist()[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"style": "verse"}, "styles {'verse'}"),
        ({"net_chips": 3}, "row 1: 1 turns, big_blind=2, net_chips=3"),
        ({"turns": []}, "row 1: 0 turns"),
        ({"turns": [None]}, "row 1: a value is missing"),
        ({"big_blind": 0}, "big_blind=0"),
        ({"group": None}, "row 1: a value is missing"),
    ],
)
def test_rows_that_are_no_hand_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    path = write(tmp_path / "t.arrow", [row(**changes) if "style" in changes else row(), row(**changes)])
    with pytest.raises(DataError, match=message):
        read_records(path)


def test_other_files_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = write(tmp_path / "trajectories.arrow", [], TRAJECTORIES)
    aged = write(tmp_path / "aged.arrow", [row()], SCHEMA.with_metadata({"version": "0"}))
    for path in (other, aged):
        with pytest.raises(DataError, match="another schema than version 1"):
            read_records(path)
    whole = write(tmp_path / "whole.arrow", [row()] * 100).read_bytes()
    for name, content in (("text", b"no table"), ("cut", whole[: len(whole) // 2]), ("empty", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=f"{name}: no readable table"):
            read_records(tmp_path / name)
    with pytest.raises(DataError, match="missing: no readable table"):
        read_records(tmp_path / "missing")
    monkeypatch.setattr(records, "MAX_FILE_BYTES", 100)
    with pytest.raises(DataError, match="at most 100 are read"):
        read_records(tmp_path / "whole.arrow")


def test_nothing_half_written_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "offline.arrow"
    write_records(path, some(1), "compact")
    before = path.read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(records.os, "fsync", full)
    with pytest.raises(ClusterError, match="No space left"):
        write_records(path, some(2), "compact")
    assert path.read_bytes() == before
    with pytest.raises(DataError, match="no hand"):
        write_records(path, [], "compact")


def test_the_command_writes_a_table_or_says_in_one_line_why_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hand.phh").write_text(LOG)
    out = tmp_path / "offline.arrow"
    assert main(["records", "--out", str(out), "--hands", "4", str(tmp_path / "hand.phh"), "stack_bb=8"]) == 0
    table = read_records(out)
    assert len(table.records) >= 6
    assert max(abs(record.net_chips) for record in table.records[2:]) <= 16
    for words in (
        ["records", "--out", str(out), str(tmp_path / "no.phh")],
        ["records", "--out", str(out), "seats=1"],
        ["records", "--out", str(out), "--hands", "0"],
        ["unknown"],
        [],
    ):
        assert main(words) == 2
        told = capsys.readouterr().err
        assert told.startswith("error: ")
        assert told.count("\n") == 1


def test_a_turn_says_what_the_table_would_not_take(tmp_path: Path) -> None:
    record = OfflineRecord("log", 0, 2, (Turn("s:", "f", 0, is_legal=False),), "22", 0)
    write_records(tmp_path / "t", [record], "compact")
    assert read_records(tmp_path / "t").records == (record,)
