"""Output of a fleet plan: a table for the terminal, JSON, and a page with charts.

Every figure that is not given or measured is marked "(estimated)"; JSON has it under the key "estimated".
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from echo_planes.fleet.instance_types import InstanceType
from echo_planes.fleet.planning import Fleet, Method, Planned
from echo_planes.fleet.sku_facts import AS_OF
from echo_planes.fleet.throughput import MEMORY_SHARE, Source
from echo_planes.reporting.formats import count, show_percent, show_seconds, show_usd
from echo_planes.reporting.html import page
from echo_planes.reporting.sections.charts import Chart, Point, bar_chart, points_chart

MARK = "(estimated)"
MAX_INSTANCE_TYPES = 12  # shown, the cheapest per trajectory first; all are in the JSON
_COLORS: dict[Method, int] = {"greedy": 2, "exact": 1}  # series of the style sheet, in drawing order
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
    """Return a figure as text, marked if it is an estimate."""
    return f"{text} {MARK}" if source == "estimated" else text


def cheapest_instance_types(planned: Planned) -> list[InstanceType]:
    return sorted(planned.instance_types, key=lambda instance_type: (instance_type.rho, instance_type.name))


# --- terminal ------------------------------------------------------------------------------------


def as_text(planned: Planned) -> str:
    """Render the plan for the terminal."""
    lines = [f"{name:12s}{text}" for name, text in _facts(planned)]
    lines += [
        "",
        *_table(
            ["instance type", "$/h", "trajectories/s", "rho, $/h per trajectory/s"], _instance_types(planned)
        ),
    ]
    left = len(planned.instance_types) - MAX_INSTANCE_TYPES
    if left > 0:
        lines.append(f"and {count(left, 'instance type')} more")
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
    kv_gib = config.answers.kv_bytes(size) / 2**30
    kv_cache = marked(f"{size.kv_bytes_per_token / 1024:.3g} KiB a token", size.kv_source)
    return [
        ("Model", f"{size.num_params / 1e9:.3g} B weights, KV cache {kv_cache}"),
        (
            "Worker",
            f"{size.weight_bytes / 2**30:.3g} GiB of weights, and {kv_gib:.2g} GiB of KV cache for each of "
            f"up to {config.max_num_seqs} answers at once, in {show_percent(MEMORY_SHARE)} of its GPUs' "
            f"memory {MARK}",
        ),
        *([("Learner", f"{planned.learner_memory} {MARK}")] if planned.learner_memory else []),
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
        f"{config.max_per_instance_type:,} workers of an instance type",
        None if config.spot else "no spot",
    ]
    return ", ".join(one for one in said if one)


def _instance_types(planned: Planned) -> list[list[str]]:
    return [
        [
            instance_type.name,
            show_usd(instance_type.usd_per_hour),
            marked(f"{instance_type.mu:.3g}", planned.sources[instance_type.sku]),
            marked(show_usd(instance_type.rho), planned.sources[instance_type.sku]),
        ]
        for instance_type in cheapest_instance_types(planned)[:MAX_INSTANCE_TYPES]
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
    return [*_found(planned), *planned.dear_spot, *planned.sparse]


def _found(planned: Planned) -> list[str]:
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
    """Return lines with aligned columns, all but the first flush right. Marked heads take two lines."""
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
    """Return the plan as JSON. Values under "estimated" are estimates; units are in the names."""
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
        "instance_types": [
            _with_source(
                {
                    "name": instance_type.name,
                    "sku": instance_type.sku,
                    "usd_per_hour": instance_type.usd_per_hour,
                    "max_count": instance_type.max_count,
                    "mu_source": planned.sources[instance_type.sku],
                },
                {"mu": instance_type.mu, "rho": instance_type.rho},
                planned.sources[instance_type.sku],
            )
            for instance_type in cheapest_instance_types(planned)
        ],
        "fastest": None if fastest is None else {"title": fastest.title, "method": fastest.method},
        "fleets": [_fleet_tree(fleet) for fleet in planned.fleets],
        "feasible": planned.advice is None,
        "advice": list(planned.advice or ()),
        "left_out": list(planned.notes),
        "learner_memory": planned.learner_memory or None,
        "sparse": list(planned.sparse),
        "dear_spot": list(planned.dear_spot),
        "config": planned.config.model_dump(mode="json"),
    }
    for key, figure in (("t_train_s", planned.t_train_s), ("payload_bytes", planned.payload_bytes)):
        _with_source(tree, {key: figure.value}, figure.source)
    _with_source(tree, {"kv_bytes_per_token": planned.size.kv_bytes_per_token}, planned.size.kv_source)
    return json.dumps(tree, indent=2, allow_nan=False) + "\n"


def _with_source(tree: dict[str, Any], figures: dict[str, float], source: Source) -> dict[str, Any]:
    """Put figures into `tree`, under "estimated" if they are estimates; return `tree`."""
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
    """Return one self-contained page: facts, fleets, $/step against the bubble, and instance types."""
    return page(
        "plan",
        is_feasible=planned.advice is None,
        facts=_facts(planned),
        mark=MARK,
        as_of=AS_OF,
        columns=COLUMNS,
        fleets=[(_cells(fleet), _machines(fleet)) for fleet in planned.fleets],
        verdict=_verdict(planned),
        notes=planned.notes,
        frontier=_frontier(planned),
        instance_types=_instance_type_bars(planned),
    )


def _instance_type_bars(planned: Planned) -> Markup:
    known = sorted(sku for sku, source in planned.sources.items() if source != "estimated")
    note = f"rho, $/h for one trajectory/s; the cheapest instance types {MARK}"
    bars = [
        (
            f"{instance_type.sku} {instance_type.region.split('/')[0]}"
            + (" spot" if instance_type.market == "spot" else ""),
            instance_type.rho,
        )
        for instance_type in cheapest_instance_types(planned)[:MAX_INSTANCE_TYPES]
    ]
    note += f", but not {', '.join(known)}" if known else ""
    return bar_chart("Unit throughput cost", note, bars, show_usd)


def _frontier(planned: Planned) -> Markup:
    """Draw $/step against the learner's bubble: a point for each fleet size, a line for each method."""
    chart = Chart(
        f"Cost of a step against the learner's bubble {MARK}",
        "Each point is the cheapest fleet of its throughput; rings are the fleets of the table",
        y_label="$/step, learner included",
        show=show_usd,
        x_label="learner bubble",
        show_x=show_percent,
    )
    sweep = sorted(planned.sweep, key=lambda fleet: (-fleet.bubble, fleet.plan.usd_per_hour))
    lines = [
        (method, color, [_point(fleet) for fleet in sweep if fleet.method == method])
        for method, color in _COLORS.items()
    ]
    return points_chart(chart, lines, [_point(fleet) for fleet in planned.fleets], "in the table")


def _point(fleet: Fleet) -> Point:
    text = (
        f"{_name(fleet)}: {count(fleet.plan.num_workers, 'worker')}, {show_usd(fleet.usd_per_step)} a step, "
        f"bubble {show_percent(fleet.bubble)} {MARK}: {_machines(fleet)}"
    )
    return fleet.bubble, fleet.usd_per_step, text
