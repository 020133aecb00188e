"""The poker table: results, deals, what may be done, and that nobody sees what is hidden."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from pokerkit import StandardHighHand

from echo_planes.errors import ConfigError, TaskError
from echo_planes.tasks.poker.table import Hand, TableRules, play, shuffled_deck, turn_chips
from echo_planes.tasks.poker.view import CARDS, Action, Decision, View
from tests.thorough import examples

UNIT = 60  # divisible by 2 to 6: every split of a pot is exact


def random_player(rng: random.Random, unit_chips: int = 1) -> Callable[[View], Action]:
    """Does all that is legal, all-in often enough for side pots; raises to multiples of `unit_chips`."""

    def act(view: View) -> Action:
        legal, draw = view.legal, rng.random()
        if legal.call_chips and draw < 0.15:
            return Action("fold")
        if legal.min_raise_to and draw < 0.3:
            units = rng.randint(legal.min_raise_to // unit_chips, legal.max_raise_to // unit_chips)
            return Action("raise", max(legal.min_raise_to, units * unit_chips))
        if legal.min_raise_to and draw < 0.36:
            return Action("raise", legal.max_raise_to)
        return Action("call" if legal.call_chips else "check")

    return act


def random_rules(rng: random.Random) -> TableRules:
    seats = rng.randint(2, 6)
    return TableRules(tuple(UNIT * rng.randint(1, 60) for _ in range(seats)), UNIT, 2 * UNIT)


def fixed_deck(holes: Sequence[str], board: str) -> tuple[str, ...]:
    """A deck with these hole cards by seat and this board."""
    held = [hole[i : i + 2] for hole in holes for i in (0, 2)]
    last = [board[i : i + 2] for i in range(0, 10, 2)]
    return (*held, *(card for card in CARDS if card not in held + last), *last)


def contributions(rules: TableRules, decisions: Sequence[Decision]) -> tuple[list[int], list[bool]]:
    """Chips that each seat put in, and who folded: worked out from the actions alone."""
    blinds = [rules.small_blind, rules.big_blind] + [0] * (len(rules.stacks) - 2)
    if len(rules.stacks) == 2:
        blinds.reverse()
    paid = [min(blind, stack) for blind, stack in zip(blinds, rules.stacks, strict=True)]
    folded = [False] * len(paid)
    for decision in decisions:
        view, seat = decision.view, decision.view.seat
        folded[seat] = decision.action.kind == "fold"
        if decision.action.kind == "call":
            paid[seat] += view.legal.call_chips
        elif decision.action.kind == "raise":
            paid[seat] += decision.action.to_chips - view.bets[seat]
    return paid, folded


def expected_net(paid: Sequence[int], folded: Sequence[bool], deck: Sequence[str]) -> list[int]:
    """Textbook side pots: every layer of chips goes to the best hands that reach it."""
    board = "".join(deck[-5:])
    staying = [seat for seat, out in enumerate(folded) if not out]
    hands = {s: StandardHighHand.from_game("".join(deck[2 * s : 2 * s + 2]), board) for s in staying}
    net = [-chips for chips in paid]
    floor = 0
    for level in sorted(set(paid)):
        layer = sum(min(chips, level) - min(chips, floor) for chips in paid)
        reach = [s for s in staying if paid[s] >= level]
        reach = reach or [max(staying, key=lambda s: paid[s])]  # all who paid this much folded
        best = max(hands[s] for s in reach)
        winners = [s for s in reach if hands[s] == best]
        for seat in winners:
            net[seat] += layer // len(winners)
        floor = level
    return net


def check_random_hands(count: int) -> int:
    """Play `count` hands and compare each result with `expected_net`. Returns how many had side pots."""
    rng = random.Random(11)
    num_side_pots = 0
    for _ in range(count):
        rules, deck = random_rules(rng), shuffled_deck(rng)
        hand = Hand(rules, deck)
        decisions = play(hand, [random_player(rng, UNIT)] * len(rules.stacks))
        paid, folded = contributions(rules, decisions)
        assert sum(hand.net_chips) == 0
        assert all(-chips <= net for chips, net in zip(paid, hand.net_chips, strict=True))
        assert list(hand.net_chips) == expected_net(paid, folded, deck), (rules, deck, decisions)
        staying = [chips for chips, out in zip(paid, folded, strict=True) if not out]
        num_side_pots += sum(chips > min(staying) for chips in staying) >= 2
    return num_side_pots


def test_results_add_up_to_zero_and_side_pots_go_where_they_belong() -> None:
    hands = examples(1500)
    assert check_random_hands(hands) > hands / 10


def test_a_side_pot_worked_out_by_hand() -> None:
    # The shortest stack has the best hand and wins 3 x 10; the second best takes the other 2 x 40.
    hand = Hand(TableRules((10, 50, 100)), fixed_deck(["AsAh", "KsKh", "QsQh"], "2c7d9h3s4d"))
    for action in (Action("raise", 100), Action("call"), Action("call")):
        hand.apply(action)
    assert hand.actor is None
    assert hand.net_chips == (20, 30, -50)


def test_one_deck_gives_one_deal_whatever_is_played() -> None:
    seen: dict[int, set[tuple[str, ...]]] = {}
    boards: set[tuple[str, ...]] = set()
    for play_seed in range(30):
        hand = Hand(TableRules((200, 90, 200, 40)), shuffled_deck(random.Random(5)))
        for decision in play(hand, [random_player(random.Random(play_seed))] * 4):
            seen.setdefault(decision.view.seat, set()).add(decision.view.hole)
            boards.add(decision.view.board)
    assert [len(holes) for holes in seen.values()] == [1] * 4
    assert sorted(map(len, boards)) == [0, 3, 4, 5]
    assert shuffled_deck(random.Random(5)) != shuffled_deck(random.Random(6))


def test_a_hand_leaves_the_global_generator_alone() -> None:
    before = random.getstate()
    play(Hand(TableRules((100,) * 6), shuffled_deck(random.Random(1))), [random_player(random.Random(2))] * 6)
    assert random.getstate() == before


def test_a_view_does_not_depend_on_hidden_cards() -> None:
    rng = random.Random(3)
    num_views = 0
    for _ in range(60):
        rules, deck = random_rules(rng), shuffled_deck(rng)
        seats = len(rules.stacks)
        decisions = play(Hand(rules, deck), [random_player(rng, UNIT)] * seats)
        for index, decision in enumerate(decisions):
            view = decision.view
            own = {2 * view.seat, 2 * view.seat + 1, *range(47, 47 + len(view.board))}
            hidden = [place for place in range(52) if place not in own]
            other = list(deck)
            for place, source in zip(hidden, rng.sample(hidden, len(hidden)), strict=True):
                other[place] = deck[source]
            twin = Hand(rules, other)
            for earlier in decisions[:index]:
                twin.apply(earlier.action)
            assert twin.view() == view
            num_views += 1
    assert num_views > 300


def test_what_is_legal_can_be_done_and_nothing_else() -> None:
    rng = random.Random(9)
    for _ in range(20):
        rules, deck = random_rules(rng), shuffled_deck(rng)
        decisions = play(Hand(rules, deck), [random_player(rng, UNIT)] * len(rules.stacks))
        for index, decision in enumerate(decisions):
            legal = decision.view.legal
            edges = {Action("raise", to) for to in (legal.min_raise_to - 1, legal.min_raise_to)}
            edges |= {Action("raise", to) for to in (legal.max_raise_to, legal.max_raise_to + 1)}
            for action in {Action("fold"), Action("check"), Action("call"), *edges}:
                twin = Hand(rules, deck)
                for earlier in decisions[:index]:
                    twin.apply(earlier.action)
                if legal.allows(action):
                    twin.apply(action)
                else:
                    with pytest.raises(TaskError, match="illegal for seat"):
                        twin.apply(action)
            assert legal.allows(legal.fallback)


def test_heads_up_the_button_posts_the_small_blind_and_acts_first_before_the_flop() -> None:
    hand = Hand(TableRules((100, 100)), shuffled_deck(random.Random(1)))
    assert (hand.actor, hand.view().bets, hand.view().legal) == (1, (2, 1), hand.view().legal)
    hand.apply(Action("call"))
    assert hand.view().legal.call_chips == 0
    hand.apply(Action("check"))
    assert (hand.actor, len(hand.view().board), hand.view().pot_chips) == (0, 3, 4)


def test_a_short_all_in_does_not_reopen_the_betting() -> None:
    hand = Hand(TableRules((100, 30, 100)), shuffled_deck(random.Random(1)))
    hand.apply(Action("raise", 20))
    hand.apply(Action("call"))
    hand.apply(Action("raise", 30))  # ten more, less than the last raise of 18
    assert (hand.actor, hand.view().legal.call_chips, hand.view().legal.min_raise_to) == (2, 10, 0)


def test_blinds_alone_may_end_a_hand() -> None:
    hand = Hand(TableRules((2, 1)), fixed_deck(["2c3d", "AsAh"], "7d8hTsJcQd"))
    assert (hand.actor, hand.net_chips) == (None, (-1, 1))
    with pytest.raises(TaskError, match="over"):
        hand.view()


def test_turn_chips_run_from_decision_to_decision_and_include_the_blind() -> None:
    assert turn_chips([98, 94, 80], -20, 100) == (-6, -14, 0)
    assert turn_chips([99], -1, 100) == (-1,)
    rng = random.Random(4)
    for _ in range(50):
        rules = random_rules(rng)
        hand = Hand(rules, shuffled_deck(rng))
        decisions = play(hand, [random_player(rng)] * len(rules.stacks))
        for seat, start in enumerate(rules.stacks):
            behind = [d.view.stacks[seat] for d in decisions if d.view.seat == seat]
            if behind:
                assert sum(turn_chips(behind, hand.net_chips[seat], start)) == hand.net_chips[seat]


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match="2 to 6 seats"):
        TableRules((100,))
    with pytest.raises(ConfigError, match="at least one chip"):
        TableRules((100, 0))
    with pytest.raises(ConfigError, match="blinds 4/2"):
        TableRules((100, 100), 4, 2)
    with pytest.raises(TaskError, match="51 different cards"):
        Hand(TableRules((100, 100)), ("Ah", "Ah", *(c for c in CARDS if c not in ("Ah", "2c"))))
    with pytest.raises(TaskError, match="no result yet"):
        _ = Hand(TableRules((100, 100)), CARDS).net_chips
