"""Problems from files: rows of HumanEval and MBPP, as their authors distribute them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from echo_planes.data.tasks.datasets import iter_rows
from echo_planes.errors import DataError

Dataset = Literal["functions", "humaneval", "mbpp"]
DATA_VARIABLE = "ECHO_PLANES_DATA"
_HOLDOUT = 5  # 1 row in 5 is held out
_FIELDS: dict[str, dict[str, Any]] = {
    "humaneval": {"prompt": str, "canonical_solution": str, "test": str, "entry_point": str},
    "mbpp": {"text": str, "code": str, "test_list": list, "test_setup_code": str},
}


@dataclass(frozen=True, slots=True)
class Problem:
    """Problem: its question, and the tests that judge an answer."""

    question: str
    head: str  # Python that the answer may continue; "" if the answer must be a whole program
    tests: str  # Python with assertions about the answer's definitions
    solution: str  # the authors' solution, with the head
    place: str = field(default="", compare=False)  # "mbpp.jsonl: row 7"


def load_problems(dataset: Dataset, data: str | None) -> tuple[Problem, ...]:
    """Load all rows of a dataset, in order.

    Args:
        data: file or folder; default `$ECHO_PLANES_DATA/<dataset>`.

    Raises:
        DataError: there is nothing to read, or a row is not one of the dataset.
    """
    if data is None:
        root = os.environ.get(DATA_VARIABLE)
        if not root:
            raise DataError(f"task.dataset={dataset} needs its file: set task.data=PATH or {DATA_VARIABLE}")
        data = str(Path(root) / dataset)
    made = _humaneval if dataset == "humaneval" else _mbpp
    rows = iter_rows(Path(data).expanduser(), _FIELDS[dataset], what=dataset)
    return tuple(replace(made(row), place=place) for place, row in rows)


def split(problems: tuple[Problem, ...]) -> tuple[tuple[Problem, ...], tuple[Problem, ...]]:
    """Split problems into training and held-out ones.

    Raises:
        DataError: there are too few for both.
    """
    held_out = problems[_HOLDOUT - 1 :: _HOLDOUT]
    training = tuple(problem for problem in problems if problem not in held_out)
    if not held_out or not training:
        raise DataError(
            f"{len(problems)} problems leave {len(training)} to train on and {len(held_out)} held out; at "
            f"least {_HOLDOUT} different ones are needed"
        )
    return training, held_out


def _humaneval(row: dict[str, Any]) -> Problem:
    question = f"Complete this Python function:\n\n```python\n{row['prompt']}\n```"
    tests = f"{row['test']}\n\ncheck({row['entry_point']})\n"
    return Problem(question, row["prompt"], tests, row["prompt"] + row["canonical_solution"])


def _mbpp(row: dict[str, Any]) -> Problem:
    tests = "\n".join(str(test) for test in row["test_list"])
    # The first test shows the function's name and arguments, which the text does not give.
    question = f"{row['text']}\nThe function must pass this test:\n\n{row['test_list'][0]}"
    return Problem(question, "", f"{row['test_setup_code']}\n{tests}\n", row["code"])
