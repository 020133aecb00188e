"""Plain function `reward(prompt, response, row) -> float` with a file of prompts: `task=function`.

    task=function task.reward=my_module:my_reward task.data=prompts.jsonl

The task calls the function with the prompt as it is in the file, the answer's text, and the row. The function
returns a number; 1 or more counts as correct.
"""

from __future__ import annotations

import json
import numbers
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, cast

from pydantic import Field

from echo_planes.config.extensions import extension
from echo_planes.data.tasks.adapter import TaskAdapter, TaskOptions, Tokenizer
from echo_planes.data.tasks.chat import Chat, plain_prompt
from echo_planes.types import Episode, Prompt, Reward

from .rows import PlacedRow, RowOptions, Rows, text_of


class FunctionOptions(RowOptions):
    """`task.*` settings of a plain reward function."""

    reward: str = Field(description="package.module:function, called with prompt, response and row")
    template: Literal["plain", "chat"] = Field(default="chat", description="how a prompt becomes tokens")


class FunctionTask(TaskAdapter):
    """Prompts from a file, rewards from a function.

    Raises:
        ConfigError: `task.reward` names no function that can be imported.
        ModelError: template=chat and the tokenizer has no chat template.
    """

    Options: ClassVar[type[TaskOptions]] = FunctionOptions

    def __init__(self, options: TaskOptions, tokenizer: Tokenizer, seed: int) -> None:
        super().__init__(options, tokenizer, seed)
        self._options = cast(FunctionOptions, options)
        self._function: Callable[..., Any] = extension("task.reward", self._options.reward, {})
        self._rows = Rows(self._options, seed, self._question)
        self._chat = Chat(tokenizer) if self._options.template == "chat" else None

    def sources(self) -> tuple[Sequence[str], Sequence[str]]:
        return self._rows.sources()

    def prompt(self, index: int) -> Prompt:
        return self._prompt(index, self._rows.training(index))

    def eval_prompt(self, index: int) -> Prompt:
        return self._prompt(index, self._rows.held_out(index))

    def reward(self, prompt: Prompt, episode: Episode) -> Reward:
        row = json.loads(prompt.answer)
        value = self._function(row[self._options.prompt_field], episode.text, row)
        # Not checked here, so that the scorer reports a value that is no number as an invalid reward.
        return Reward(value, isinstance(value, numbers.Real) and float(value) >= 1)

    def right_answer(self, prompt: Prompt) -> str:
        return self._rows.right_answer(json.loads(prompt.answer))

    def _prompt(self, index: int, row: PlacedRow) -> Prompt:
        messages = self._rows.messages(row.fields)
        text = text_of(messages)
        with row.named():
            ids = self._chat.prompt(messages) if self._chat else plain_prompt(self.tokenizer, text)
        return Prompt(index, ids, json.dumps(row.fields), text)

    def _question(self, fields: dict[str, Any]) -> str:
        """Return what makes two rows the same question: the policy sees nothing of a row but its prompt."""
        return " ".join(text_of(self._rows.messages(fields)).split())
