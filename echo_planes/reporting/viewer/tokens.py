"""Tokens and turns of a stored trajectory: the text, logprob and version of each token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from echo_planes.reporting.metrics import number
from echo_planes.reporting.sections.rollouts import Row, aligned, decoded, token_texts


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a response."""

    id: int
    text: str | None  # None: no tokenizer
    logprob: float | None  # when it was sampled; None for the environment's
    version: int | None
    is_sampled: bool  # by the policy; else the environment wrote it
    others: tuple[tuple[str, float], ...] = ()  # alternatives that were stored: text or id, logprob

    @property
    def others_json(self) -> str:
        """Alternatives as JSON for viewer.js, logprobs as text."""
        return json.dumps([[text, f"{logprob:.4f}"] for text, logprob in self.others])


@dataclass(frozen=True, slots=True)
class Turn:
    """Turn of an episode: the policy's tokens, and those of the environment's answer."""

    said: tuple[Token, ...]
    answered: tuple[Token, ...]
    reward: float | None  # None: not stored for each turn


def texts(ids: Sequence[int], text: str, tokenizer: Any | None) -> list[str] | None:
    """Return the text of each token, special ones included; None if it is not known."""
    if tokenizer is None:
        return token_texts(ids, text, None)
    return decoded(ids, tokenizer, skip_special_tokens=False)


def response_tokens(row: Row, tokenizer: Any | None) -> list[Token]:
    """Return the tokens of a stored row's response, in order."""
    ids: list[int] = list(row["response_ids"] or [])
    pieces = texts(ids, row["response_text"] or "", tokenizer)
    mask, logprobs = row["response_mask"] or [], row["logprobs"] or []
    versions = _versions(row, len(ids))
    tops = list(zip(row["top_ids"] or [], row["top_logprobs"] or [], strict=False))
    tokens = []
    for i, token_id in enumerate(ids):
        is_sampled = bool(mask[i]) if i < len(mask) else True
        logprob = number(logprobs[i]) if is_sampled and i < len(logprobs) else None
        others = _others(tops[i], tokenizer) if i < len(tops) else ()
        text = None if pieces is None else pieces[i]
        tokens.append(Token(token_id, text, logprob, versions[i], is_sampled, others))
    return tokens


def is_text_shown(row: Row, tokens: Sequence[Token], tokenizer: Any | None) -> bool:
    """Return whether the tokens' texts make up the response's text; with a wrong tokenizer they do not."""
    text = row["response_text"] or ""
    if tokenizer is None:
        return not text or any(token.text is not None for token in tokens)
    return aligned([token.text or "" for token in tokens], text) is not None


def turns_of(row: Row, tokens: Sequence[Token]) -> list[Turn]:
    """Return the turns of a response; turns without environment tokens in between count as one."""
    runs = [(sampled, tuple(run)) for sampled, run in groupby(tokens, lambda token: token.is_sampled)]
    if runs and not runs[0][0]:
        runs.insert(0, (True, ()))
    said = [run for sampled, run in runs if sampled]
    answered = [run for sampled, run in runs if not sampled]
    answered += [()] * (len(said) - len(answered))
    rewards: list[float | None] = [number(reward) for reward in row["turn_rewards"] or []]
    if len(rewards) != len(said):
        rewards = [None] * len(said)
    return [Turn(*parts) for parts in zip(said, answered, rewards, strict=True)]


def versions_of(tokens: Sequence[Token]) -> list[int]:
    """Return all versions that sampled a token, in order."""
    return sorted({token.version for token in tokens if token.is_sampled and token.version is not None})


def _versions(row: Row, length: int) -> list[int | None]:
    found: list[int | None] = []
    for stop, version in zip(row["span_stops"] or [], row["span_versions"] or [], strict=False):
        found += [version] * (min(stop, length) - len(found))
    return found + [None] * (length - len(found))


def _others(
    top: tuple[Sequence[int], Sequence[float]], tokenizer: Any | None
) -> tuple[tuple[str, float], ...]:
    def name(token_id: int) -> str:
        return (
            str(token_id)
            if tokenizer is None
            else str(tokenizer.decode([token_id], skip_special_tokens=False))
        )

    return tuple((name(token_id), logprob) for token_id, logprob in zip(*top, strict=False))
