"""Filter and order of the groups in a list. Pure except for the rows that the snapshot reads.

Conditions on the index (step, version, fate, mean reward) apply to all groups at once. Workers, statuses and
texts are only in the rows: `find` reads groups in order until a page is full or a limit is reached.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from echo_planes.data.store.index import Fate, GroupIndex
from echo_planes.data.store.snapshot import StoreSnapshot
from echo_planes.errors import DataError
from echo_planes.types import IntArray

PAGE_GROUPS = 50
LOOK_GROUPS = 4096  # read for one page at most, if the query has conditions on rows
LOOK_BYTES = 64 * 2**20
MAX_TEXT = 200  # characters of a search text
_CHUNK_GROUPS = 64
SORTS = {
    "sequence": "arrival",
    "step": "step",
    "version": "version",
    "reward_mean": "mean reward",
    "num_rows": "samples",
}
FATES = tuple(fate.name.lower() for fate in Fate if fate != Fate.ERASED)


@dataclass(frozen=True, slots=True)
class Bounds:
    """A range, both ends included."""

    low: float = -math.inf
    high: float = math.inf

    @property
    def is_open(self) -> bool:
        return self.low == -math.inf and self.high == math.inf


@dataclass(frozen=True, slots=True)
class Query:
    """Filter and order of a list."""

    step: Bounds = field(default_factory=Bounds)  # that trained the group, from 1 as in the report
    version: Bounds = field(default_factory=Bounds)  # oldest of any token
    reward: Bounds = field(default_factory=Bounds)  # mean of the group
    fate: str = ""  # of FATES; "": any
    worker: str = ""  # a part of its id
    status: str = ""
    text: str = ""  # in prompt, response, notes or group id; upper and lower case are equal
    sort: str = "sequence"
    descending: bool = True
    start: int = 0  # position in the order at which the page starts

    @property
    def needs_rows(self) -> bool:
        return bool(self.worker or self.status or self.text)


@dataclass(frozen=True, slots=True)
class Page:
    """One page of groups."""

    sequences: IntArray
    start: int
    looked: int  # candidates examined for this page
    candidates: int  # groups that match by the index

    @property
    def next_start(self) -> int | None:
        """Start of the next page; None: there is none."""
        end = self.start + self.looked
        return end if end < self.candidates else None


def parse_query(fields: Mapping[str, str]) -> Query:
    """Parse the fields of the page's form; an empty field sets no condition.

    Raises:
        DataError: a field is no number, not one of its choices, or longer than MAX_TEXT.
    """
    fate, sort = fields.get("fate", ""), fields.get("sort") or "sequence"
    if fate and fate not in FATES:
        raise DataError(f"fate={fate!r} is not one of {', '.join(FATES)}; choose one of them")
    if sort not in SORTS:
        raise DataError(f"sort={sort!r} is not one of {', '.join(SORTS)}; choose one of them")
    start = _number(fields, "start", 0.0)
    return Query(
        step=_bounds(fields, "step"),
        version=_bounds(fields, "version"),
        reward=_bounds(fields, "reward"),
        fate=fate,
        worker=_text(fields, "worker"),
        status=_text(fields, "status"),
        text=_text(fields, "text"),
        sort=sort,
        descending=fields.get("order", "down") != "up",
        start=int(min(max(start, 0.0), 2.0**53)),
    )


def find(snapshot: StoreSnapshot, query: Query) -> Page:
    """Return the next page of groups that match a query.

    Raises:
        DataError: the store cannot be read.
    """
    order = candidates(snapshot.index, query)
    start = min(query.start, len(order))
    if not query.needs_rows:
        chosen = order[start : start + PAGE_GROUPS]
        return Page(chosen, start, len(chosen), len(order))
    found: list[int] = []
    end, bytes_read = start, 0
    while end < min(len(order), start + LOOK_GROUPS) and len(found) < PAGE_GROUPS and bytes_read < LOOK_BYTES:
        chunk = order[end : end + _CHUNK_GROUPS]
        bytes_read += int(snapshot.index.groups["num_bytes"][chunk].sum())
        hits = matching(snapshot.gather(chunk), query)
        for sequence in chunk.tolist():
            if len(found) == PAGE_GROUPS:
                break
            end += 1
            if snapshot.index.ids[sequence] in hits:
                found.append(sequence)
    return Page(np.array(found, np.int64), start, end - start, len(order))


def candidates(index: GroupIndex, query: Query) -> IntArray:
    """Return the sequence numbers of the groups that match by the index, in order."""
    groups = index.groups
    keep = np.ones(groups.length, bool)
    if query.fate:
        keep &= groups["fate"] == Fate[query.fate.upper()]
    if not query.step.is_open:
        keep &= groups["step"] >= 0
    for column, bounds in (
        (groups["step"] + 1, query.step),
        (groups["version"], query.version),
        (groups["reward_mean"], query.reward),
    ):
        if not bounds.is_open:
            keep &= (column >= bounds.low) & (column <= bounds.high)
    kept: IntArray = np.flatnonzero(keep)
    if query.sort == "sequence":
        return kept[::-1] if query.descending else kept
    keys = groups[query.sort][kept].astype(np.float64)
    return kept[np.argsort(-keys if query.descending else keys, kind="stable")]


def matching(table: pa.Table, query: Query) -> set[str]:
    """Return the ids of groups that have a row which meets all conditions on rows."""
    mask = pa.chunked_array([pa.repeat(pa.scalar(True), table.num_rows)])
    if query.worker:
        mask = pc.and_(mask, pc.match_substring(table["worker_id"], query.worker))
    if query.status:
        mask = pc.and_(mask, pc.equal(table["status"], query.status))
    if query.text:
        # Not `ignore_case`, which makes a regular expression: its time grows with both lengths.
        wanted = pc.utf8_lower(pa.scalar(query.text)).as_py()
        hit = pc.match_substring(pc.utf8_lower(table["group_id"]), wanted)
        for name in ("prompt_text", "response_text", "notes"):
            hit = pc.or_kleene(hit, pc.match_substring(pc.utf8_lower(table[name]), wanted))
        mask = pc.and_(mask, hit)
    return set(table["group_id"].filter(mask, null_selection_behavior="drop").to_pylist())


def _bounds(fields: Mapping[str, str], name: str) -> Bounds:
    return Bounds(_number(fields, f"{name}_min", -math.inf), _number(fields, f"{name}_max", math.inf))


def _text(fields: Mapping[str, str], name: str) -> str:
    text = fields.get(name, "").strip()
    if len(text) > MAX_TEXT:
        raise DataError(f"{name} has {len(text):,} characters; search for {MAX_TEXT} at most")
    return text.encode(errors="replace").decode()  # without lone surrogates, which Arrow refuses


def _number(fields: Mapping[str, str], name: str, default: float) -> float:
    text = fields.get(name, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise DataError(f"{name}={text[:40]!r} is no number; give one, or leave it empty")
    return value
