"""Questions of the quiz, and the judge of their answers.

It uses the standard library only, so that other trainers can ask and judge the same.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass

NAMES = ("Tom", "Anna", "Ben", "Lucy", "Sam", "Mia", "Paul", "Rosa", "Jack", "Nina", "Max", "Emma")
_THINGS = ("apples", "books", "pens", "eggs", "coins", "cups", "balls", "keys", "stamps", "cards", "shells")
_HELD_OUT_ONE_IN = 5  # operands of a family
_NUMBER = re.compile(r"(?<![\w.])-?[0-9]+(?:[.,][0-9]+)*")
_NAME = re.compile(rf"\b(?:{'|'.join(NAMES)})\b")


@dataclass(frozen=True, slots=True)
class Question:
    """One question."""

    family: str
    operands: str  # decide whether it is held out; of families that compute the same they are the same
    text: str
    answer: str  # a number in digits, or one of NAMES


_Made = tuple[str, str, int | str]  # operands, text, answer


def _sum(rng: random.Random) -> _Made:
    a, b = rng.randint(1, 9), rng.randint(1, 9)
    return _pair("+", a, b), f"What is {a} plus {b}?", a + b


def _product(rng: random.Random) -> _Made:
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    return _pair("*", a, b), f"What is {a} times {b}?", a * b


def _larger(rng: random.Random) -> _Made:
    numbers = rng.sample(range(1, 100), 2)
    return _set(numbers), f"Which number is larger, {numbers[0]} or {numbers[1]}?", max(numbers)


def _age(rng: random.Random) -> _Made:
    names, ages = rng.sample(NAMES, 2), rng.sample(range(5, 80), 2)
    told = _joined([f"{name} is {age}" for name, age in zip(names, ages, strict=True)])
    who = rng.randrange(2)
    return _set(ages), f"{told} years old. How old is {names[who]}?", ages[who]


def _has(rng: random.Random) -> _Made:
    names, counts, thing = rng.sample(NAMES, 2), rng.sample(range(2, 40), 2), rng.choice(_THINGS)
    told = _joined([f"{name} has {count} {thing}" for name, count in zip(names, counts, strict=True)])
    who = rng.randrange(2)
    return _set(counts), f"{told}. How many {thing} does {names[who]} have?", counts[who]


def _last(rng: random.Random) -> _Made:
    numbers = rng.sample(range(1, 100), 4)
    return _set(numbers), f"What is the last number in this list: {_listed(numbers)}?", numbers[-1]


def _largest(rng: random.Random) -> _Made:
    numbers = rng.sample(range(1, 100), 4)
    return _set(numbers), f"Which of these numbers is the largest: {_listed(numbers)}?", max(numbers)


def _owner(rng: random.Random) -> _Made:
    names, things = rng.sample(NAMES, 3), rng.sample(_THINGS, 3)
    told = _joined([f"{name} has the {thing}" for name, thing in zip(names, things, strict=True)])
    who = rng.randrange(3)
    return " ".join(sorted(things)), f"{told}. Who has the {things[who]}?", names[who]


def _pair(operation: str, a: int, b: int) -> str:
    return f"{min(a, b)}{operation}{max(a, b)}"


def _set(numbers: list[int]) -> str:
    return " ".join(map(str, sorted(numbers)))


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _joined(parts: list[str]) -> str:
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


_Draw = Callable[[random.Random], _Made]
TRAINED: dict[str, _Draw] = {
    "sum": _sum,
    "product": _product,
    "larger": _larger,
    "age": _age,
    "has": _has,
    "last": _last,
}
UNSEEN: dict[str, _Draw] = {"largest": _largest, "owner": _owner}  # asked in evaluations only
_ROUNDS = 2  # of the trained families, before one that is unseen


def training_question(seed: int, index: int) -> Question:
    """Return training question `index`: an independent draw of a family, and of operands not held out."""
    rng = random.Random(f"{seed}/{index}")
    return _drawn(rng, rng.choice(list(TRAINED)), held_out=False)


def held_out_question(index: int) -> Question:
    """Return held-out question `index`, the same for every seed."""
    return _drawn(random.Random(f"held out/{index}"), held_out_family(index), held_out=True)


def held_out_family(index: int) -> str:
    """Return the family of held-out question `index`: each trained one in turn, twice, then an unseen one."""
    block, place = divmod(index, _ROUNDS * len(TRAINED) + 1)
    trained = place < _ROUNDS * len(TRAINED)
    return list(TRAINED)[place % len(TRAINED)] if trained else list(UNSEEN)[block % len(UNSEEN)]


def is_held_out(operands: str) -> bool:
    """Return whether questions with these operands are held out, in all families."""
    return zlib.crc32(operands.encode()) % _HELD_OUT_ONE_IN == 0


def is_right(question: str, answer: str, said: str, *, ended: bool) -> bool:
    """Return whether an answer is right.

    Its last number (name, where the answer is one) is the right one, and all others are the question's. So
    `7 times 8 is 56.` is right, and a list of guesses is wrong. A number at the place where an answer was cut
    off may be incomplete, and counts as wrong.

    Args:
        question: the question's text.
        answer: the right answer.
        said: the policy's answer, without special tokens.
        ended: whether the policy ended it, not the token limit.
    """
    kind = _NAME if answer in NAMES else _NUMBER
    found = list(kind.finditer(said))
    if not found or (not ended and not said[found[-1].end() :].strip(".,")):
        return False
    values = [one[0] for one in found]
    return values[-1] == answer and {*values[:-1]} <= {answer, *kind.findall(question)}


def _drawn(rng: random.Random, family: str, *, held_out: bool) -> Question:
    draw = (TRAINED | UNSEEN)[family]
    while True:
        operands, text, answer = draw(rng)
        if is_held_out(operands) == held_out:
            wanted = "number" if isinstance(answer, int) else "name"
            return Question(family, operands, f"{text} Answer with only the {wanted}.", str(answer))
