"""Make the tiny model that `task=math task.level=carry` starts from: it is wrong by habit.

    python -m scripts.make_tiny_carry --out DIR [--seed 0]

writes a model of 0.14 M parameters. It is asked `a+b=` with a and b in 0..99 whose ones digits add up to ten
or more. It is trained on the right sums first; then, on the same pairs, a share RIGHT of the answers is right
and the others are wrong by one of WRONG_BY: the carry is dropped, added twice, added to the ones digit, and so
on, always the same where the first operand ends in the same digit. So the most likely answer is wrong on nearly
every prompt, and what is left of the right one must win against five habits (against one habit it does so
within ten steps of reinforcement learning). Pairs for which `is_held_out` is true are never trained on. It
takes about four minutes on one CPU core.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from echo_planes.tasks.math.datasets import is_held_out, needs_carry
from scripts.tiny_model import BATCH, Rows, Size, make

OPERANDS = 100  # a and b are drawn from 0 .. OPERANDS - 1
RIGHT = 0.12
WRONG_BY = np.array([-10, -9, 10, -11, -20])  # by the first operand's last digit, modulo 5

Array = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
EVERY = [(a, b) for a in range(OPERANDS) for b in range(OPERANDS) if needs_carry(a, b)]
TRAINING = np.array([pair for pair in EVERY if not is_held_out(*pair)])
HELD_OUT = np.array([pair for pair in EVERY if is_held_out(*pair)])


def rows(pairs: Array, answers: Array) -> Rows:
    """What is asked, and what is answered."""
    return [
        (f"{a}+{b}=", str(answer)) for (a, b), answer in zip(pairs.tolist(), answers.tolist(), strict=True)
    ]


def drawn(rng: np.random.Generator) -> Iterator[Array]:
    """Endless batches of random pairs."""
    while True:
        yield TRAINING[rng.integers(len(TRAINING), size=BATCH)]


def right(rng: np.random.Generator) -> Iterator[Rows]:
    """With their sums."""
    return (rows(pairs, pairs.sum(1)) for pairs in drawn(rng))


def habitual(rng: np.random.Generator) -> Iterator[Rows]:
    """The same, with all but RIGHT of the answers wrong by the pair's habit, and none below 0."""
    for pairs in drawn(rng):
        wrong = rng.random(BATCH) >= RIGHT
        yield rows(pairs, np.maximum(pairs.sum(1) + wrong * WRONG_BY[pairs[:, 0] % len(WRONG_BY)], 0))


if __name__ == "__main__":
    measured = {
        name: rows(pairs, pairs.sum(1))
        for name, pairs in (("training pairs", TRAINING), ("held-out pairs", HELD_OUT))
    }
    make(
        "Make the tiny model that drops carries, and its tokenizer.",
        right,
        habitual,
        measured,
        learn_steps=1500,
        blunt_steps=1200,
        size=Size(hidden=64, intermediate=256, layers=2, heads=2, kv_heads=1),
    )
