"""ECHO-2, appendix B: the bound on staleness, wherever its assumptions hold."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from bench.papers_base import Claim, Row, Values, run, scenario
from echo_planes.fleet.capacity import Need, staleness_bound

TOKENS = 100  # of every answer: with equal ones the rate of a worker is what it is set to
MBIT_S = 8.0
WORKER_MBIT = 100.0


@dataclass(frozen=True, slots=True)
class Observed:
    """One setting. Staleness is in learner steps."""

    max_staleness: int
    kappa: int
    t_bcast_share: float
    mu_share: float
    bound: int
    observed: int


def settings(values: Values) -> Iterator[tuple[int, int, float, float]]:
    """S, kappa, T_bcast / T_train and mu / mu_min, where some fleet is enough."""
    shares = itertools.product(values["t_bcast_share"], values["mu_share"])
    for (bcast, mu), staleness in itertools.product(shares, values["max_staleness"]):
        for kappa in range(1, staleness + 2):
            if kappa > bcast:
                yield staleness, kappa, bcast, mu


def observe(
    values: Values, setting: tuple[int, int, float, float], queue_batches: float | None = None
) -> Observed:
    """One run. `queue_batches`: leased and buffered at once; default: as assumed."""
    staleness, kappa, bcast, mu_share = setting
    t_train_s, size = values["t_train_s"], values["samples_per_prompt"]
    need = Need(staleness, kappa, values["prompts_per_step"] * size, t_train_s, bcast * t_train_s)
    mu = mu_share * (need.mu_min or 0.0)
    simulated = scenario(
        values | {"median_tokens": TOKENS, "sigma": 0.0, "max_tokens": TOKENS},
        staleness={
            "max_staleness": staleness,
            "publish_every": kappa,
            "selector": values["selector"],
            "policy": values["policy"],
            "queue_batches": queue_batches or values["queue_batches"],
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
        instance_types=[
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
    bound = staleness_bound(need, mu) or 0
    return Observed(staleness, kappa, bcast, mu_share, bound, summary["max_staleness_observed"])


def claim(assumed: dict[str, Values], every: int = 1) -> Claim:
    """The bound over a sweep. `every`: only every so many-th setting."""
    values = assumed["staleness"]
    swept = list(settings(values))[::every]
    found = [observe(values, setting) for setting in swept]
    default = [
        observe(values, setting, values["default_queue_batches"])
        for setting in swept[:: values["default_every"]]
    ]
    beyond = [one for one in found if one.observed > one.bound]
    beyond_s = [one for one in found + default if one.observed > one.max_staleness]
    within = sum(one.observed <= one.bound for one in default)
    met = sum(one.observed == one.bound for one in found)
    total = len(found)
    runs = total + len(default)
    rows = (
        Row("observed <= S", "always", f"{runs - len(beyond_s)} of {runs} runs", not beyond_s),
        Row("observed <= bound", "always", f"{total - len(beyond)} of {total} settings", not beyond),
        Row("observed = bound", "-", f"{met} of {total}"),
        Row("observed <= bound, 1.5 batches queued", "-", f"{within} of {len(default)}"),
    )
    return Claim(
        "5. bound on staleness",
        "ECHO-2, appendix B, eq. 7",
        rows,
        notes=(
            "The bound counts no time in a queue: at most one batch is leased and buffered at once. With the "
            "library's default of 1.5 a surplus may rest, and only S bounds its age.",
            "Boot delay and price do not matter; throughput is swept, as mu / mu_min.",
            *(f"beyond: {one}" for one in (beyond + beyond_s)[:5]),
        ),
        assumptions=("staleness",),
        figures={"settings": total, "beyond_the_bound": len(beyond), "beyond_s": len(beyond_s)},
    )
