"""Draws of the fault campaign: a small scenario and a plan of faults, both from one seed."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any, Literal

from echo_planes.sim.scenario import Scenario, parse_scenario

WAIT_LIMIT_S = 3000.0  # longer than all faults and the back-offs that follow them

Kind = Literal["cut off", "recall", "no installs", "old install", "no machines", "wrong clock"]
KINDS: tuple[Kind, ...] = ("cut off", "recall", "no installs", "old install", "no machines", "wrong clock")


@dataclass(frozen=True, slots=True)
class Disturbance:
    """Fault of the campaign's plan."""

    at_s: float
    kind: Kind
    lasts_s: float
    pick: float  # in [0, 1): selects the worker or instance type


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of the faults in one run."""

    disturbances: tuple[Disturbance, ...]
    calm_s: float  # time from which no new fault begins
    stream_every_s: float  # interval of the workers' streams
    lost: float  # share of messages that are lost, ...
    late: float  # ... late ...
    twice: float  # ... or duplicated
    spoilt: float  # share of results that are invalid
    leave_s: float  # longest time that a worker takes to leave
    disk_full_s: float = math.inf
    budget_usd: float | None = None


def draw(seed: int) -> tuple[Scenario, Plan]:
    """Draw the scenario and the plan of a seed."""
    rng = random.Random(f"{seed}/campaign")
    steps = rng.choice((6, 6, 8, 10, 12, 20))
    max_staleness = rng.randint(0, 6)
    mode = rng.choice(("fixed", "kept", "provisioned"))
    t_train_s = rng.choice((4.0, 10.0, 25.0))
    span_s = steps * t_train_s * rng.choice((1.0, 2.0))
    instance_types = _instance_types(rng, mode, rng.choice((2, 2, 3, 4, 6, 8)))
    plan = _plan(rng, span_s)
    # A worker that generates nothing while it receives would stall for ever if its install never comes.
    in_place = rng.random() < 0.2 and all(one.kind != "no installs" for one in plan.disturbances)
    first_usd = sum(
        instance_type["count"] * instance_type["usd_per_hour"] for instance_type in instance_types
    )
    scenario: dict[str, Any] = {
        "name": f"campaign-{seed}",
        "seed": seed,
        "run": {"hours": 24, "steps": steps, "wait_limit_s": WAIT_LIMIT_S, "batch_wait_s": 15.0},
        "sampling": {
            "prompts_per_step": rng.choice((1, 2, 3, 4, 6)),
            "samples_per_prompt": rng.choice((2, 2, 3)),
            "lease_s": rng.choice((15.0, 40.0, 120.0)),
            "stream_s": 2.0,
        },
        "lengths": {
            "median_tokens": rng.choice((20, 60)),
            "sigma": rng.choice((0.3, 1.0)),
            "max_tokens": 300,
        },
        "staleness": {
            "max_staleness": max_staleness,
            "publish_every": rng.choice((None, rng.randint(1, max_staleness + 1))),
            "policy": rng.choice(("drop", "wait")),
            "selector": rng.choice(("fifo", "freshest", "uniform", "staleness", "reward")),
            "queue_batches": rng.choice((1.0, 1.5, 3.0, 100.0)),
            "reuse": rng.choice((1, 1, min(2, max_staleness + 1), rng.randint(1, max_staleness + 1))),
        },
        "learner": {
            "t_train_s": t_train_s,
            "jitter": rng.choice((0.0, 0.3)),
            "publish_s": rng.choice((0.0, 1.0)),
            "checkpoint_every": rng.choice((0, 3)),
            "checkpoint_s": 2.0,
            "usd_per_hour": rng.choice((0.0, 20.0)),
        },
        "network": {
            "mode": rng.choice(("chain", "star")),
            "snapshot_mb": rng.choice((1, 50, 300)),
            "patch_mb": rng.choice((None, 1)),
            "detection_s": rng.choice((1.0, 10.0)),
            "receive_in_place": in_place,
        },
        "fleet": {
            "mode": mode,
            "restarts": rng.choice((1, 4, 12)),
            "boot_limit_s": 60.0,
            "sustain_s": 30.0,
            "tick_s": 15.0,
            "usd_per_hour": rng.choice((None, max(first_usd, 4.0))) if mode == "provisioned" else None,
        },
        "instance_types": instance_types,
        "faults": [_fault(rng, span_s) for _ in range(rng.choice((0, 2, 5)))],
    }
    scenario["sampling"] |= _refill(random.Random(f"{seed}/refill"))
    return parse_scenario(scenario), plan


def _refill(rng: random.Random) -> dict[str, Any]:
    """Draw the settings of refill, from their own generator so that a seed's other draws stay the same."""
    return {
        "solved": rng.choice((0.0, 0.5, 0.9, 1.0)),
        "refill": rng.choice(("off", "reward", "correct")),
        "refill_limit": rng.choice((0.5, 1.0, 4.0)),
    }


def _instance_types(rng: random.Random, mode: str, workers: int) -> list[dict[str, Any]]:
    kinds = rng.randint(1, min(3, workers))
    counts = [workers // kinds + (i < workers % kinds) for i in range(kinds)]
    return [
        {
            "name": f"type{i}",
            "sku": f"gpu{i}",
            "market": rng.choice(("spot", "on_demand")),
            "region": rng.choice(("", "east")),
            "usd_per_hour": rng.choice((0.5, 1.0, 2.5)),
            "count": count if mode != "provisioned" else min(count, 1),
            "max_count": count,
            "min_count": int(mode == "provisioned" and i == 0 and count % 2 == 1),
            "peak_tokens_per_s": rng.choice((20.0, 60.0, 200.0)),
            "half_batch": 4.0,
            "max_groups": rng.randint(1, 4),
            "boot_s": rng.choice((1.0, 20.0)),
            "notice_s": rng.choice((0.0, 5.0, 30.0)),
        }
        for i, count in enumerate(counts)
    ]


def _fault(rng: random.Random, span_s: float) -> dict[str, Any]:
    kinds = ("kill", "kill", "preempt", "preempt", "slow", "slow_link", "silence", "refuse_install")
    return {
        "at_s": rng.uniform(0.0, span_s),
        "kind": rng.choice(kinds),
        "count": rng.choice((1, 1, 2)),
        "factor": rng.choice((0.1, 0.5)),
        "duration_s": rng.choice((5.0, 30.0, 120.0)),
    }


def _plan(rng: random.Random, span_s: float) -> Plan:
    disturbances = [
        Disturbance(rng.uniform(0.0, span_s), rng.choice(KINDS), rng.uniform(5.0, 100.0), rng.random())
        for _ in range(rng.choice((0, 2, 4, 8)))
    ]
    return Plan(
        disturbances=tuple(sorted(disturbances, key=lambda one: one.at_s)),
        calm_s=span_s + 200.0,
        stream_every_s=rng.choice((7.0, 20.0)),
        lost=rng.choice((0.0, 0.05)),
        late=rng.choice((0.0, 0.1)),
        twice=rng.choice((0.0, 0.1)),
        spoilt=rng.choice((0.0, 0.0, 0.15)),
        leave_s=rng.choice((0.0, 50.0)),
        disk_full_s=rng.uniform(0.0, span_s) if rng.random() < 0.05 else math.inf,
        budget_usd=rng.uniform(0.02, 0.4) if rng.random() < 0.15 else None,
    )
