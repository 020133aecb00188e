"""Dollars of a run by part, SKU and step, and the work and cost of each worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from echo_planes.fleet.money import WASTED
from echo_planes.reporting.formats import known, show_percent, show_usd
from echo_planes.reporting.metrics import Record, number

PARTS = {
    "learner": "the learner trains",
    "learner_idle": "the learner waits for a batch",
    "booting": "machines before they can work",
    "idle": "workers with nothing in flight",
    "trained": "tokens that were trained",
    "evaluated": "answers to held-out prompts",
    "open": "tokens in the buffer, or on their way to it",
    "stale": "tokens dropped as too old",
    "uninformative": "tokens of groups without a signal, which others replaced",
    "failed": "tokens of answers that could not be used",
    "lost": "tokens that no worker could continue from",
}


def dollars_by_part(summary: Record) -> list[tuple[str, ...]]:
    """Return rows of a table: part, its description, whether it is wasted, dollars, share of all."""
    return [
        (name.replace("_", " "), PARTS.get(name, ""), "wasted" if name in WASTED else "", *shown)
        for name, *shown in dollars_by_name(summary, "usd_by_part")
    ]


def dollars_by_name(summary: Record, key: str) -> list[tuple[str, ...]]:
    """Return rows of a table, the largest first: name, dollars, share of all."""
    found = summary.get(key)
    values = found if isinstance(found, Mapping) else {}
    dollars = {str(name): usd for name, value in values.items() if (usd := number(value))}
    total = sum(dollars.values())
    ordered = sorted(dollars.items(), key=lambda item: -item[1])
    return [(name, show_usd(usd), show_percent(usd / total)) for name, usd in ordered]


def spent_so_far(usd: Sequence[float | None]) -> list[float]:
    """Return the dollars spent up to and including each step."""
    return list(accumulate(value or 0.0 for value in usd))


def worker_rows(workers: Sequence[Record]) -> list[list[str]]:
    """Return rows of a table: id, SKU, trajectories, tokens, restarts, $/hour, cost, $ per million tokens."""
    rows = []
    for worker in workers:
        usd, tokens = number(worker.get("usd")), number(worker.get("tokens"))
        counts = (known(number(worker.get(key))) for key in ("trajectories", "tokens", "restarts"))
        hourly = known(number(worker.get("usd_per_hour")), lambda v: f"${v:.3f}")
        price = show_usd(usd / tokens * 1e6) if usd is not None and tokens else "-"
        name, sku = str(worker.get("id", "?")), str(worker.get("sku", "-"))
        rows.append([name, sku, *counts, hourly, known(usd, show_usd), price])
    return rows
