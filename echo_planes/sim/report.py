"""Page report.html of a simulated run: self-contained and marked as simulated."""

from __future__ import annotations

from echo_planes.reporting.formats import show_percent, show_seconds
from echo_planes.reporting.html import page
from echo_planes.reporting.ledger import ledger_equation
from echo_planes.reporting.sections.cards import CHARTS, StepCharts, told_events
from echo_planes.reporting.sections.charts import Series
from echo_planes.reporting.sections.fleet import fleet_cards
from echo_planes.reporting.sections.fleet_history import read_history
from echo_planes.reporting.sections.money import spent_so_far
from echo_planes.sim.world import Result

MAX_DOTS = 2000  # in the timeline, spread evenly
LANES = ("fault", "worker lost", "notice", "worker left", "refused", "fleet", "end")


def render(result: Result, scenario_text: str) -> str:
    """Render the page as HTML.

    Args:
        result: result of the simulation.
        scenario_text: the resolved scenario, YAML.
    """
    summary, steps = result.summary, StepCharts(result.steps)
    events = told_events(result.events)
    dots = [event for event in events if event[1] in LANES]
    parts = sorted(summary["usd_by_part"].items(), key=lambda item: -item[1])
    faults = [
        (
            f"{fault['time_s']:,.0f} s",
            fault["what"],
            show_percent(fault["capacity_drop"]),
            "never" if (after := fault["recovered_after_s"]) is None else show_seconds(after),
        )
        for fault in summary["faults"]
    ]
    return page(
        "simulation",
        **CHARTS,
        s=summary,
        steps=steps,
        spent=Series("spent", spent_so_far(steps.column("usd")), 1, pool="last"),
        fleet=fleet_cards(read_history(result.events, summary["seconds"])),
        faults=faults,
        by_part=[(name.replace("_", " "), usd) for name, usd in parts if usd],
        ledger=ledger_equation(summary),
        events=events,
        dots=dots[:: len(dots) // MAX_DOTS + 1],
        scenario_text=scenario_text,
    )
