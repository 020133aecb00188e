"""ECHO-2, appendix B: the bound on staleness, wherever its assumptions hold."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from bench.papers_base import Claim, Row, Values, run, scenario
from echo_planes.rollout.capacity import staleness_bound
from echo_planes.rollout.offers import Need

TOKENS = 100  # of every answer: with equal ones the rate of a worker is what it is set to
MBIT_S = 8.0
WORKER_MBIT = 100.0


@dataclass(frozen=True, slots=True)
class Observed:
    """One setting. Bounds are in learner steps."""

    max_staleness: int
    kappa: int
    t_bcast_share: float
    mu_share: float
    bound: int
    fluid_bound: int  # by the plain formula
    observed: int


def settings(values: Values) -> Iterator[tuple[int, int, float, float]]:
    """S, kappa, T_bcast / T_train and mu / mu_min, where some fleet is enough."""
    shares = itertools.product(values["t_bcast_share"], values["mu_share"])
    for (bcast, mu), staleness in itertools.product(shares, values["max_staleness"]):
        for kappa in range(1, staleness + 2):
            if kappa > bcast:
                yield staleness, kappa, bcast, mu


def observe(values: Values, staleness: int, kappa: int, bcast: float, mu_share: float) -> Observed:
    """One run."""
    t_train_s, size = values["t_train_s"], values["samples_per_prompt"]
    need = Need(staleness, kappa, values["prompts_per_step"] * size, t_train_s, bcast * t_train_s)
    mu = mu_share * (need.mu_min or 0.0)
    group_s = values["workers"] * size / mu  # a worker makes one group at a time
    simulated = scenario(
        values | {"median_tokens": TOKENS, "sigma": 0.0, "max_tokens": TOKENS},
        staleness={
            "max_staleness": staleness,
            "publish_every": kappa,
            "selector": values["selector"],
            "policy": values["policy"],
            "queue_batches": staleness + 1.0,
        },
        network={
            "mode": "star_unlimited",
            "worker_mbit": WORKER_MBIT,
            "rtt_s": 0.0,
            "chunk_kib": 1,
            "snapshot_mb": bcast * t_train_s * WORKER_MBIT / MBIT_S,
            "install_s": 0.0,
            "receive_in_place": True,
        },
        run={"steps": values["steps"]},
        offers=[
            {
                "name": "worker",
                "count": values["workers"],
                "max_groups": 1,
                "half_batch": 0.0,
                "peak_tokens_per_s": TOKENS * mu / values["workers"],
                "boot_s": 0.0,
            }
        ],
    )
    summary = run(simulated).summary
    grained = Need(staleness, kappa, need.per_step, t_train_s, need.t_bcast_s + group_s)
    return Observed(
        staleness,
        kappa,
        bcast,
        mu_share,
        staleness_bound(grained, mu) or 0,
        staleness_bound(need, mu) or 0,
        summary["max_staleness_observed"],
    )


def claim(assumed: dict[str, Values]) -> Claim:
    """The bound over a sweep."""
    values = assumed["staleness"]
    found = [observe(values, *setting) for setting in settings(values)]
    beyond = [one for one in found if one.observed > one.bound]
    beyond_fluid = [one for one in found if one.observed > one.fluid_bound]
    beyond_s = [one for one in found if one.observed > one.max_staleness]
    met = sum(one.observed == one.bound for one in found)
    total = len(found)
    rows = (
        Row("settings", "-", f"{total}", total >= 200),
        Row("observed staleness <= S", "always", f"{total - len(beyond_s)} of {total}", not beyond_s),
        Row("observed <= bound", "always", f"{total - len(beyond)} of {total}", not beyond),
        Row("observed = bound", "-", f"{met} of {total}"),
        Row("observed <= bound of a fluid", "-", f"{total - len(beyond_fluid)} of {total}"),
    )
    return Claim(
        "5. bound on staleness",
        "ECHO-2, appendix B, eq. 7",
        rows,
        notes=(
            "The formula's rollouts are a fluid. Ours come in groups, and one that began before an install is of "
            "the old version: the bound that is claimed has the time of one group added to T_bcast.",
            "Settings are ratios to T_train: boot delay and price do not matter, throughput is swept (mu / mu_min).",
            *(f"beyond the bound: {one}" for one in (beyond + beyond_s)[:5]),
        ),
        assumptions=("staleness",),
        figures={"beyond_the_bound": len(beyond), "beyond_the_fluid_bound": len(beyond_fluid), "settings": total},
    )
