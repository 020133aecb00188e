"""One hand of no-limit Texas hold'em for 2 to 6 seats, with a fixed deck. pokerkit applies the rules.

Seat 0 is the first after the button: it posts the small blind, seat 1 the big blind, the last seat has the
button. Heads-up seat 0 posts the big blind, seat 1 has the button and the small blind. All chips are whole.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from echo_planes.errors import ConfigError, TaskError

from .engine import legal_of, new_state, view_of
from .view import CARDS, Action, Decision, View

MAX_SEATS = 6


@dataclass(frozen=True, slots=True)
class TableRules:
    """Stacks by seat, and the blinds, in chips.

    Raises:
        ConfigError: there are not 2 to 6 seats, a stack has no chips, or the blinds are not 0 < small <= big.
    """

    stacks: tuple[int, ...]
    small_blind: int = 1
    big_blind: int = 2

    def __post_init__(self) -> None:
        if not 2 <= len(self.stacks) <= MAX_SEATS or min(self.stacks) < 1:
            raise ConfigError(f"stacks={self.stacks}: give 2 to {MAX_SEATS} seats at least one chip each")
        if not 0 < self.small_blind <= self.big_blind:
            raise ConfigError(f"blinds {self.small_blind}/{self.big_blind}: need 0 < small <= big")


def shuffled_deck(rng: random.Random) -> tuple[str, ...]:
    """Return all 52 cards in random order. `Hand` says which card goes where."""
    cards = list(CARDS)
    rng.shuffle(cards)
    return tuple(cards)


class Hand:
    """Hand in play: `actor` is the seat to act on `view()`, `apply` plays on, `net_chips` is the result.

    Seat i holds cards 2i and 2i + 1 of `deck`, and the board is its last five, whatever the actions.

    Raises:
        TaskError: `deck` is not the 52 cards.
    """

    def __init__(self, rules: TableRules, deck: Sequence[str]) -> None:
        if len(deck) != len(CARDS) or set(deck) != set(CARDS):
            raise TaskError(f"poker: a deck of {len(set(deck))} different cards; pass each of the 52 once")
        self.rules = rules
        seats = len(rules.stacks)
        self._state = new_state(rules.stacks, (rules.small_blind, rules.big_blind))
        self._board = deck[-5:]
        self._burns = deck[2 * seats :]
        for seat in range(seats):
            self._state.deal_hole("".join(deck[2 * seat : 2 * seat + 2]), seat)
        self._deal_on()

    @property
    def actor(self) -> int | None:
        """Seat to act; None when the hand is over (the blinds alone may put all players all-in)."""
        return self._state.actor_index

    def view(self) -> View:
        """Return the view of the seat to act.

        Raises:
            TaskError: the hand is over.
        """
        return view_of(self._state, self.rules.small_blind, self.rules.big_blind)

    def apply(self, action: Action) -> None:
        """Apply the action of the seat to act, then deal up to the next decision or the end.

        Raises:
            TaskError: the hand is over, or the action is not legal now.
        """
        legal = legal_of(self._state)
        if not legal.allows(action):
            raise TaskError(f"poker: {action} is illegal for seat {self.actor}; allowed: {legal}")
        if action.kind == "raise":
            self._state.complete_bet_or_raise_to(action.to_chips)
        elif action.kind == "fold":
            self._state.fold()
        else:
            self._state.check_or_call()
        self._deal_on()

    @property
    def net_chips(self) -> tuple[int, ...]:
        """Chips won or lost, by seat; their sum is zero.

        Raises:
            TaskError: the hand is not over.
        """
        if self._state.status:
            raise TaskError(f"poker: no result yet, seat {self.actor} is to act: finish the hand first")
        return tuple(self._state.payoffs)

    def _deal_on(self) -> None:
        state = self._state
        while state.status and not state.actor_indices:
            dealt = len(state.board_cards)
            if state.card_burning_status:
                state.burn_card(self._burns[max(0, dealt - 2)])
            else:
                state.deal_board("".join(self._board[dealt : max(3, dealt + 1)]))


def play(hand: Hand, players: Sequence[Callable[[View], Action]]) -> tuple[Decision, ...]:
    """Play `hand` to its end, `players` by seat. Returns every decision in order."""
    decisions = []
    while (seat := hand.actor) is not None:
        view = hand.view()
        action = players[seat](view)
        hand.apply(action)
        decisions.append(Decision(view, action))
    return tuple(decisions)


def turn_chips(stacks_chips: Sequence[int], net_chips: int, start_chips: int) -> tuple[int, ...]:
    """Return the change of a seat's stack from each decision to its next or the end: r_t of ECHO-2 eq. 14.

    Args:
        stacks_chips: chips behind at each of the seat's T decisions.
        net_chips: the seat's result.
        start_chips: its stack before blinds and antes, which count with the first decision.

    Returns:
        T changes whose sum is `net_chips`, as eq. 20 requires.
    """
    marks = [start_chips, *stacks_chips[1:], start_chips + net_chips]
    return tuple(after - before for before, after in pairwise(marks))
