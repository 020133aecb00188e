"""Three rule-based opponents of different styles, which rate their hand before and after the flop."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from .view import RANKS, Action, View


class Opponent(Protocol):
    """Rule-based player: the same view and generator state give the same action."""

    @property
    def name(self) -> str: ...

    def act(self, view: View, rng: random.Random) -> Action:
        """Return a legal action for the seat to act."""
        ...


class CallingStation:
    """Loose-passive player: calls with almost any hand and rarely raises."""

    name = "calling-station"

    def act(self, view: View, rng: random.Random) -> Action:
        strength = hand_strength(view)
        if strength > 0.85 and rng.random() < 0.3:
            return _raise_by(view, 0.5)
        if strength < 0.3 and _price(view) > 0.3 and rng.random() < 0.8:
            return view.legal.fallback
        return _check_or_call(view)


class TightAggressive:
    """Tight-aggressive player: plays few hands, by raising; folds hands that are not worth the call."""

    name = "tight-aggressive"

    def act(self, view: View, rng: random.Random) -> Action:
        strength = hand_strength(view)
        if not view.board:
            opponents = sum(not folded for folded in view.folded) - 1
            entry = 0.5 + 0.02 * opponents  # more opponents require a better hand
            num_raises = sum(action.kind == "raise" for _, action in view.line[0])
            if strength >= entry + 0.12 * num_raises:
                return _raise_by(view, 1.0)
            return _check_or_call(view) if strength >= entry + 0.2 * _price(view) else view.legal.fallback
        if strength >= 0.75 or (strength >= 0.55 and not view.legal.call_chips):
            return _raise_by(view, 0.7)
        if not view.legal.call_chips and rng.random() < 0.15:
            return _raise_by(view, 0.5)
        return _check_or_call(view) if strength >= 0.2 + _price(view) else view.legal.fallback


class Maniac:
    """Loose-aggressive player: raises about every second time, by any size, and seldom folds."""

    name = "maniac"

    def act(self, view: View, rng: random.Random) -> Action:
        strength = hand_strength(view)
        if rng.random() < 0.35 + 0.3 * strength:
            return _raise_by(view, rng.uniform(0.4, 1.5))
        if strength < 0.35 and _price(view) > 0.2 and rng.random() < 0.5:
            return view.legal.fallback
        return _check_or_call(view)


def all_opponents() -> tuple[Opponent, ...]:
    """Return one opponent of each style."""
    return (CallingStation(), TightAggressive(), Maniac())


def hand_strength(view: View) -> float:
    """Rate a hand from 0 to 1 (best): `preflop_strength`, or `made_strength` once there is a board."""
    return made_strength(view.hole, view.board) if view.board else preflop_strength(view.hole)


def preflop_strength(hole: Sequence[str]) -> float:
    """Rate hole cards from 0 to 1 by ranks, pair, suit and distance: AA 1, AKs 0.75, 22 0.5, 72o 0.18."""
    low, high = sorted(RANKS.index(card[0]) for card in hole)
    if low == high:
        return 0.5 + high / 24
    suited = 0.06 * (hole[0][1] == hole[1][1])
    connected = max(0.0, 0.05 - 0.0125 * (high - low - 1))
    return 0.035 * high + 0.02 * low + suited + connected


def made_strength(hole: Sequence[str], board: Sequence[str]) -> float:
    """Rate a hand from 0 to 1 by what the hole cards add to the board; a hand on the board adds nothing."""
    made, on_board = _category([*hole, *board]), _category(board)
    if made > on_board:
        if made > 1:
            return (0.7, 0.8, 0.86, 0.9, 0.96, 0.99, 1.0)[made - 2]
        paired = max(rank for rank, count in _rank_counts([*hole, *board]).items() if count == 2)
        ranks = sorted(RANKS.index(card[0]) for card in board)
        return 0.6 if paired >= ranks[-1] else 0.45 if paired >= ranks[-2] else 0.35
    draw = max(Counter(card[1] for card in [*hole, *board]).values()) == 4 and len(board) < 5
    return 0.4 if draw else 0.01 * max(RANKS.index(card[0]) for card in hole)


def _rank_counts(cards: Sequence[str]) -> Counter[int]:
    return Counter(RANKS.index(card[0]) for card in cards)


def _category(cards: Sequence[str]) -> int:
    """Return 0 high card, 1 pair, 2 two pair, 3 trips, 4 straight, 5 flush, 6 full, 7 quads, 8 str. flush."""
    counts = _rank_counts(cards)
    repeats = [*sorted(counts.values(), reverse=True), 0][:2]
    suit, length = Counter(card[1] for card in cards).most_common(1)[0]
    if length >= 5:
        is_straight = _has_straight({RANKS.index(card[0]) for card in cards if card[1] == suit})
        return 8 if is_straight else 5  # with seven cards a flush leaves no full house
    if repeats[0] == 4:
        return 7
    if repeats[0] == 3:
        return 6 if repeats[1] >= 2 else 4 if _has_straight(set(counts)) else 3
    if _has_straight(set(counts)):
        return 4
    return sum(count == 2 for count in repeats)


def _has_straight(ranks: set[int]) -> bool:
    low_ace = ranks | {-1} if RANKS.index("A") in ranks else ranks
    return any(all(start + step in low_ace for step in range(5)) for start in range(-1, 9))


def _price(view: View) -> float:
    """Return the call's share of the pot after it: 0 where checking is free, below a half otherwise."""
    return view.legal.call_chips / (view.pot_chips + view.legal.call_chips)


def _check_or_call(view: View) -> Action:
    return Action("call" if view.legal.call_chips else "check")


def _raise_by(view: View, pot_share: float) -> Action:
    """Raise by a share of the pot after a call, within the limits; check or call where none is allowed."""
    legal = view.legal
    if not legal.min_raise_to:
        return _check_or_call(view)
    by_chips = round(pot_share * (view.pot_chips + legal.call_chips))
    to_chips = max(view.bets) + by_chips
    return Action("raise", min(max(to_chips, legal.min_raise_to), legal.max_raise_to))
