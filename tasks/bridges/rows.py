"""Prompts from a user's file, for the tasks `gym` and `function`."""

from __future__ import annotations

import random
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import Field

from echo_planes.data.tasks.adapter import TaskOptions
from echo_planes.data.tasks.datasets import FieldType, load_rows
from echo_planes.errors import DataError

_ANYTHING: FieldType = (str, int, float, bool, list, dict)


class RowOptions(TaskOptions):
    """`task.*` settings of tasks whose prompts are in a file."""

    data: str = Field(description="JSONL, Parquet or Arrow file, or a folder of them")
    prompt_field: str = Field(
        default="prompt", description='field that holds the prompt: text, or {"role":, "content":} messages'
    )
    row_fields: list[str] = Field(default=["answer"], description="further fields that rows must have")
    holdout: int = Field(default=20, ge=2, description="1 row in so many is held out, at least 1")


class Rows:
    """Rows of the file, split in two: every training row comes once per epoch, in a new order each time."""

    def __init__(self, options: RowOptions, seed: int) -> None:
        self._options = options
        self._seed = seed
        self._orders: dict[int, list[int]] = {}  # of the last requested epoch only

    def training(self, index: int) -> dict[str, Any]:
        num = len(self._rows) - len(self._rows[:: self._options.holdout])
        epoch, position = divmod(index, num)
        if epoch not in self._orders:  # drawn once per epoch, because prompts are requested in order
            numbers = [i for i in range(len(self._rows)) if i % self._options.holdout]
            self._orders = {epoch: random.Random(f"{self._seed}/{epoch}").sample(numbers, num)}
        return self._rows[self._orders[epoch][position]]

    def held_out(self, index: int) -> dict[str, Any]:
        """Return held-out row `index`, the same for every seed; rows repeat after the last."""
        rows = self._rows[:: self._options.holdout]
        return rows[index % len(rows)]

    def messages(self, row: dict[str, Any]) -> list[dict[str, str]]:
        """Return the prompt as messages.

        Raises:
            DataError: the prompt is neither text nor messages with "role" and "content".
        """
        said = row[self._options.prompt_field]
        messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
        for message in messages or [None]:
            if not isinstance(message, dict) or not {"role", "content"} <= set(message):
                raise DataError(
                    f"{self._options.data}: field '{self._options.prompt_field}' holds {message!r:.60}; it "
                    'must be text, or messages with "role" and "content"'
                )
        return messages

    def text(self, row: dict[str, Any]) -> str:
        """Return the prompt as text: the contents of its messages."""
        return "\n\n".join(str(message["content"]) for message in self.messages(row))

    def right_answer(self, row: dict[str, Any]) -> str:
        """Return the field `answer`, else the first, which is the first of `task.row_fields`."""
        return str(row.get("answer", next(iter(row.values()))))

    @cached_property
    def _rows(self) -> tuple[dict[str, Any], ...]:
        path = Path(self._options.data).expanduser()
        fields: dict[str, FieldType] = dict.fromkeys(self._options.row_fields, _ANYTHING)
        name = self._options.prompt_field
        try:
            rows = load_rows(path, {**fields, name: (str, list)}, what="prompt")
        except DataError as error:
            if f"no field '{name}'" not in str(error):
                raise
            raise DataError(f"{error}; task.prompt_field names the one that holds the prompt") from error
        if len(rows) < 2:
            raise DataError(f"{path}: one row is held out, so none is left to train on; give 2 rows or more")
        return rows
