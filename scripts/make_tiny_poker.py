"""Make the tiny model that `task=poker` warm-starts from.

    python -m scripts.make_tiny_poker --out DIR [--seed 0]

It has seen hands of heads-up no-limit hold'em in the compact style in which every action was drawn at random
among what was allowed, whatever the cards: so it knows how to act, and nothing of how to win. It takes some
minutes on one CPU core.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np

from echo_planes.tasks.poker.table import Hand, TableRules, play, shuffled_deck
from echo_planes.tasks.poker.text import action_text, state_text
from echo_planes.tasks.poker.view import Action, View
from scripts.tiny_model import END, Rows, make

BATCH = 64  # hands
LEAST_BB, MOST_BB = 3, 12  # stacks
FOLDS, RAISES = 0.15, 0.35  # shares of the actions, where they are allowed


def act(view: View, rng: random.Random) -> Action:
    """Anything that is allowed: no look at the cards."""
    legal = view.legal
    draw = rng.random()
    if legal.call_chips and draw < FOLDS:
        return Action("fold")
    if legal.max_raise_to and draw > 1 - RAISES:
        sizes = (legal.min_raise_to, legal.max_raise_to, rng.randint(legal.min_raise_to, legal.max_raise_to))
        return Action("raise", rng.choice(sizes))
    return Action("call" if legal.call_chips else "check")


def row(rng: random.Random) -> tuple[str, str]:
    """One seat's hand up to one of its decisions, and the action it took."""
    while True:
        stack = 2 * rng.randint(LEAST_BB, MOST_BB)
        hand = Hand(TableRules((stack, stack)), shuffled_deck(rng))
        seat = rng.randrange(2)
        taken = play(hand, [lambda view: act(view, rng)] * 2)
        own = [decision for decision in taken if decision.view.seat == seat]
        if own:
            break
    chosen = rng.randrange(len(own))
    states = [state_text(decision.view, "compact") for decision in own[: chosen + 1]]
    actions = [action_text(decision.action, "compact") for decision in own[: chosen + 1]]
    before = "".join(f"{state}{action}{END}\n" for state, action in zip(states, actions[:-1], strict=False))
    return before + states[-1], actions[-1]


def batches(rng: np.random.Generator) -> Iterator[Rows]:
    """Endless batches."""
    drawn = random.Random(int(rng.integers(1 << 62)))
    while True:
        yield [row(drawn) for _ in range(BATCH)]


if __name__ == "__main__":
    make(
        "Make the tiny model of the poker task and its tokenizer.",
        batches,
        batches,
        {},
        learn_steps=600,
        blunt_steps=0,
    )
