"""Views and actions of the players of a hand, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RANKS, SUITS = "23456789TJQKA", "cdhs"
CARDS = tuple(rank + suit for rank in RANKS for suit in SUITS)

Kind = Literal["fold", "check", "call", "raise"]


@dataclass(frozen=True, slots=True)
class Action:
    """Betting decision; a bet is a raise. All-in is a raise or a call of the whole stack."""

    kind: Kind
    to_chips: int = 0  # raise: the seat's whole bet on this street afterwards; else 0


@dataclass(frozen=True, slots=True)
class Legal:
    """Legal actions of the seat to act. Folding is legal only where checking is not free."""

    call_chips: int  # chips that a call adds; 0: checking is free
    min_raise_to: int  # 0: no raise is allowed
    max_raise_to: int  # the raise that is all-in; 0: no raise is allowed

    def allows(self, action: Action) -> bool:
        if action.kind == "raise":
            return 0 < self.min_raise_to <= action.to_chips <= self.max_raise_to
        return action.to_chips == 0 and (action.kind == "check") == (self.call_chips == 0)

    @property
    def fallback(self) -> Action:
        """Stand-in for an illegal action: check where it is free, else fold."""
        return Action("fold" if self.call_chips else "check")


@dataclass(frozen=True, slots=True)
class View:
    """Everything that the seat to act may know. N: seats. Cards like "Ah", in a canonical order."""

    seat: int
    hole: tuple[str, ...]  # 2, high to low
    board: tuple[str, ...]  # 0, 3, 4 or 5; the flop high to low, then turn and river
    pot_chips: int  # all chips in the pot, bets of this street included
    stacks: tuple[int, ...]  # N, chips behind
    bets: tuple[int, ...]  # N, chips bet on this street
    folded: tuple[bool, ...]  # N
    blinds: tuple[int, int]  # small, big
    line: tuple[tuple[tuple[int, Action], ...], ...]  # per street so far: (seat, action) in order
    legal: Legal


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision of a hand."""

    view: View
    action: Action
