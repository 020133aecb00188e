"""What all pages share: the frame, links, escaping. Whatever comes from a run may be hostile."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from html import escape
from urllib.parse import urlencode

from echo_planes.report import csp_hash
from echo_planes.viewer.style import PAGE_CSS, PAGE_JS

POLICY = (
    f"default-src 'none'; style-src '{csp_hash(PAGE_CSS)}'; script-src '{csp_hash(PAGE_JS)}'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
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


def address(path: str, fields: Mapping[str, object]) -> str:
    """A link's target as an attribute's value; empty fields are left out."""
    given = {name: str(value) for name, value in fields.items() if str(value)}
    return escape(f"{path}?{urlencode(given, errors='replace')}" if given else path)


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def pill(text: str, kind: str = "") -> str:
    return f'<span class="pill {kind}">{safe(text)}</span>'


def facts(pairs: Sequence[tuple[str, object]], title: str = "") -> str:
    """Short facts in a line: name, value."""
    shown = [f"<span><i>{safe(name)}</i> {safe(value)}</span>" for name, value in pairs]
    head = f"<b>{title}</b>" if title else ""
    return f'<p class="facts">{head}{"".join(shown)}</p>'


def layout(
    title: str, body: str, *, run: str, crumbs: Sequence[tuple[str, str]] = (), refresh_s: int = 0
) -> str:
    """A whole page.

    Args:
        title: of the page.
        body: HTML.
        run: name of the run.
        crumbs: (target, name) of the pages above.
        refresh_s: load again after so many seconds; 0: never.
    """
    trail = "".join(f'<a href="{escape(target)}">{safe(name)}</a> / ' for target, name in crumbs)
    again = f'<meta http-equiv="refresh" content="{refresh_s}">' if refresh_s else ""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{again}'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{safe(title)} · {safe(run)}</title><style>{PAGE_CSS}</style></head><body><main>"
        f'<header><p class="over">{trail}echo_planes run {safe(run)}</p>'
        f'<div class="line"><h1>{safe(title)}</h1></div></header>{body}'
        f'</main><div id="tip"></div><script>{PAGE_JS}</script></body></html>\n'
    )
