"""Values that an answer states: one, a chain of equations, or a list of values.

Boxes with several numbers, of which math-verify would compare only the right one, are found here.

math-verify takes the last side of a chain of equations (`33=34`), the text inside another box or between
dollars, and the text before a unit at the end (`34\\text{ cm}, 33\\text{ cm}`). It also joins digits across
marks that it removes (`3\\!4`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .grade import boxed

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


# A comma between digits, three of them behind it and no more, only parts thousands.
_SEPARATOR = re.compile(
    r"\\text\s*\{\s*(?:,\s*)?(?:and|or)\s*\}|\\(?:lor|land|vee|wedge|quad|qquad)(?![a-zA-Z])|\b(?:and|or)\b"
    r"|(?P<thousands>(?<=\d)\{?,\}?(?=\d{3}(?!\d)))|[,;]|\\[{}]|[{}()\[\]]"
)
_PLUS_MINUS = re.compile(r"\\pm(?![a-zA-Z])\s*")
_VARIABLE = re.compile(r"\\?[a-zA-Z]+(?:_(?:\w|\{\w+\}))?")
MOST_ITEMS = 32


@dataclass(frozen=True, slots=True)
class Listed:
    """Values that a text lists.

    Attributes:
        names: the variable of each value (`x=2, y=3`); None where no value has one.
        is_ordered: whether round brackets around them say that their order matters.
    """

    items: tuple[str, ...]
    names: tuple[str, ...] | None
    is_ordered: bool


def listed(text: str) -> Listed | None:
    """Return the values of a list; None: it is none, or a side of an equation in it is another number."""
    inner, is_ordered = text.strip(), False
    for opening, closing in (
        ("\\left(", "\\right)"),
        ("(", ")"),
        ("\\left\\{", "\\right\\}"),
        ("\\{", "\\}"),
    ):
        if inner.startswith(opening) and inner.endswith(closing) and _closes_last(inner, opening, closing):
            inner, is_ordered = inner[len(opening) : -len(closing)], opening.endswith("(")
            break
    parts = _items(inner)
    if len(parts) == 1 and parts[0].count("\\pm") == 1:
        parts = [_PLUS_MINUS.sub(sign, parts[0]) for sign in ("+", "-")]
    if not 1 < len(parts) <= MOST_ITEMS or "" in parts:
        return None
    names: list[str] = []
    items: list[str] = []
    for part in parts:
        sides = _parts(part)
        if len(sides) == 1:
            names.append(names[-1] if names else "")  # `x=2, 3`
        elif len(sides) == 2 and _VARIABLE.fullmatch(sides[0]):
            names.append(sides[0])
        else:
            return None
        items.append(sides[-1])
    if not any(names):
        return Listed(tuple(items), None, is_ordered)
    return Listed(tuple(items), tuple(names), is_ordered) if all(names) else None


def _closes_last(text: str, opening: str, closing: str) -> bool:
    """Return whether the bracket at the start is the one that is closed at the end."""
    inner = text[len(opening) : -len(closing)]
    depth = 0
    for mark in re.findall(r"\\[{}]|[{}()]", inner):
        depth += 1 if mark in ("\\{", "{", "(") else -1
        if depth < 0:
            return False
    return depth == 0


def _items(text: str) -> list[str]:
    parts, start, depth = [], 0, 0
    for match in _SEPARATOR.finditer(text):
        mark = match[0]
        if mark in ("\\{", "{", "[", "("):
            depth += 1
        elif mark in ("\\}", "}", "]", ")"):
            depth -= 1
        elif depth == 0 and not match["thousands"]:
            parts.append(text[start : match.start()].strip())
            start = match.end()
    parts.append(text[start:].strip())
    # `2, 3, and 5` has an empty place between the comma and the word.
    return [part for i, part in enumerate(parts) if part or i in (0, len(parts) - 1)]


def values(gold: str, answer: str) -> list[str] | None:
    """Return the numbers in an answer that is a chain of equations; all of them must be equal.

    Returns:
        [] for an answer without equations; None where the box holds more than one answer, in a way that
        math-verify would overlook.
    """
    text = answer.strip().strip("$")
    if text.startswith("\\boxed{") and (box := boxed(text)) and box == (text[7:-1], len(text)):
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


def is_value_or_named(text: str) -> bool:
    """Return whether a text is no equation, but for one that names a value (`x=5`)."""
    sides = _parts(text)
    return len(sides) == 1 or (len(sides) == 2 and _VARIABLE.fullmatch(sides[0]) is not None)


def is_equation(text: str) -> bool:
    """Return whether a text is one equation, of which no side is a number."""
    sides = _parts(text)
    return len(sides) == 2 and not any(map(_is_value, sides))


def unnamed(text: str) -> str:
    """Return the value of an equation that names one (`x=5`); the text if it is none."""
    sides = _parts(text)
    return sides[1] if len(sides) == 2 and _VARIABLE.fullmatch(sides[0]) else text


def _is_value(part: str) -> bool:
    """Return whether a side of an equation is a number, with or without a unit, and not a variable's name."""
    plain = _COMMAND.sub(" ", _TEXT.sub("", part)).strip()
    if not any(map(str.isdigit, plain)) or _ANGLE.search(part):
        return False
    return not any(map(str.isalpha, plain)) or bool(_WITH_UNIT.fullmatch(plain))
