"""The evaluation table: duplicate deals, honest intervals."""

from __future__ import annotations

import random
from functools import partial

import pytest

from echo_planes.errors import ConfigError
from echo_planes.tasks.poker.evaluate import Z_95, EvaluationRow, evaluate
from echo_planes.tasks.poker.opponents import CallingStation, Maniac, Opponent, TightAggressive, all_opponents
from echo_planes.tasks.poker.table import TableRules
from echo_planes.tasks.poker.view import Action, View

SHORT = TableRules((40, 40))


class Pusher:
    """All-in whenever it may, so a policy that folds loses exactly its blinds."""

    name = "pusher"

    def act(self, view: View, rng: random.Random) -> Action:
        to_chips = view.legal.max_raise_to
        return Action("raise", to_chips) if to_chips else Action("call")


def folder(view: View) -> Action:
    return view.legal.fallback


def checker(view: View) -> Action:
    return Action("call" if view.legal.call_chips else "check")


class Checker:
    name = "checker"

    def act(self, view: View, rng: random.Random) -> Action:
        return checker(view)


def test_one_who_always_folds_loses_the_blinds() -> None:
    (row,) = evaluate(folder, [Pusher()], SHORT, deals=10, seed=1)
    assert row == EvaluationRow("pusher", 10, 20, -0.75, -0.75, -0.75)
    # Six seats: one big and one half-size small blind in six hands, whoever raises first.
    (row,) = evaluate(folder, [Pusher()], TableRules((40,) * 6), deals=4, seed=1)
    assert (row.hands, row.mean_bb) == (24, pytest.approx(-1.5 / 6))


def test_duplicate_deals_cancel_the_luck_of_the_cards() -> None:
    (row,) = evaluate(checker, [Checker()], SHORT, deals=20, seed=3)
    assert (row.mean_bb, row.low_bb, row.high_bb) == (0, 0, 0)


def test_the_interval_covers_zero_for_a_policy_against_itself() -> None:
    for player in all_opponents():
        covered, widths = 0, []
        for seed in range(10):
            policy = partial(player.act, rng=random.Random(f"policy/{seed}"))
            (row,) = evaluate(policy, [player], SHORT, deals=40, seed=seed)
            covered += row.low_bb <= 0 <= row.high_bb
            widths.append(row.high_bb - row.low_bb)
        assert covered >= 8, player.name  # 95 % each: below 8 of 10 has probability 0.01
        assert max(widths) > 0


def test_better_play_shows_outside_the_interval() -> None:
    tight, station = TightAggressive(), CallingStation()
    pairs: list[tuple[Opponent, Opponent, int]] = [(tight, station, 1), (station, tight, -1)]
    for player, opponent, sign in pairs:
        policy = partial(player.act, rng=random.Random(1))
        (row,) = evaluate(policy, [opponent], SHORT, deals=150, seed=2)
        assert row.opponent == opponent.name
        assert min(sign * row.low_bb, sign * row.high_bb) > 0


def test_the_interval_is_the_normal_one_over_deals() -> None:
    def width(deals: int) -> float:
        pusher = partial(Pusher().act, rng=random.Random(0))
        (row,) = evaluate(pusher, [CallingStation()], TableRules((40,) * 3), deals=deals, seed=5)
        assert row.mean_bb == pytest.approx((row.low_bb + row.high_bb) / 2)
        return row.high_bb - row.low_bb

    assert width(25) / width(225) == pytest.approx(3, rel=0.35)  # as the root of the number of deals
    assert pytest.approx(1.96, abs=0.001) == Z_95


def test_the_same_seed_gives_the_same_table() -> None:
    def table(seed: int) -> tuple[EvaluationRow, ...]:
        policy = partial(Maniac().act, rng=random.Random(4))
        return evaluate(policy, all_opponents(), SHORT, deals=8, seed=seed)

    assert table(1) == table(1) != table(2)


def test_one_deal_has_no_interval() -> None:
    with pytest.raises(ConfigError, match="deals=1"):
        evaluate(folder, [Pusher()], SHORT, deals=1, seed=1)
