"""Grading of a response's text: finds the answer and its form, and compares texts and numbers exactly."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from echo_planes.data.tasks.adapter import last_tagged

AnswerForm = Literal["boxed", "answer"]

_NUMBER = re.compile(r"[+-]?(\d+(\.\d+)?|\.\d+)")
_RATIO = re.compile(r"([+-]?\d+)/(\d+)")
_LATEX_RATIO = re.compile(r"([+-]?)\\[dt]?frac\{(-?\d+)\}\{(\d+)\}")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}((,\d{3})+|( \d{3})+)(\.\d+)?")
_DOLLARS = re.compile(r"(?<![\d.])\\\$|\\\$(?![\d.])")  # not a dollar between two numbers
_SPACES = re.compile(r"(?<!\d) | (?!\d)")


@dataclass(frozen=True, slots=True)
class Parsed:
    """Parts of a response. `answer` is None if the response has none in the requested form."""

    answer: str | None
    has_thinking: bool  # a non-empty <think>...</think>
    has_trailing: bool  # anything but white space and closing punctuation after the answer


def parse_response(text: str, form: AnswerForm) -> Parsed:
    """Find the last answer after the thinking: `\\boxed{...}` or `<answer>...</answer>`."""
    before, closed, _ = text.partition("</think>")
    # Some chat templates add <think> to the prompt, so the response may only close it.
    thought = before.partition("<think>")[2] if "<think>" in before else before
    start = text.rfind("</think>") + len("</think>") if closed else 0
    found = last_boxed(text, start) if form == "boxed" else last_tagged(text, "answer", start)
    has_thinking = bool(closed and thought.strip())
    if found is None:
        return Parsed(None, has_thinking, has_trailing=False)
    answer, end = found
    return Parsed(answer.strip(), has_thinking, has_trailing=bool(text[end:].strip(" \t\r\n.$")))


def last_boxed(text: str, start: int = 0) -> tuple[str, int] | None:
    """Return the contents of the last `\\boxed{}` after `start`, and the position of its end."""
    opening = text.rfind("\\boxed{", start)
    if opening < 0:
        return None
    depth, begin = 1, opening + len("\\boxed{")
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin:position], position + 1
    return None


def compare_exactly(gold: str, answer: str) -> bool | None:
    """Return whether the answers are equal as texts or numbers; None where only algebra can decide."""
    left, right = _normalise(gold), _normalise(answer)
    if left == right:
        return True
    gold_number, number = _as_fraction(left), _as_fraction(right)
    if gold_number is None or number is None:
        return None
    return gold_number == number


def _normalise(text: str) -> str:
    text = _DOLLARS.sub("", text.strip().strip("$")).replace("\\!", " ").replace("\\,", " ")
    # White space has a meaning only between two digits.
    text = _SPACES.sub("", " ".join(text.split())).removesuffix(".")
    return text.replace(",", "").replace(" ", "") if _THOUSANDS.fullmatch(text) else text


def _as_fraction(text: str) -> Fraction | None:
    if _NUMBER.fullmatch(text):
        return Fraction(text)
    match = _LATEX_RATIO.fullmatch(text)
    if match:
        text = f"{match[2]}/{match[3]}"
    ratio = _RATIO.fullmatch(text)
    if ratio is None or int(ratio[2]) == 0:
        return None
    sign = -1 if match and match[1] == "-" else 1
    return sign * Fraction(int(ratio[1]), int(ratio[2]))
