"""Sources of questions: generated addition pairs, and files of word problems."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from echo_planes.data.tasks.datasets import FieldType, Row, has_split, iter_rows
from echo_planes.errors import DataError

HOLDOUT_STRIDE, HOLDOUT_OFFSET = 20, 7  # 1 in 20 is held out
DATA_VARIABLE = "ECHO_PLANES_DATA"


def stable_hash(*parts: int | str) -> int:
    """Return a 64-bit hash of `parts`, the same on every machine and Python version."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def is_held_out(a: int, b: int) -> bool:
    """Return whether a pair is one of the 5 % of operand pairs that training never sees."""
    return (a * 100 + b) % HOLDOUT_STRIDE == HOLDOUT_OFFSET


def needs_carry(a: int, b: int) -> bool:
    """Return whether the ones digits add up to ten or more."""
    return a % 10 + b % 10 >= 10


def training_pair(seed: int, index: int, max_operand: int, *, only_carry: bool = False) -> tuple[int, int]:
    """Return the operands of training prompt `index`, each in 0 .. max_operand - 1, never a held-out pair."""
    draw = 0
    while True:
        a, b = divmod(stable_hash("addition", seed, index, draw) % max_operand**2, max_operand)
        if not is_held_out(a, b) and (needs_carry(a, b) or not only_carry):
            return a, b
        draw += 1


@cache
def held_out_pairs(max_operand: int, *, only_carry: bool = False) -> tuple[tuple[int, int], ...]:
    """Return every held-out pair, in a fixed order that mixes small and large operands."""
    pairs = [(a, b) for a in range(max_operand) for b in range(max_operand) if is_held_out(a, b)]
    pairs = [pair for pair in pairs if needs_carry(*pair) or not only_carry]
    return tuple(sorted(pairs, key=lambda pair: stable_hash("held out", *pair)))


@dataclass(frozen=True, slots=True)
class Problem:
    """Word problem and its gold answer."""

    question: str
    answer: str
    place: str = field(default="", compare=False)  # "train.jsonl: row 7"


def _gsm8k(row: Row) -> Problem:
    _working, mark, answer = row["answer"].rpartition("####")
    if not mark or not answer.strip():
        raise ValueError("its 'answer' does not end in '#### <number>'")
    return Problem(row["question"], answer.strip().replace(",", ""))


def _math500(row: Row) -> Problem:
    return Problem(row["problem"], str(row["answer"]))


# Data set -> fields of a row, and the function that turns it into a problem.
PARSERS: dict[str, tuple[dict[str, FieldType], Callable[[Row], Problem]]] = {
    "gsm8k": ({"question": str, "answer": str}, _gsm8k),
    "math500": ({"problem": str, "answer": (str, int, float)}, _math500),
}


def read_problems(path: Path, dataset: str, split: str | None = None) -> list[Problem]:
    """Read all rows of a file, or of one split of a folder, in order; see `echo_planes.data.tasks.datasets`.

    Raises:
        DataError: the file is missing, unreadable or empty, or a row is not one of `dataset`.
    """
    advice = f"set task.data=PATH to a {dataset} file or folder, or {DATA_VARIABLE} to the folder above it"
    fields, parse = PARSERS[dataset]
    problems = []
    try:
        for place, row in iter_rows(path, fields, split=split, what=dataset):
            try:
                problems.append(replace(parse(row), place=place))
            except ValueError as error:
                raise DataError(f"{place} is not a {dataset} row: {error}") from error
    except DataError as error:
        raise DataError(f"{error}; {advice}") from error
    if not problems:
        raise DataError(f"{path}: no rows; {advice}")
    return problems


def load_splits(
    dataset: str, data: str | None, eval_data: str | None
) -> tuple[tuple[Problem, ...], tuple[Problem, ...]]:
    """Return the training and held-out problems of `dataset`, disjoint by question.

    `data` and `eval_data` name a file, or a folder with train and test files; `data` is by default
    `$ECHO_PLANES_DATA/<dataset>`, and `eval_data` is `data`. A single split has 1 row in 20 held out.

    Raises:
        DataError: `data` is neither given nor in the environment, cannot be read, or leaves a part empty.
    """
    if data is None:
        root = os.environ.get(DATA_VARIABLE)
        if not root:
            raise DataError(f"task.dataset={dataset} needs its files: set task.data=PATH or {DATA_VARIABLE}")
        data = str(Path(root) / dataset)
    train, train_split = _find(data, "train", "test")
    held, held_split = _find(eval_data, "test") if eval_data else _find(data, "test", "train")
    rows = read_problems(train, dataset, train_split)
    is_one = (held, held_split) == (train, train_split)
    evaluation = rows[HOLDOUT_OFFSET::HOLDOUT_STRIDE] if is_one else read_problems(held, dataset, held_split)
    unseen = {problem.question for problem in evaluation}
    training = tuple(problem for problem in rows if problem.question not in unseen)
    if not training or not evaluation:
        raise DataError(
            f"{train}: {len(rows)} rows leave {len(training)} to train on and {len(evaluation)} "
            f"held out; set task.data=PATH to a larger {dataset} file"
        )
    return training, tuple(evaluation)


def _find(source: str, *splits: str) -> tuple[Path, str | None]:
    """Return folder `source` and the first of `splits` that it has; with None if it has none of them."""
    root = Path(source).expanduser()
    return root, next((split for split in splits if has_split(root, split)), None)
