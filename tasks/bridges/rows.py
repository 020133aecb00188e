"""Prompts from a user's file, for the tasks `gym` and `function`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import Field

from echo_planes.config.extensions import in_words, raised_at
from echo_planes.data.tasks.adapter import TaskOptions
from echo_planes.data.tasks.datasets import FieldType, iter_rows
from echo_planes.errors import DataError, EchoPlanesError, shown

_ANYTHING: FieldType = (str, int, float, bool, list, dict)


class RowOptions(TaskOptions):
    """`task.*` settings of tasks whose prompts are in a file."""

    data: str = Field(description="JSONL, Parquet or Arrow file, or a folder of them")
    prompt_field: str = Field(
        default="prompt", description='field that holds the prompt: text, or {"role":, "content":} messages'
    )
    row_fields: list[str] = Field(default=["answer"], description="further fields that rows must have")
    holdout: int = Field(default=20, ge=2, description="1 row in so many is held out, at least 1")


@dataclass(frozen=True, slots=True)
class PlacedRow:
    """Row of a file."""

    place: str  # "prompts.jsonl: row 7"
    fields: dict[str, Any]

    @contextmanager
    def named(self) -> Iterator[None]:
        """Name the row in whatever is raised in the block, by a template or by a user's code."""
        try:
            yield
        except Exception as error:
            is_ours = isinstance(error, EchoPlanesError)
            why = str(error) if is_ours else f"{in_words(error)} ({raised_at(error)})"
            raise DataError(
                f"{self.place}: its prompt cannot be made: {why}; correct the row or leave it out"
            ) from error


class Rows:
    """Rows of the file, split in two: every training row comes once per epoch, in a new order each time.

    Args:
        options: the task's settings.
        seed: `run.seed`.
        content: what makes two rows the same question; of equal rows none is trained if one is held out.
    """

    def __init__(self, options: RowOptions, seed: int, content: Callable[[dict[str, Any]], str]) -> None:
        self._options = options
        self._seed = seed
        self._content = content
        self._orders: dict[int, list[PlacedRow]] = {}  # of the last requested epoch only

    def training(self, index: int) -> PlacedRow:
        rows = self._split[0]
        epoch, position = divmod(index, len(rows))
        if epoch not in self._orders:  # drawn once per epoch, because prompts are requested in order
            self._orders = {epoch: random.Random(f"{self._seed}/{epoch}").sample(rows, len(rows))}
        return self._orders[epoch][position]

    def held_out(self, index: int) -> PlacedRow:
        """Return held-out row `index`, the same for every seed; rows repeat after the last."""
        rows = self._split[1]
        return rows[index % len(rows)]

    def sources(self) -> tuple[list[str], list[str]]:
        """Return the places of the training rows, in the order of the first epoch, and of held-out rows."""
        training, held_out = self._split
        return [self.training(i).place for i in range(len(training))], [row.place for row in held_out]

    def messages(self, fields: dict[str, Any]) -> list[dict[str, str]]:
        """Return the prompt of a row as messages; see `messages_of`."""
        name = self._options.prompt_field
        try:
            return messages_of(fields[name])
        except ValueError as error:
            raise ValueError(f"field '{name}' {error}") from error

    def right_answer(self, row: dict[str, Any]) -> str:
        """Return the field `answer`, else the first, which is the first of `task.row_fields`."""
        return str(row.get("answer", next(iter(row.values()))))

    @cached_property
    def _split(self) -> tuple[list[PlacedRow], list[PlacedRow]]:
        """The training and the held-out rows, disjoint by content. Equal rows are held out once."""
        rows = self._read()
        contents = [self._content(row.fields) for row in rows]
        different = list(dict.fromkeys(contents))
        held_out = set(different[:: self._options.holdout])
        first = dict(zip(reversed(contents), reversed(rows), strict=True))
        training = [row for row, content in zip(rows, contents, strict=True) if content not in held_out]
        if not training:
            raise DataError(
                f"{self._options.data}: one row is held out, so none is left to train on; give 2 rows or more"
                " that differ"
            )
        return training, [first[content] for content in different if content in held_out]

    def _read(self) -> list[PlacedRow]:
        path = Path(self._options.data).expanduser()
        fields: dict[str, FieldType] = dict.fromkeys(self._options.row_fields, _ANYTHING)
        name = self._options.prompt_field
        rows = []
        try:
            for place, found in iter_rows(path, {**fields, name: (str, list)}, what="prompt"):
                try:
                    self.messages(found)
                except ValueError as error:
                    raise DataError(f"{place} is not a prompt row: {error}") from error
                rows.append(PlacedRow(place, found))
        except DataError as error:
            if f"no field '{name}'" not in str(error):
                raise
            raise DataError(f"{error}; task.prompt_field names the one that holds the prompt") from error
        if not rows:
            raise DataError(f"{path}: no rows; give a file that holds some")
        return rows


def messages_of(said: object) -> list[dict[str, str]]:
    """Return a prompt, text or a list of messages, as messages whose content is text.

    Raises:
        ValueError: it is neither, a message has another content than text, or there is no text at all.
    """
    listed = [{"role": "user", "content": said}] if isinstance(said, str) else said
    if not isinstance(listed, Sequence) or not listed:
        listed = [None]
    messages = []
    for message in listed:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(
                f'holds {shown(message)}; it must be text, or messages with "role" and "content"'
            )
        # Columns have all keys in all rows, null where a message has none.
        given = {key: value for key, value in message.items() if value is not None}
        messages.append({**given, "content": joined(given.get("content"))})
    if not text_of(messages).strip():
        raise ValueError(f"holds no text: {shown(said)}; write the question there")
    return messages


def joined(content: object) -> str:
    """Return the content of a message as text: its parts, of text only, one after another as templates do.

    Raises:
        ValueError: it is no text.
    """
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) and content else [content]:
        kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (None, part)
        if not isinstance(text, str) or kind not in (None, "text", "input_text", "output_text"):
            raise ValueError(f"holds a message with the content {shown(part)}; only text can be asked")
        texts.append(text)
    return "".join(texts)


def text_of(messages: Sequence[dict[str, str]]) -> str:
    """Return messages as one text: their contents."""
    return "\n\n".join(message["content"] for message in messages)
