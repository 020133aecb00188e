"""A few sample rollouts of a run, read from trajectories/*.arrow and shown token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import pyarrow as pa

from echo_planes.metrics import number

PER_STEP = 3  # samples shown of the first and of the last trained step
MAX_CANDIDATES = 64  # samples of a step to choose from
MAX_TOKENS = 400
MAX_CHARACTERS = 3000

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Rows of the first and last trained step, and how many files could not be read."""

    first: list[Row]
    last: list[Row]
    unreadable: int


def read_rollouts(folder: Path) -> Rollouts:
    """Pick rollouts from `folder`/*.arrow (Arrow IPC files); only the step column is read of all of them."""
    places: dict[int, list[tuple[Path, int, int]]] = {}  # step -> (file, batch, row)
    unreadable = 0
    for path in sorted(folder.glob("*.arrow")):
        try:
            found = _steps(path)
        except (pa.ArrowInvalid, OSError, KeyError):
            unreadable += 1  # a crash left it without its footer; the others are still worth showing
            continue
        for step, batch, row in found:
            kept = places.setdefault(step, [])
            if len(kept) < MAX_CANDIDATES:
                kept.append((path, batch, row))
    trained = sorted(step for step in places if step >= 0)
    if not trained:
        return Rollouts(_choose([_row(*place) for place in places.get(-1, [])]), [], unreadable)
    first = _choose([_row(*place) for place in places[trained[0]]])
    last = _choose([_row(*place) for place in places[trained[-1]]]) if len(trained) > 1 else []
    return Rollouts(first, last, unreadable)


def load_tokenizer(model_folder: str | None) -> Any | None:
    """The model's fast tokenizer, to show the text of each token; None where there is none."""
    if model_folder is None:
        return None
    path = Path(model_folder).expanduser() / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError:  # comes with the engines, which a machine that only reads reports may lack
        return None
    return Tokenizer.from_file(str(path))


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
    return (
        f'<article class="card rollout"><div class="head">{head}</div><dl class="said">'
        f"<dt>prompt</dt><dd><pre>{escape(_cut(str(row.get('prompt_text') or '')))}</pre></dd>"
        f"<dt>answer</dt><dd><pre>{_answer(row, tokenizer)}</pre></dd></dl></article>"
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
    pieces = []
    for i in range(len(ids)):
        # A short window keeps the spaces that a token alone would lose, at linear cost.
        before = tokenizer.decode(list(ids[max(0, i - 4) : i]), skip_special_tokens=True)
        upto = tokenizer.decode(list(ids[max(0, i - 4) : i + 1]), skip_special_tokens=True)
        pieces.append(upto[len(before) :])
    return pieces if "".join(pieces) == text else None


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


def _steps(path: Path) -> list[tuple[int, int, int]]:
    with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
        column = reader.schema.get_field_index("step")
        if column < 0:
            raise KeyError("step")
        return [
            (-1 if step is None else int(step), batch, row)
            for batch in range(reader.num_record_batches)
            for row, step in enumerate(reader.get_batch(batch).column(column).to_pylist())
        ]


def _row(path: Path, batch: int, row: int) -> Row:
    with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
        found: Row = reader.get_batch(batch).slice(row, 1).to_pylist()[0]
        return found


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
