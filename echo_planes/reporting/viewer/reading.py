"""Reading a group: its samples side by side, or one of them turn by turn, token by token."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from echo_planes.reporting.metrics import number
from echo_planes.reporting.sections.html import count, cut, facts, pill, safe
from echo_planes.reporting.sections.notes import draw, draw_notes, draw_parts, read_notes, turn_notes
from echo_planes.reporting.sections.rollouts import Row, heat_class
from echo_planes.reporting.viewer.style import VERSION_COLOURS
from echo_planes.reporting.viewer.tokens import (
    Token,
    Turn,
    is_text_shown,
    response_tokens,
    texts,
    turns_of,
    versions_of,
)

SIDE_BY_SIDE_TOKENS = 600  # shown of a sample beside others
MAX_TOKENS = 20_000
MAX_SAMPLES = 64
_MAX_TEXT = 20_000  # characters
COLOURS = ("logprob", "version")
_NO_MISMATCH = (
    "Mismatch cannot be shown by token: the store holds the sampler's logprobs only. Its mean of every step "
    "is in the report."
)


def group_body(rows: Sequence[Row], tokenizer: Any | None, colour: str, link: str) -> str:
    """A group's samples side by side.

    Args:
        rows: of `schema.SCHEMA`, at least one.
        tokenizer: of the run's model, if there is one.
        colour: one of COLOURS.
        link: address of sample i is this, then i.
    """
    shown = rows[:MAX_SAMPLES]
    tokens = [response_tokens(row, tokenizer) for row in shown]
    versions = sorted({version for each in tokens for version in versions_of(each)})
    cards = [
        _sample(i, row, each, versions, f"{link}{i}")
        for i, (row, each) in enumerate(zip(shown, tokens, strict=True))
    ]
    more = (
        f'<p class="note">{len(rows) - len(shown)} more samples are not shown.</p>'
        if len(rows) > len(shown)
        else ""
    )
    return (
        f"{_bar(colour, versions, tokenizer)}"
        f'<div class="block card"><h3>Prompt</h3>{_prompt(rows[0], tokenizer)}</div>'
        f'<div class="samples" data-colour="{colour}">{"".join(cards)}</div>{more}'
    )


def sample_body(row: Row, tokenizer: Any | None, colour: str) -> str:
    """One trajectory: prompt, turns with their rewards, what the environment noted. Arguments as above."""
    tokens = response_tokens(row, tokenizer)
    versions = versions_of(tokens)
    turns = turns_of(row, tokens[:MAX_TOKENS])
    noted = turn_notes(read_notes(row["notes"]))
    fits = len(noted) == len(turns)
    cards = [_turn(i, turn, len(turns), versions, noted[i] if fits else {}) for i, turn in enumerate(turns)]
    if not is_text_shown(row, tokens, tokenizer):
        cards.append(
            f'<div class="card block">{_text("text of the response", row["response_text"] or "")}</div>'
        )
    if len(tokens) > MAX_TOKENS:
        cards.append(f'<p class="note">{len(tokens) - MAX_TOKENS:,} more tokens are not shown.</p>')
    if row["turn_rewards"] and len(row["turn_rewards"]) != len(turns):
        given = ", ".join(f"{reward:.4g}" for reward in row["turn_rewards"])
        cards.append(f'<p class="note">Rewards of its {len(row["turn_rewards"])} turns: {given}</p>')
    rest = draw_notes(row["notes"], without_turns=fits)
    notes = f'<div class="card block"><h3>Notes</h3><div class="noted">{rest}</div></div>' if rest else ""
    parts = draw_parts(row["reward_parts"])
    return (
        f"{_outcome(row, tokens)}{parts}{_bar(colour, versions, tokenizer)}"
        f'<div class="block card"><h3>Prompt</h3>{_prompt(row, tokenizer)}</div>'
        f'<div data-colour="{colour}">{"".join(cards)}</div>{notes}'
    )


def _outcome(row: Row, tokens: Sequence[Token]) -> str:
    sampled = sum(token.is_sampled for token in tokens)
    known: list[tuple[str, object]] = [
        ("fate", row["fate"]),
        ("step", row["step"] + 1 if row["step"] >= 0 else ""),
        ("reward", _reward(row)),
        ("status", row["status"] or "ok"),
        ("finished by", row["finish_reason"]),
        (
            "tokens",
            f"{sampled:,}"
            + (f" and {len(tokens) - sampled:,} of the environment" if sampled < len(tokens) else ""),
        ),
        ("turns", row["num_turns"]),
        ("version", row["version"]),
        ("worker", row["worker_id"]),
        ("lineage", row["lineage"]),
        ("answer", cut(row["answer"] or "", 200)),
    ]
    return facts([(name, value) for name, value in known if value not in ("", None)])


def _reward(row: Row) -> str:
    reward = number(row["reward"])
    return "-" if reward is None else f"{reward:.4g}"


def _bar(colour: str, versions: Sequence[int], tokenizer: Any | None) -> str:
    switches = " · ".join(
        f'<span class="on">{name}</span>' if name == colour else f'<a href="?colour={name}">{name}</a>'
        for name in COLOURS
    )
    if colour == "version":
        key = " ".join(
            f'<span class="swatch v{i % VERSION_COLOURS}">v{version}</span>'
            for i, version in enumerate(versions)
        )
    else:
        shades = "".join(f'<span class="tok h{level}">&nbsp;&nbsp;</span>' for level in range(0, 10, 2))
        key = f"probability 1 {shades} 0"
    missing = "" if tokenizer else "<span>No tokenizer was found for this run's model.</span>"
    return (
        f'<div class="bar"><span>Colour: {switches}</span><span>{key}</span>{missing}'
        f"<span>{_NO_MISMATCH}</span></div>"
    )


def _prompt(row: Row, tokenizer: Any | None) -> str:
    ids: list[int] = list(row["prompt_ids"] or [])
    text = row["prompt_text"] or ""
    pieces = texts(ids, text, tokenizer) if len(ids) <= MAX_TOKENS else None
    if pieces is None:
        return f'<pre>{safe(cut(text, _MAX_TEXT))}</pre><p class="mark">{len(ids):,} tokens</p>'
    shown = "".join(
        f'<span class="tok given" data-i="{token_id}">{_shown(piece)}</span>'
        for token_id, piece in zip(ids, pieces, strict=True)
    )
    # A chat template stands around the text; and who reads a task's text may read other words than the model.
    is_shown = text in "".join(pieces)
    return f"<pre>{shown}</pre>" + ("" if is_shown else _text("text", text))


def _text(name: str, text: str) -> str:
    return f'<p class="mark">{name}</p><pre>{safe(cut(text, _MAX_TEXT))}</pre>'


def _sample(i: int, row: Row, tokens: Sequence[Token], versions: Sequence[int], link: str) -> str:
    status = row["status"] or "ok"
    verdict = pill("right", "yes") if row["correct"] else pill("wrong", "no")
    head = (
        f'<a href="{link}">Sample {i}</a>{verdict}{"" if status == "ok" else pill(status, "failed")}'
        f"<span>reward {safe(_reward(row))}</span><span>{count(len(tokens), 'token')}</span>"
        f"<span>{safe(row['finish_reason'] or '')}</span><span>{safe(row['worker_id'] or '')}</span>"
    )
    turns = turns_of(row, tokens[:SIDE_BY_SIDE_TOKENS])
    parts = []
    for place, turn in enumerate(turns):
        if len(turns) > 1:
            reward = "" if turn.reward is None else f" · reward {turn.reward:.4g}"
            parts.append(f'<p class="mark">turn {place + 1}{reward}</p>')
        parts.append(_turn_tokens(turn, versions))
    if len(tokens) > SIDE_BY_SIDE_TOKENS:
        parts.append(f'<p class="note">{len(tokens) - SIDE_BY_SIDE_TOKENS:,} more tokens</p>')
    return f'<article class="card sample"><div class="head">{head}</div>{"".join(parts)}</article>'


def _turn(i: int, turn: Turn, num_turns: int, versions: Sequence[int], noted: Mapping[str, Any]) -> str:
    title = f"Turn {i + 1} of {num_turns}" if num_turns > 1 else "Response"
    reward = "" if turn.reward is None else f"<span>reward {turn.reward:.4g}</span>"
    notes = f'<div class="noted">{draw(noted)}</div>' if noted else ""
    return (
        f'<article class="card turn"><div class="head"><b>{title}</b>{reward}'
        f"<span>{count(len(turn.said), 'token')}</span></div>{_turn_tokens(turn, versions)}{notes}</article>"
    )


def _turn_tokens(turn: Turn, versions: Sequence[int]) -> str:
    said = f"<pre>{''.join(_token(token, versions) for token in turn.said)}</pre>"
    if not turn.answered:
        return said
    answered = "".join(_token(token, versions) for token in turn.answered)
    return f'{said}<p class="mark">environment</p><pre class="answered">{answered}</pre>'


def _token(token: Token, versions: Sequence[int]) -> str:
    kinds, data = ["tok"], [f'data-i="{token.id}"']
    if token.is_sampled:
        kinds.append(heat_class(token.logprob))
        if token.logprob is not None:
            data.append(f'data-p="{token.logprob:.4f}"')
        if token.version is not None:
            kinds.append(f"v{versions.index(token.version) % VERSION_COLOURS}")
            data.append(f'data-v="{token.version}"')
    else:
        kinds.append("env")
        data.append('data-w="written by the environment"')
    if token.others:
        others = [[text, f"{logprob:.4f}"] for text, logprob in token.others]
        data.append(f'data-o="{safe(json.dumps(others))}"')
    if token.text is None:
        return f'<span class="{" ".join(kinds)} id" {" ".join(data)}>{token.id}</span>'
    if not token.text.isprintable() or not token.text:
        data.append(f'data-t="{safe(token.text)}"')
    return f'<span class="{" ".join(kinds)}" {" ".join(data)}>{_shown(token.text)}</span>'


def _shown(text: str) -> str:
    """A token's text; one that adds nothing visible, or ends a line, is marked."""
    if not text:
        return '<span class="none">·</span>'
    return safe(text).replace("\n", '<span class="none">↵</span>\n')
