"""How well a policy plays: net big blinds a hand against each opponent, over duplicate deals."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from echo_planes.errors import ConfigError

from .opponents import Opponent
from .table import Hand, TableRules, play, shuffled_deck
from .view import Action, View

Z_95 = statistics.NormalDist().inv_cdf(0.975)


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """A policy against one opponent in all other seats. Units: big blinds per hand."""

    opponent: str
    deals: int
    hands: int  # deals x seats
    mean_bb: float
    low_bb: float  # 95 % confidence interval, from the spread between deals
    high_bb: float


def evaluate(
    policy: Callable[[View], Action],
    opponents: Sequence[Opponent],
    rules: TableRules,
    *,
    deals: int,
    seed: int,
) -> tuple[EvaluationRow, ...]:
    """Play `policy` against each of `opponents`, which fills all other seats: one row each, in their order.

    Every deal is played once from each seat, with the same cards and the same generator for the opponents,
    so that good cards do not count as good play. A deal's mean over its seats is one observation; the
    interval is the normal one over deals, so it wants a hundred or more. The same deals serve every opponent
    and policy.

    Raises:
        ConfigError: fewer than two deals.
        TaskError: a player acted illegally.
    """
    if deals < 2:
        raise ConfigError(f"deals={deals}: an interval needs at least 2")
    return tuple(_row(policy, opponent, rules, deals, seed) for opponent in opponents)


def _row(
    policy: Callable[[View], Action], opponent: Opponent, rules: TableRules, deals: int, seed: int
) -> EvaluationRow:
    observations = [_deal_bb(policy, opponent, rules, f"{seed}/{deal}") for deal in range(deals)]
    mean = statistics.fmean(observations)
    half_width = Z_95 * statistics.stdev(observations) / math.sqrt(deals)
    hands = deals * len(rules.stacks)
    return EvaluationRow(opponent.name, deals, hands, mean, mean - half_width, mean + half_width)


def _deal_bb(policy: Callable[[View], Action], opponent: Opponent, rules: TableRules, key: str) -> float:
    """The policy's mean result over all seats of one deal, big blinds."""
    deck = shuffled_deck(random.Random(f"deal/{key}"))
    seats = range(len(rules.stacks))
    net_chips = 0
    for seat in seats:
        rng = random.Random(f"opponent/{key}")
        players = [policy if other == seat else partial(opponent.act, rng=rng) for other in seats]
        hand = Hand(rules, deck)
        play(hand, players)
        net_chips += hand.net_chips[seat]
    return net_chips / len(seats) / rules.big_blind
