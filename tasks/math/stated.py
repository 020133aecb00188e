"""Detection of boxes with several numbers, of which math-verify would compare only the right one.

math-verify takes the last side of a chain of equations (`33=34`), the text inside another box or between
dollars, and the text before a unit at the end (`34\\text{ cm}, 33\\text{ cm}`). It also joins digits across
marks that it removes (`3\\!4`).
"""

from __future__ import annotations

import re

from .grade import last_boxed

# Marks that math-verify removes, so that the digits on both sides become one number.
_JOINED = re.compile(
    r"[\d.](?:[\"'\s]|\\!|\\displaystyle|\\?\$|\\text\s*\{\s*\}|\\mathrm\{th\})*"
    r"(?:[\"']|\\!|\\displaystyle|\\?\$|\\text\s*\{\s*\}|\\mathrm\{th\})\s*[\d.]"
)
_LIST = re.compile(r"\\text\s*\{\s*(?:and|or)\s*\}")
_TEXT = re.compile(r"\\(?:text(?:normal|bf|it|rm)?|mbox|math(?:rm|it|bf))\s*\{([^{}]*)\}")
_ANY_TEXT = re.compile(r"\\(?:text(?:normal|bf|it|rm)?|mbox|math(?:rm|it|bf))\s*\{")
_AFTER_UNIT = re.compile(r"(?:\s|\^\{?-?\d+\}?|\\[,!;: ]|\\cdot(?![a-zA-Z])|[/.)}\]])*")
_EQUALS = re.compile(r"[{}()\[\]]|(?<![<>!:\\])=|\\equiv(?![a-zA-Z])")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_ANGLE = re.compile(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_WITH_UNIT = re.compile(r"[+-]?[\d.,]+\s*[a-zA-Z]+[.]?")
MOST_VALUES = 3  # most numbers of a chain; a longer one is unparsable


def values(gold: str, answer: str) -> list[str] | None:
    """Return the numbers in an answer that is a chain of equations; all of them must be equal.

    Returns:
        [] for an answer without equations; None where the box holds more than one answer, in a way that
        math-verify would overlook.
    """
    text = answer.strip().strip("$")
    if text.startswith("\\boxed{") and (box := last_boxed(text)) and box == (text[7:-1], len(text)):
        text = box[0].strip().strip("$")  # inside tags
    if "$" in text.replace("\\$", "") or "\\boxed" in text or "\\fbox" in text or _JOINED.search(text):
        return None
    if _goes_on(text) and not _goes_on(gold):
        return None
    parts = _parts(text)
    if len(parts) == 1:
        return []
    found = [part for part in parts if _is_value(part)]
    return None if "" in parts or len(found) > MOST_VALUES else found


def _goes_on(text: str) -> bool:
    """Return whether more text follows a number's unit."""
    text = _LIST.sub(",", text)
    opening = _ANY_TEXT.search(text)
    if opening is None or not text[: opening.start()].strip():
        return False
    unit = _TEXT.match(text, opening.start())
    if unit is None:
        return True
    rest = text[opening.start() :]
    has_digits = any(any(map(str.isdigit, inner)) for inner in _TEXT.findall(rest))
    return has_digits or not _AFTER_UNIT.fullmatch(_TEXT.sub("", rest))


def _parts(text: str) -> list[str]:
    """Return the sides of a chain of equations, split only outside brackets."""
    parts, start, depth = [], 0, 0
    for match in _EQUALS.finditer(text):
        mark = match[0]
        if mark in "{[(":
            depth += 1
        elif mark in "}])":
            depth -= 1
        elif depth == 0:
            parts.append(text[start : match.start()].strip())
            start = match.end()
    return [*parts, text[start:].strip()]


def _is_value(part: str) -> bool:
    """Return whether a side of an equation is a number, with or without a unit, and not a variable's name."""
    plain = _COMMAND.sub(" ", _TEXT.sub("", part)).strip()
    if not any(map(str.isdigit, plain)) or _ANGLE.search(part):
        return False
    return not any(map(str.isalpha, plain)) or bool(_WITH_UNIT.fullmatch(plain))
