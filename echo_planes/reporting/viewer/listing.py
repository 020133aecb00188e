"""List of groups: a form that filters, a table that sorts, and a summary of each group's rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import pyarrow as pa
import pyarrow.compute as pc
from markupsafe import Markup

from echo_planes.data.store.index import Fate
from echo_planes.data.store.snapshot import StoreSnapshot
from echo_planes.reporting.html import address, page
from echo_planes.reporting.metrics import number
from echo_planes.reporting.viewer.queries import FATES, PAGE_GROUPS, SORTS, Page, Query
from echo_planes.types import Status

_PREVIEW = 120  # characters of a prompt
_COLUMNS = (  # sort key, title, class
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
    """Return a summary of each group by its id, from rows of `schema.SCHEMA`."""
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


def list_body(snapshot: StoreSnapshot, query: Query, found: Page, fields: Mapping[str, str]) -> Markup:
    """Render the list.

    Args:
        snapshot: of the run's store.
        query: the filter and the order.
        found: the groups that match.
        fields: the query as form fields, for links.
    """
    told = summaries(snapshot.gather(found.sequences)) if len(found.sequences) else {}
    kept = {name: value for name, value in fields.items() if name != "start"}
    counts = snapshot.index.counts()
    shown = ("trained", "buffered", "dropped", "uninformative", "quarantined", "removed", "lost")
    said, neighbours = _pages(query, found, kept)
    return page(
        "listing",
        fields=fields,
        accepted=counts.accepted,
        counts=[(name, getattr(counts, name)) for name in shown],
        damaged=snapshot.num_damaged,
        fates=FATES,
        statuses=get_args(Status),
        workers=sorted({worker for summary in told.values() for worker in summary.workers}),
        said=said,
        neighbours=neighbours,
        heads=_heads(query, kept),
        rows=[_row(snapshot, sequence, told) for sequence in found.sequences.tolist()],
    )


def _heads(query: Query, kept: Mapping[str, str]) -> list[tuple[str, str, str, str]]:
    """Return for each column its title, class, sort key as text and sort link; "" if it cannot sort."""
    heads = []
    for sort, title, kind in _COLUMNS:
        is_now = bool(sort) and sort == query.sort
        order = "up" if is_now and query.descending else "down"
        arrow = (" ↓" if query.descending else " ↑") if is_now else ""
        link = address("./", {**kept, "sort": sort, "order": order}) if sort else ""
        heads.append((title + arrow, kind, SORTS.get(sort, ""), link))
    return heads


def _row(snapshot: StoreSnapshot, sequence: int, told: Mapping[str, Summary]) -> dict[str, object]:
    groups = snapshot.index.groups
    group_id = snapshot.index.ids[sequence]
    fate = Fate(int(groups["fate"][sequence])).name.lower()
    step, version = int(groups["step"][sequence]), int(groups["version"][sequence])
    summary = told.get(group_id)
    low, high = (min(summary.rewards), max(summary.rewards)) if summary else (0.0, 0.0)
    return {
        "sequence": sequence,
        "id": group_id or f"#{sequence}",
        "step": step + 1 if step >= 0 else "-",
        "version": version if version >= 0 else "-",
        "fate": fate,
        "kind": FATE_KINDS.get(fate, "quiet"),
        "reward": number(float(groups["reward_mean"][sequence])),
        "spread": f"{low:.3g} to {high:.3g}" if low < high else "",
        "num_rows": int(groups["num_rows"][sequence]),
        "told": summary,
        "preview": " ".join(summary.prompt[: 4 * _PREVIEW].split())[:_PREVIEW] if summary else "",
    }


def _pages(query: Query, found: Page, kept: Mapping[str, str]) -> tuple[str, list[tuple[Markup, str]]]:
    """Return this page's range of groups as text, and links to other pages: (address, name)."""
    links = []
    if found.start and not query.needs_rows:
        links.append((address("./", {**kept, "start": max(0, found.start - PAGE_GROUPS)}), "previous"))
    elif found.start:
        links.append((address("./", kept), "from the beginning"))
    if found.next_start is not None:
        name = "next" if len(found.sequences) == PAGE_GROUPS else "look further"
        links.append((address("./", {**kept, "start": found.next_start}), name))
    said = f"{found.start + 1 if found.looked else 0:,} to {found.start + found.looked:,}"
    if query.needs_rows:
        said = f"{len(found.sequences)} found in {said}"
    return f"{said} of {found.candidates:,} groups", links
