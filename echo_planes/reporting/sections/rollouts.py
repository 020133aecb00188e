"""A few sample rollouts of a run, read from its replay store and shown token by token."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from echo_planes.config.files import MODEL_JSON_BYTES, check_regular, user_path
from echo_planes.config.hub import cached_file, is_pinned
from echo_planes.config.schema import BUILTIN_MODELS
from echo_planes.data.store.files import REPLAY_FOLDER
from echo_planes.data.store.index import Fate
from echo_planes.data.store.snapshot import StoreSnapshot, is_store
from echo_planes.errors import DataError
from echo_planes.reporting.formats import cut, known
from echo_planes.reporting.html import heat_class, part
from echo_planes.reporting.metrics import Record, number
from echo_planes.reporting.sections.notes import draw_all
from echo_planes.types import IntArray

PER_STEP = 3  # samples shown of the first and of the last trained step
MAX_GROUPS = 8  # groups of a step to choose from
MAX_TOKENS = 400
MAX_CHARACTERS = 3000
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # stands for an incomplete character in decoded text

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Rows of the first and last trained step, and a note on what could not be read."""

    first: list[Row]
    last: list[Row]
    problem: str = ""  # the note, for users; "": none


def read_rollouts(run: Path) -> Rollouts:
    """Pick rollouts from the replay store of a run folder; read the rows of a few groups only."""
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
    except DataError as error:  # the page shows the error beside its other sections
        return Rollouts([], [], str(error))
    damaged = snapshot.num_damaged
    return Rollouts(first, last, f"{damaged} damaged places of the store were left out" if damaged else "")


def _rows(snapshot: StoreSnapshot, sequences: IntArray) -> list[Row]:
    rows: list[Row] = snapshot.gather(sequences[:MAX_GROUPS]).to_pylist()
    return rows


def run_tokenizer(config: Record) -> Any | None:
    """Return the fast tokenizer of the model that a run's config.yaml names, for the text of each token.

    None if the model has none. Transformers supports more tokenizers, but takes seconds to import.
    """
    model = config.get("model")
    name = model.get("path") if isinstance(model, dict) else None
    if not isinstance(name, str):
        return None
    path = (
        cached_file(name, "tokenizer.json")
        if is_pinned(name)
        else BUILTIN_MODELS.get(name, user_path(name)) / "tokenizer.json"
    )
    if path is None or not os.path.exists(path):
        return None
    check_regular(path, MODEL_JSON_BYTES, advice="restore it")
    try:
        from tokenizers import Tokenizer
    except ImportError:  # comes with the engines, which a machine that only makes reports may lack
        return None
    try:
        return Tokenizer.from_file(str(path))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the library raises plain exceptions, and panics of Rust
        raise DataError(f"{path} cannot be read as a tokenizer ({error}); restore it") from error


def rollout_card(row: Row, tokenizer: Any | None) -> Markup:
    """Return the card of one rollout: prompt, answer, versions, and the probability of each token."""
    step = row.get("step", -1)
    ids = list(row.get("response_ids") or [])
    text = str(row.get("response_text") or "")
    lead, tokens = _answer(row, ids, text, tokenizer)
    return part(
        "rollout",
        correct=bool(row.get("correct")),
        facts=[
            f"step {step + 1:,}" if isinstance(step, int) and step >= 0 else "not trained",
            f"reward {known(number(row.get('reward')), '.3g')}",
            f"{len(ids):,} tokens",
            str(row.get("worker_id", "")),
            _versions(row),
            str(row.get("trajectory_id", "")),
        ],
        prompt=cut(str(row.get("prompt_text") or ""), MAX_CHARACTERS),
        lead=lead,
        tokens=tokens,
        rest=f" … {len(ids) - MAX_TOKENS:,} more tokens" if tokens and len(ids) > MAX_TOKENS else "",
        notes=draw_all(row.get("notes")),
    )


def token_texts(ids: Sequence[int], text: str, tokenizer: Any | None) -> list[str] | None:
    """Return the text of each token; None if no tokenizer fits and tokens are not single characters."""
    if tokenizer is not None:
        pieces = decoded(ids, tokenizer, skip_special_tokens=False)
        if (found := aligned(pieces, text)) is not None:
            return found
    if len(text) == len(ids):
        return list(text)
    if len(text) + 1 == len(ids):
        return [*text, ""]  # characters, and an end-of-sequence token that is not part of the text
    return None


def aligned(pieces: Sequence[str], text: str) -> list[str] | None:
    """Return the pieces that make up a text, "" for those that it leaves out; None if they do not.

    The text of an answer has no tokens that begin or end a turn, but other special ones.
    """
    found, position = [], 0
    for piece in pieces:
        found.append(piece if text.startswith(piece, position) else "")
        position += len(found[-1])
    return found if position == len(text) else None


def decoded(ids: Sequence[int], tokenizer: Any, *, skip_special_tokens: bool) -> list[str]:
    """Return the text that each token adds. The last token of a multi-token character gets the character."""
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
    """Return the length of the longest common prefix of two texts."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (left, right) in pairs if left != right), min(len(a), len(b)))


def _answer(
    row: Row, ids: Sequence[int], text: str, tokenizer: Any | None
) -> tuple[str, list[tuple[str, str, str]]]:
    """Return the text before the tokens, and for each token its class, hover text and text."""
    logprobs = [number(value) for value in (row.get("logprobs") or [])]
    if not ids or len(logprobs) != len(ids):
        return cut(text, MAX_CHARACTERS), []
    pieces = token_texts(ids, text, tokenizer)
    turns = set((row.get("span_stops") or [])[:-1])
    tokens = []
    for i, (token_id, logprob) in enumerate(zip(ids[:MAX_TOKENS], logprobs, strict=False)):
        kind = f"tok {heat_class(logprob)}{' turn' if i in turns else ''}{' cell' if pieces is None else ''}"
        shown = "?" if logprob is None else f"{logprob:.3f}"
        title = f"token {token_id}, logprob {shown}, v{_version_at(row, i)}"
        tokens.append((kind, title, "" if pieces is None else pieces[i] or "·"))
    return f"{cut(text, MAX_CHARACTERS)}\n" if pieces is None else "", tokens


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
    """Return up to PER_STEP rows of different groups: a right one, a wrong one, then in order."""
    chosen: list[Row] = []
    wanted: list[bool | None] = [True, False, *[None] * PER_STEP]
    for want in wanted:
        taken = {row.get("group_id") for row in chosen}
        for row in rows:
            if row.get("group_id") not in taken and want in (None, bool(row.get("correct"))):
                chosen.append(row)
                break
    return chosen[:PER_STEP]
