"""Poker in words: one text per state, and answers read strictly and fairly."""

from __future__ import annotations

import random
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from echo_planes.config.schema import BUILTIN_MODELS
from echo_planes.tasks.poker.opponents import all_opponents
from echo_planes.tasks.poker.table import Hand, TableRules, play, shuffled_deck
from echo_planes.tasks.poker.text import Style, action_text, read_answer, state_text
from echo_planes.tasks.poker.view import CARDS, Action, Legal, View
from tests.unit.test_poker_table import fixed_deck, random_player, random_rules

STYLES: tuple[Style, ...] = ("compact", "plain")
FREE, FACING, COVERED = Legal(0, 4, 100), Legal(10, 20, 100), Legal(10, 0, 0)


@st.composite
def legals(draw: st.DrawFn) -> Legal:
    call_chips = draw(st.integers(0, 10**9))
    if draw(st.booleans()):
        return Legal(call_chips, 0, 0)
    least = draw(st.integers(1, 10**9))
    return Legal(call_chips, least, draw(st.integers(least, 10**11)))


def views(count: int) -> list[View]:
    rng = random.Random(2)
    found: list[View] = []
    for _ in range(count):
        rules = random_rules(rng)
        decisions = play(Hand(rules, shuffled_deck(rng)), [random_player(rng)] * len(rules.stacks))
        found.extend(decision.view for decision in decisions)
    return found


NEAR = st.from_regex(r"\s*(fold|check|call|all-in|raise to|[fkcar]) ?-?[0-9]{0,30}\s*", fullmatch=True)


@given(st.one_of(st.text(), NEAR), legals(), st.sampled_from(STYLES))
def test_any_text_gets_a_legal_action(text: str, legal: Legal, style: Style) -> None:
    answer = read_answer(text, legal, style)
    assert legal.allows(answer.action)
    assert answer.is_legal or answer.action == legal.fallback


@given(st.data(), legals(), st.sampled_from(STYLES))
def test_every_legal_action_reads_back(data: st.DataObject, legal: Legal, style: Style) -> None:
    actions = [Action("fold"), Action("call")] if legal.call_chips else [Action("check")]
    if legal.min_raise_to:
        actions.append(Action("raise", data.draw(st.integers(legal.min_raise_to, legal.max_raise_to))))
    for action in actions:
        answer = read_answer(action_text(action, style), legal, style)
        assert (answer.action, answer.fault) == (action, "")


@pytest.mark.parametrize(
    ("text", "legal", "style", "action", "fault"),
    [
        ("fold", FACING, "plain", Action("fold"), ""),
        (" Call\n", FACING, "plain", Action("call"), ""),
        ("RAISE TO 20", FACING, "plain", Action("raise", 20), ""),
        ("all-in", FACING, "plain", Action("raise", 100), ""),
        ("a", COVERED, "compact", Action("call"), ""),
        ("r4", FREE, "compact", Action("raise", 4), ""),
        ("fold", FREE, "plain", Action("check"), "not allowed now"),
        ("check", FACING, "plain", Action("fold"), "not allowed now"),
        ("c", FREE, "compact", Action("check"), "not allowed now"),
        ("r50", COVERED, "compact", Action("fold"), "not allowed now"),
        ("a", Legal(0, 0, 0), "compact", Action("check"), "not allowed now"),
        ("raise to 101", FACING, "plain", Action("fold"), "raise out of range"),
        ("r3", FREE, "compact", Action("check"), "raise out of range"),
        ("raise to 020", FACING, "plain", Action("fold"), "unparsable"),
        ("raise 20", FACING, "plain", Action("fold"), "unparsable"),
        ("I fold", FACING, "plain", Action("fold"), "unparsable"),
        ("call.", FACING, "plain", Action("fold"), "unparsable"),
        ("F", FACING, "compact", Action("fold"), "unparsable"),
        ("call", FACING, "compact", Action("fold"), "unparsable"),
        ("r\u0663\u0660", FACING, "compact", Action("fold"), "unparsable"),
        ("chec\u212a", FREE, "plain", Action("check"), "unparsable"),
        ("r" + "9" * 5000, FREE, "compact", Action("check"), "unparsable"),
        ("", FREE, "compact", Action("check"), "unparsable"),
    ],
)
def test_answers(text: str, legal: Legal, style: Style, action: Action, fault: str) -> None:
    answer = read_answer(text, legal, style)
    assert (answer.action, answer.fault) == (action, fault)


@pytest.mark.parametrize("style", STYLES)
def test_different_states_have_different_texts(style: Style) -> None:
    known: dict[str, View] = {}
    for view in views(250):
        assert known.setdefault(state_text(view, style), view) == view
    assert len(known) > 1000


def test_the_order_of_dealt_cards_does_not_change_the_text() -> None:
    rules = TableRules((100, 100))
    texts = set()
    for holes, board in ((["AhKd", "2c3c"], "Qs2hTh7d5c"), (["KdAh", "2c3c"], "ThQs2h7d5c")):
        hand = Hand(rules, fixed_deck(holes, board))
        hand.apply(Action("call"))
        hand.apply(Action("check"))
        texts.add(state_text(hand.view(), "compact"))
    assert len(texts) == 1


def test_the_compact_text_is_as_described_and_short() -> None:
    hand = Hand(TableRules((100, 100, 100)), fixed_deck(["KdAh", "2c3c", "2d3d"], "2hThQs7d5c"))
    for action in (Action("raise", 6), Action("call"), Action("fold"), Action("check"), Action("raise", 4)):
        hand.apply(action)
    assert state_text(hand.view(), "compact") == "AhKd QsTh2h p18 c4 r8-94 b1/2 s*94,x98,90+4 r6cf/kr4:"
    texts = [state_text(view, "compact") for view in views(100)]
    assert all(" " <= character <= "~" for text in texts for character in text)


def test_the_plain_text_says_what_is_allowed() -> None:
    hand = Hand(TableRules((100, 50, 100)), fixed_deck(["AhKd", "2c3c", "9s9h"], "2hThQs7d5c"))
    hand.apply(Action("raise", 60))
    hand.apply(Action("fold"))
    text = state_text(hand.view(), "plain")
    assert "You are seat 2 of 3." in text
    assert "Hand: 3c 2c. Board: none. Pot: 63. To call: 48" in text
    assert "seat 1 folded, has 99, bet 1; seat 3 has 40, bet 60." in text
    assert "Preflop: seat 3 raises to 60, seat 1 folds." in text
    assert text.endswith("Allowed: fold, call.")


def test_the_tiny_model_reads_a_short_stack_in_few_tokens() -> None:
    tokenizer = Tokenizer.from_file(str(BUILTIN_MODELS["builtin:tiny-poker"] / "tokenizer.json"))
    rng, lengths = random.Random(4), []
    for _ in range(60):
        hand = Hand(TableRules((10, 10)), shuffled_deck(rng))
        for decision in play(hand, [partial(opponent.act, rng=rng) for opponent in all_opponents()[1:]]):
            text = state_text(decision.view, "compact")
            ids = tokenizer.encode(text).ids
            assert tokenizer.decode(ids) == text
            lengths.append(len(ids))
            assert len(tokenizer.encode(action_text(decision.action, "compact")).ids) == 1
    assert len(lengths) > 60
    assert sum(lengths) / len(lengths) < 20
    assert all(len(tokenizer.encode(card).ids) == 1 for card in CARDS)
