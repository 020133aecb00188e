"""Comparison of `bench.cost`'s rule with the papers, at the prices that they state."""

from __future__ import annotations

import csv
from pathlib import Path

from bench.cost_fleets import HOUR_S
from echo_planes.errors import DataError
from echo_planes.fleet.exact import exact
from echo_planes.fleet.instance_types import FleetPlan, InstanceType, Limits


def papers_own(path: Path) -> list[tuple[str, str, str]]:
    """Compare the same rule with the papers at the prices that they state: rows of what, ours, theirs.

    Raises:
        DataError: the file lacks a price.
    """
    with path.open(newline="", encoding="utf-8") as file:
        usd = {row["item"]: float(row["usd_per_hour"]) / int(row["gpus"]) for row in csv.DictReader(file)}
    try:
        a100, rtx, h100 = usd["A100-80GB on demand"], usd["RTX-5090 on demand"], usd["H100 rollout"]
        reserved, spot = usd["8xH100 on demand (training)"], usd["2xH100 spot (rollout)"]
    except KeyError as error:
        raise DataError(f"{path} has no item {error}: give the list with the papers' prices") from error
    # E.3: 10 H100 or 76 RTX 5090 keep 8 H100 busy, which make 4,096 trajectories in 1,320 s (table 6).
    step_s = 1914 / 100 / (18 * h100) * HOUR_S
    mu = 4096 / step_s
    instance_types = [
        InstanceType("H100", "H100", h100, mu / 10, 10),
        InstanceType("RTX-5090", "RTX-5090", rtx, mu / 76, 76),
    ]
    plan = exact(instance_types, mu, Limits(), {})
    if not isinstance(plan, FleetPlan):
        raise DataError(f"{path}: no fleet of 10 H100 and 76 RTX 5090 makes {mu:.2f} trajectories/s")
    fleet, learner = ", ".join(f"{n} {name}" for name, n in plan.counts.items()), 8 * h100
    total = 1 - (learner + plan.usd_per_hour) / (learner + 10 * h100)
    central = 8 * a100 * 1508.2 / HOUR_S  # 5.2: veRL's step on 8 A100
    split = [(4 * a100 + count * rtx) * 1631.2 / HOUR_S for count in (8, 9)]
    return [
        (
            f"E.3, 32 B: {fleet} for 10 H100",
            f"rollout {1 - plan.usd_per_hour / (10 * h100):.1%} below, total {total:.1%} below",
            "total 4.6 % below",
        ),
        (
            "5.2, 8 B: 4 A100 + 8 or 9 RTX 5090 for 8 A100",
            f"total {1 - split[0] / central:.1%} or {1 - split[1] / central:.1%} below",
            "total 33.3 - 36.3 % below",
        ),
        ("table 2: random activation", "see (b)", f"total {9.339 / 8.098 - 1:.1%} above"),
        (
            "RLBoost table 2: a spot H100 for an on-demand one",
            f"{1 - spot / reserved:.1%} below",
            "28 - 49 % better tokens/$",
        ),
    ]
