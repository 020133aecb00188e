"""An environment's notes, drawn by what they contain. They are JSON; whatever else they are is shown as text.

- `program`, `tests`, `output`: text, shown as code. `passed` and `total` beside them: how the tests went.
- `turns`: a list of objects, one for each turn; each is shown with the turn it belongs to.
- A list of playing cards ("Ah", "Tc") anywhere is drawn as cards.
- Short values stand in a line, in the order in which they were written; empty ones are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from echo_planes.reporting.sections.html import cut, facts, pill, safe

MAX_CHARACTERS = 20_000  # of one value
_SHORT = 60
_CODE = ("program", "tests", "output")
_CARD = re.compile(r"[2-9TJQKA][cdhs]")
_SUITS = {"c": "♣", "d": "♦", "h": "♥", "s": "♠"}


def read_notes(text: str | None) -> dict[str, Any] | None:
    """The notes of a trajectory; None where there are none, or they are no JSON object."""
    try:
        found = json.loads(text or "")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def turn_notes(notes: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Notes of each turn; none where they are not in the form of turns."""
    turns = (notes or {}).get("turns")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return []
    return turns


def draw_notes(text: str | None, *, without_turns: bool) -> str:
    """A trajectory's notes as HTML; `without_turns`: these are shown elsewhere."""
    notes = read_notes(text)
    try:
        if notes is not None:
            return draw(
                {name: value for name, value in notes.items() if name != "turns" or not without_turns}
            )
    except RecursionError:  # nested almost too deeply to be read at all
        return _block("notes", text or "")
    return _block("notes", text) if text else ""


def draw_all(text: str | None) -> str:
    """All of a trajectory's notes in one block: what was noted of its turns in order, then the rest."""
    turns = turn_notes(read_notes(text))
    listed = "".join(f"<li>{draw(turn)}</li>" for turn in turns)
    rest = draw_notes(text, without_turns=bool(turns))
    return (f"<ol>{listed}</ol>" if turns else "") + rest


def draw(notes: Mapping[str, Any]) -> str:
    """An object of the notes as HTML."""
    parts = []
    passed, total = notes.get("passed"), notes.get("total")
    is_judged = isinstance(passed, int) and isinstance(total, int)
    if is_judged:
        parts.append(
            f"<p>{pill(f'{passed} of {total} tests passed', 'yes' if passed == total else 'no')}</p>"
        )
    codes = [name for name in _CODE if isinstance(notes.get(name), str) and notes[name]]
    taken = {*codes, *(("passed", "total") if is_judged else ())}
    line, blocks = [], []
    for name, value in notes.items():
        if name in taken or value in ("", None, [], {}):
            continue
        short = _short(value)
        if short is not None:
            line.append(f"<span><i>{safe(name)}</i> {short}</span>")
        else:
            blocks.append(_block(name, value if isinstance(value, str) else _as_json(value)))
    if line:
        parts.append(f'<p class="facts">{"".join(line)}</p>')
    parts += [_block(name, notes[name]) for name in codes]
    return "".join(parts + blocks)


def draw_parts(text: str | None) -> str:
    """The parts of a reward, a JSON object of numbers."""
    parts = read_notes(text) or {}
    shown = [(name, f"{value:.4g}" if isinstance(value, float) else value) for name, value in parts.items()]
    return facts(shown, "Reward parts") if shown else ""


def _short(value: Any) -> str | None:
    """A value as HTML that fits into a line; None: it does not."""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        if all(_CARD.fullmatch(item) for item in value):
            return "".join(_card(item) for item in value)
        value = ", ".join(value)
    elif isinstance(value, list | dict):
        value = _as_json(value)
    elif isinstance(value, float):
        value = f"{value:.4g}"
    text = str(value)
    return safe(text) if len(text) <= _SHORT and "\n" not in text else None


def _card(name: str) -> str:
    return f'<span class="suit {"red" if name[1] in "dh" else ""}">{name[0]}{_SUITS[name[1]]}</span>'


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _block(name: str, text: str) -> str:
    return f"<h4>{safe(name)}</h4><pre>{safe(cut(text, MAX_CHARACTERS))}</pre>"
