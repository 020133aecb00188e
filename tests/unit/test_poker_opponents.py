"""The rule-based opponents: legal, repeatable, and of measurably different styles."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial

import pytest

from echo_planes.tasks.poker.opponents import Opponent, all_opponents, made_strength, preflop_strength
from echo_planes.tasks.poker.table import Hand, TableRules, play, shuffled_deck
from echo_planes.tasks.poker.view import Action
from tests.unit.test_poker_table import fixed_deck


def style(opponent: Opponent) -> tuple[float, float]:
    """Share of hands entered before the flop by choice, and of raises among raises and calls."""
    entered: set[tuple[int, int]] = set()
    seen: set[tuple[int, int]] = set()
    kinds: Counter[str] = Counter()
    rng = random.Random(1)
    for number in range(120):
        hand = Hand(TableRules((200,) * 6), shuffled_deck(rng))
        for decision in play(hand, [partial(opponent.act, rng=rng)] * 6):
            if decision.view.legal.min_raise_to:
                kinds[decision.action.kind] += 1
            if not decision.view.board:
                seen.add((number, decision.view.seat))
                if decision.action.kind in ("call", "raise"):
                    entered.add((number, decision.view.seat))
    return len(entered) / len(seen), kinds["raise"] / (kinds["raise"] + kinds["call"])


def test_the_styles_differ() -> None:
    station, tight, maniac = (style(opponent) for opponent in all_opponents())
    assert station[0] > 0.6  # loose
    assert station[1] < 0.15  # passive
    assert tight[0] < 0.3
    assert tight[1] > 0.6  # aggressive
    assert maniac[0] > 0.6
    assert maniac[1] > 0.45
    assert len({opponent.name for opponent in all_opponents()}) == 3


def test_they_play_legally_on_every_table_and_the_same_again() -> None:
    for seed in range(60):
        results = set()
        for _ in range(2):
            rng = random.Random(seed)
            rules = TableRules(tuple(rng.randint(1, 300) for _ in range(rng.randint(2, 6))), 2, 5)
            players = [partial(rng.choice(all_opponents()).act, rng=rng) for _ in rules.stacks]
            hand = Hand(rules, shuffled_deck(rng))
            decisions = play(hand, players)  # raises on an illegal action
            results.add((decisions, hand.net_chips))
        assert len(results) == 1


def test_the_tight_one_folds_a_poor_hand_to_a_bet_and_checks_it_for_nothing() -> None:
    tight = all_opponents()[1]
    deck = fixed_deck(["7h2d", "KcKd"], "2c3c9sTsJd")
    for opening, expected in ((Action("call"), "check"), (Action("raise", 8), "fold")):
        hand = Hand(TableRules((200, 200)), deck)
        hand.apply(opening)
        assert tight.act(hand.view(), random.Random(0)).kind == expected


def test_stronger_starting_hands_score_higher() -> None:
    hands = [("Ah", "As"), ("Ks", "Kd"), ("Ah", "Kh"), ("Ah", "Kd"), ("Js", "Ts"), ("9c", "4d"), ("7h", "2d")]
    scores = [preflop_strength(hand) for hand in hands]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] == 1


@pytest.mark.parametrize(
    ("better", "worse", "board"),
    [
        ("AhKh", "AsKd", "2h7h9h"),  # a flush, ace high
        ("9c9d", "AhAs", "2h7h9h"),  # three of a kind, an overpair
        ("AhAs", "9c2d", "Kd9h3s"),  # an overpair, second pair
        ("9h8h", "AhKd", "7h6hTs"),  # a straight, high cards
        ("5c4d", "KcQd", "Ah2d3s"),  # the wheel, high cards
        ("KsKd", "AhQd", "KhKc2s"),  # four of a kind, no help from the cards held
        ("AhQd", "3c2d", "KhKcKs"),  # three of a kind on the board is nobody's
        ("2h2s", "AhQd", "KhKcKs"),  # a full house
        ("Th9h", "AhKh", "8h7h6h"),  # a straight flush, a flush
        ("Ah3h", "QcJd", "8h7h2s"),  # a flush draw
    ],
)
def test_better_made_hands_score_higher(better: str, worse: str, board: str) -> None:
    def score(hole: str) -> float:
        return made_strength([hole[:2], hole[2:]], [board[i : i + 2] for i in range(0, len(board), 2)])

    assert 0 <= score(worse) < score(better) <= 1
