"""Text of answers: what the policy wrote, without the marks of a turn, and where its thoughts end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

OPENING, CLOSING = "<think>", "</think>"
_TAIL = 8  # last tokens of a prompt, among which a template may open a thought


class Decoder(Protocol):
    """The part of a tokenizer that gives tokens their text."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str: ...


def text_of(
    tokenizer: Decoder, token_ids: Sequence[int], *, ended: bool, mask: Sequence[bool] | None = None
) -> str:
    """Return the text of an answer without the tokens that begin, end or pad a turn.

    Other special tokens that the policy sampled stay: for some models `<think>` is one.

    Args:
        ended: whether the last token ended the turn. It may be any of the model's end tokens, of which the
            tokenizer knows only one.
        mask: whether the policy sampled each token; default all. Of an environment's, no special ones stay.
    """
    marks, special = turn_marks(tokenizer), frozenset(getattr(tokenizer, "all_special_ids", ()))
    hidden = [marks if mask is None or mask[i] else marks | special for i in range(len(token_ids))]
    if ended and hidden:
        hidden[-1] = marks | special
    kept = [token_id for token_id, some in zip(token_ids, hidden, strict=True) if token_id not in some]
    return tokenizer.decode(kept, skip_special_tokens=False)


def turn_marks(tokenizer: Decoder) -> frozenset[int]:
    """Return the tokens that begin, end and pad a text."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    found = (getattr(tokenizer, name, None) for name in names)
    return frozenset(token_id for token_id in found if token_id is not None)


def opens_thought(tokenizer: Decoder, prompt_ids: Sequence[int]) -> bool:
    """Return whether a prompt ends inside a thought, as those of some chat templates do."""
    tail = tokenizer.decode(list(prompt_ids[-_TAIL:]), skip_special_tokens=False)
    return tail.rfind(OPENING) > tail.rfind(CLOSING)


def after_thought(text: str, *, opened: bool = False) -> int | None:
    """Return where the answer begins: behind the last thought. None: a thought is open, so there is none.

    Args:
        opened: whether the prompt opened a thought (`opens_thought`).

    Example:
        >>> after_thought("<think>6 times 7</think>42")
        24
        >>> after_thought("<think>or 41? Wait") is None
        True
    """
    closed = text.rfind(CLOSING)
    if text.rfind(OPENING) > closed or (opened and closed < 0):
        return None
    return closed + len(CLOSING) if closed >= 0 else 0


def answering(tokenizer: Decoder, prompt_ids: Sequence[int], text: str) -> str:
    """Return `text` as the answer to a prompt: behind the end of a thought that the prompt opened."""
    return f"{CLOSING}{text}" if opens_thought(tokenizer, prompt_ids) else text


def has_thought(text: str) -> bool:
    """Return whether an answer has a closed thought that says something."""
    before, closed, _ = text.rpartition(CLOSING)
    # Templates add the opening to a prompt, and some models leave it out.
    return bool(closed and before.replace(OPENING, "").replace(CLOSING, "").strip())


def last_tagged(text: str, tag: str, start: int = 0) -> tuple[str, int] | None:
    """Return the text in the last `<tag></tag>` after `start`, and the index behind it, in linear time.

    A tag ends at the first closing tag after it, even if another tag opens in between.
    """
    opening, closing = f"<{tag}>", f"</{tag}>"
    found = None
    while (at := text.find(opening, start)) >= 0:
        begin = at + len(opening)
        end = text.find(closing, begin)
        if end < 0:
            break
        start = end + len(closing)
        found = text[begin:end], start
    return found
