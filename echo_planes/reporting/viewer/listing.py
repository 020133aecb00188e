"""The list of groups: a form that filters, a table that sorts, and what each group's rows say of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import pyarrow as pa
import pyarrow.compute as pc

from echo_planes.data.store.index import Fate
from echo_planes.data.store.snapshot import StoreSnapshot
from echo_planes.reporting.metrics import number
from echo_planes.reporting.sections.html import pill, safe
from echo_planes.reporting.viewer.html import address
from echo_planes.reporting.viewer.queries import FATES, PAGE_GROUPS, SORTS, Page, Query
from echo_planes.types import Status

_PREVIEW = 120  # characters of a prompt
_COLUMNS = (  # what it sorts by, title, kind
    ("sequence", "Group", ""),
    ("step", "Step", "num"),
    ("version", "Version", "num"),
    ("", "Fate", ""),
    ("reward_mean", "Reward", "num"),
    ("num_rows", "Right", "num"),
    ("", "Tokens", "num"),
    ("", "Worker", ""),
    ("", "Prompt", ""),
)
FATE_KINDS = {"trained": "done", "buffered": "", "lost": "failed"}


@dataclass(frozen=True, slots=True)
class Summary:
    """Summary of the rows of a group."""

    rewards: tuple[float, ...]
    num_correct: int
    tokens_mean: float
    workers: tuple[str, ...]
    statuses: tuple[str, ...]  # that are not "ok"
    prompt: str


def summaries(table: pa.Table) -> dict[str, Summary]:
    """By group id, from rows of `schema.SCHEMA`."""
    lengths = pc.fill_null(pc.list_value_length(table["response_ids"]), 0)
    columns = ["group_id", "reward", "correct", "worker_id", "status", "prompt_text"]
    rows: dict[str, list[dict[str, Any]]] = {}
    for row, length in zip(table.select(columns).to_pylist(), lengths.to_pylist(), strict=True):
        rows.setdefault(row["group_id"], []).append({**row, "length": length})
    return {
        group: Summary(
            rewards=tuple(row["reward"] for row in members),
            num_correct=sum(bool(row["correct"]) for row in members),
            tokens_mean=sum(row["length"] for row in members) / len(members),
            workers=tuple(sorted({row["worker_id"] or "" for row in members})),
            statuses=tuple(sorted({row["status"] or "ok" for row in members} - {"ok"})),
            prompt=members[0]["prompt_text"] or "",
        )
        for group, members in rows.items()
    }


def list_body(snapshot: StoreSnapshot, query: Query, page: Page, fields: Mapping[str, str]) -> str:
    """The list as HTML.

    Args:
        snapshot: of the run's store.
        query: what was asked for.
        page: what it found.
        fields: the query as it came, for links.
    """
    told = summaries(snapshot.gather(page.sequences)) if len(page.sequences) else {}
    kept = {name: value for name, value in fields.items() if name != "start"}
    rows = [_row(snapshot, sequence, told) for sequence in page.sequences.tolist()]
    workers = sorted({worker for summary in told.values() for worker in summary.workers})
    table = (
        f'<div class="card list"><table><thead><tr>{_heads(query, kept)}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
        if rows
        else '<p class="empty">No group fits.</p>'
    )
    return f"{_counts(snapshot)}{_form(fields, workers)}{_pages(query, page, kept)}{table}"


def _counts(snapshot: StoreSnapshot) -> str:
    counts = snapshot.index.counts()
    parts = [f"<span><b>{counts.accepted:,}</b> groups</span>"]
    for name in ("trained", "buffered", "dropped", "uninformative", "quarantined", "removed", "lost"):
        if number := getattr(counts, name):
            parts.append(f"<span><i>{name}</i> {number:,}</span>")
    damaged = snapshot.num_damaged
    note = f'<p class="note">{damaged} damaged places of the store are left out.</p>' if damaged else ""
    return f'<p class="facts">{"".join(parts)}</p>{note}'


def _form(fields: Mapping[str, str], workers: list[str]) -> str:
    def value(name: str) -> str:
        return safe(fields.get(name, ""))

    def pair(name: str, label: str) -> str:
        ends = "".join(
            f'<input name="{name}_{end}" value="{value(f"{name}_{end}")}" placeholder="{hint}" '
            f'aria-label="{label} {hint}">'
            for end, hint in (("min", "from"), ("max", "to"))
        )
        return f'<label>{label}<span class="pair">{ends}</span></label>'

    def choice(name: str, label: str, options: tuple[str, ...]) -> str:
        chosen = fields.get(name, "")
        shown = "".join(
            f'<option value="{option}"{" selected" if option == chosen else ""}>{option or "any"}</option>'
            for option in ("", *options)
        )
        return f'<label>{label}<select name="{name}">{shown}</select></label>'

    known = "".join(f'<option value="{safe(worker)}"></option>' for worker in workers)
    hidden = "".join(
        f'<input type="hidden" name="{name}" value="{value(name)}">'
        for name in ("sort", "order")
        if value(name)
    )
    return (
        f'<form class="card" method="get" action="./">{pair("step", "Step")}{pair("version", "Version")}'
        f"{pair('reward', 'Mean reward')}{choice('fate', 'Fate', FATES)}"
        f"{choice('status', 'Status', get_args(Status))}"
        f'<label>Worker<input name="worker" value="{value("worker")}" list="workers"></label>'
        f'<datalist id="workers">{known}</datalist>'
        f'<label class="wide">Text<input name="text" value="{value("text")}" '
        'placeholder="in prompt, response, notes, id"></label>'
        f'{hidden}<button>Filter</button><a href="./">Clear</a></form>'
    )


def _heads(query: Query, kept: Mapping[str, str]) -> str:
    heads = []
    for sort, title, kind in _COLUMNS:
        if not sort:
            heads.append(f'<th class="{kind}">{title}</th>')
            continue
        is_now = sort == query.sort
        order = "up" if is_now and query.descending else "down"
        arrow = (" ↓" if query.descending else " ↑") if is_now else ""
        link = address("./", {**kept, "sort": sort, "order": order})
        heads.append(
            f'<th class="{kind}"><a href="{link}" title="sort by {SORTS[sort]}">{title}{arrow}</a></th>'
        )
    return "".join(heads)


def _row(snapshot: StoreSnapshot, sequence: int, told: Mapping[str, Summary]) -> str:
    groups = snapshot.index.groups
    group_id = snapshot.index.ids[sequence]
    fate = Fate(int(groups["fate"][sequence])).name.lower()
    step = int(groups["step"][sequence])
    version = int(groups["version"][sequence])
    reward = number(float(groups["reward_mean"][sequence]))
    count = int(groups["num_rows"][sequence])
    summary = told.get(group_id)
    cells = [
        f'<td class="id"><a href="group/{sequence}">{safe(group_id) or f"#{sequence}"}</a></td>',
        f'<td class="num">{step + 1 if step >= 0 else "-"}</td>',
        f'<td class="num">{version if version >= 0 else "-"}</td>',
        f"<td>{pill(fate, FATE_KINDS.get(fate, 'quiet'))}</td>",
        f'<td class="num">{"-" if reward is None else f"{reward:.3g}"}',
    ]
    if summary is None:
        cells.append(
            f'</td><td class="num">- of {count}</td><td></td><td></td><td class="text">rows are gone</td>'
        )
        return f"<tr>{''.join(cells)}</tr>"
    low, high = min(summary.rewards), max(summary.rewards)
    spread = f' <span class="spread">{low:.3g} to {high:.3g}</span>' if low < high else ""
    statuses = "".join(pill(status, "failed") for status in summary.statuses)
    cells += [
        f"{spread}</td>",
        f'<td class="num">{summary.num_correct} of {count} {statuses}</td>',
        f'<td class="num">{summary.tokens_mean:,.0f}</td>',
        f'<td class="id">{safe(", ".join(summary.workers))}</td>',
        f'<td class="text">{safe(" ".join(summary.prompt[: 4 * _PREVIEW].split())[:_PREVIEW])}</td>',
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _pages(query: Query, page: Page, kept: Mapping[str, str]) -> str:
    links = []
    if page.start and not query.needs_rows:
        links.append(
            f'<a href="{address("./", {**kept, "start": max(0, page.start - PAGE_GROUPS)})}">previous</a>'
        )
    elif page.start:
        links.append(f'<a href="{address("./", kept)}">from the beginning</a>')
    if page.next_start is not None:
        name = "next" if len(page.sequences) == PAGE_GROUPS else "look further"
        links.append(f'<a href="{address("./", {**kept, "start": page.next_start})}">{name}</a>')
    end = page.start + page.looked
    if query.needs_rows:
        said = f"{len(page.sequences)} found in {page.start + 1 if page.looked else 0:,} to {end:,}"
        said += f" of {page.candidates:,} groups"
    else:
        said = f"{page.start + 1 if page.looked else 0:,} to {end:,} of {page.candidates:,} groups"
    return f'<div class="pages"><span>{said}</span>{"".join(links)}</div>'
