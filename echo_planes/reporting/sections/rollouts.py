"""A few sample rollouts of a run, read from its replay store and shown token by token."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from echo_planes.config.files import MODEL_JSON_BYTES, check_regular, user_path
from echo_planes.config.schema import BUILTIN_MODELS
from echo_planes.data.store.files import REPLAY_FOLDER
from echo_planes.data.store.index import Fate
from echo_planes.data.store.snapshot import StoreSnapshot, is_store
from echo_planes.errors import DataError
from echo_planes.reporting.metrics import Record, number
from echo_planes.reporting.sections.notes import draw_all
from echo_planes.types import IntArray

PER_STEP = 3  # samples shown of the first and of the last trained step
MAX_GROUPS = 8  # of a step to choose from
MAX_TOKENS = 400
MAX_CHARACTERS = 3000
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # decoded for bytes that are no whole character yet

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Rows of the first and last trained step, and what could not be read."""

    first: list[Row]
    last: list[Row]
    problem: str = ""  # for people; "": none


def read_rollouts(run: Path) -> Rollouts:
    """Pick rollouts from the replay store of a run's folder; only theirs are read of all the rows."""
    folder = run / REPLAY_FOLDER
    if not is_store(folder):
        return Rollouts([], [])
    try:
        snapshot = StoreSnapshot(folder)
        groups = snapshot.index.groups
        steps = groups["step"]
        trained = np.flatnonzero(groups["fate"] == Fate.TRAINED)
        if not len(trained):
            first, last = _choose(_rows(snapshot, np.flatnonzero(groups["fate"] != Fate.LOST))), []
        else:
            low, high = steps[trained].min(), steps[trained].max()
            first = _choose(_rows(snapshot, trained[steps[trained] == low]))
            last = _choose(_rows(snapshot, trained[steps[trained] == high])) if high > low else []
    except DataError as error:  # the rest of the page is worth having all the same
        return Rollouts([], [], str(error))
    damaged = snapshot.num_damaged
    return Rollouts(first, last, f"{damaged} damaged places of the store were left out" if damaged else "")


def _rows(snapshot: StoreSnapshot, sequences: IntArray) -> list[Row]:
    rows: list[Row] = snapshot.gather(sequences[:MAX_GROUPS]).to_pylist()
    return rows


def run_tokenizer(config: Record) -> Any | None:
    """The fast tokenizer of the model that a run's config.yaml names, to show the text of each token.

    None where there is none. Transformers would find more of them, but takes seconds to import.
    """
    model = config.get("model")
    name = model.get("path") if isinstance(model, dict) else None
    if not isinstance(name, str):
        return None
    path = BUILTIN_MODELS.get(name, user_path(name)) / "tokenizer.json"
    if not os.path.exists(path):
        return None
    check_regular(path, MODEL_JSON_BYTES, advice="restore it")
    try:
        from tokenizers import Tokenizer
    except ImportError:  # comes with the engines, which a machine that only reads reports may lack
        return None
    try:
        return Tokenizer.from_file(str(path))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the library raises nothing more special, or a panic of Rust
        raise DataError(f"{path} cannot be read as a tokenizer ({error}); restore it") from error


def rollout_card(row: Row, tokenizer: Any | None) -> str:
    """One rollout as HTML: prompt, answer, versions, and how sure each token was."""
    reward = number(row.get("reward"))
    step = row.get("step", -1)
    verdict = ("yes", "right") if row.get("correct") else ("no", "wrong")
    facts = [
        f"step {step + 1:,}" if isinstance(step, int) and step >= 0 else "not trained",
        f"reward {'-' if reward is None else format(reward, '.3g')}",
        f"{len(row.get('response_ids') or []):,} tokens",
        str(row.get("worker_id", "")),
        _versions(row),
        str(row.get("trajectory_id", "")),
    ]
    head = f'<b>{escape(facts[0])}</b><span class="pill {verdict[0]}">{verdict[1]}</span>'
    head += "".join(f"<span>{escape(fact)}</span>" for fact in facts[1:])
    notes = draw_all(row.get("notes"))
    return (
        f'<article class="card rollout"><div class="head">{head}</div><dl class="said">'
        f"<dt>prompt</dt><dd><pre>{escape(_cut(str(row.get('prompt_text') or '')))}</pre></dd>"
        f"<dt>answer</dt><dd><pre>{_answer(row, tokenizer)}</pre></dd></dl>"
        + (f'<div class="noted">{notes}</div>' if notes else "")
        + "</article>"
    )


