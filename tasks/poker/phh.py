"""Hand histories in PHH (arXiv:2312.11753), replayed under the rules: `.phh` has one hand, `.phhs` many."""

from __future__ import annotations

import gzip
import re
import tomllib
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pokerkit import State, parse_action

from echo_planes.errors import DataError

from .engine import new_state, view_of
from .view import CARDS, Action, Decision, View

MAX_FILE_BYTES = 64 * 2**20  # unpacked
MAX_SEATS = 10
MAX_CHIPS = 10**12
_CARD = r"(?:[2-9TJQKA][cdhs]|\?\?)"
_ACTION = re.compile(
    rf"d dh p(?P<dealee>[0-9]+) (?P<hole>{_CARD}+)|d db (?P<board>{_CARD}+)|"
    rf"p(?P<player>[0-9]+) (?:(?P<bet>f|cc|cbr (?P<amount>[0-9]{{1,12}}))|sm(?: (?:-|(?P<shown>{_CARD}+)))?)"
)


@dataclass(frozen=True, slots=True)
class Replay:
    """Hand that was replayed to its end. N: seats, in the order of `TableRules`."""

    source: str  # file and hand
    big_blind: int  # chips
    start_chips: tuple[int, ...]  # N
    decisions: tuple[Decision, ...]  # every seat's, in order; an unknown card is "??"
    net_chips: tuple[int, ...]  # N


def read_replays(path: Path) -> Iterator[Replay]:
    """Yield every hand of a PHH file, gzipped if its name ends in `.gz`, in order.

    A hand that breaks the rules is refused, never repaired. Chips must be whole numbers.

    Raises:
        DataError: the file cannot be read, is larger than `MAX_FILE_BYTES` or not PHH; a hand has another
            variant, breaks the rules, is incomplete, or ends with other stacks than it states. The message
            names the file, and the line or the hand and action.
    """
    try:
        content = tomllib.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not a PHH file: {error}; mend or remove what is there") from error
    hands = {"1": content} if "actions" in content or "variant" in content else content
    if not hands:
        raise DataError(f"{path}: no hands in it; give a .phh or .phhs file")
    for name, fields in hands.items():
        source = f"{path}: hand {name}"
        if not isinstance(fields, dict):
            raise DataError(f"{source} is {fields!r:.40}: a .phhs file holds one [table] per hand")
        yield _replay(fields, source)


def _read(path: Path) -> str:
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) <= MAX_FILE_BYTES:
            return content.decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as text: {error}; give a PHH file") from error
    raise DataError(f"{path}: more than {MAX_FILE_BYTES} bytes unpacked: split it")


def _replay(fields: dict[str, Any], source: str) -> Replay:
    state, blinds = _start(fields, source)
    decisions = []
    actions = fields.get("actions")
    if not isinstance(actions, list):
        raise DataError(f"{source}: actions={actions!r:.40} is no list of actions; mend or remove the hand")
    known: set[str] = set()
    for number, action in enumerate(actions, 1):
        try:
            decision = _apply(state, str(action).split("#")[0].strip(), blinds, known)
        except ValueError as error:
            why = f"{source}, action {number} {action!r:.60}"
            raise DataError(f"{why}: {error}; mend or remove the hand") from error
        if decision:
            decisions.append(decision)
    if state.status:
        raise DataError(f"{source}: stops after {len(actions)} actions, before the hand is over; remove it")
    stated = fields.get("finishing_stacks", state.stacks)
    if stated != state.stacks:
        raise DataError(f"{source}: ends with {state.stacks}, but states {stated!r:.80}; mend or remove it")
    return Replay(source, blinds[1], state.starting_stacks, tuple(decisions), tuple(state.payoffs))


def _start(fields: dict[str, Any], source: str) -> tuple[State, tuple[int, int]]:
    variant = fields.get("variant")
    if variant != "NT":
        raise DataError(f"{source}: variant={variant!r:.20}, but only no-limit Texas hold'em (NT) is read")
    stacks, blinds, antes = (
        _chips(fields, name, source) for name in ("starting_stacks", "blinds_or_straddles", "antes")
    )
    min_bet, trims = fields.get("min_bet"), fields.get("ante_trimming_status", False)
    is_sound = 2 <= len(stacks) == len(blinds) == len(antes) <= MAX_SEATS and min(stacks) > 0 < blinds[1]
    if not is_sound or type(min_bet) is not int or not 0 < min_bet < MAX_CHIPS or type(trims) is not bool:
        shown = f"starting_stacks={stacks} blinds_or_straddles={blinds} antes={antes} min_bet={min_bet!r:.20}"
        raise DataError(f"{source}: no table for 2 to {MAX_SEATS} seats: {shown}; mend or remove the hand")
    try:
        state = new_state(stacks, blinds, antes=antes, min_bet=min_bet, trims_antes=trims, is_history=True)
    except ValueError as error:
        raise DataError(f"{source}: cannot be set up: {error}; mend or remove the hand") from error
    return state, (blinds[0], blinds[1])


def _chips(fields: dict[str, Any], name: str, source: str) -> list[int]:
    values = fields.get(name)
    if isinstance(values, list) and all(type(value) is int and 0 <= value < MAX_CHIPS for value in values):
        return values
    raise DataError(f"{source}: {name}={values!r:.60} is no list of whole chips; scale or remove the hand")


def _apply(state: State, action: str, blinds: tuple[int, int], known: set[str]) -> Decision | None:
    """Apply one action; return the decision if it is one. Raises ValueError if it is not allowed."""
    match = _ACTION.fullmatch(action)
    if match is None:
        raise ValueError("no action of no-limit hold'em")
    player = int(match["dealee"] or match["player"] or 1)
    if not 1 <= player <= state.player_count:
        raise ValueError(f"there is no player {player}")
    _claim(match, [f"{card.rank}{card.suit}" for card in state.hole_cards[player - 1]], known)
    while state.can_burn_card("??"):  # PHH leaves burnt cards out
        state.burn_card("??")
    decision = None
    if match["bet"] and state.actor_index == player - 1:
        view = view_of(state, *blinds)
        decision = Decision(view, _betting(match, view))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a log may have a fold where checking was free
        parse_action(state, action, int)
    return decision


def _betting(match: re.Match[str], view: View) -> Action:
    if match["amount"]:
        return Action("raise", int(match["amount"]))
    if match["bet"] == "f":
        return Action("fold")
    return Action("call" if view.legal.call_chips else "check")


def _claim(match: re.Match[str], hole: list[str], known: set[str]) -> None:
    """Record the cards that an action reveals. Raises ValueError if a card was dealt elsewhere before."""
    text = match["hole"] or match["board"] or match["shown"] or ""
    cards = [card for card in map("".join, zip(text[::2], text[1::2], strict=True)) if card in CARDS]
    if match["shown"] and "??" not in hole and not set(cards) <= set(hole):
        raise ValueError(f"shows {text}, but holds {''.join(hole)}")
    fresh = cards if not match["shown"] else [card for card in cards if card not in hole]
    if len(set(fresh)) < len(fresh) or known & set(fresh):
        raise ValueError("a card that was dealt before")
    known.update(fresh)
