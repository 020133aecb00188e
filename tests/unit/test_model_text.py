"""Reading what a model wrote takes time in proportion to its length, and finds what it always found."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_planes.data.tasks.answers import last_tagged
from echo_planes.tasks.code.judging import parse_answer
from echo_planes.tasks.math.clean import as_interval, clean, without_unit
from echo_planes.tasks.math.grade import compare_exactly, parse_response
from echo_planes.tasks.math.stated import listed, values

LONGER = 8  # times as much text; what is quadratic takes 64 times as long
READERS: dict[str, tuple[Callable[[str], object], tuple[str, ...]]] = {
    "a fenced answer": (
        lambda text: parse_answer(text, "def f(x):\n", fenced=True),
        ("```python\n", "```\n", "```x\n```\n", " ```", "`", " \t", "\n", "<think>", "</think>", "def f("),
    ),
    "a bare answer": (
        lambda text: parse_answer(text, "f=lambda x,y:", fenced=False),
        ("(", "-", "1+", ".a", "()", "9", "'a' ", "1 if 1 else ", "\na=1", "a,", "f'{", "\\\n", "not "),
    ),
    "an answer in tags": (
        lambda text: parse_response(text, "answer"),
        ("<answer>", "</answer>", "<answer></answer>", "<think></think>", "<answer", "<"),
    ),
    "an answer in a box": (
        lambda text: parse_response(text, "boxed"),
        ("\\boxed{", "\\boxed{}", "}", "<think>", "</think>"),
    ),
    "a compared answer": (
        lambda text: compare_exactly("1", text),
        ("1,", "1 ", " ", "\\$", "\\!", ",", "1,000", "-"),
    ),
    "a cleaned answer": (
        clean,
        (
            "*",
            "**a**",
            "$",
            "$1",
            "{",
            "}",
            "\\(",
            "\\[",
            "\\color{",
            "\\bm{",
            " ",
            "\\,",
            "\u221a(",
            "1,\\!",
            ".",
        ),
    ),
    "an answer with a unit": (
        lambda text: without_unit(f"1 {text}"),
        ("a", "a ", " ", "1,", "\\text{", "\\text{a}", "^{2}", "(", "\\,", "/", "%"),
    ),
    "a list": (listed, ("1,", "x=1,", "(", ")", "\\{", "and ", " or", "\\text{ or }", "1,000", ";")),
    "an interval": (as_interval, ("<", "x<", "1\\le x", " or ", "\\text{ or }", "\\ge")),
    "a stated answer": (
        lambda text: values("1", f"1\\text{{ cm}}{text}"),
        (
            "1",
            "1 ",
            '"',
            "1\\!",
            "\\text{",
            "\\text{a}",
            "\\text{ and }",
            "=",
            "1=",
            "{",
            "\\mathrm ",
            "^{1}",
            "$",
        ),
    ),
}


@pytest.mark.parametrize(
    ("name", "piece"), [(name, piece) for name, (_, pieces) in READERS.items() for piece in pieces]
)
def test_eight_times_the_text_takes_no_more_than_some_eight_times_as_long(name: str, piece: str) -> None:
    read = READERS[name][0]
    count = 12_000 // len(piece)

    def quickest_s(text: str) -> float:
        found = []
        for _ in range(5):
            begun_s = time.thread_time()
            read(text)
            found.append(time.thread_time() - begun_s)
        return min(found)

    # A stall of the machine is no reason to fail: some of several tries must be in proportion.
    assert any(quickest_s(piece * count * LONGER) < 3 * LONGER * quickest_s(piece * count) for _ in range(3))


@given(st.lists(st.sampled_from(["<answer>", "</answer>", "1", "\n", "<", "answer>", "</answer> <answer>"])))
def test_the_last_tags_are_those_a_regular_expression_finds(parts: list[str]) -> None:
    text = "".join(parts)
    found = list(re.finditer("<answer>(.*?)</answer>", text, re.DOTALL))
    assert last_tagged(text, "answer") == ((found[-1][1], found[-1].end()) if found else None)
