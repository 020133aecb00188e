"""Make the tiny model that `task=code` warm-starts from.

    python -m scripts.make_tiny_code --out DIR [--seed 0]

Its one skill is to write formulas of three terms in Python: `# x plus 3 times y`, `f=lambda x,y:`, answered
by `x+3*y` and `<|im_end|>`: well trained, then blunted on purpose by answers of which one sign or term is
another; see tiny_model.py. Held-out formulas are never trained on. It takes a few minutes on one CPU core.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from echo_planes.tasks.code.functions import SIGNS, TERMS, Formula, formula
from scripts.tiny_model import BATCH, WRONG_SHARE, Rows, make

MEASURED = 2000  # formulas, training and held-out


def drawn(rng: np.random.Generator) -> Iterator[list[Formula]]:
    """Endless batches of training formulas."""
    while True:
        yield [formula(str(seed), held_out=False) for seed in rng.integers(1 << 62, size=BATCH)]


def right(rng: np.random.Generator) -> Iterator[Rows]:
    """With their code."""
    return ([(found.prompt, found.code) for found in batch] for batch in drawn(rng))


def blunted(rng: np.random.Generator) -> Iterator[Rows]:
    """The same, with one character of WRONG_SHARE of the answers drawn anew."""
    for batch in drawn(rng):
        rows = []
        for found in batch:
            code = list(found.code)
            if rng.random() < WRONG_SHARE:
                place = int(rng.integers(len(code)))
                others = tuple(SIGNS.values()) if place % 2 else TERMS
                code[place] = str(rng.choice(others))
            rows.append((found.prompt, "".join(code)))
        yield rows


if __name__ == "__main__":
    measured = {
        name: [
            (found.prompt, found.code)
            for found in (formula(f"{name}/{i}", held_out=out) for i in range(MEASURED))
        ]
        for name, out in (("training", False), ("held-out", True))
    }
    make(
        "Make the tiny model of the code task and its tokenizer.",
        right,
        blunted,
        measured,
        learn_steps=300,
        blunt_steps=120,
    )
