"""Generated one-line functions: small enough to learn without data, and judged by execution.

A problem gives a formula of x and y in words, `x plus 3 times y`, and asks for the body of a lambda. As in
Python, times has precedence over plus and minus.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

SIGNS = {"plus": "+", "minus": "-", "times": "*"}
TERMS = ("x", "y", *(str(digit) for digit in range(2, 10)))
HEAD = "f=lambda x,y:"
_INPUTS = ((0, 0), (1, 0), (0, 1), (3, 2), (2, 5), (7, -3), (-4, 6), (11, 13))
_HOLDOUT = 20  # 1 in 20 is held out


@dataclass(frozen=True, slots=True)
class Formula:
    """Formula in words."""

    words: str  # "x plus 3 times y"

    @property
    def code(self) -> str:
        """Formula in Python: `x+3*y`."""
        return "".join(SIGNS.get(word, word) for word in self.words.split())

    @property
    def prompt(self) -> str:
        """Prompt that the policy continues."""
        return f"# {self.words}\n{HEAD}"

    def tests(self) -> str:
        """Return the tests that a right function passes, as assertions about `f`."""
        # Safe to evaluate: the code is generated from three TERMS and two SIGNS.
        results = [eval(self.code, {"__builtins__": {}}, {"x": x, "y": y}) for x, y in _INPUTS]
        lines = [f"assert f({x}, {y}) == {result}" for (x, y), result in zip(_INPUTS, results, strict=True)]
        return "\n".join(lines)


def is_held_out(formula: Formula) -> bool:
    """Return whether a formula is one of the 5 % that training never sees, the same on every machine."""
    return hashlib.blake2b(formula.words.encode(), digest_size=1).digest()[0] % _HOLDOUT == 0


def formula(seed: str, *, held_out: bool) -> Formula:
    """Return the formula of a seed. It depends only on the arguments."""
    rng = random.Random(seed)
    while True:
        words = [rng.choice(TERMS)]
        for _ in range(2):
            words += [rng.choice(tuple(SIGNS)), rng.choice(TERMS)]
        found = Formula(" ".join(words))
        if is_held_out(found) == held_out and {"x", "y"} & set(words):
            return found
