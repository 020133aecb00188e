"""report.html of a simulated run: one self-contained page, marked as simulated."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from echo_planes.reporting.ledger import ledger_equation
from echo_planes.reporting.metrics import FLEET_STATE, WORKER_STATE
from echo_planes.reporting.report import csp_hash
from echo_planes.reporting.sections.charts import (
    Chart,
    Series,
    bar_chart,
    line_chart,
    show_percent,
    show_usd,
    si,
    stacked_chart,
    timeline,
)
from echo_planes.reporting.sections.fleet import fleet_cards
from echo_planes.reporting.sections.fleet_history import read_history
from echo_planes.reporting.sections.html import pill, safe
from echo_planes.reporting.sections.style import CSS, JS
from echo_planes.sim.trace import Record
from echo_planes.sim.world import Result

MAX_EVENTS = 500  # newest, in the table
MAX_DOTS = 2000  # in the timeline, spread evenly
LANES = ("fault", "worker lost", "notice", "worker left", "refused", "fleet", "end")


def render(result: Result, scenario_text: str) -> str:
    """The page as text.

    Args:
        result: of the simulation.
        scenario_text: the resolved scenario, YAML.
    """
    summary, steps = result.summary, result.steps
    body = [_header(summary)]
    if steps:
        body += [_overlap(steps, summary), _fleet(steps, summary, result.events)]
    body += [_money(steps, summary), _data(steps, summary, result.events)]
    body.append(
        '<section><h2>Scenario</h2><details class="card"><summary>scenario.yaml</summary>'
        f"<pre>{escape(scenario_text)}</pre></details></section>"
    )
    policy = (
        f"default-src 'none'; style-src '{csp_hash(CSS)}'; script-src '{csp_hash(JS)}'; base-uri 'none'; "
        "form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{safe(summary['scenario'])} (simulated)</title><style>{CSS}</style></head><body><main>"
        f"{''.join(body)}"
        "<footer>Simulated by echo_planes: the real code decides; learner, engines, links, prices and faults "
        "are models.</footer>"
        f'</main><div id="tip"></div><script>{JS}</script></body></html>\n'
    )


def _header(summary: Record) -> str:
    status = str(summary["status"])
    error = f'<p class="error">{safe(summary["error"])}</p>' if summary["error"] else ""
    good = "failed" if status == "failed" else "done"
    within = summary["max_staleness_observed"] <= summary["max_staleness"]
    bcast = summary["t_bcast_s_median"]
    per_step = summary["usd_per_step"]
    figures = [
        _figure("Learner bubble", show_percent(summary["bubble_ratio"]), "share of time spent waiting"),
        _figure(
            "Staleness, max",
            f"{summary['max_staleness_observed']} of {summary['max_staleness']}",
            f"mean {summary['staleness_mean']:.2f}, published every {summary['publish_every']}",
            within,
        ),
        _figure(
            "T_bcast",
            "-" if bcast is None else _seconds(bcast),
            "median, until 1/1.1 of the workers serve it",
        ),
        _figure("Steps", f"{summary['steps']:,}", f"in {summary['seconds'] / 3600:,.1f} virtual hours"),
        _figure(
            "Cost",
            show_usd(summary["usd_total"]),
            "-" if per_step is None else f"{show_usd(per_step)} / step",
        ),
        _figure("Wasted", show_percent(summary["wasted_share"]), "of the dollars"),
        _figure(
            "Workers",
            f"{summary['workers_most']:,}",
            f"at most at once; {summary['workers_lost']:,} were lost",
        ),
        _figure(
            "Lost trajectories",
            f"{summary['lost_trajectories']}",
            f"of {summary['accepted']:,} accepted",
            summary["lost_trajectories"] == 0,
        ),
    ]
    return (
        f'<header><p class="over">echo_planes simulation, seed {summary["seed"]}</p>'
        f'<div class="line"><h1>{safe(summary["scenario"])}</h1>{pill("simulated")}{pill(status, good)}</div>'
        f'<p class="sub">Nothing on this page was measured on hardware.</p>{error}'
        f'<div class="figures">{"".join(figures)}</div></header>'
    )


def _figure(name: str, value: str, more: str, good: bool | None = None) -> str:
    kind = "" if good is None else " good" if good else " bad"
    return (
        f'<div class="figure"><div class="name">{safe(name)}</div>'
        f'<div class="value{kind}">{safe(value)}</div><div class="more">{safe(more)}</div></div>'
    )


def _section(title: str, cards: Sequence[str]) -> str:
    return f'<section><h2>{title} (simulated)</h2><div class="grid">{"".join(cards)}</div></section>'


def _column(steps: Sequence[Record], key: str) -> list[float | None]:
    return [step[key] for step in steps]


def _x(steps: Sequence[Record]) -> list[float]:
    return [float(step["step"]) for step in steps]


def _overlap(steps: Sequence[Record], summary: Record) -> str:
    x, bound = _x(steps), summary["max_staleness"]
    time = Chart("Learner time", "What each step's wall time went to", x, "seconds per step", _seconds)
    bubble = Chart("Learner bubble", "Since the start", x, "share of time", show_percent, y_max=0.2)
    stale = Chart(
        "Staleness", "Versions behind the learner", x, "versions", lambda v: f"{v:.3g}", y_max=bound + 0.5
    )
    bcast = Chart("T_bcast", "Of the newest publication that arrived", x, "seconds", _seconds)
    return _section(
        "Overlap",
        [
            stacked_chart(
                time,
                [
                    Series("training", _column(steps, "t_train_s"), 1),
                    Series("waiting", _column(steps, "t_idle_s"), 2),
                ],
            ),
            line_chart(bubble, [Series("bubble ratio", _column(steps, "bubble_ratio"), 1, pool="last")]),
            line_chart(
                stale,
                [
                    Series("max", _column(steps, "staleness_max"), 2, pool="max"),
                    Series("mean", _column(steps, "staleness_mean"), 1),
                ],
                references=[(bound, f"S = {bound}")],
            ),
            line_chart(bcast, [Series("T_bcast", _column(steps, "t_bcast_s"), 1, pool="last")]),
        ],
    )


def _fleet(steps: Sequence[Record], summary: Record, events: Sequence[Record]) -> str:
    cards = fleet_cards(read_history(events, summary["seconds"]))
    note = "Of all workers that serve, with full batches"
    capacity = Chart("Capacity", note, _x(steps), "tokens/s", si, 1140)
    cards.append(
        line_chart(capacity, [Series("tokens/s", _column(steps, "capacity_tokens_per_s"), 1, pool="last")])
    )
    if summary["faults"]:
        cards.append(_faults(summary["faults"]))
    return _section("Fleet", cards)


def _faults(faults: Sequence[Record]) -> str:
    rows = "".join(
        f'<tr><td class="num">{fault["time_s"]:,.0f} s</td><td>{safe(fault["what"])}</td>'
        f'<td class="num">{show_percent(fault["capacity_drop"])}</td>'
        f'<td class="num">{_recovered(fault["recovered_after_s"])}</td></tr>'
        for fault in faults
    )
    head = '<th></th><th>Fault</th><th class="num">Capacity lost</th><th class="num">Made good after</th>'
    return (
        '<div class="card wide"><h3>Faults</h3><div class="scroll">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></div>"
    )


def _seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 100 else f"{value:.3g} s"


def _recovered(seconds: float | None) -> str:
    return "never" if seconds is None else _seconds(seconds)


def _money(steps: Sequence[Record], summary: Record) -> str:
    spent, total = [], 0.0
    for step in steps:
        total += step["usd"]
        spent.append(total)
    parts = sorted(summary["usd_by_part"].items(), key=lambda item: -item[1])
    bars = [(name.replace("_", " "), usd, show_usd(usd)) for name, usd in parts if usd]
    skus = [(name, usd, show_usd(usd)) for name, usd in summary["usd_by_sku"].items()]
    cards = []
    if steps:
        chart = Chart("Cumulative cost", "Learner and workers", _x(steps), "US dollars", show_usd)
        cards.append(line_chart(chart, [Series("spent", spent, 1, pool="last")]))
    cards += [
        bar_chart("What the dollars went into", "A machine's dollars are shared over its tokens", bars),
        bar_chart("By machine", "SKU and market", skus),
    ]
    return _section("Money", cards)


def _data(steps: Sequence[Record], summary: Record, every: Sequence[Record]) -> str:
    cards = []
    # The fleet's section shows the others.
    events = [event for event in every if event["kind"] not in (FLEET_STATE, WORKER_STATE)]
    if steps:
        ledger = Chart("Ledger", ledger_equation(summary), _x(steps), "trajectories so far", si, 1140, 260)
        series = [
            Series("trained", _column(steps, "trained"), 1, pool="last"),
            Series("buffered", _column(steps, "buffered"), 3, pool="last"),
            Series("dropped as stale", _column(steps, "dropped_stale"), 2, pool="last"),
        ]
        if summary["uninformative"]:
            series.append(Series("uninformative", _column(steps, "uninformative"), 4, pool="last"))
        cards.append(
            stacked_chart(
                ledger,
                series,
                outline=Series("accepted", _column(steps, "accepted"), 5, pool="last"),
            )
        )
    dots = [(e["time_s"], e["kind"], _text(e)) for e in events if e["kind"] in LANES]
    dots = dots[:: len(dots) // MAX_DOTS + 1]
    if dots:
        cards.append(timeline("Events", "Point at a dot to read it", dots, summary["seconds"]))
    rows = "".join(
        f'<tr><td class="num">{e["time_s"]:,.1f} s</td><td>{safe(e["kind"])}</td>'
        f"<td>{safe(_text(e))}</td></tr>"
        for e in events[-MAX_EVENTS:]
    )
    shown = min(len(events), MAX_EVENTS)
    cards.append(
        f'<details class="card wide"><summary>Events, the last {shown} of {len(events):,}</summary>'
        f'<div class="scroll"><table><tbody>{rows}</tbody></table></div></details>'
    )
    return _section("Data and events", cards)


def _text(event: Record) -> str:
    where = [f"{name}{event[key]}" for key, name in (("worker", ""), ("version", "v")) if key in event]
    return str(event["text"]) + (f" ({', '.join(where)})" if where else "")
