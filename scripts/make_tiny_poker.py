"""Make the tiny model that `task=poker` warm-starts from, and its tokenizer.

    python -m scripts.make_tiny_poker --out DIR [--seed 0] [--threads 1]

It has seen hands of heads-up no-limit hold'em in the compact style in which every action was drawn at
random among what was allowed, whatever the cards: so it knows how to act, and nothing of how to win. Its
tokenizer knows the words of the compact style (a card, a pot, an action), so a state takes about 15 tokens,
an action one. It takes some minutes on one CPU core.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from echo_planes.tasks.poker.table import Hand, TableRules, play, shuffled_deck
from echo_planes.tasks.poker.text import action_text, state_text
from echo_planes.tasks.poker.view import CARDS, Action, View
from scripts.tiny_model import END, LEARN_LR, LEARN_WARMUP, Rows, make_model, make_tokenizer, report, train

BATCH = 24  # hands
STEPS = 500
MOST_DECISIONS = 3  # of a row; a hand that goes on is cut, so that no row is long
MEASURED = 250  # hands
LEAST_BB, MOST_BB = 3, 12  # stacks
MOST_CHIPS = 2 * MOST_BB  # of one seat, with a big blind of two chips


def words() -> list[str]:
    """Words that are one token each for the tokenizer; everything else it spells."""
    chips = range(MOST_CHIPS + 1)
    return [
        *CARDS,
        *(str(n) for n in chips if n > 9),
        *(f"+{n}" for n in chips),
        *(f" c{n}" for n in chips),
        *(f" r{n}-" for n in chips),
        *(f"r{n}" for n in chips),
        *(f" p{n}" for n in range(2 * MOST_CHIPS + 1)),
        " b1/2 s",
        " r-",
        " -",
        " :",
    ]


def act(view: View, rng: random.Random) -> Action:
    """Fold, check or call, and raise are equally likely where they are allowed: no look at the cards."""
    legal = view.legal
    kinds = [*["fold"] * bool(legal.call_chips), "call", *["raise"] * bool(legal.max_raise_to)]
    kind = rng.choice(kinds)
    if kind == "raise":
        sizes = (legal.min_raise_to, legal.max_raise_to, rng.randint(legal.min_raise_to, legal.max_raise_to))
        return Action("raise", rng.choice(sizes))
    if kind == "fold":
        return Action("fold")
    return Action("call" if legal.call_chips else "check")


def said(view: View, action: Action) -> str:
    """An action as the model says it: the greatest raise is `a`, the same word at every stack."""
    is_all_in = action.kind == "raise" and action.to_chips == view.legal.max_raise_to
    return "a" if is_all_in else action_text(action, "compact")


def rows(rng: random.Random) -> list[tuple[str, str]]:
    """One hand from both seats, each up to one of its decisions, and the action it took."""
    stack = 2 * rng.randint(LEAST_BB, MOST_BB)
    hand = Hand(TableRules((stack, stack)), shuffled_deck(rng))
    taken = play(hand, [lambda view: act(view, rng)] * 2)
    found = []
    for seat in range(2):
        own = [decision for decision in taken if decision.view.seat == seat]
        if not own:
            continue
        own = own[: rng.randint(1, min(len(own), MOST_DECISIONS))]
        states = [state_text(decision.view, "compact") for decision in own]
        actions = [said(decision.view, decision.action) for decision in own]
        before = "".join(
            f"{state}{action}{END}\n" for state, action in zip(states, actions[:-1], strict=False)
        )
        found.append((before + states[-1], actions[-1]))
    return found


def batches(rng: random.Random) -> Iterator[Rows]:
    """Endless batches."""
    while True:
        yield [row for _ in range(BATCH) for row in rows(rng)]


def learn_lr(step: int) -> float:
    """Linear warm-up, then linear to 0."""
    return LEARN_LR * min((step + 1) / LEARN_WARMUP, (STEPS - step) / (STEPS - LEARN_WARMUP))


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the tiny model of the poker task and its tokenizer.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; part of what fixes the result")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(words())
    tokenizer.save_pretrained(args.out)  # before its first use: padding, once used, would be saved with it
    model = make_model(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters())} parameters, vocabulary {len(tokenizer)}")
    train("learn", model, tokenizer, batches(rng), STEPS, learn_lr)
    model.bfloat16().save_pretrained(args.out)
    saved = AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.float32)
    measured = [row for number in range(MEASURED) for row in rows(random.Random(f"measured/{number}"))]
    report("saved", saved, tokenizer, {"random actions": measured})
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
