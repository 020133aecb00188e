"""Notes of an environment, drawn by their content. Notes are JSON; anything else is shown as text.

- `program`, `tests`, `output`: text, shown as code. `passed` and `total`: numbers of tests.
- `turns`: a list of objects, one for each turn; each is shown with its turn.
- A list of playing cards ("Ah", "Tc") anywhere is drawn as cards.
- Short values share a line, in the order in which they were written; empty ones are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from markupsafe import Markup

from echo_planes.reporting.formats import cut
from echo_planes.reporting.html import part

MAX_CHARACTERS = 20_000  # of one value
_SHORT = 60
_CODE = ("program", "tests", "output")
_CARD = re.compile(r"[2-9TJQKA][cdhs]")
_SUITS = {"c": "♣", "d": "♦", "h": "♥", "s": "♠"}


def read_notes(text: str | None) -> dict[str, Any] | None:
    """Parse the notes of a trajectory; None if there are none, or they are no JSON object."""
    try:
        found = json.loads(text or "")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def turn_notes(notes: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Return the notes of each turn; [] if the notes do not have the form of turns."""
    turns = (notes or {}).get("turns")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return []
    return turns


def draw_notes(text: str | None, *, without_turns: bool) -> Markup:
    """Draw a trajectory's notes; `without_turns`: leave out the turns, which are shown elsewhere."""
    notes = read_notes(text)
    with suppress(RecursionError):  # notes nested too deeply to draw are shown as text
        if notes is not None:
            hidden = "turns" if without_turns else None
            return draw({name: value for name, value in notes.items() if name != hidden})
    return _noted(blocks=[("notes", text)]) if text else Markup()


def draw_all(text: str | None) -> Markup:
    """Draw all of a trajectory's notes in one block: those of its turns in order, then the rest."""
    turns = turn_notes(read_notes(text))
    rest = draw_notes(text, without_turns=bool(turns))
    return part("noted_turns", turns=[draw(turn) for turn in turns], rest=rest)


def draw(notes: Mapping[str, Any]) -> Markup:
    """Draw one object of the notes."""
    passed, total = notes.get("passed"), notes.get("total")
    is_judged = isinstance(passed, int) and isinstance(total, int)
    codes = [name for name in _CODE if isinstance(notes.get(name), str) and notes[name]]
    taken = {*codes, *(("passed", "total") if is_judged else ())}
    line: list[tuple[str, str]] = []
    blocks = [(name, notes[name]) for name in codes]
    for name, value in notes.items():
        if name in taken or value in ("", None, [], {}):
            continue
        short = _short(value)
        if short is not None:
            line.append((name, short))
        else:
            blocks.append((name, value if isinstance(value, str) else _as_json(value)))
    return _noted(passed, total if is_judged else None, line, blocks)


def draw_parts(text: str | None) -> Markup:
    """Draw the parts of a reward, a JSON object of numbers."""
    parts = read_notes(text) or {}
    shown = [(name, f"{value:.4g}" if isinstance(value, float) else value) for name, value in parts.items()]
    return part("facts", pairs=shown, title="Reward parts") if shown else Markup()


def _noted(
    passed: int | None = None,
    total: int | None = None,
    line: Sequence[tuple[str, str]] = (),
    blocks: Sequence[tuple[str, str]] = (),
) -> Markup:
    blocks = [(name, cut(text, MAX_CHARACTERS)) for name, text in blocks]
    return part("noted", passed=passed, total=total, line=line, blocks=blocks)


def _short(value: Any) -> str | None:
    """Return a value as text for a line, playing cards drawn; None if it does not fit."""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        if all(_CARD.fullmatch(item) for item in value):
            cards = [(item[0], _SUITS[item[1]], item[1] in "dh") for item in value]
            return part("playing_cards", cards=cards)
        value = ", ".join(value)
    elif isinstance(value, list | dict):
        value = _as_json(value)
    elif isinstance(value, float):
        value = f"{value:.4g}"
    text = str(value)
    return text if len(text) <= _SHORT and "\n" not in text else None


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
