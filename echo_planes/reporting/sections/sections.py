"""The chart and table sections of report.html, each a function of the run's records."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from echo_planes.reporting.ledger import ledger_equation, reward_failures
from echo_planes.reporting.metrics import FLEET_STATE, WORKER_STATE, Record, number
from echo_planes.reporting.sections.charts import (
    Chart,
    Series,
    bar_chart,
    line_chart,
    moving_average,
    show_percent,
    show_seconds,
    show_usd,
    si,
    stacked_chart,
    timeline,
)

MAX_EVENTS = 500  # newest, in the table


def column(steps: Sequence[Record], key: str) -> list[float | None]:
    return [number(step.get(key)) for step in steps]


def step_numbers(steps: Sequence[Record]) -> list[float]:
    return [number(step.get("step")) or 0.0 for step in steps]


def section(title: str, cards: Sequence[str]) -> str:
    return f'<section><h2>{escape(title)}</h2><div class="grid">{"".join(cards)}</div></section>'


def learning(steps: Sequence[Record], summary: Record) -> str:
    """Reward with its evaluations, pass@k, gradient norm."""
    x = step_numbers(steps)
    evals = summary.get("evals", [])
    reward, correct = column(steps, "reward_mean"), column(steps, "correct_mean")
    window = max(1, min(20, len(steps) // 10))
    lines = [
        Series("reward of each step", reward, 1, "faint"),
        Series(f"reward, mean of {window} steps", moving_average(reward, window), 1),
    ]
    if correct != reward:
        lines.append(Series(f"correct, mean of {window} steps", moving_average(correct, window), 3))
    marks = [
        (
            float(e["step"]),
            float(e["reward_mean"]),
            f"step {e['step']}, {_versions(e)}: "
            f"held-out reward {e['reward_mean']:.3f}, accuracy {number(e.get('accuracy')) or 0.0:.3f}",
        )
        for e in evals
        if number(e.get("step")) is not None and number(e.get("reward_mean")) is not None
    ]
    top = 1.0 if all(0 <= (v or 0.0) <= 1 for v in reward) else None
    chart = Chart(
        "Reward",
        f"Training batches, and held-out prompts{_drawn(evals)}",
        x,
        "reward",
        lambda v: f"{v:.3g}",
        1140,
        300,
        top,
    )
    cards = [line_chart(chart, lines, marks=marks, marks_name="held-out evaluation")]
    if curve := _pass_at(evals):
        cards.append(curve)
    line = Series("gradient norm", column(steps, "grad_norm"), 1)
    chart = Chart("Gradient norm", "Before clipping", x, "L2 norm", lambda v: f"{v:.3g}")
    return section("Learning", [*cards, line_chart(chart, [line])])


def _versions(evaluation: Record) -> str:
    newest = evaluation.get("newest_version")
    return f"v{evaluation.get('version', '?')}" + ("" if newest is None else f" to v{newest}")


def _drawn(evals: Sequence[Record]) -> str:
    """The temperature and top-p of evaluations that have some."""
    drawn = {(number(e.get("temperature")), number(e.get("top_p"))) for e in evals}
    if len(drawn) != 1 or None in (pair := drawn.pop()):
        return ""
    return f" at temperature {pair[0]:g}, top-p {pair[1]:g}"


def _pass_at(evals: Sequence[Record]) -> str:
    """pass@k over the evaluations, for at most five k; empty where there is one answer a prompt."""
    curves = [(number(e.get("step")) or 0.0, e["pass_at"]) for e in evals if e.get("pass_at")]
    ks = sorted({int(k) for _, curve in curves for k in curve if k.isdecimal() and len(k) < 7})
    if len(ks) < 2:
        return ""
    shown = sorted({ks[round(i * (len(ks) - 1) / 4)] for i in range(5)})
    chart = Chart(
        "Does it learn, or only sharpen?",
        f"Held-out prompts with a right answer among k; where only pass@1 rises, and pass@{ks[-1]} does not, "
        "it sharpens",
        [step for step, _ in curves],
        "share of prompts",
        lambda v: f"{v:.3f}",
        y_max=1.0,
    )
    lines = [
        Series(f"pass@{k}", [number(curve.get(str(k))) for _, curve in curves], color, pool="last")
        for color, k in enumerate(shown, 1)
    ]
    return line_chart(chart, lines)


def asynchrony(steps: Sequence[Record], summary: Record) -> str:
    """Staleness, and what the learner's time went to."""
    x = step_numbers(steps)
    bound = number(summary.get("max_staleness"))
    top = Series("max", column(steps, "staleness_max"), 2, pool="max")
    cards = [
        line_chart(
            Chart(
                "Staleness",
                "Versions between the policy that sampled and the policy that is trained",
                x,
                "versions",
                lambda v: f"{v:.3g}",
                y_max=None if bound is None else bound + 0.5,
            ),
            [top, Series("mean", column(steps, "staleness_mean"), 1)],
            references=[] if bound is None else [(bound, f"S = {bound:.0f}")],
        ),
        stacked_chart(
            Chart("Learner time", "What each step's wall time went to", x, "seconds per step", show_seconds),
            [
                Series("training", column(steps, "t_train_s"), 1),
                Series("waiting", column(steps, "t_idle_s"), 2),
            ],
        ),
        line_chart(
            Chart(
                "Learner bubble",
                "Waiting / (waiting + training), since the start",
                x,
                "share of time",
                show_percent,
                y_max=0.2,
            ),
            [Series("bubble ratio", column(steps, "bubble_ratio"), 1, pool="last")],
        ),
    ]
    return section("Asynchrony", cards)


