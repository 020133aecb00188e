"""Counts of `bench.verify`: right answers refused, wrong ones taken, hands that do not add up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import verify
from bench.verify import code_reason, verify_math, verify_poker, wrong_answers, wrong_programs
from echo_planes.errors import DataError
from echo_planes.types import Reward

HAND = """variant = 'NT'
antes = [0, 0]
blinds_or_straddles = [1, 2]
min_bet = 2
starting_stacks = [100, 80]
actions = ['d dh p1 AhKd', 'd dh p2 2c2d', 'p2 cbr 6', 'p1 f']
"""


def write(folder: Path, name: str, *rows: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_right_answers_are_counted_and_what_contradicts_them_is_listed(tmp_path: Path) -> None:
    rows = [
        {"problem": "a", "solution": r"So $\boxed{7}$.", "answer": "7"},
        {"problem": "b", "solution": r"So $\boxed{8}$.", "answer": "9"},
        {"problem": "c", "solution": "It is ten.", "answer": "10"},
    ]
    section = verify_math(write(tmp_path / "math500", "test.jsonl", *rows), "math500")
    assert section.rows == 3
    assert section.judged["answer against itself"] == section.judged["reference solution"] == 3
    assert section.odd("answer against itself") == 0
    assert [(odd.where, odd.reason) for odd in section.oddities] == [
        ("row 2", "judged to differ; the gold answer is 9"),
        ("row 3", "no answer found; the gold answer is 10"),
    ]
    assert section.oddities[1].text == "It is ten."


def test_gsm8k_answers_stand_as_the_authors_wrote_them(tmp_path: Path) -> None:
    rows = [{"question": "a", "answer": "So.\n#### 1,234"}, {"question": "b", "answer": "So.\n#### -5"}]
    section = verify_math(write(tmp_path / "gsm8k", "test.jsonl", *rows), "gsm8k")
    assert not section.oddities
    assert section.judged["wrong: two answers"] == 4
    assert section.judged["wrong: another row's"] == 4


def test_a_wrong_answer_that_is_taken_is_listed(tmp_path: Path) -> None:
    # "07" is another row's answer, in other letters, but the same number.
    rows = [{"question": "a", "answer": "#### 7"}, {"question": "b", "answer": "#### 07"}]
    section = verify_math(write(tmp_path / "gsm8k", "test.jsonl", *rows), "gsm8k")
    assert {(odd.check, odd.reason) for odd in section.oddities} == {
        ("wrong: another row's", "counted as 7"),
        ("wrong: another row's", "counted as 07"),
    }
    assert section.odd("wrong: another row's") == 4


def test_wrong_answers_are_wrong() -> None:
    golds = ["5", r"\frac{1}{2}", "x=5", "5"]
    assert dict(wrong_answers(golds, 0)) == {
        "wrong: plus one": "6",
        "wrong: two answers": "6, 5",
        "wrong: another row's": r"\frac{1}{2}",
    }
    assert next(wrong_answers(golds, 1)) == ("wrong: plus one", r"\frac{1}{2}+1")
    assert [text for check, text in wrong_answers(golds, 3) if "another" in check] == []


def test_wrong_programs_define_what_is_asked_for() -> None:
    found = dict(wrong_programs("def f(a):\n    return a\ndef g(): return 1", "def h(): return 2"))
    space: dict[str, Any] = {}
    exec(found["wrong: returns nothing"], space)
    assert space["f"](1) is None is space["g"]()
    assert found["wrong: another row's"] == "def h(): return 2"
    assert found["wrong: ends early"].endswith("os._exit(0)\n")
    reward = Reward(0.0, False, {"passed": 0.5, "is_timeout": 1.0})
    assert code_reason(reward) == "timeout, passed 50% of its tests"


def test_hands_are_compared_with_what_they_state(tmp_path: Path) -> None:
    folder = tmp_path / "poker"
    folder.mkdir()
    (folder / "a.phh").write_text(HAND)
    (folder / "b.phh").write_text(HAND + "finishing_stacks = [98, 82]\n")
    (folder / "c.phh").write_text(HAND + "finishing_stacks = [99, 81]\n")
    (folder / "d.phh").write_text(HAND.replace("NT", "PO"))
    section = verify_poker(folder)
    assert section.rows == 4
    assert section.judged == {
        "replays by the rules": 3,
        "payoffs of pokerkit's reader": 2,
        "finishing stacks": 1,
    }
    assert section.counts == {
        "hands that state no finishing stacks": 1,
        "hands of other variants, not read": 1,
    }
    (odd,) = section.oddities
    assert odd.where == "c.phh"
    assert "but states [99, 81]" in odd.reason


def test_the_command_says_by_its_status_whether_all_is_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "poker"
    folder.mkdir()
    (folder / "a.phhs").write_text(f"[1]\n{HAND}[2]\n{HAND}")
    result = tmp_path / "found.json"
    arguments = ["verify", "--data", str(tmp_path), "--only", "poker", "--json", str(result)]
    monkeypatch.setattr("sys.argv", arguments)
    assert verify.main() == 0
    assert json.loads(result.read_text())["poker"]["judged"]["replays by the rules"] == 2
    assert "replays by the rules: 2/2" in capsys.readouterr().out
    (folder / "b.phh").write_text(HAND + "finishing_stacks = [99, 81]\n")
    assert verify.main() == 1
    assert "! replays by the rules, b.phh" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", [*arguments[:4], "gsm8k"])
    with pytest.raises(DataError, match="gsm8k"):
        verify.main()


def test_a_folder_with_nothing_to_judge_shows_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "poker").mkdir()
    monkeypatch.setattr("sys.argv", ["verify", "--data", str(tmp_path), "--only", "poker"])
    assert verify.main() == 1
    assert "poker: 0 rows, 0 judged" in capsys.readouterr().out
