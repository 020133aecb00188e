"""Distance of the trained policy from the policies that sampled, and how much a batch teaches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from echo_planes.reporting.metrics import Record, number
from echo_planes.reporting.sections.charts import (
    Chart,
    Panel,
    Series,
    line_chart,
    panel_chart,
    show_percent,
    si,
    stacked_chart,
)
from echo_planes.reporting.sections.sections import column, section, step_numbers

MAX_LAG_LINES = 4  # more lags share lines


def drift(steps: Sequence[Record], target: Any) -> str:
    """Drift by lag, what its control does to the learning rate, the tail, and what is left out.

    Args:
        target: `learner.drift_target`, nats; 0 or none: drift is not controlled.
    """
    x = step_numbers(steps)
    aim = number(target) or 0.0
    tail = [
        Series(name, column(steps, key), color, pool="max")
        for key, name, color in (
            ("log_weight_max", "largest", 2),
            ("log_weight_p999", "99.9 %", 4),
            ("log_weight_p99", "99 %", 3),
            ("log_weight_p50", "median", 1),
        )
    ]
    left_out = [
        Series(name, column(steps, key), color)
        for key, name, color in (
            ("clip_fraction", "clipped", 1),
            ("masked_fraction", "masked", 2),
            ("truncated_fraction", "weight truncated", 3),
        )
    ]
    return section(
        "Drift",
        [
            line_chart(
                Chart(
                    "Does staleness hurt?",
                    "Drift, mean |log pi_learner - log pi_sampler|, by versions between the two",
                    x,
                    "nats",
                    _short,
                ),
                [*_by_lag(steps), Series("all tokens", column(steps, "mismatch_mean"), 5)],
                references=[(aim, f"target {aim:g}")] if aim else [],
            ),
            panel_chart(
                "How much does drift control slow learning?",
                "What drift multiplies the learning rate by, and the rate that came of it"
                + ("" if aim else "; drift is not controlled in this run"),
                x,
                [
                    Panel(
                        "factor", _short, [Series("rate factor", column(steps, "rate_factor"), 1)], y_max=1.0
                    ),
                    Panel("rate", _power, [Series("learning rate", column(steps, "learning_rate"), 2)]),
                ],
            ),
            line_chart(
                Chart(
                    "How far off are the worst tokens?",
                    "|log importance weight|, shares of tokens below",
                    x,
                    "nats",
                    _short,
                ),
                tail,
            ),
            line_chart(
                Chart(
                    "How much is left out of the gradient?",
                    "Of the scored tokens",
                    x,
                    "share of tokens",
                    show_percent,
                ),
                [line for line in left_out if any(v is not None for v in line.values)],
            ),
        ],
    )


def signal(steps: Sequence[Record]) -> str:
    """Section on the learning signal of batches: groups with a gradient, answers cut off, entropy."""
    x = step_numbers(steps)
    groups = [
        Series("mixed", column(steps, "groups_mixed"), 1),
        Series("all right", column(steps, "groups_all_right"), 3),
        Series("all wrong", column(steps, "groups_all_wrong"), 2),
    ]
    length = [
        Series("95th percentile", column(steps, "response_tokens_p95"), 2),
        Series("mean", column(steps, "response_tokens_mean"), 1),
    ]
    return section(
        "Signal",
        [
            stacked_chart(
                Chart(
                    "How much of the batch carries signal?",
                    "Groups by their answers; effective samples: share of the tokens that carries the weight",
                    x,
                    "share",
                    show_percent,
                    y_max=1.0,
                ),
                groups,
                outline=Series("effective samples", column(steps, "effective_samples"), 4),
            ),
            panel_chart(
                "Are answers cut off?",
                "Length of the answers, and share of them that ended at their token limit",
                x,
                [
                    Panel("tokens per answer", si, length),
                    Panel(
                        "share of answers",
                        show_percent,
                        [Series("cut off", column(steps, "cut_off_share"), 4)],
                    ),
                ],
            ),
            line_chart(
                Chart(
                    "Is the policy still exploring?",
                    "How undecided it is, on the scored tokens",
                    x,
                    "nats per token",
                    _short,
                ),
                [Series("entropy", column(steps, "entropy"), 1)],
            ),
        ],
    )


def _by_lag(steps: Sequence[Record]) -> list[Series]:
    """Drift of the tokens of each lag, or of neighbouring lags together where there are many."""
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


def _power(value: float) -> str:
    """0.00025 -> '2.5e-4', which fits beside an axis."""
    digits, power = f"{value:.1e}".split("e")
    return f"{digits.removesuffix('.0')}e{int(power)}" if value else "0"


def _short(value: float) -> str:
    return f"{value:.3g}"
