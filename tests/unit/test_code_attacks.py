"""Judging that no answer can lead by the nose: its values are judged where its code has never run."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, namedtuple
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_planes.tasks.code import inside
from echo_planes.tasks.code.judging import programs
from tests.unit.code_attacks import (
    ATTACKS,
    HELPED_ATTACK,
    HELPED_HEAD,
    HELPED_SOLUTION,
    HELPED_TESTS,
    SOLUTION,
    TAKES_ALL,
    TESTS,
)
from tests.unit.test_code_task import run, run_problem


def test_the_authors_own_answer_passes() -> None:
    assert run(SOLUTION, TESTS, SOLUTION).passed == 3


@pytest.mark.parametrize("name", ATTACKS)
def test_an_answer_that_solves_nothing_has_passed_nothing(name: str) -> None:
    found = run(ATTACKS[name], TESTS, SOLUTION)
    assert (found.passed, found.total >= 3) == (0, True), found


def test_what_tests_compare_with_is_not_told_to_the_answers_program() -> None:
    judge, answer = programs("def f(x): return 1", TESTS, "", SOLUTION)
    assert "8675309" in judge.files[inside.TOLD]
    assert not any("8675309" in text for text in (answer.source, answer.stdin, *answer.files.values()))


def test_a_helper_of_the_question_is_the_authors_own() -> None:
    assert run_problem(HELPED_SOLUTION, HELPED_TESTS, HELPED_HEAD, HELPED_SOLUTION).passed == 2
    assert run_problem(HELPED_ATTACK, HELPED_TESTS, HELPED_HEAD, HELPED_SOLUTION).passed == 0


@pytest.mark.parametrize(
    "returned", ["A()", "[1, {'a': (A(),)}]", "lambda: 1", "iter([1])", "type('A', (), {})"]
)
def test_what_is_no_plain_data_is_refused_by_name(returned: str) -> None:
    found = run(TAKES_ALL + f"def f(x): return {returned}", "assert f(1) == [1, {'a': (2,)}]")
    assert found.passed == 0
    assert "which is no plain data to compare" in found.detail


@pytest.mark.parametrize(
    "test", ["f(1) != 5", "not f(1)", "f(1)", "f(1) < 5", "5 > f(1)", "f(1) in [5]", "5 in [f(1)]"]
)
def test_nothing_can_be_found_out_of_it_by_comparing(test: str) -> None:
    assert run(TAKES_ALL + "def f(x): return A()", f"assert {test}").passed == 0


@pytest.mark.parametrize("argument", ["lambda x: x", "object()", "print", "(i for i in 'a')", "Mine(1)"])
def test_an_argument_that_is_no_plain_data_is_refused_by_name(argument: str) -> None:
    found = run(
        "def f(x): return 1", f"class Mine:\n    def __init__(self, x): pass\nassert f({argument}) == 1"
    )
    assert (found.passed, found.total) == (0, 1)
    assert "is no plain data to call the answer with" in found.detail


# --- what honest answers need --------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        "from collections import Counter\ndef f(x): return Counter([x])",
        "from collections import namedtuple\nP = namedtuple('P', 'a')\ndef f(x): return {x: P(1)[0]}",
        "f = lambda x: {x: x}",
        "from functools import lru_cache\n@lru_cache\ndef f(x): return {x: 1}",
        "class f(dict):\n    def __init__(self, x): self[x] = x",
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    a: 'int'\ndef f(x): return {P(x).a: 1}",
        "print('hello')\ndef f(x):\n    print(x)\n    return {x: 1}",
        "import enum\nclass E(enum.IntEnum): A = 1\ndef f(x): return {E.A: E.A}",
    ],
)
def test_results_of_library_types_are_compared_as_the_plain_data_they_hold(answer: str) -> None:
    assert run(answer, "assert f(1) == {1: 1}").passed == 1


def test_objects_of_the_answers_own_can_be_made_changed_and_handed_back() -> None:
    answer = """
class Node:
    def __init__(self, value):
        self.value, self.left = value, None
    def plus(self, other): return self.value + other
def total(node): return 0 if node is None else node.value + total(node.left)
def each(node):
    while node: yield node.value; node = node.left
def largest(nodes): return max(node.value for node in nodes)
"""
    tests = """
root = Node(1)
root.left = Node(2)
assert total(root) == 3
assert root.left.value == 2
assert root.plus(4) == 5
assert list(each(root)) == [1, 2] and 2 in each(root)
assert largest([root, Node(9)]) == 9
assert total(root.left.left) == 0
"""
    found = run(answer, tests, answer)
    assert (found.passed, found.total) == (6, 6), found


def test_exceptions_cross_as_the_builtin_ones_they_are() -> None:
    answer = "class Mine(Exception): pass\ndef f(x):\n    if x: raise ValueError('no')\n    raise Mine"
    tests = (
        "def raises(x):\n    try: f(x)\n    except ValueError as error: return str(error)\nassert raises(1)"
    )
    found = run(answer, f"{tests} == 'ValueError: no'\nassert raises(0)")
    assert (found.passed, found.total, found.detail) == (1, 2, "Refused: Mine: ")


def test_tests_see_types_constants_and_the_authors_imports() -> None:
    answer = "LIMIT = 3\ndef f(x, kind): return [v for v in x if type(v) is not kind]"
    tests = "assert f([1, 'a', 2.0], int) == ['a', 2.0]\nassert LIMIT == 3\nassert sys.getsizeof(()) > 0"
    found = run(answer, tests, f"import sys\n{answer}")
    assert found.passed == 3, found


def test_an_answer_that_reads_or_leaves_something_undefined_is_judged_all_the_same() -> None:
    assert run("x = input()\ndef f(x): return x + 1").passed == 0
    assert run("def f(x): return x + 1\nraise ValueError").passed == 2


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.binary()
    | st.sampled_from([int, str, dict, ValueError]),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.integers() | st.text() | st.tuples(st.floats()), inner)
        | st.sets(st.integers() | st.text())
        | st.frozensets(st.booleans() | st.binary())
        | st.binary().map(bytearray)
    ),
    max_leaves=20,
)


def exact(value: object) -> object:
    """Types and contents, so that 1, 1.0 and True differ, and NaN is itself."""
    if isinstance(value, dict):
        return dict, [(exact(key), exact(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [exact(item) for item in value]
    if isinstance(value, set | frozenset):
        return type(value), {exact(item) for item in value}
    return type(value), repr(value)


def refuse(*_: object) -> Any:
    raise AssertionError


@given(plain)
def test_plain_data_comes_over_as_it_was(value: object) -> None:
    come = inside.decode(inside.encode(value, refuse), refuse)
    assert exact(come) == exact(value)


def test_numbers_of_any_size_come_over_exactly() -> None:
    for value in (3**20000, -(3**20000), 1 << 63, math.inf, -0.0, 5e-324):
        assert inside.decode(inside.encode(value, refuse), refuse) == value
    Point = namedtuple("Point", "x y")
    for derived, value in ((Counter("aa"), {"a": 2}), (OrderedDict(a=1), {"a": 1}), (Point(1, 2), (1, 2))):
        come = inside.decode(inside.encode(derived, refuse), refuse)
        assert (come, type(come)) == (value, type(value))


@given(st.recursive(st.none() | st.integers() | st.text() | st.floats(), st.lists, max_leaves=8))
def test_whatever_comes_is_plain_data_or_refused(data: object) -> None:
    try:
        come = inside.decode(data, lambda number, kind: None)
    except inside.NONSENSE:
        return
    exact = (bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict, type)
    assert come is None or type(come) in exact
