"""Make the tiny addition model that the examples and tests warm-start from.

    python -m scripts.make_tiny_math --out DIR [--seed 0]

writes a Hugging Face folder: a Qwen3-architecture language model of about 0.6 M parameters (bf16
safetensors) and a byte-level tokenizer. Its one skill is `a+b=` with a and b in 0..99, answered by the sum
and `<|im_end|>`: well trained, then blunted on purpose by sums that are wrong by 1, 2, 9 or 10; see
tiny_model.py. Operand pairs for which `is_held_out` is true are never trained on. It takes about 9 to 11
minutes on one CPU core.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from scripts.tiny_model import BATCH, WRONG_SHARE, Rows, make

OPERANDS = 100  # a and b are drawn from 0 .. OPERANDS - 1
WRONG_BY = np.array([-10, -9, -2, -1, 1, 2, 9, 10])

Array = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
EVERY = [(a, b) for a in range(OPERANDS) for b in range(OPERANDS)]


def is_held_out(a: int, b: int) -> bool:
    """True for the 5 % of operand pairs kept out of training: `(a * 100 + b) % 20 == 7`.

    As 100 is a multiple of 20 this is `b % 20 == 7`: every pair whose second operand is 7, 27, 47, 67 or 87.
    The model has never seen those as second operands, only as first ones.
    """
    return (a * 100 + b) % 20 == 7


TRAINING = np.array([pair for pair in EVERY if not is_held_out(*pair)])


def rows(pairs: Array, answers: Array) -> Rows:
    """Rows of questions and answers."""
    return [
        (f"{a}+{b}=", str(answer)) for (a, b), answer in zip(pairs.tolist(), answers.tolist(), strict=True)
    ]


def drawn(training: Array, rng: np.random.Generator) -> Iterator[Array]:
    """Endless batches of random pairs."""
    while True:
        yield training[rng.integers(len(training), size=BATCH)]


def right(training: Array, rng: np.random.Generator) -> Iterator[Rows]:
    """With their sums."""
    return (rows(pairs, pairs.sum(1)) for pairs in drawn(training, rng))


def blunted(rng: np.random.Generator) -> Iterator[Rows]:
    """The same, with WRONG_SHARE of the answers moved by one of WRONG_BY, and none below 0."""
    for pairs in drawn(TRAINING, rng):
        wrong = rng.random(BATCH) < WRONG_SHARE
        yield rows(pairs, np.maximum(pairs.sum(1) + wrong * rng.choice(WRONG_BY, size=BATCH), 0))


if __name__ == "__main__":
    sets = {
        "all pairs": np.array(EVERY),
        "held-out pairs": np.array([pair for pair in EVERY if is_held_out(*pair)]),
        "training pairs": TRAINING,
    }
    measured = {name: rows(pairs, pairs.sum(1)) for name, pairs in sets.items()}
    make(
        "Make the tiny addition model and its tokenizer.",
        partial(right, TRAINING),
        blunted,
        measured,
        learn_steps=2500,
        blunt_steps=350,
    )
