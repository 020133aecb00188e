"""From a response's text to a reward: find the answer, compare it, weigh the parts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

AnswerForm = Literal["boxed", "answer"]

_NUMBER = re.compile(r"[+-]?(\d+(\.\d+)?|\.\d+)")
_RATIO = re.compile(r"([+-]?\d+)/(\d+)")
_LATEX_RATIO = re.compile(r"([+-]?)\\[dt]?frac\{(-?\d+)\}\{(\d+)\}")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?")
_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a response holds. `answer` is None where there is none in the form asked for."""

    answer: str | None
    has_thinking: bool  # a non-empty <think>...</think>
    has_trailing: bool  # anything but white space and closing punctuation after the answer


def parse_response(text: str, form: AnswerForm) -> Parsed:
    """Find the last answer after the thinking: `\\boxed{...}` or `<answer>...</answer>`."""
    before, closed, _ = text.partition("</think>")
    # Some chat templates open <think> themselves, so the response may only close it.
    thought = before.partition("<think>")[2] if "<think>" in before else before
    start = text.rfind("</think>") + len("</think>") if closed else 0
    found = _last_boxed(text, start) if form == "boxed" else _last_tagged(text, start)
    has_thinking = bool(closed and thought.strip())
    if found is None:
        return Parsed(None, has_thinking, has_trailing=False)
    answer, end = found
    return Parsed(answer.strip(), has_thinking, has_trailing=bool(text[end:].strip(" \t\r\n.$")))


def _last_boxed(text: str, start: int) -> tuple[str, int] | None:
    opening = text.rfind("\\boxed{", start)
    if opening < 0:
        return None
    depth, begin = 1, opening + len("\\boxed{")
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin:position], position + 1
    return None


def _last_tagged(text: str, start: int) -> tuple[str, int] | None:
    matches = list(_ANSWER_TAG.finditer(text, start))
    return (matches[-1].group(1), matches[-1].end()) if matches else None


def compare_exactly(gold: str, answer: str) -> bool | None:
    """True or False where text or number comparison settles it, None where algebra is needed."""
    left, right = _normalise(gold), _normalise(answer)
    if left == right:
        return True
    gold_number, number = _as_fraction(left), _as_fraction(right)
    if gold_number is None or number is None:
        return None
    return gold_number == number


def _normalise(text: str) -> str:
    text = text.strip().strip("$").replace("\\$", "").replace("\\!", "").replace("\\,", "")
    text = "".join(text.split()).removesuffix(".")
    return text.replace(",", "") if _THOUSANDS.fullmatch(text) else text


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
