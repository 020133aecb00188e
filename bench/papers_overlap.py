"""ECHO-2, figure 3c: the learner's bubble vanishes at the predicted number of workers."""

from __future__ import annotations

import itertools
from typing import Any

from bench.papers_base import (
    BASE,
    Claim,
    Row,
    Values,
    Variation,
    bubble,
    instance_type,
    run,
    scenario,
    variations,
    workers_for,
)
from echo_planes.fleet.capacity import needed_capacity

MBIT_S = 8.0  # Mbit of a MB


def predicted(values: Values, kappa: int, mu: float) -> int:
    """Workers by ECHO-2's rule: a chain's T_bcast is that of one link, and the install."""
    t_bcast_s = values["snapshot_mb"] * MBIT_S / values["worker_mbit"] + values["install_s"]
    per_step = values["prompts_per_step"] * values["samples_per_prompt"]
    mu_min = needed_capacity(kappa, per_step, values["t_train_s"], t_bcast_s)
    return 0 if mu_min is None else workers_for(mu_min, mu)


def bubble_with(values: Values, steps: Values, s_kappa: tuple[int, int], mu: float, workers: int) -> float:
    """The bubble ratio of one fleet, after the warm-up."""
    staleness, kappa = s_kappa
    simulated = scenario(
        values,
        staleness={
            "max_staleness": staleness,
            "publish_every": kappa,
            "queue_batches": staleness + 1.0,
        },
        network={
            key: values[key]
            for key in ("worker_mbit", "uplink_mbit", "rtt_s", "snapshot_mb", "install_s", "receive_in_place")
        },
        run={"steps": steps["steps"]},
        instance_types=[instance_type(values, "worker", mu, count=workers)],
    )
    return bubble(run(simulated), steps["warm_up_steps"])


def curve(
    values: Values, steps: Values, s_kappa: tuple[int, int], variation: Variation, beside: int
) -> tuple[int, dict[int, float]]:
    """The predicted count, and the bubble ratio for it and so many counts to either side."""
    mu = values["mu"] * variation.throughput
    count = predicted(values, s_kappa[1], mu)
    counts = range(max(1, count - beside), count + beside + 1)
    return count, {n: bubble_with(values, steps, s_kappa, mu, n) for n in counts}


def knee(bubbles: dict[int, float], limit: float) -> int | None:
    """The fewest workers from which on the bubble ratio is at most `limit`; None where it never is."""
    found = None
    for count in sorted(bubbles, reverse=True):
        if bubbles[count] > limit:
            break
        found = count
    return found


def claim(assumed: dict[str, Values], *, sensitivity: bool = True) -> Claim:
    """Figure 3c."""
    values, steps = assumed["echo2"], assumed["knee"]
    limit = steps["bubble"]
    rows, knees, figures = [], {}, []
    for staleness, kappa in steps["settings"]:
        count, bubbles = curve(
            values, steps, (staleness, kappa), BASE, beside=2 if kappa == staleness - 1 else 1
        )
        found = knee(bubbles, limit)
        if kappa == staleness - 1:
            knees[staleness] = found
        holds = found is not None and abs(found - count) <= 1
        shown = ", ".join(f"{n}: {100 * share:.1f} %" for n, share in bubbles.items())
        rows.append(
            Row(f"S={staleness} kappa={kappa}: knee", f"{count} predicted", f"{found} ({shown})", holds)
        )
        figures.append(_figure(staleness, kappa, count, found, bubbles))
    order = [knees[staleness] for staleness in sorted(knees)]
    fewer = None not in order and all((a or 0) >= (b or 0) for a, b in itertools.pairwise(order))
    ours = " >= ".join(map(str, order))
    rows.append(
        Row("larger S needs fewer workers (kappa = S-1)", "yes", ours, fewer and order[-1] != order[0])
    )
    varied = []
    for variation in variations("throughput") if sensitivity else ():
        count, bubbles = curve(values, steps, (3, 2), variation, beside=1)
        found = knee(bubbles, limit)
        varied.append(Row(f"S=3, {variation.name}", f"{count} predicted", f"knee at {found}"))
    return Claim(
        "1. bubble against workers",
        "ECHO-2, figure 3c and 5.4",
        tuple(rows),
        tuple(varied),
        (
            f"The knee is the fewest workers from which on the bubble ratio is at most {100 * limit:g} %.",
            "Boot delay and prices do not matter here: the fleet is there from the start.",
        ),
        ("echo2", "knee"),
        {"curves": figures},
    )


def _figure(
    staleness: int, kappa: int, count: int, found: int | None, bubbles: dict[int, float]
) -> dict[str, Any]:
    return {"S": staleness, "kappa": kappa, "predicted": count, "knee": found, "bubble_by_workers": bubbles}
