"""Text of a table's state for a policy, and reading of a policy's text as an action.

There is exactly one text per state and style. `compact` is one line of ASCII, for tiny character-level
models. Its fields, in order: hole cards; board or `-`; `p` pot; `c` chips to call; `r` least and greatest
raise or `r-`; `b` blinds; `s` stacks by seat, each with `*` for the acting seat or `x` if folded, chips
behind, `+` its bet on this street; the betting, with `/` between streets; `:`. For example
`AhKd QsTh2c p24 c4 r8-94 b1/2 s*94,90+4,x98 r6cf/kr4:`. `plain` is the same in English words.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from .view import Action, Kind, Legal, View

Style = Literal["compact", "plain"]
Fault = Literal["", "unparsable", "not allowed now", "raise out of range"]

SYSTEM_PROMPT = (
    "You play one hand of no-limit Texas hold'em. Your aim is to win chips. At each of your turns you are "
    "shown the state. Answer with one action and nothing else: fold, check, call, raise to N (N: your whole "
    "bet on this street, in chips) or all-in. An action that is not allowed counts as a check where checking "
    "is free, else as a fold."
)
STREETS = ("preflop", "flop", "turn", "river")

_LETTERS: dict[Kind, str] = {"fold": "f", "check": "k", "call": "c", "raise": "r"}
_WORDS: dict[Kind, str] = {"fold": "folds", "check": "checks", "call": "calls", "raise": "raises to"}
_NUMBER = r"([1-9][0-9]{0,11})"  # no sign, no leading zero, and never a number too long to convert
_FORMS: dict[Style, re.Pattern[str]] = {
    "compact": re.compile(rf"([fkca])|r{_NUMBER}"),
    "plain": re.compile(rf"(fold|check|call|all-in)|raise to {_NUMBER}", re.IGNORECASE | re.ASCII),
}
_KINDS: dict[str, Kind] = {
    **{letter: kind for kind, letter in _LETTERS.items()},
    **{kind: kind for kind in _LETTERS},
}


@dataclass(frozen=True, slots=True)
class Answer:
    """Policy's answer as the table applies it. `action` is always legal."""

    action: Action
    fault: Fault = ""  # why the answer was illegal; "": it was legal

    @property
    def is_legal(self) -> bool:
        """False if `action` replaces an illegal answer."""
        return not self.fault


def state_text(view: View, style: Style) -> str:
    """Return the canonical text of the view of the seat to act."""
    return _compact(view) if style == "compact" else _plain(view)


def action_text(action: Action, style: Style) -> str:
    """Return the canonical text of an action, `r12` or `raise to 12`; all-in is written as raise or call."""
    amount = str(action.to_chips) if action.kind == "raise" else ""
    if style == "compact":
        return _LETTERS[action.kind] + amount
    return f"raise to {amount}" if amount else action.kind


def read_answer(text: str, legal: Legal, style: Style) -> Answer:
    """Read a policy's answer. Never raises.

    The whole text must be one action, except for surrounding white space: `f`, `k` (check), `c`, `rN`, `a`
    (all-in) in the compact style; `fold`, `check`, `call`, `raise to N`, `all-in` in the plain one, in upper
    or lower case. All-in is the greatest raise, or a call where no raise is allowed. An illegal or unreadable
    answer counts as a check where checking is free, else as a fold, and is flagged. A fold where checking is
    free is illegal. A raise out of range is not moved to the nearest legal one, because a model must learn
    the range.
    """
    match = _FORMS[style].fullmatch(text.strip())
    if match is None:
        return Answer(legal.fallback, "unparsable")
    word, amount = match.groups()
    if amount is not None:
        action = Action("raise", int(amount))
    elif word.lower() in ("a", "all-in"):
        action = Action("raise", legal.max_raise_to) if legal.max_raise_to else Action("call")
    else:
        action = Action(_KINDS[word.lower()])
    if legal.allows(action):
        return Answer(action)
    is_range = action.kind == "raise" and legal.max_raise_to > 0
    return Answer(legal.fallback, "raise out of range" if is_range else "not allowed now")


def _compact(view: View) -> str:
    seats = []
    for seat, (stack, bet, folded) in enumerate(zip(view.stacks, view.bets, view.folded, strict=True)):
        mark = "*" if seat == view.seat else "x" if folded else ""
        seats.append(f"{mark}{stack}+{bet}" if bet else f"{mark}{stack}")
    legal = view.legal
    line = "/".join("".join(action_text(action, "compact") for _, action in street) for street in view.line)
    fields = [
        "".join(view.hole),
        "".join(view.board) or "-",
        f"p{view.pot_chips}",
        f"c{legal.call_chips}",
        f"r{legal.min_raise_to}-{legal.max_raise_to}" if legal.min_raise_to else "r-",
        f"b{view.blinds[0]}/{view.blinds[1]}",
        "s" + ",".join(seats),
        line,
    ]
    return " ".join(fields) + ":"


def _plain(view: View) -> str:
    seats = len(view.stacks)
    small, big = (1, 0) if seats == 2 else (0, 1)
    legal = view.legal
    others = [
        f"seat {seat + 1}{' folded,' * view.folded[seat]} has {view.stacks[seat]}, bet {view.bets[seat]}"
        for seat in range(seats)
        if seat != view.seat
    ]
    to_call = "nothing"
    if legal.call_chips:
        share = 100 * legal.call_chips / (view.pot_chips + legal.call_chips)
        to_call = f"{legal.call_chips} ({share:.0f}% of the pot after it)"
    choices = ["fold", "call"] if legal.call_chips else ["check"]
    if legal.min_raise_to:
        choices.append(f"raise to N with N from {legal.min_raise_to} to {legal.max_raise_to}")
    lines = [
        f"You are seat {view.seat + 1} of {seats}. Seat {small + 1} posted the small blind {view.blinds[0]}, "
        f"seat {big + 1} the big blind {view.blinds[1]}. The button is seat {seats}.",
        f"Hand: {' '.join(view.hole)}. Board: {' '.join(view.board) or 'none'}. Pot: {view.pot_chips}. "
        f"To call: {to_call}.",
        f"You have {view.stacks[view.seat]}, bet {view.bets[view.seat]}; {'; '.join(others)}.",
        *(_street_line(name, street) for name, street in zip(STREETS, view.line, strict=False)),
        f"Allowed: {', '.join(choices)}.",
    ]
    return "\n".join(lines)


def _street_line(name: str, street: tuple[tuple[int, Action], ...]) -> str:
    said = [
        f"seat {seat + 1} {_WORDS[action.kind]}" + (f" {action.to_chips}" if action.kind == "raise" else "")
        for seat, action in street
    ]
    return f"{name.capitalize()}: {', '.join(said) or 'no action yet'}."
