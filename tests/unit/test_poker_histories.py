"""Poker logs: hands replayed by the rules, records as ECHO-2 describes them, and bad files named."""

from __future__ import annotations

import gzip
import os
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pokerkit import HandHistory

from echo_planes.errors import DataError
from echo_planes.tasks.poker import phh
from echo_planes.tasks.poker.histories import records_of_play, records_of_replay
from echo_planes.tasks.poker.opponents import all_opponents
from echo_planes.tasks.poker.phh import Replay, read_replays
from echo_planes.tasks.poker.table import TableRules

DATA = Path(os.environ.get("ECHO_PLANES_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
needs_data = pytest.mark.skipif(not (DATA / "poker").is_dir(), reason=f"no poker hands in {DATA}")

ACTIONS = [
    "d dh p1 AhKd",
    "d dh p2 ????",
    "d dh p3 2c2d",
    "p3 cbr 6 # opens",
    "p1 cc",
    "p2 f",
    "d db QsTh2s",
    "p1 cc",
    "p3 cbr 10",
    "p1 f",
]
HAND = {
    "variant": "'NT'",
    "antes": "[0, 0, 0]",
    "blinds_or_straddles": "[1, 2, 0]",
    "min_bet": "2",
    "starting_stacks": "[100, 80, 60]",
    "actions": str(ACTIONS),
    "finishing_stacks": "[94, 78, 68]",
}


def phh_text(**changes: str) -> str:
    return "".join(f"{name} = {value}\n" for name, value in {**HAND, **changes}.items() if value)


def replays_of(folder: Path, text: str) -> list[Replay]:
    path = folder / "hand.phh"
    path.write_text(text)
    return list(read_replays(path))


def test_a_hand_becomes_a_record_per_known_seat(tmp_path: Path) -> None:
    (replay,) = replays_of(tmp_path, phh_text())
    assert replay.net_chips == (-6, -2, 8)
    first, third = records_of_replay(replay, "compact")
    assert (first.seat, first.group, first.net_chips, first.big_blind) == (0, "AKo", -6, 2)
    assert first.source == f"{tmp_path / 'hand.phh'}: hand 1"
    assert [turn.action for turn in first.turns] == ["c", "k", "f"]
    assert [turn.chips for turn in first.turns] == [-6, 0, 0]  # the blind counts with the first call
    assert first.turns[1].state == "AhKd QsTh2s p14 c0 r2-94 b1/2 s*94,x78,54 r6cf/:"
    assert (third.seat, third.group, [turn.chips for turn in third.turns]) == (2, "22", [-6, 14])


def test_a_record_is_a_chat_of_states_and_actions(tmp_path: Path) -> None:
    (replay,) = replays_of(tmp_path, phh_text())
    messages = records_of_replay(replay, "plain")[1].messages()
    assert [message["role"] for message in messages] == ["system", *["user", "assistant"] * 2]
    assert messages[1]["content"].startswith("State: You are seat 3 of 3.")
    assert [message["content"] for message in messages[2::2]] == ["raise to 6", "raise to 10"]


def test_a_fold_for_nothing_is_kept_and_flagged(tmp_path: Path) -> None:
    actions = [*ACTIONS[:7], "p1 f"]
    (replay,) = replays_of(tmp_path, phh_text(actions=str(actions), finishing_stacks=""))
    record = records_of_replay(replay, "compact")[0]
    assert [(turn.action, turn.is_legal) for turn in record.turns] == [("c", True), ("f", False)]


@needs_data
def test_stored_hands_replay_to_the_results_of_pokerkits_own_reader() -> None:
    for name, count in (("phh-std-example-1.phh", 1), ("synthetic-nlhe-random-300.phhs.gz", 300)):
        path = DATA / "poker" / name
        replays = list(read_replays(path))
        if path.suffix == ".gz":
            histories = list(HandHistory.loads_all(gzip.decompress(path.read_bytes()).decode()))
        else:
            histories = [HandHistory.loads(path.read_text())]
        assert len(replays) == len(histories) == count
        for replay, history in zip(replays, histories, strict=True):
            *_, end = history
            assert replay.net_chips == tuple(end.payoffs)
            assert sum(replay.net_chips) == 0
            for record in records_of_replay(replay, "compact"):
                assert sum(turn.chips for turn in record.turns) == record.net_chips


@needs_data
def test_a_hand_of_another_variant_is_refused_by_name() -> None:
    with pytest.raises(DataError, match=r"example-2\.phh: hand 1: variant='F2L3D'"):
        list(read_replays(DATA / "poker" / "phh-std-example-2.phh"))


def swapped(index: int, action: str) -> str:
    return str([*ACTIONS[:index], action, *ACTIONS[index + 1 :]])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("variant = 'NT'\nantes = [0,\n= 1", r"hand\.phh: not a PHH file: .*line 3"),
        ("[" * 100_000, "not a PHH file"),
        ("", "no hands"),
        ("a = 1", "hand a is 1"),
        (phh_text(variant=""), "hand 1: variant=None"),
        (phh_text(variant="'PO'"), "variant='PO', but only"),
        (phh_text(actions="'none'"), "no list of actions"),
        (phh_text(antes="[0, 0]"), "no table for 2 to 10 seats"),
        (phh_text(starting_stacks="[100, 80, 0]"), "no table for"),
        (phh_text(starting_stacks="[100, 80, 60.5]"), "no list of whole chips"),
        (phh_text(starting_stacks="[100, 80, 99999999999999]"), "no list of whole chips"),
        (phh_text(min_bet="'2'"), "min_bet='2'"),
        (phh_text(actions=swapped(3, "p1 cc")), "action 4 'p1 cc': .*not a valid player"),
        (phh_text(actions=swapped(3, "p9 cc")), "action 4 'p9 cc': there is no player 9"),
        (phh_text(actions=swapped(3, "p3 cbr 3")), "action 4 'p3 cbr 3': .*below the minimum"),
        (phh_text(actions=swapped(3, "p3 cbr 6.5")), "action 4 .*no action of"),
        (phh_text(actions=swapped(3, "p3 sd")), "action 4 'p3 sd': no action of"),
        (phh_text(actions=swapped(2, "d dh p3 2cAh")), "action 3 .*dealt before"),
        (phh_text(actions=swapped(6, "d db QsTh2c")), "action 7 .*dealt before"),
        (phh_text(actions=swapped(6, "d db QsTh")), "'d db QsTh'|before the hand is over|action 8"),
        (phh_text(actions=str(ACTIONS[:-1])), "stops after 9 actions"),
        (phh_text(actions=str([*ACTIONS, "p3 cc"])), "action 11"),
        (phh_text(finishing_stacks="[94, 78, 69]"), r"ends with \[94, 78, 68\], but states \[94, 78, 69\]"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        replays_of(tmp_path, text)
    assert str(tmp_path / "hand.phh") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_showdown_with_other_cards_than_were_dealt_is_refused(tmp_path: Path) -> None:
    actions = [*ACTIONS[:7], "p1 cbr 94", "p3 cc", "p1 sm AhKs"]
    with pytest.raises(DataError, match=r"action 10 .*shows AhKs, but holds AhKd"):
        replays_of(tmp_path, phh_text(actions=str(actions), finishing_stacks=""))


def test_files_that_cannot_be_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"missing\.phh: cannot be read"):
        list(read_replays(tmp_path / "missing.phh"))
    (tmp_path / "a.phhs.gz").write_bytes(b"no gzip")
    with pytest.raises(DataError, match=r"a\.phhs\.gz: cannot be read"):
        list(read_replays(tmp_path / "a.phhs.gz"))
    (tmp_path / "cut.phhs.gz").write_bytes(gzip.compress(phh_text().encode())[:-20])
    with pytest.raises(DataError, match=r"cut\.phhs\.gz: cannot be read"):
        list(read_replays(tmp_path / "cut.phhs.gz"))
    monkeypatch.setattr(phh, "MAX_FILE_BYTES", 1000)
    (tmp_path / "bomb.phhs.gz").write_bytes(gzip.compress(b"#" * 10**6))
    with pytest.raises(DataError, match="more than 1000 bytes"):
        list(read_replays(tmp_path / "bomb.phhs.gz"))


STRAYS = ["p1 sm AhKd", "p3 sm", "p2 sm 9s9d", "d db 4s", "p0 f", "p3 cbr 99999", "d dh p1 ??", "p1 f"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(0, len(ACTIONS) - 1), max_size=3),
    st.sampled_from([*ACTIONS, *STRAYS]),
    st.integers(0, len(ACTIONS)),
)
def test_a_damaged_hand_is_replayed_or_refused(
    tmp_path: Path, lost: list[int], line: str, place: int
) -> None:
    actions = [action for index, action in enumerate(ACTIONS) if index not in lost]
    actions.insert(place, line)
    try:
        (replay,) = replays_of(tmp_path, phh_text(actions=str(actions), finishing_stacks=""))
    except DataError:
        return
    assert sum(replay.net_chips) == 0


def test_rule_based_play_becomes_records_that_the_table_would_accept() -> None:
    players = [*all_opponents(), all_opponents()[0]]
    rules = TableRules((200, 90, 40, 200))

    def some(seed: int) -> list[object]:
        return list(records_of_play(players, rules, "compact", random.Random(seed), hands=20))

    assert some(1) == some(1) != some(2)
    records = list(records_of_play(players, rules, "compact", random.Random(1), hands=20))
    assert records[0].source == "calling-station/tight-aggressive/maniac/calling-station hand 0"
    by_hand: dict[str, int] = {}
    for record in records:
        by_hand[record.source] = by_hand.get(record.source, 0) + record.net_chips
        assert record.turns
        assert sum(turn.chips for turn in record.turns) == record.net_chips
        assert all(turn.is_legal for turn in record.turns)
    assert len(by_hand) == 20