def throughput(steps: Sequence[Record], summary: Record) -> str:
    """Throughput, workers and start-up."""
    cards = []
    if steps:
        chart = Chart(
            "Throughput", "Trained tokens per second of step time", step_numbers(steps), "tokens/s", si
        )
        cards = [line_chart(chart, [Series("tokens/s", column(steps, "tokens_per_s"), 1)])]
    workers = summary.get("workers", [])
    bars = [(str(w.get("id", "?")), number(w.get("tokens")) or 0.0) for w in workers]
    if bars:
        named = [(name, tokens, f"{si(tokens)} tokens") for name, tokens in bars]
        cards.append(bar_chart("Tokens per worker", "Sampled, in the whole run", named))
    startup = {name: number(s) or 0.0 for name, s in summary.get("seconds_startup", {}).items()}
    if startup:
        cards.append(
            bar_chart(
                "Start-up",
                "Seconds until each part was ready; parts may overlap",
                [(name, s, f"{s:.1f} s") for name, s in startup.items()],
            )
        )
    if workers:
        cards.append(_worker_table(workers))
    return section("Throughput and workers", cards) if cards else ""


def _worker_table(workers: Sequence[Record]) -> str:
    rows = []
    for w in workers:
        usd, tokens = number(w.get("usd")), number(w.get("tokens"))
        price = show_usd(usd / tokens * 1e6) if usd is not None and tokens else "-"
        cells = [
            _cell(w, "trajectories"),
            _cell(w, "tokens"),
            _cell(w, "restarts"),
            "-" if number(w.get("usd_per_hour")) is None else f"${w['usd_per_hour']:.3f}",
            "-" if usd is None else show_usd(usd),
            price,
        ]
        rows.append(
            f"<tr><td>{escape(str(w.get('id', '?')))}</td><td>{escape(str(w.get('sku', '-')))}</td>"
            + "".join(f'<td class="num">{cell}</td>' for cell in cells)
            + "</tr>"
        )
    names = ("Trajectories", "Tokens", "Restarts", "$/hour", "Cost", "$ per M tokens")
    head = "<th>Worker</th><th>SKU</th>" + "".join(f'<th class="num">{name}</th>' for name in names)
    return (
        '<div class="card wide"><h3>Workers</h3><div class="scroll">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></div>"
    )


def _cell(record: Record, key: str) -> str:
    value = number(record.get(key))
    return "-" if value is None else f"{value:,.0f}"


def data(steps: Sequence[Record], summary: Record, events: Sequence[Record]) -> str:
    """The trajectory ledger and the events."""
    cards = []
    if steps:
        equation = ledger_equation(summary)
        if failures := reward_failures(summary):
            equation += f"; rewards that failed, so that their groups were not trained: {failures}"
        parts = [
            Series("trained", column(steps, "trained"), 1, pool="last"),
            Series("buffered", column(steps, "buffered"), 3, pool="last"),
            Series("dropped as stale", column(steps, "dropped_stale"), 2, pool="last"),
        ]
        if any(column(steps, "uninformative")):
            parts.append(Series("uninformative", column(steps, "uninformative"), 4, pool="last"))
        cards.append(
            stacked_chart(
                Chart("Ledger", equation, step_numbers(steps), "trajectories so far", si, 1140, 260),
                parts,
                outline=Series("accepted", column(steps, "accepted"), 5, pool="last"),
            )
        )
    shown = [
        (number(e.get("time_s")) or 0.0, str(e.get("kind", "event")), _event_text(e))
        for e in events
        if e.get("kind") not in (FLEET_STATE, WORKER_STATE)  # the fleet's own section shows them
    ]
    end_s = number(summary.get("seconds")) or 0.0
    if shown:
        cards.append(timeline("Events", "Point at a dot to read it", shown, end_s))
        rows = "".join(
            f'<tr><td class="num">{time_s:,.1f} s</td><td>{escape(kind)}</td><td>{escape(text)}</td></tr>'
            for time_s, kind, text in shown[-MAX_EVENTS:]
        )
        cards.append(
            f'<details class="card wide"><summary>All events ({len(shown):,})</summary><div class="scroll">'
            f"<table><tbody>{rows}</tbody></table></div></details>"
        )
    return section("Data and events", cards) if cards else ""


def _event_text(event: Record) -> str:
    where = [f"{name}{event[key]}" for key, name in (("worker", "worker "), ("version", "v")) if key in event]
    return str(event.get("text", "")) + (f" ({', '.join(where)})" if where else "")
