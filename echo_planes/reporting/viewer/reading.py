"""Pages of a group (its samples side by side) and of a sample (turn by turn, token by token)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from echo_planes.reporting.formats import cut
from echo_planes.reporting.html import page
from echo_planes.reporting.sections.notes import draw, draw_notes, draw_parts, read_notes, turn_notes
from echo_planes.reporting.sections.rollouts import Row
from echo_planes.reporting.viewer.tokens import (
    is_text_shown,
    response_tokens,
    texts,
    turns_of,
    versions_of,
)

SIDE_BY_SIDE_TOKENS = 600  # shown of each sample on a group's page
MAX_TOKENS = 20_000
MAX_SAMPLES = 64
_MAX_TEXT = 20_000  # characters
COLOURS = ("logprob", "version")
VERSION_COLOURS = 8  # of the style sheet; more versions repeat them


def group_body(rows: Sequence[Row], tokenizer: Any | None, colour: str, link: str) -> Markup:
    """Render a group's samples side by side.

    Args:
        rows: of `schema.SCHEMA`, at least one.
        tokenizer: of the run's model, if there is one.
        colour: one of COLOURS.
        link: prefix of addresses; that of sample i is `link` followed by i.
    """
    shown = rows[:MAX_SAMPLES]
    tokens = [response_tokens(row, tokenizer) for row in shown]
    versions = sorted({version for each in tokens for version in versions_of(each)})
    samples = [
        {"row": row, "num_tokens": len(each), "turns": turns_of(row, each[:SIDE_BY_SIDE_TOKENS])}
        for row, each in zip(shown, tokens, strict=True)
    ]
    return page(
        "group",
        **_colours(colour, versions),
        prompt=_prompt(rows[0], tokenizer),
        samples=samples,
        link=link,
        max_tokens=SIDE_BY_SIDE_TOKENS,
        num_left_out=len(rows) - len(shown),
    )


def sample_body(row: Row, tokenizer: Any | None, colour: str) -> Markup:
    """Render one trajectory: prompt, turns with their rewards, notes. Arguments as of `group_body`."""
    tokens = response_tokens(row, tokenizer)
    turns = turns_of(row, tokens[:MAX_TOKENS])
    noted = turn_notes(read_notes(row["notes"]))
    fits = len(noted) == len(turns)
    is_shown = is_text_shown(row, tokens, tokenizer)
    return page(
        "sample",
        **_colours(colour, versions_of(tokens)),
        row=row,
        num_tokens=len(tokens),
        num_sampled=sum(token.is_sampled for token in tokens),
        answer=cut(row["answer"] or "", 200),
        reward_parts=draw_parts(row["reward_parts"]),
        prompt=_prompt(row, tokenizer),
        turns=turns,
        turn_notes=[draw(notes) for notes in noted] if fits else [""] * len(turns),
        text=None if is_shown else cut(row["response_text"] or "", _MAX_TEXT),
        num_left_out=max(0, len(tokens) - MAX_TOKENS),
        notes=draw_notes(row["notes"], without_turns=fits),
    )


def _colours(colour: str, versions: Sequence[int]) -> dict[str, object]:
    return {"colour": colour, "colours": COLOURS, "versions": versions, "num_hues": VERSION_COLOURS}


def _prompt(row: Row, tokenizer: Any | None) -> dict[str, object]:
    ids: list[int] = list(row["prompt_ids"] or [])
    text = row["prompt_text"] or ""
    pieces = texts(ids, text, tokenizer) if len(ids) <= MAX_TOKENS else None
    return {
        "has_tokenizer": tokenizer is not None,
        "pieces": None if pieces is None else list(zip(ids, pieces, strict=True)),
        "is_text_shown": text in "".join(pieces or ()),
        "text": cut(text, _MAX_TEXT),
        "num_tokens": len(ids),
    }