def heat_class(logprob: float | None) -> str:
    """h0 (probability 1) to h9 (probability 0)."""
    probability = math.exp(min(0.0, logprob)) if logprob is not None else 1.0
    return f"h{min(9, int((1.0 - probability) * 10))}"


def token_texts(ids: Sequence[int], text: str, tokenizer: Any | None) -> list[str] | None:
    """The text of each token, or None: they are not one character each and no tokenizer fits."""
    if len(text) == len(ids):
        return list(text)
    if len(text) + 1 == len(ids):
        return [*text, ""]  # characters, and an end-of-sequence token that is not part of the text
    if tokenizer is None:
        return None
    pieces = decoded(ids, tokenizer, skip_special_tokens=True)
    return pieces if "".join(pieces) == text else None


def decoded(ids: Sequence[int], tokenizer: Any, *, skip_special_tokens: bool) -> list[str]:
    """Text that each token adds to the text before it. A character of several tokens is the last one's."""
    pieces = []
    for i in range(len(ids)):
        # A short window keeps the spaces that a token alone would lose, at linear cost.
        before, upto = (
            tokenizer.decode(list(ids[max(0, i - 4) : end]), skip_special_tokens=skip_special_tokens)
            for end in (i, i + 1)
        )
        is_open = upto.endswith(UNFINISHED) and i + 1 < len(ids)
        pieces.append("" if is_open else upto[_num_equal(before, upto) :])
    return pieces


def _num_equal(a: str, b: str) -> int:
    """Length of the longest common prefix of two texts."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (left, right) in pairs if left != right), min(len(a), len(b)))


def _answer(row: Row, tokenizer: Any | None) -> str:
    text = str(row.get("response_text") or "")
    ids = list(row.get("response_ids") or [])
    logprobs = [number(value) for value in (row.get("logprobs") or [])]
    if not ids or len(logprobs) != len(ids):
        return escape(_cut(text))
    pieces = token_texts(ids, text, tokenizer)
    turns = set((row.get("span_stops") or [])[:-1])
    cells = []
    for i in range(min(len(ids), MAX_TOKENS)):
        logprob = logprobs[i]
        shown = "?" if logprob is None else f"{logprob:.3f}"
        kind = f"tok {heat_class(logprob)}{' turn' if i in turns else ''}"
        title = f"token {ids[i]}, logprob {shown}, v{_version_at(row, i)}"
        if pieces is None:
            cells.append(f'<span class="{kind} cell" title="{title}"></span>')
        else:
            piece = pieces[i] or "·"
            cells.append(f'<span class="{kind}" title="{title}">{escape(piece)}</span>')
    rest = f" … {len(ids) - MAX_TOKENS:,} more tokens" if len(ids) > MAX_TOKENS else ""
    lead = f"{escape(_cut(text))}\n" if pieces is None else ""
    return f"{lead}{''.join(cells)}{rest}"


def _version_at(row: Row, position: int) -> str:
    spans = zip(row.get("span_stops") or [], row.get("span_versions") or [], strict=False)
    return next((str(version) for stop, version in spans if position < stop), "?")


def _versions(row: Row) -> str:
    spans = list(zip(row.get("span_stops") or [], row.get("span_versions") or [], strict=False))
    if not spans:
        return f"v{row.get('version', '?')}"
    starts = [0, *(stop for stop, _ in spans)]
    if len(spans) == 1:
        return f"v{spans[0][1]}"
    pairs = zip(starts, spans[:6], strict=False)
    shown = [f"v{version} [{start}, {stop})" for start, (stop, version) in pairs]
    return "spans " + ", ".join(shown) + (" …" if len(spans) > 6 else "")


def _choose(rows: list[Row]) -> list[Row]:
    """Up to PER_STEP rows of different groups: a right one, a wrong one, then in order."""
    chosen: list[Row] = []
    wanted: list[bool | None] = [True, False, *[None] * PER_STEP]
    for want in wanted:
        taken = {row.get("group_id") for row in chosen}
        for row in rows:
            if row.get("group_id") not in taken and want in (None, bool(row.get("correct"))):
                chosen.append(row)
                break
    return chosen[:PER_STEP]


def _cut(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"{text[:MAX_CHARACTERS]} … {len(text) - MAX_CHARACTERS:,} more characters"
