"""Progress of learning: reward with its evaluations, pass@k, and drift by the versions between policies."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from echo_planes.reporting.formats import show_short
from echo_planes.reporting.metrics import Record, number
from echo_planes.reporting.sections.cards import StepCharts
from echo_planes.reporting.sections.charts import WIDE, Chart, Series, line_chart, moving_average

MAX_LAG_LINES = 4  # more lags share lines


def reward_chart(steps: StepCharts, evals: Sequence[Record]) -> Markup:
    """Draw the reward of the training batches, and a mark for each evaluation."""
    reward, correct = steps.column("reward_mean"), steps.column("correct_mean")
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
            f"held-out reward {e['reward_mean']:.3f}, accuracy {number(e.get('accuracy')) or 0.0:.3f}"
            f"{_left_out(e)}",
        )
        for e in evals
        if number(e.get("step")) is not None and number(e.get("reward_mean")) is not None
    ]
    top = 1.0 if all(0 <= (v or 0.0) <= 1 for v in reward) else None
    note = f"Training batches, and held-out prompts{_drawn(evals)}"
    chart = Chart("Reward", note, steps.x, "reward", show_short, WIDE, 300, top)
    return line_chart(chart, lines, marks=marks, marks_name="held-out evaluation")


def reward_parts_chart(steps: StepCharts) -> Markup:
    """Draw the means of the first five parts of the rewards; nothing if they have none."""
    rows = steps.records("reward_parts")
    names = sorted({name for row in rows for name in row})[:5]
    if not names:
        return Markup()
    note = "Mean of each step's answers, as the task gave them (Reward.parts)"
    chart = Chart("Parts of the reward", note, steps.x, "mean", show_short)
    return line_chart(
        chart,
        [Series(name, [number(row.get(name)) for row in rows], color) for color, name in enumerate(names, 1)],
    )


def _left_out(evaluation: Record) -> str:
    unscored = number(evaluation.get("num_unscored"))
    return f"; {unscored:,.0f} answers without a reward left out" if unscored else ""


def _versions(evaluation: Record) -> str:
    newest = evaluation.get("newest_version")
    return f"v{evaluation.get('version', '?')}" + ("" if newest is None else f" to v{newest}")


def _drawn(evals: Sequence[Record]) -> str:
    """Return the temperature and top-p of the evaluations as text; "" if unknown or not all equal."""
    drawn = {(number(e.get("temperature")), number(e.get("top_p"))) for e in evals}
    if len(drawn) != 1 or None in (pair := drawn.pop()):
        return ""
    return f" at temperature {pair[0]:g}, top-p {pair[1]:g}"


def pass_at_chart(evals: Sequence[Record]) -> Markup:
    """Draw pass@k over the evaluations, for at most five k; nothing with only one answer per prompt."""
    curves = [(number(e.get("step")) or 0.0, e["pass_at"]) for e in evals if e.get("pass_at")]
    ks = sorted({int(k) for _, curve in curves for k in curve if k.isdecimal() and len(k) < 7})
    if len(ks) < 2:
        return Markup()
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


def drift_by_lag(steps: Sequence[Record]) -> list[Series]:
    """Return the drift of the tokens of each lag; many lags share series with their neighbours."""
    tables = [
        {
            int(row["lag"]): row
            for row in step.get("lags") or []
            if all(number(row.get(key)) is not None for key in ("lag", "drift", "tokens"))
        }
        for step in steps
    ]
    lags = sorted({lag for table in tables for lag in table})
    count = min(len(lags), MAX_LAG_LINES)
    shares = [lags[i * len(lags) // count : (i + 1) * len(lags) // count] for i in range(count)]
    return [
        Series(
            f"lag {share[0]}" + ("" if len(share) == 1 else f" to {share[-1]}"),
            [_mean_drift([table[lag] for lag in share if lag in table]) for table in tables],
            color,
        )
        for color, share in enumerate(shares, 1)
    ]


def _mean_drift(rows: Sequence[Record]) -> float | None:
    total = sum(row["tokens"] for row in rows)
    return sum(row["tokens"] * row["drift"] for row in rows) / total if total else None
