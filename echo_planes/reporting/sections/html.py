"""Small pieces of HTML. Whatever comes from a run may be hostile, and is escaped here."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from html import escape

_HIDDEN = "\u061c\u200b\u200e\u200f\u2060\ufeff"  # besides the bidirectional controls
_CONTROLS = ("Cc", "Cs", "Zl", "Zp")


def safe(value: object) -> str:
    """Any text as HTML, with characters named that would be invisible or turn the line around."""
    return escape("".join(_visible(character) for character in str(value)))


def _visible(character: str) -> str:
    if character in "\n\t" or " " <= character <= "~":
        return character
    is_bidi = "\u202a" <= character <= "\u202e" or "\u2066" <= character <= "\u2069"
    if is_bidi or character in _HIDDEN or unicodedata.category(character) in _CONTROLS:
        return f"⟨{ord(character):X}⟩"
    return character


def cut(text: str, limit: int) -> str:
    """The beginning of a text, and how much more there is."""
    return text if len(text) <= limit else f"{text[:limit]} … {len(text) - limit:,} more characters"


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def pill(text: str, kind: str = "") -> str:
    return f'<span class="pill {kind}">{safe(text)}</span>'


def facts(pairs: Sequence[tuple[str, object]], title: str = "") -> str:
    """Short facts in a line: name, value."""
    shown = [f"<span><i>{safe(name)}</i> {safe(value)}</span>" for name, value in pairs]
    head = f"<b>{title}</b>" if title else ""
    return f'<p class="facts">{head}{"".join(shown)}</p>'
