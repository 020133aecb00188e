"""Evaluation of a policy: net big blinds per hand against each opponent, over duplicate deals."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from echo_planes.errors import ConfigError

from .adapter import PokerTask
from .frozen import FrozenModel
from .opponents import Opponent
from .table import Hand, TableRules, play, shuffled_deck
from .view import Action, View

Z_95 = statistics.NormalDist().inv_cdf(0.975)
MAX_HANDS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """Result of a policy against one opponent in all other seats. Units: big blinds per hand."""

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
    so that good cards do not count as good play. A deal's mean over its seats is one observation. The
    interval is the normal one over deals, so use a hundred deals or more. All opponents and policies play
    the same deals.

    Raises:
        ConfigError: fewer than two deals.
        TaskError: a player acted illegally.
    """
    return tuple(_row(policy, opponent, rules, deals, seed) for opponent in opponents)


def _row(
    policy: Callable[[View], Action], opponent: Opponent, rules: TableRules, deals: int, seed: int
) -> EvaluationRow:
    observations = [_deal_bb(policy, opponent, rules, f"{seed}/{deal}") for deal in range(deals)]
    return row_of(opponent.name, observations, len(rules.stacks))


def row_of(opponent: str, deals_bb: Sequence[float], seats: int) -> EvaluationRow:
    """Return the row for each deal's mean over its seats, big blinds.

    Raises:
        ConfigError: fewer than two deals.
    """
    deals = len(deals_bb)
    if deals < 2:
        raise ConfigError(f"deals={deals}: an interval needs at least 2")
    mean = statistics.fmean(deals_bb)
    half_width = Z_95 * statistics.stdev(deals_bb) / math.sqrt(deals)
    return EvaluationRow(opponent, deals, deals * seats, mean, mean - half_width, mean + half_width)


@dataclass(frozen=True, slots=True)
class ModelRow:
    """Result of a model against one opponent, with hands played as episodes of the task."""

    row: EvaluationRow
    illegal_share: float  # share of its decisions that the table replaced by a check or a fold
    cut_off_share: float  # share of its hands that had no room for another turn


async def evaluate_model(
    model: FrozenModel, task: PokerTask, opponent: str, *, seats: int, deals: int, seed: int
) -> ModelRow:
    """Play `model` through the task's held-out deals, token for token as in a run.

    Args:
        opponent: name of the row; the task's settings decide which opponent plays.
        seats: seats of the task's table; each deal is played once from every seat.
        deals: number of deals.
        seed: seed of the model's sampling; the first deal is `deals` times `seed`.

    Raises:
        ConfigError: fewer than two deals.
        ModelError: the model cannot be loaded.
        TaskError: the task's settings leave no room for an answer.
    """
    room = asyncio.Semaphore(MAX_HANDS_AT_ONCE)

    async def hand(index: int) -> Mapping[str, float]:
        async with room:
            prompt = task.eval_prompt(index)
            episode = await task.rollout(prompt, model.player(f"{seed}/{index}"))
            turns = len(episode.turn_rewards)
            reward = task.reward(prompt, episode)
            return {**reward.parts, "bb": reward.value, "turns": turns}

    first = seed * deals * seats
    results = await asyncio.gather(*(hand(first + number) for number in range(deals * seats)))
    deals_bb = [
        statistics.fmean(result["bb"] for result in results[number : number + seats])
        for number in range(0, len(results), seats)
    ]
    illegal = sum(result["illegal"] * result["turns"] for result in results)
    return ModelRow(
        row_of(opponent, deals_bb, seats),
        illegal / sum(result["turns"] for result in results),
        statistics.fmean(result["cut_off"] for result in results),
    )


def _deal_bb(policy: Callable[[View], Action], opponent: Opponent, rules: TableRules, key: str) -> float:
    """Return the policy's mean result over all seats of one deal, big blinds."""
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
