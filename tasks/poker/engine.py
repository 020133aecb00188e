"""Rules of the game: pokerkit's state, made without its random deck, and read as a `View`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import combinations

from pokerkit import Automation, Mode, NoLimitTexasHoldem, StandardHighHand, State
from pokerkit import state as operations
from pokerkit.lookups import Entry
from pokerkit.utilities import Card, CardsLike

from echo_planes.errors import TaskError

from .view import CARDS, RANKS, Action, Legal, View

_PACK = tuple(Card.parse("".join(CARDS)))
_AUTOMATIC = (
    Automation.ANTE_POSTING,
    Automation.BET_COLLECTION,
    Automation.RUNOUT_COUNT_SELECTION,
    Automation.HAND_KILLING,
    Automation.CHIPS_PUSHING,
    Automation.CHIPS_PULLING,
)


class _CachedHighHand(StandardHighHand):
    """Cached evaluation: pokerkit evaluates the same seven cards about ten times a hand, slowly."""

    @classmethod
    def from_game(cls, hole_cards: CardsLike, board_cards: CardsLike = ()) -> _CachedHighHand:
        return _best_hand((*Card.clean(hole_cards), *Card.clean(board_cards)))

    @cached_property
    def entry(self) -> Entry:
        return self.lookup.get_entry(self.cards)


@lru_cache(maxsize=256)
def _best_hand(cards: tuple[Card, ...]) -> _CachedHighHand:
    return _CachedHighHand(max(combinations(cards, 5), key=StandardHighHand.lookup.get_entry))


class _DealtState(State):
    """State whose caller deals all cards, so that it never draws from the process's global generator."""

    def get_dealable_cards(self, deal_count: int | None = 0, warning_status: bool = True) -> Iterator[Card]:
        return iter(tuple(self.deck_cards))  # hold'em never uses up the deck: no muck returns


def new_state(
    stacks: Sequence[int],
    blinds: Sequence[int],
    *,
    antes: Sequence[int] = (),
    min_bet: int | None = None,
    trims_antes: bool = True,
    is_history: bool = False,
) -> State:
    """Make a pokerkit state that waits for hole cards: seats, blinds and antes in the order of `TableRules`.

    With `is_history` explicit actions show the cards, and a cash game's rules hold: folding is always
    allowed. Otherwise pokerkit shows the best hands automatically.

    Raises:
        ValueError: pokerkit refuses the numbers.
    """
    automatic = _AUTOMATIC if is_history else (*_AUTOMATIC, Automation.HOLE_CARDS_SHOWING_OR_MUCKING)
    bet = max(blinds) if min_bet is None else min_bet
    game = NoLimitTexasHoldem(automatic, trims_antes, tuple(antes), tuple(blinds), bet)
    state = _DealtState(
        automatic,
        (),  # type: ignore[arg-type]  # pokerkit would shuffle a deck with the process's global generator
        (_CachedHighHand,),
        game.streets,
        game.betting_structure,
        trims_antes,
        tuple(antes),
        tuple(blinds),
        0,
        tuple(stacks),
        len(stacks),
        mode=Mode.CASH_GAME if is_history else Mode.TOURNAMENT,
    )
    state.deck_cards.extend(_PACK)  # before the blinds: pokerkit then checks the number of cards
    while state.can_post_blind_or_straddle():
        state.post_blind_or_straddle()
    return state


def legal_of(state: State) -> Legal:
    """Return the legal actions of the seat to act in `state`. Raises TaskError when no seat is to act."""
    call_chips = state.checking_or_calling_amount
    if call_chips is None:
        raise TaskError("poker: no player is to act, the hand is over: look at net_chips")
    min_raise_to = state.min_completion_betting_or_raising_to_amount
    if min_raise_to is None:
        return Legal(call_chips, 0, 0)
    seat = state.actor_indices[0]
    return Legal(call_chips, min_raise_to, state.stacks[seat] + state.bets[seat])


def view_of(state: State, small_blind: int, big_blind: int) -> View:
    """Return the view of the seat to act in `state`. Raises TaskError when no seat is to act."""
    legal = legal_of(state)
    seat = state.actor_indices[0]
    board = [_text(cards[0]) for cards in state.board_cards]
    return View(
        seat=seat,
        hole=_high_to_low([_text(card) for card in state.hole_cards[seat]]),
        board=(*_high_to_low(board[:3]), *board[3:]),
        pot_chips=sum(state.starting_stacks) - sum(state.stacks),
        stacks=tuple(state.stacks),
        bets=tuple(state.bets),
        folded=tuple(not status for status in state.statuses),
        blinds=(small_blind, big_blind),
        line=_line(state),
        legal=legal,
    )


def _text(card: Card) -> str:
    return f"{card.rank}{card.suit}"


def _high_to_low(cards: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted(cards, key=lambda card: (RANKS.find(card[0]), card[1]), reverse=True))


def _line(state: State) -> tuple[tuple[tuple[int, Action], ...], ...]:
    streets: list[list[tuple[int, Action]]] = [[]]
    num_cards = 0
    for done in state.operations:
        if isinstance(done, operations.Folding):
            streets[-1].append((done.player_index, Action("fold")))
        elif isinstance(done, operations.CheckingOrCalling):
            streets[-1].append((done.player_index, Action("call" if done.amount else "check")))
        elif isinstance(done, operations.CompletionBettingOrRaisingTo):
            streets[-1].append((done.player_index, Action("raise", done.amount)))
        elif isinstance(done, operations.BoardDealing):
            num_cards += len(done.cards)
            streets.extend([] for _ in range(max(0, num_cards - 2) - len(streets) + 1))
    return tuple(tuple(street) for street in streets)
