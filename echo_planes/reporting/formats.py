"""Formats of numbers and texts on pages and in the terminal."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Iterable

Format = Callable[[float], str]

_HIDDEN = "\u061c\u200b\u200e\u200f\u2060\ufeff"  # invisible characters, besides the bidirectional controls
_CONTROLS = ("Cc", "Cs", "Zl", "Zp")


def si(value: float) -> str:
    """Format with an SI prefix: 1234567 -> '1.23M'; small numbers keep three significant digits."""
    size = abs(value)
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            unit = 1e3 if suffix == "k" else limit
            return f"{value / unit:.3g}{suffix}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def show_short(value: float) -> str:
    return f"{value:.3g}"


def show_percent(share: float) -> str:
    return f"{share * 100:.3g} %"


def show_seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 100 else f"{value:.3g} s"


def show_usd(value: float) -> str:
    """Format dollars with cents; below a dollar with three significant digits: '$0.60', '$0.000212'."""
    if value == 0:
        return "$0"
    if abs(value) >= 1:
        return f"${value:,.2f}"
    whole, digits = f"{value:.{2 - math.floor(math.log10(abs(value)))}f}".split(".")
    return f"${whole}.{digits.rstrip('0'):0<2}"


def show_power(value: float) -> str:
    """Format as a power of ten: 0.00025 -> '2.5e-4', which fits beside an axis."""
    digits, power = f"{value:.1e}".split("e")
    return f"{digits.removesuffix('.0')}e{int(power)}" if value else "0"


def known(value: float | None, show: Format | str = ",.0f") -> str:
    """Format a number by a function or a format specification; "-" for None."""
    if value is None:
        return "-"
    return format(value, show) if isinstance(show, str) else show(value)


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def ranges(numbers: Iterable[int]) -> str:
    """Format whole numbers in ascending order: 1, 2, 3, 5 -> '1-3, 5'."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


def cut(text: str, limit: int) -> str:
    """Return the beginning of a text, and how many characters follow."""
    return text if len(text) <= limit else f"{text[:limit]} … {len(text) - limit:,} more characters"


def visible(text: str) -> str:
    """Replace characters that are invisible or change the direction of text by their code points."""
    return text if text.isascii() and text.isprintable() else "".join(map(_visible, text))


def _visible(character: str) -> str:
    if character in "\n\t" or " " <= character <= "~":
        return character
    is_bidi = "\u202a" <= character <= "\u202e" or "\u2066" <= character <= "\u2069"
    if is_bidi or character in _HIDDEN or unicodedata.category(character) in _CONTROLS:
        return f"⟨{ord(character):X}⟩"
    return character
