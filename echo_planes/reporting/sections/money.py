"""Cost of a run, and what the dollars went into: a section of report.html."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from echo_planes.fleet.money import WASTED
from echo_planes.reporting.metrics import Record, number
from echo_planes.reporting.sections.charts import Chart, Series, line_chart, show_percent, show_usd
from echo_planes.reporting.sections.html import safe

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
    "lost": "tokens that nobody could go on from",
}


def money(steps: Sequence[Record], summary: Record) -> str:
    """Dollars of each step and in all, by what they went into, and by kind of machine."""
    cards = []
    if steps:
        x = [number(step.get("step")) or 0.0 for step in steps]
        usd = [number(step.get("usd")) for step in steps]
        spent, total = [], 0.0
        for value in usd:
            total += value or 0.0
            spent.append(total)
        # The first one pays for the start as well, and would hide all others.
        note = "All machines; without the first, which pays for the start"
        chart = Chart("Cost of a step", note, x, "US dollars", show_usd)
        cards = [
            line_chart(chart, [Series("$ per step", [None, *usd[1:]] if len(usd) > 1 else usd, 1)]),
            line_chart(
                Chart("Cumulative cost", "Learner and workers, at their prices", x, "US dollars", show_usd),
                [Series("spent", spent, 1, pool="last")],
            ),
        ]
    parts, skus = _dollars(summary, "usd_by_part"), _dollars(summary, "usd_by_sku")
    if parts:
        rows = [
            (name.replace("_", " "), PARTS.get(name, ""), "wasted" if name in WASTED else "", usd)
            for name, usd in _dearest(parts)
        ]
        cards.append(_table("Where the dollars went", ("Part", "What it is", ""), rows))
    if skus:
        cards.append(_table("By machine", ("SKU and market",), _dearest(skus)))
    return f'<section><h2>Money</h2><div class="grid">{"".join(cards)}</div></section>' if cards else ""


def _dollars(summary: Record, key: str) -> dict[str, float]:
    found = summary.get(key)
    values = found if isinstance(found, Mapping) else {}
    return {str(name): usd for name, value in values.items() if (usd := number(value))}


def _dearest(dollars: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(dollars.items(), key=lambda item: -item[1])


def _table(title: str, names: Sequence[str], rows: Sequence[tuple[*tuple[str, ...], float]]) -> str:
    """Words, and in the last column dollars, with their share of all."""
    total = sum(row[-1] for row in rows)
    body = "".join(
        "<tr>"
        + "".join(f"<td>{safe(word)}</td>" for word in row[:-1])
        + f'<td class="num">{show_usd(row[-1])}</td>'
        + f'<td class="num">{show_percent(row[-1] / total)}</td></tr>'
        for row in rows
    )
    head = "".join(f"<th>{name}</th>" for name in names)
    head += '<th class="num">Cost</th><th class="num">Share</th>'
    return (
        f'<div class="card"><h3>{title}</h3><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div></div>"
    )
