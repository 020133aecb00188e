"""The mutation tool: what it draws, what it keeps, and when it is content."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from bench import mutation
from bench.mutation import Kept, Result, Tried, verdicts
from bench.mutation_changes import Change, changes
from bench.mutation_trials import Trial

SOURCE = '''"""What it is: 3."""

LIMIT: int | None = 3  # a comment


class Book:
    def fence(self, name: str, now: int | None) -> int | None:
        """Leave it out after 5."""
        if name in self.names and now < LIMIT:
            self.gone.add(name)
            self.count += 1
        return now
'''


# --- what is drawn ---------------------------------------------------------------------------------


def drawn(seed: str = "a", most: int = 100) -> list[Change]:
    pytest.importorskip("cosmic_ray", reason="needs the extra `mutants`")
    return changes(SOURCE, most=most, seed=seed)[0]


def test_the_same_changes_are_drawn_again_and_fewer_are_a_part_of_them() -> None:
    assert drawn() == drawn()
    assert drawn() != drawn("b")
    assert len(drawn(most=5)) == 5
    assert {change.text for change in drawn(most=5)} < {change.text for change in drawn()}


def test_a_change_is_another_program_and_none_comes_twice() -> None:
    trees = [ast.dump(ast.parse(change.source)) for change in drawn()]
    assert len({*trees, ast.dump(ast.parse(SOURCE))}) == len(trees) + 1


def test_every_change_has_a_name_of_its_own() -> None:
    pytest.importorskip("cosmic_ray", reason="needs the extra `mutants`")
    twice = changes("def f(x):\n    x += 1\n    x += 1\n", most=100, seed="a")[0]
    texts = [change.text for change in twice]
    assert {"f: x += 1 -> pass", "f: x += 1 -> pass (2)"} <= set(texts)
    assert len(set(texts)) == len(texts)


def test_annotations_and_docstrings_are_left_alone() -> None:
    for change in drawn():
        for kept in ('"""What it is: 3."""', '"""Leave it out after 5."""', "name: str, now: int | None"):
            assert kept in change.source


def test_a_statement_and_a_condition_may_be_left_out() -> None:
    texts = {change.text for change in drawn()}
    assert "Book.fence: self.gone.add(name) -> pass" in texts
    assert "Book.fence: if name in self.names and now < LIMIT: -> if name in self.names and True:" in texts


def test_a_change_is_named_by_its_place_and_not_by_its_line() -> None:
    pytest.importorskip("cosmic_ray", reason="needs the extra `mutants`")
    moved = changes(f"{SOURCE[:22]}\n# more\n{SOURCE[22:]}", most=100, seed="a")[0]
    assert [change.text for change in moved] == [change.text for change in drawn()]
    assert [change.line for change in moved] == [change.line + 2 for change in drawn()]


# --- what is kept ----------------------------------------------------------------------------------

CHANGE = Change(1, "f: a -> b", "")
CONFTEST = "tests/unit/conftest.py"


TESTS = "def helper():\n    return 1\n\n\ndef test_a():\n    assert helper()\n\n\ndef test_b():\n    pass\n"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(mutation, "ROOT", tmp_path)
    monkeypatch.setattr(mutation, "KEPT", tmp_path / "kept")
    for path in ("m.py", "t1.py", "t2.py", CONFTEST):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(TESTS)
    return tmp_path


def kept(*tests: str) -> Kept:
    """As the next run finds it."""
    for cached in (mutation._digest, mutation._test_digest, mutation._shared):
        cached.cache_clear()
    return Kept("m.py", tests or ("t1.py", "t2.py"))


def test_what_a_test_noticed_stays_known_while_that_test_and_the_module_stay(root: Path) -> None:
    assert kept().outcome(CHANGE) is None
    kept().add(CHANGE, Trial("killed", "t1.py::test_a", 1.0, 1.0))
    (root / "t2.py").write_text("")
    (root / "t1.py").write_text(TESTS.replace("pass", "assert True") + "\n\ndef test_c():\n    pass\n")
    assert kept().outcome(CHANGE) == "killed"
    assert kept("t2.py").outcome(CHANGE) is None  # that test is no longer of the module
    for path, was, now in (
        ("t1.py", "assert helper()", "pass"),
        ("t1.py", "return 1", "return 2"),
        ("m.py", "return 1", "return 2"),
        (CONFTEST, "return 1", "return 2"),
    ):
        (root / path).write_text(TESTS.replace(was, now))
        assert kept().outcome(CHANGE) is None
        (root / path).write_text(TESTS)
    assert kept().outcome(CHANGE) == "killed"


def test_a_test_file_that_could_not_be_imported_counts_as_a_whole(root: Path) -> None:
    kept().add(CHANGE, Trial("killed", "t1.py", 1.0, 1.0))
    assert kept().outcome(CHANGE) == "killed"
    (root / "t1.py").write_text(TESTS.replace("pass", "assert True"))
    assert kept().outcome(CHANGE) is None


@pytest.mark.parametrize("outcome", ["survived", "timed out"])
def test_what_no_test_noticed_is_tried_again_when_any_test_is_another(root: Path, outcome: str) -> None:
    kept().add(CHANGE, Trial(outcome, "", 1.0, 1.0))  # type: ignore[arg-type]
    assert kept().outcome(CHANGE) == outcome
    assert kept("t1.py", "t2.py", "m.py").outcome(CHANGE) is None
    (root / "t2.py").write_text(TESTS.replace("pass", "assert True"))
    assert kept().outcome(CHANGE) is None
    assert kept().survived(CHANGE) is (outcome == "survived")


def test_the_last_trial_counts_and_a_line_that_was_cut_short_is_passed_over(root: Path) -> None:
    kept().add(CHANGE, Trial("survived", "", 1.0, 1.0))
    kept().add(CHANGE, Trial("killed", "t1.py::test_a", 1.0, 1.0))
    (path,) = (root / "kept").iterdir()
    path.write_text(path.read_text() + '{"text": "f: a -')
    assert kept().outcome(CHANGE) == "killed"
    assert not kept().survived(CHANGE)


# --- the verdicts ----------------------------------------------------------------------------------


def result(killed: int, survived: int) -> Result:
    tried = [Tried(i, f"killed {i}", "killed") for i in range(killed - 1)]
    tried.append(Tried(0, "for ever", "timed out"))
    return Result("m.py", 0, tried + [Tried(i, f"survived {i}", "survived") for i in range(survived)])


def failing(results: list[Result], explained: dict[str, str], least_tried: int = 20) -> list[str]:
    told = verdicts(results, {"m.py": explained}, least_tried)
    return [claim for claim, holds in told.items() if not holds]


def test_nineteen_of_twenty_are_enough_where_the_other_one_is_explained() -> None:
    assert failing([result(19, 1)], {"survived 0": "untested: it is a word in a message"}) == []
    assert failing([result(18, 1)], {"survived 0": "untested: it is a word in a message"}) == [
        "at least 20 tried",
        "m.py: killed >= 95%",
    ]


def test_what_is_the_same_is_no_failure_of_the_tests() -> None:
    why = {"survived 0": "same: a count is never negative", "survived 1": "same: it is sorted already"}
    assert failing([result(18, 2)], why) == []
    assert failing([result(17, 3)], why) == ["m.py: killed >= 95%", "every survivor is explained"]


def test_every_survivor_needs_its_explanation_and_no_explanation_outlives_its_survivor() -> None:
    for none in ({}, {"survived 0": ""}, {"survived 0": "I do not know"}):
        assert failing([result(19, 1)], none) == ["every survivor is explained"]
    assert failing([result(20, 0)], {"survived 0": "same: a count is never negative"}) == [
        "every explanation is of a survivor"
    ]


def test_every_explanation_that_is_kept_is_of_a_change_that_is_tried() -> None:
    explained = mutation.explanations()
    assert explained.keys() <= mutation.MODULES.keys()
    assert all(len(why.splitlines()) == 1 for module in explained.values() for why in module.values())


def test_the_modules_and_their_tests_are_there() -> None:
    for module in mutation.MODULES:
        assert (mutation.ROOT / module).is_file()
        for path in mutation.test_paths(module):
            assert (mutation.ROOT / path).is_file(), path
