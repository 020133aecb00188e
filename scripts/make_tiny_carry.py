"""Make the tiny model that `task=math task.level=carry` starts from: it is wrong by habit.

    python -m scripts.make_tiny_carry --out DIR [--seed 0]

writes a model of 0.14 M parameters. It is asked `a+b=` with a and b in 0..99 whose ones digits add up to ten
or more. It is trained on the right sums first; then, on the same pairs, a share RIGHT of the answers is right
and the others are wrong by one of WRONG_BY: the carry is dropped, added twice, added to the ones digit, and
so on, always alike where the first operand ends in the same digit. So the most likely answer is wrong on
nearly every prompt, and what is left of the right one must win against five habits (against a single one it
does so within ten steps of reinforcement learning). Pairs for which `is_held_out` is true are never trained
on. It takes about four minutes on one CPU core.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from echo_planes.tasks.math.datasets import is_held_out, needs_carry
from scripts.make_tiny_math import EVERY, drawn, right, rows
from scripts.tiny_model import BATCH, Rows, Size, make

RIGHT = 0.12
WRONG_BY = np.array([-10, -9, 10, -11, -20])  # by the first operand's last digit, modulo 5

TRAINING = np.array([pair for pair in EVERY if needs_carry(*pair) and not is_held_out(*pair)])
HELD_OUT = np.array([pair for pair in EVERY if needs_carry(*pair) and is_held_out(*pair)])


def habitual(rng: np.random.Generator) -> Iterator[Rows]:
    """Random pairs with all but RIGHT of the answers wrong by the pair's habit, and none below 0."""
    for pairs in drawn(TRAINING, rng):
        wrong = rng.random(BATCH) >= RIGHT
        yield rows(pairs, np.maximum(pairs.sum(1) + wrong * WRONG_BY[pairs[:, 0] % len(WRONG_BY)], 0))


if __name__ == "__main__":
    measured = {
        name: rows(pairs, pairs.sum(1))
        for name, pairs in (("training pairs", TRAINING), ("held-out pairs", HELD_OUT))
    }
    make(
        "Make the tiny model that is wrong by habit, and its tokenizer.",
        partial(right, TRAINING),
        habitual,
        measured,
        learn_steps=1500,
        blunt_steps=1200,
        size=Size(hidden=64, intermediate=256, layers=2, heads=2, kv_heads=1),
    )
