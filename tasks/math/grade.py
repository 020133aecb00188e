"""Grading of a response's text: finds the answer and its form, and compares texts and numbers exactly."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from echo_planes.data.tasks.answers import after_thought, has_thought, last_tagged

AnswerForm = Literal["boxed", "answer"]

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![a-zA-Z])\s*(?:\{|(?P<token>[0-9a-zA-Z]+))")
_JOINS = re.compile(
    r"[\s$]*(?:\\[)\]]\s*)?(?:,?\s*(?:and|or)|\\text\s*\{\s*,?\s*(?:and|or)\s*\}|,)[\s$]*(?:\\[(\[]\s*)?"
)
_BRACE = re.compile(r"(?<!\\)[{}]")
_CLOSING = re.compile(r"(?:\s|[.$*`]|\\[)\]])*")  # of a sentence, a formula, bold text
_NUMBER = re.compile(r"[+-]?(\d+(\.\d+)?|\.\d+)")
_SCIENTIFIC = re.compile(
    r"([+-]?(?:\d+(?:\.\d+)?|\.\d+))(?:[eE]([+-]?\d+)|\\(?:times|cdot)10\^(?:\{([+-]?\d+)\}|(\d)))"
)
MOST_DIGITS = 400  # of a power of ten
_RATIO = re.compile(r"([+-]?\d+)/(\d+)")
_MIXED = re.compile(r"([+-]?)(\d+)(?: |\\[dt]?frac\{)(\d+)(?:/|\}\{)(\d+)\}?")
_POWER_OF_TEN = re.compile(r"([+-]?)10\^(?:\{([+-]?\d+)\}|(\d))")
_REPEATING = re.compile(r"([+-]?)(\d*)\.(\d*)\\(?:overline|bar|dot)(?:\{(\d+)\}|(\d))")
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


def parse_response(text: str, form: AnswerForm, *, opened: bool = False) -> Parsed:
    """Find the last answer after the thinking: `\\boxed{...}` or `<answer>...</answer>`.

    Args:
        opened: whether the prompt opened a thought. An open thought holds no answer.
    """
    thinks, start = has_thought(text), after_thought(text, opened=opened)
    if start is None:
        return Parsed(None, thinks, has_trailing=False)
    found = boxed(text, start) if form == "boxed" else last_tagged(text, "answer", start)
    if found is None:
        return Parsed(None, thinks, has_trailing=False)
    answer, end = found
    return Parsed(answer.strip(), thinks, has_trailing=not _CLOSING.fullmatch(text, end))


def boxed(text: str, start: int = 0) -> tuple[str, int] | None:
    """Return what the last box after `start` holds, and the position of its end.

    Boxes that a comma, `and` or `or` joins are one list. Empty boxes and one that is never closed are none.
    """
    closings = closing_braces(text)
    found: list[tuple[int, int, str]] = []  # from, to, contents
    for opening in _BOX.finditer(text, start):
        if found and opening.start() < found[-1][1]:
            continue  # inside another box
        inner, end = opening["token"], opening.end()
        if inner is None:
            closing = closings.get(end - 1, end)
            inner, end = text[end:closing], closing + 1
        if not inner.strip():
            continue
        if found and _JOINS.fullmatch(text, found[-1][1], opening.start()):
            first, _, before = found[-1]
            found[-1] = first, end, f"{before}, {inner}"
        else:
            found.append((opening.start(), end, inner))
    return (found[-1][2], found[-1][1]) if found else None


def closing_braces(text: str) -> dict[int, int]:
    """Return for each brace that opens the place of the one that closes it, if any does."""
    found, opened = {}, []
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif opened:
            found[opened.pop()] = brace.start()
    return found


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


def as_fraction(text: str) -> Fraction | None:
    """Return the number that a text writes down, exactly; None: it is none, or its power is too large."""
    return _as_fraction(_normalise(text))


def _as_fraction(text: str) -> Fraction | None:
    if _NUMBER.fullmatch(text):
        return Fraction(text)
    if found := _SCIENTIFIC.fullmatch(text):
        power = int(found[2] or found[3] or found[4])
        return Fraction(found[1]) * Fraction(10) ** power if abs(power) <= MOST_DIGITS else None
    if (found := _POWER_OF_TEN.fullmatch(text)) and abs(power := int(found[2] or found[3])) <= MOST_DIGITS:
        return Fraction(f"{found[1]}1e{power}")
    if (found := _MIXED.fullmatch(text)) and int(found[4]):
        size = Fraction(int(found[3]), int(found[4])) + int(found[2])
        return -size if found[1] == "-" else size
    if found := _REPEATING.fullmatch(text):
        whole, period = found[2] + found[3], found[4] or found[5]
        size = (Fraction(int(period), 10 ** len(period) - 1) + int(whole or 0)) / Fraction(
            f"1e{len(found[3])}"
        )
        return -size if found[1] == "-" else size
    match = _LATEX_RATIO.fullmatch(text)
    if match:
        text = f"{match[2]}/{match[3]}"
    ratio = _RATIO.fullmatch(text)
    if ratio is None or int(ratio[2]) == 0:
        return None
    sign = -1 if match and match[1] == "-" else 1
    return sign * Fraction(int(ratio[1]), int(ratio[2]))
