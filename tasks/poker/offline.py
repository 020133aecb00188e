"""Offline records as tokens: the same tokens that the policy sees and samples when it plays the task."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from echo_planes.data.tasks.adapter import Tokenizer
from echo_planes.data.tasks.chat import Chat, plain_prompt
from echo_planes.errors import ModelError

from .histories import OfflineRecord
from .records import read_records
from .text import SYSTEM_PROMPT, Style

Template = Literal["plain", "chat"]


@dataclass(frozen=True, slots=True)
class Example:
    """One hand from one seat, in the layout of an episode of the task."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]  # True on the seat's own actions, end tokens included: ECHO-2 eq. 19
    value: float  # the return, big blinds
    group: str  # initial-state tag


def read_examples(path: Path, tokenizer: Tokenizer, template: Template) -> list[Example]:
    """Return every record of a table as an example, in order.

    Raises:
        DataError: the table cannot be read, or is invalid.
        ModelError: the tokenizer has no end token, or no chat template for `template`="chat".
    """
    table = read_records(path)
    chat = Chat(tokenizer) if template == "chat" else None
    return [example_of(record, table.style, tokenizer, chat) for record in table.records]


def example_of(record: OfflineRecord, style: Style, tokenizer: Tokenizer, chat: Chat | None) -> Example:
    """Return a record as tokens. Actions that the table would refuse are included, but not trained.

    Args:
        chat: None for the plain template.

    Raises:
        ModelError: the tokenizer has no end token.
    """
    end = tokenizer.eos_token_id
    if end is None:
        raise ModelError("the model's tokenizer has no end token, so its answers would never end; set one")
    ids: list[int] = []
    mask: list[bool] = []
    for number, turn in enumerate(record.turns):
        seen = _observation(turn.state, style, chat, tokenizer, is_first=number == 0)
        said = [*tokenizer.encode(turn.action, add_special_tokens=False), end]
        ids += [*seen, *said]
        mask += [False] * len(seen) + [turn.is_legal] * len(said)
    return Example(tuple(ids), tuple(mask), record.net_chips / record.big_blind, record.group)


def _observation(
    state: str, style: Style, chat: Chat | None, tokenizer: Tokenizer, *, is_first: bool
) -> tuple[int, ...]:
    text = f"\n{state}"
    if is_first:
        text = f"{SYSTEM_PROMPT}\n\n{state}\n" if style == "plain" else state
    if chat is None and is_first:
        return plain_prompt(tokenizer, text)
    if chat is None:
        return tuple(tokenizer.encode(text, add_special_tokens=False))
    message = {"role": "user", "content": text}
    return chat.prompt([message]) if is_first else chat.reply(message, ended=True)
