"""The math judge: writings that mean the same are right, others are not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from echo_planes.tasks.math.grade import parse_response
from echo_planes.tasks.math.judging import MathJudge

RIGHT = [
    # lists whose values are named
    ("(3,-7)", "x=3, y=-7"),
    ("(3,-7)", "y=-7, x=3"),
    ("2, 3", "x=2, x=3"),
    ("2, 3", r"x=2 \text{ or } x=3"),
    ("2, 3", "x=2, 3"),
    (r"\{2,3\}", "x=2,x=3"),
    ("1,-1,2", "x=1, x=-1, x=2"),
    ("x=2, y=3", "y=3, x=2"),
    ("(1,2,3)", "x=1, y=2, z=3"),
    ("0, 5", r"n=0 \text{ or } n=5"),
    ("2, -2", r"x=\pm 2"),
    ("1,2,3", "1, 2, and 3"),
    ("1,2,3", "$1$, $2$, and $3$"),
    # units, money, marks
    ("12", r"12~\text{cm}"),
    ("45", "45°"),
    ("45", r"45\degree"),
    ("45", "$45$ degrees"),
    ("18", "18 dollars"),
    ("12", "12 eggs"),
    ("7", "7 people"),
    ("60", "60 miles per hour"),
    ("100", "100 USD"),
    ("100", "£100"),
    ("100", "100€"),
    ("18", "$18.00"),
    ("1500000", "1.5 million"),
    ("73", "**73**"),
    ("73", r"\textbf{73}"),
    ("3.14", r"\approx 3.14"),
    ("1200000", "1.2e6"),
    ("1200000", r"1.2 \times 10^6"),
    ("-5", "\u20135"),
    ("-5", "\uff0d5"),
    ("2-3x", "2\u20133x"),
    ("10", r"\bm{10}"),
    ("10", r"\color{red}10"),
    ("10", r"\color{red}{10}"),
    ("3/4", "¾"),
    ("50", r"50\%"),
    (r"50\%", "0.5"),
    (r"50\%", "50 percent"),
    # sets, intervals, roots, letters, numerals
    (r"\emptyset", r"\varnothing"),
    (r"\varnothing", r"\emptyset"),
    (r"[5,\infty)", r"x \ge 5"),
    ("x > 5", r"(5, \infty)"),
    ("(2,5]", r"2 < x \le 5"),
    (r"(-\infty,2)\cup(3,\infty)", r"x<2 \text{ or } x>3"),
    (r"1/\sqrt n", r"\sqrt{1/n}"),
    ("E", "E: text"),
    (r"\text{(C)}", "C) 12"),
    (r"\text{(C)}", r"**$\text{(C)}$**"),
    (r"\text{(C)}", r"\color{red}\text{(C)}"),
    (r"\text{(C)}", r"\text{\left(C\right)}"),
    (r"\text{(C)}", r"~\text{(C)}\text{ twelve}."),
    (r"10,\!080", r"x = 10,\!080"),
    (r"\$32,\!348", r"x=\$32,\!348"),
    ("10,080", r"n = 10,080\text{ cm}"),
    ("2516_9", "2516_{9}"),
    ("2516_9", "2516"),
    ("2516_9", r"2516_{\text{nine}}"),
    ("1/2006!", r"\frac{1}{2006!}"),
    ("1/2^{98}", "2^{-98}"),
    ("-1<x<1", r"x > -1 \text{ and } x<1"),
    ("-1<x<1", "1 > x > -1"),
    (r"(-\infty,0)\cup(0,\infty)", r"x\neq0"),
    # words around and instead of the answer
    ("5", "The answer is 5"),
    ("A", "Option A"),
    ("A, C", "C and A"),
    (r"\text{B,D,E}", "B, D, and E"),
    ("8", "eight"),
    ("True", "true"),
    (r"2:30 \text{ PM}", "2:30 p.m."),
    (r"\text{6 hours}", "6"),
    (r"\infty", "infinity"),
    # numbers
    (r"\frac{3}{2}", "1 1/2"),
    (r"2\frac12", "2 1/2"),
    (r"\frac56", "5/6 cups"),
    ("1/3", r"0.\overline{3}"),
    (r"\frac56", r"0.8\overline{3}"),
    (r"137 \frac{1}{2}", r"137 \frac{1}{2} years old"),
    (r"33\frac13\%", r"33\frac{1}{3}\%"),
    ("x^{10}", "x^10"),
    ("10^{-3}", "1e-3"),
    ("0.05", "5 \u00d7 10^-2"),
    ("0.18", "18 cents"),
    ("18", "US$18"),
    ("45", "45\u00ba"),
    ("-5", r"\text{-}5"),
    # marks, spaces, functions, equations
    ("5", "*5*"),
    ("5", r"5\;"),
    ("5", "5,"),
    ("8", "= 8"),
    ("5", r"\Large{5}"),
    ("5", r"5\rm{ cm}"),
    (r"\ln 2", "ln 2"),
    ("2,3", r"x_1 = 2,\ x_2 = 3"),
    (r"1\pm\sqrt2", r"x=1+\sqrt2, x=1-\sqrt2"),
    (r"\frac13", r"P(A \cap B)=\frac{1}{3}"),
    ("y=2x+1", "f(x)=2x+1"),
    ("y=-2x+3", "2x+y-3=0"),
]
WRONG = [
    ("34", "33=34"),
    ("34", "x=33, x=34"),
    ("34", "33, 34"),
    ("34", "33$ $34"),
    ("2, 3", "x=2, x=4"),
    ("2, 3", "x=3"),
    ("2, 3", "x=2, 3=4"),
    ("(3,-7)", "x=-7, y=3"),
    ("(2,3)", "x=3, y=2"),
    ("x=2, y=3", "x=3, y=2"),
    ("1,2", "1,2,3"),
    ("5", r"5 \text{ or maybe six}"),
    ("5", "5 or 6"),
    ("5", "5x"),
    ("3", "3 dozen"),
    ("12", "12 million"),
    ("12", "12!"),
    ("12", "13 eggs"),
    (r"50\%", r"0.5\%"),
    ("1/2006!", "1/2004!"),
    ("1/2^{98}", "1/2^{99}"),
    ("2516_9", "2516_8"),
    ("1010_3", "1010_2"),
    ("123456789012345678901", "123456789012345678902"),
    ("1/3", "0.333333"),
    (r"[5,\infty)", "x > 5"),
    ("|x|", "x"),
    ("x", r"\sqrt{x^2}"),
    ("E", "D: text"),
    ("A", "E or A"),
    ("E", "E) 5 or A) 6"),
    (r"\text{(C)}", r"\text{(C)}, 1037"),
    (r"\text{(C)}", r"\text{(C)}\text{(D)}"),
    ("5", "x=6=5"),
    ("5", "The answer is 6"),
    ("A", "Option B"),
    ("A, C", "A"),
    ("A, C", "A, B, C"),
    ("eight", "nine"),
    ("True", "False"),
    (r"2:30 \text{ PM}", "2:30 a.m."),
    (r"\frac{3}{2}", "1 1/3"),
    (r"2\frac12", r"2\cdot\frac12"),
    ("1/3", r"0.\overline{4}"),
    ("x^{10}", "x^{1}0"),
    ("0.18", "81 cents"),
    ("18", "0.18 cents"),
    ("-1<x<1", r"x > -1 \text{ or } x<1"),
    ("-1<x<1", r"x \ge -1 \text{ and } x<1"),
    ("x<5", "y<5"),
    (r"1\pm\sqrt2", r"x=1+\sqrt2, x=1+\sqrt2"),
    ("y=-2x+3", "y=2x+3"),
    ("y=-2x+3", "2x+y+3=0"),
    ("y=-2x+3", "-2x+3=0"),
]


@pytest.fixture(scope="module")
def judge() -> Iterator[MathJudge]:
    pytest.importorskip("math_verify")
    found = MathJudge(timeout_s=60.0, max_answer_chars=256)
    yield found
    found.close()


@pytest.mark.parametrize(("gold", "answer"), RIGHT)
def test_another_writing_of_the_answer_is_right(judge: MathJudge, gold: str, answer: str) -> None:
    assert judge.verdict(gold, answer) == "correct"


@pytest.mark.parametrize(("gold", "answer"), WRONG)
def test_another_answer_is_not_right(judge: MathJudge, gold: str, answer: str) -> None:
    assert judge.verdict(gold, answer) in ("wrong", "unparsable")


@pytest.mark.parametrize(
    ("text", "answer", "trailing"),
    [
        (r"\fbox{72}", "72", False),
        (r"\boxed {72}", "72", False),
        (r"\boxed72", "72", False),
        (r"\boxed{3} and \boxed{5}", "3, 5", False),
        (r"$\boxed{3}$, $\boxed{5}$", "3, 5", False),
        (r"\boxed{3}. No: \boxed{5}", "5", False),
        (r"\boxed{72} \boxed{}", "72", True),
        (r"\boxed{72} so \boxed{7", "72", True),
        (r"\[ \boxed{72} \]", "72", False),
        (r"**\boxed{72}**", "72", False),
        (r"\boxed{\boxed{72}}", r"\boxed{72}", False),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}", False),
        (r"boxed{72}", None, False),
    ],
)
def test_the_last_whole_box_holds_the_answer(text: str, answer: str | None, trailing: bool) -> None:
    parsed = parse_response(text, "boxed")
    assert (parsed.answer, parsed.has_trailing) == (answer, trailing)


@pytest.mark.parametrize("form", ["boxed", "answer"])
def test_an_open_thought_holds_no_answer(form: str) -> None:
    said = {"boxed": r"\boxed{72}", "answer": "<answer>72</answer>"}[form]
    for text, opened, answer in (
        (f"<think>Let me try {said}? Wait", False, None),
        (f"a</think>{said}<think>or {said}", False, None),
        (f"Let me try {said}? Wait", True, None),
        (f"Let me try</think>{said}", True, "72"),
        (said, False, "72"),
    ):
        assert parse_response(text, form, opened=opened).answer == answer, text  # type: ignore[arg-type]
