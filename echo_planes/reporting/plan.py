"""A plan for people and for programs: a table for the terminal, JSON, and a page with charts.

Every figure that is not given or measured is marked "(estimated)": in JSON it lies under that word.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from echo_planes.fleet.instance_types import Offer
from echo_planes.fleet.planning import Fleet, Method, Planned
from echo_planes.fleet.sku_facts import AS_OF
from echo_planes.fleet.throughput import Source
from echo_planes.reporting.report import csp_hash
from echo_planes.reporting.sections.charts import bar_chart, show_percent, show_seconds, show_usd, ticks
from echo_planes.reporting.sections.html import count, safe
from echo_planes.reporting.sections.style import CSS, JS

MARK = "(estimated)"
MAX_OFFERS = 12  # shown, the cheapest per trajectory first; all are in the JSON
_COLORS: dict[Method, int] = {"greedy": 2, "exact": 1}  # series of the style sheet, in drawing order
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 544, 14, 210  # the plot, in pixels of its drawing
COLUMNS = (
    "fleet",
    "by",
    "workers",
    "$/h",
    f"mu {MARK}",
    f"bubble {MARK}",
    f"staleness <= {MARK}",
    f"$/step {MARK}",
    f"$/run {MARK}",
    f"hours {MARK}",
)


def marked(text: str, source: Source) -> str:
    """A figure, and that it is an estimate where it is one."""
    return f"{text} {MARK}" if source == "estimated" else text


def cheapest_offers(planned: Planned) -> list[Offer]:
    return sorted(planned.offers, key=lambda offer: (offer.rho, offer.name))


# --- terminal ------------------------------------------------------------------------------------


def as_text(planned: Planned) -> str:
    """Render the plan for the terminal."""
    lines = [f"{name:12s}{text}" for name, text in _facts(planned)]
    lines += ["", *_table(["offer", "$/h", "trajectories/s", "rho, $/h per trajectory/s"], _offers(planned))]
    left = len(planned.offers) - MAX_OFFERS
    if left > 0:
        lines.append(f"and {count(left, 'offer')} more")
    lines.append("")
    if planned.fleets:
        lines += [*_table(COLUMNS, [_cells(fleet) for fleet in planned.fleets]), ""]
        lines += [f"{_name(fleet)}: {_machines(fleet)}" for fleet in planned.fleets]
    lines += [*_verdict(planned), *(f"Left out: {note}." for note in planned.notes)]
    return "\n".join(lines) + "\n"


def _facts(planned: Planned) -> list[tuple[str, str]]:
    config, need, size = planned.config, planned.need, planned.size
    mbit = f"{config.uplink_mbit:g} Mbit/s up, {config.worker_mbit:g} down"
    payload = f"{planned.payload_bytes.value / 2**20:,.1f} MiB"
    kv_cache = marked(f"{size.kv_bytes_per_token / 1024:.3g} KiB a token", size.kv_source)
    return [
        ("Model", f"{size.num_params / 1e9:.3g} B weights, KV cache {kv_cache}"),
        (
            "Step",
            f"{config.per_step:,} trajectories of {config.answer_tokens:,} tokens; "
            f"T_train {marked(show_seconds(planned.t_train_s.value), planned.t_train_s.source)}; "
            f"learner {show_usd(config.learner_usd_per_hour)}/h",
        ),
        (
            "Weights",
            f"{marked(payload, planned.payload_bytes.source)} every kappa = {need.kappa} steps (S = "
            f"{need.max_staleness}); {mbit}: at most {count(planned.num_chains, 'chain')}; T_bcast "
            f"{show_seconds(need.t_bcast_s)} {MARK}",
        ),
        (
            "Needed",
            f"no fleet is enough: T_bcast is not below kappa T_train {MARK}"
            if need.mu_min is None or need.mu_target is None
            else f"mu_min {need.mu_min:.3g}, mu_target {need.mu_target:.3g} trajectories/s {MARK}",
        ),
        ("Limits", _limits(planned)),
    ]


def _limits(planned: Planned) -> str:
    limits, config = planned.limits, planned.config
    said = [
        None if limits.usd_per_hour is None else f"{show_usd(limits.usd_per_hour)}/h of workers",
        None if limits.usd_left is None else f"{show_usd(limits.usd_left)} left for the run",
        None
        if limits.interruptions_per_hour is None
        else f"{limits.interruptions_per_hour:g} interruptions/h",
        None if limits.max_workers is None else count(limits.max_workers, "worker"),
        f"{config.max_per_offer:,} workers of an offer",
        None if config.spot else "no spot",
    ]
    return ", ".join(one for one in said if one)


def _offers(planned: Planned) -> list[list[str]]:
    return [
        [
            offer.name,
            show_usd(offer.usd_per_hour),
            marked(f"{offer.mu:.3g}", planned.sources[offer.sku]),
            marked(show_usd(offer.rho), planned.sources[offer.sku]),
        ]
        for offer in cheapest_offers(planned)[:MAX_OFFERS]
    ]


def _cells(fleet: Fleet) -> list[str]:
    return [
        fleet.title,
        fleet.method,
        f"{fleet.plan.num_workers:,}",
        f"{fleet.plan.usd_per_hour:,.2f}",
        f"{fleet.plan.mu:.3g}",
        show_percent(fleet.bubble),
        "-" if fleet.staleness is None else str(fleet.staleness),
        show_usd(fleet.usd_per_step),
        show_usd(fleet.usd_run),
        f"{fleet.hours:,.3g}",
    ]


def _name(fleet: Fleet) -> str:
    return f"{fleet.title[0].upper()}{fleet.title[1:]}, {fleet.method}"


def _machines(fleet: Fleet) -> str:
    shown = ", ".join(f"{number} x {name}" for name, number in sorted(fleet.plan.counts.items()))
    risk = fleet.plan.interruptions_per_hour
    if risk:
        shown += f"; {risk:.2g} interruptions/h {MARK}"
    return shown if fleet.within_total else f"{shown}; the run costs more than is left {MARK}"


def _verdict(planned: Planned) -> list[str]:
    fastest = _fastest(planned)
    if planned.advice is None and fastest is not None:
        steps = count(planned.config.steps, "step")
        return [
            f"Fastest within the limits: {fastest.title}, {fastest.method}: {fastest.hours:,.3g} h {MARK} "
            f"for {steps}. The learner is the limit: more workers would not make it faster."
        ]
    lines = ["No fleet within the limits reaches mu_target. What would help:"]
    return lines + [f"  - {one} {MARK}" for one in planned.advice or ("no single change",)]


def _fastest(planned: Planned) -> Fleet | None:
    return min(planned.fleets, key=lambda fleet: (fleet.step_s, fleet.usd_per_step), default=None)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as they must be; all but the first flush right. Long heads take several lines."""
    heads = [name.rsplit(" ", 1) if name.endswith(MARK) else ["", name] for name in head]
    lines = [[parts[0] for parts in heads], [parts[1] for parts in heads], *rows]
    if not any(lines[0]):
        del lines[0]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return [
        "  ".join(
            text.ljust(width) if i == 0 else text.rjust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


# --- JSON ----------------------------------------------------------------------------------------


def as_json(planned: Planned) -> str:
    """The plan for programs. What lies under "estimated" is an estimate; units are in the names."""
    need, fastest = planned.need, _fastest(planned)
    tree: dict[str, Any] = {
        "kappa": need.kappa,
        "max_staleness": need.max_staleness,
        "trajectories_per_step": need.per_step,
        "estimated": {
            "t_bcast_s": need.t_bcast_s,
            "mu_min": need.mu_min,
            "mu_target": need.mu_target,
        },
        "offers": [
            _with_source(
                {
                    "name": offer.name,
                    "sku": offer.sku,
                    "usd_per_hour": offer.usd_per_hour,
                    "max_count": offer.max_count,
                    "mu_source": planned.sources[offer.sku],
                },
                {"mu": offer.mu, "rho": offer.rho},
                planned.sources[offer.sku],
            )
            for offer in cheapest_offers(planned)
        ],
        "fastest": None if fastest is None else {"title": fastest.title, "method": fastest.method},
        "fleets": [_fleet_tree(fleet) for fleet in planned.fleets],
        "feasible": planned.advice is None,
        "advice": list(planned.advice or ()),
        "left_out": list(planned.notes),
        "config": planned.config.model_dump(mode="json"),
    }
    for key, figure in (("t_train_s", planned.t_train_s), ("payload_bytes", planned.payload_bytes)):
        _with_source(tree, {key: figure.value}, figure.source)
    _with_source(tree, {"kv_bytes_per_token": planned.size.kv_bytes_per_token}, planned.size.kv_source)
    return json.dumps(tree, indent=2, allow_nan=False) + "\n"


def _with_source(tree: dict[str, Any], figures: dict[str, float], source: Source) -> dict[str, Any]:
    """Put figures into `tree`, under "estimated" where they are estimates."""
    place = tree.setdefault("estimated", {}) if source == "estimated" else tree
    place.update(figures)
    return tree


def _fleet_tree(fleet: Fleet) -> dict[str, Any]:
    return {
        "title": fleet.title,
        "method": fleet.method,
        "counts": dict(fleet.plan.counts),
        "workers": fleet.plan.num_workers,
        "usd_per_hour": fleet.plan.usd_per_hour,
        "estimated": {
            "mu": fleet.plan.mu,
            "interruptions_per_hour": fleet.plan.interruptions_per_hour,
            "t_bcast_s": fleet.t_bcast_s,
            "bubble": fleet.bubble,
            "staleness_bound": fleet.staleness,
            "step_s": fleet.step_s,
            "usd_per_step": fleet.usd_per_step,
            "usd_run": fleet.usd_run,
            "hours": fleet.hours,
            "within_usd_total": fleet.within_total,
        },
    }


# --- page ----------------------------------------------------------------------------------------


def as_html(planned: Planned) -> str:
    """One self-contained page: facts, the fleets, $/step against the learner's bubble, and the offers."""
    facts = "".join(
        f"<tr><td><b>{safe(name)}</b></td><td>{safe(text)}</td></tr>" for name, text in _facts(planned)
    )
    verdict = "".join(f"<p>{safe(line)}</p>" for line in _verdict(planned) if line)
    notes = "".join(f"<p>Left out: {safe(note)}.</p>" for note in planned.notes)
    status = ("done", "a fleet was found") if planned.advice is None else ("failed", "no fleet is enough")
    policy = (
        f"default-src 'none'; style-src '{csp_hash(CSS)}'; script-src '{csp_hash(JS)}'; base-uri 'none'; "
        "form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{safe(policy)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Fleet plan</title><style>{CSS}</style></head><body><main>"
        '<header><p class="over">echo_planes plan</p><div class="line"><h1>Fleet plan</h1>'
        f'<span class="pill {status[0]}">{status[1]}</span></div></header>'
        f'<section><h2>What is planned for</h2><div class="card"><table>{facts}</table></div></section>'
        f'<section><h2>Fleets</h2><div class="grid">{_fleet_card(planned, verdict + notes)}'
        f"{_frontier(planned)}"
        f"{_offer_bars(planned)}</div></section>"
        f"<footer>Made by echo_planes. Figures marked {MARK} come from formulas and the GPU makers' peak "
        f"figures of {AS_OF}; the first steps of a run say better.</footer>"
        f'</main><div id="tip"></div><script>{JS}</script></body></html>\n'
    )


def _fleet_card(planned: Planned, below: str) -> str:
    kinds = ["", "", *["num"] * (len(COLUMNS) - 2)]
    names = [safe(name).replace(f" {MARK}", f"<br>{MARK}") for name in COLUMNS]
    head = "".join(f'<th class="{kind}">{name}</th>' for kind, name in zip(kinds, names, strict=True))
    body = []
    for fleet in planned.fleets:
        cells = zip(kinds, _cells(fleet), strict=True)
        body.append(
            "<tr>" + "".join(f'<td class="{kind}">{safe(cell)}</td>' for kind, cell in cells) + "</tr>"
        )
        body.append(f'<tr><td></td><td colspan="{len(COLUMNS) - 1}">{safe(_machines(fleet))}</td></tr>')
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>" if body else ""
    return f'<div class="card wide"><div class="plot">{table}</div>{below}</div>'


def _offer_bars(planned: Planned) -> str:
    known = sorted(sku for sku, source in planned.sources.items() if source != "estimated")
    note = f"rho, $/h for one trajectory/s; the cheapest offers {MARK}"
    bars = [
        (
            f"{offer.sku} {offer.region.split('/')[0]}{' spot' if offer.market == 'spot' else ''}",
            offer.rho,
            show_usd(offer.rho),
        )
        for offer in cheapest_offers(planned)[:MAX_OFFERS]
    ]
    return bar_chart("Unit throughput cost", note + (f", but not {', '.join(known)}" if known else ""), bars)


def _frontier(planned: Planned) -> str:
    """$/step against the learner's bubble: a point for each fleet size, a line for each way to choose."""
    title = f"Cost of a step against the learner's bubble {MARK}"
    note = "Each point is the cheapest fleet of its throughput; rings are the fleets of the table"
    shown = [*planned.sweep, *planned.fleets]
    legend = "".join(f'<span class="key"><i class="k{_COLORS[m]} line"></i>{m}</span>' for m in _COLORS)
    legend += '<span class="key"><i class="kmark"></i>in the table</span>'
    if not shown:
        return f'<div class="card"><h3>{safe(title)}</h3><p class="empty">No data.</p></div>'
    x_ticks = ticks(0.0, max(0.01, *(fleet.bubble for fleet in shown)))
    y_ticks = ticks(0.0, max(fleet.usd_per_step for fleet in shown), 4)
    x_scale, y_scale = (_RIGHT - _LEFT) / x_ticks[-1], (_BOTTOM - _TOP) / (y_ticks[-1] or 1.0)

    def at(fleet: Fleet) -> tuple[float, float]:
        return round(_LEFT + fleet.bubble * x_scale, 1), round(_BOTTOM - fleet.usd_per_step * y_scale, 1)

    body = []
    for value in y_ticks:
        y = round(_BOTTOM - value * y_scale, 1)
        body.append(
            f'<line class="{"grid" if value else "zero"}" x1="{_LEFT}" x2="{_RIGHT}" y1="{y}" y2="{y}"/>'
        )
        body.append(f'<text class="tick end" x="{_LEFT - 8}" y="{y + 3.5}">{show_usd(value)}</text>')
    for value in x_ticks:
        x = round(_LEFT + value * x_scale, 1)
        body.append(f'<text class="tick mid" x="{x}" y="{_BOTTOM + 16}">{show_percent(value)}</text>')
    middle = (_LEFT + _RIGHT) / 2
    body.append(f'<text class="axis mid" x="{middle}" y="{_BOTTOM + 32}">learner bubble</text>')
    for method, color in _COLORS.items():
        fleets = sorted(
            (f for f in planned.sweep if f.method == method), key=lambda f: (-f.bubble, f.plan.usd_per_hour)
        )
        path = " ".join(f"{x},{y}" for x, y in map(at, fleets))
        body.append(f'<polyline class="line thin s{color}" points="{path}"/>')
        body += [_point(fleet, at(fleet), f"dot f{color}", 3.0) for fleet in fleets]
    body += [_point(fleet, at(fleet), "mark", 5.0) for fleet in planned.fleets]
    return (
        f'<figure class="card"><figcaption><h3>{safe(title)}</h3><p>{safe(note)}</p></figcaption>'
        f'<div class="legend"><span class="unit">$/step, learner included</span>{legend}</div>'
        f'<div class="plot"><svg viewBox="0 0 {_RIGHT + 16} {_BOTTOM + 38}" role="img" '
        f'aria-label="{safe(title)}">{"".join(body)}</svg></div></figure>'
    )


def _point(fleet: Fleet, place: tuple[float, float], kind: str, radius: float) -> str:
    text = (
        f"{_name(fleet)}: {count(fleet.plan.num_workers, 'worker')}, {show_usd(fleet.usd_per_step)} a step, "
        f"bubble {show_percent(fleet.bubble)} {MARK}: {_machines(fleet)}"
    )
    x, y = place
    return f'<circle class="{kind}" cx="{x}" cy="{y}" r="{radius}"><title>{safe(text)}</title></circle>'
