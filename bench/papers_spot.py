"""RLBoost: preemptible machines as they came and went in recorded markets, and what migration saves.

RLBoost's learner also samples at the start of a step (seeding, `papers_seeding`). Here it does not, and is
asynchronous instead.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from bench.papers_base import BASE, Claim, Row, Values, Variation, run, scenario, variations
from echo_planes.errors import ConfigError
from echo_planes.sim.flow import Flow
from echo_planes.sim.scenario import Scenario, instance_type_trace, parse_scenario
from echo_planes.sim.worker import SimWorker, Work
from echo_planes.sim.world import Result, World
from echo_planes.types import LeaseTokens

FOLDER = "spot_traces/bamboo"
LEAST_THROUGHPUT, LEAST_PER_USD = 1.51, 1.28  # the smallest of RLBoost's gains over three models
NEVER_S = 2e4  # longer than the steps that are looked at
FAULT_STEP = 3  # the machines go while this step's rollouts are made


class Recomputing(Flow):
    """Tokens stay with their worker: an answer whose worker is lost begins anew."""

    def _so_far(self, engine: SimWorker, work: Work) -> LeaseTokens:
        """Nothing is sent before the answer is finished."""
        return LeaseTokens(work.lease.lease_id, ())


def recompute(simulated: Scenario) -> Result:
    """Simulate without migration."""
    world = World(simulated)
    world.workers.flow = Recomputing(simulated.sampling, world.kernel, world.trace, world.data)
    return world.run()


@dataclass(frozen=True, slots=True)
class Yield:
    """Yield of a run."""

    tokens_per_s: float
    tokens_per_usd: float
    lost_tokens: int
    preemptions: int


def traces_are_there() -> bool:
    """Whether the recorded markets can be read (they are not part of the library)."""
    try:
        instance_type = {"name": "spot", "count": 1, "trace": f"{FOLDER}/p3-trace.csv"}
        instance_type_trace(parse_scenario({"instance_types": [instance_type]}).instance_types[0])
    except ConfigError:
        return False
    return True


def _instance_type(
    values: Values, variation: Variation, name: str, count: int, usd: float, **more: Any
) -> Values:
    return {
        "name": name,
        "count": count,
        "usd_per_hour": usd,
        "peak_tokens_per_s": values["peak_tokens_per_s"] * variation.throughput,
        "half_batch": values["half_batch"],
        "max_groups": values["max_groups"],
        "boot_s": values["boot_s"] * variation.boot,
        **more,
    }


def market_scenario(
    values: Values, staleness: int, instance_types: list[Values], **sections: Any
) -> Scenario:
    keys = ("worker_mbit", "uplink_mbit", "snapshot_mb", "install_s")
    return scenario(
        values,
        staleness={"max_staleness": staleness, "queue_batches": staleness + 1.0},
        network={key: values[key] for key in keys},
        **{
            "learner": {"usd_per_hour": values["reserved_usd_per_hour"]},
            "fleet": {"mode": "kept", "boot_limit_s": 1e6},
            "run": {"hours": values["hours"]},
            "instance_types": instance_types,
            **sections,
        },
    )


def reserved_only(values: Values, variation: Variation) -> Scenario:
    """The learner's own machines sample, then train: synchronous, nothing else is paid for."""
    own = _instance_type(values, variation, "own", values["reserved_engines"], 0.0)
    return market_scenario(values, 0, [own])


def on_demand(values: Values, variation: Variation, machines: int) -> Scenario:
    """As many rollout machines as the market had on average, at the price of reserved ones."""
    instance_type = _instance_type(values, variation, "on-demand", machines, values["on_demand_usd_per_hour"])
    return market_scenario(values, values["max_staleness"], [instance_type])


def spot(values: Values, variation: Variation, trace: str, share: float) -> Scenario:
    """Rollouts on spot machines alone, as they were to be had."""
    instance_type = _instance_type(
        values,
        variation,
        "spot",
        values["machines"],
        values["spot_usd_per_hour"] * variation.price,
        market="spot",
        notice_s=values["notice_s"],
        trace=f"{FOLDER}/{trace}",
        trace_share=share,
    )
    return market_scenario(values, values["max_staleness"], [instance_type])


def yielded(result: Result, warm_up_steps: int) -> Yield:
    """Trained tokens per second and per dollar, after the warm-up."""
    steps = result.steps[warm_up_steps:]
    seconds = steps[-1]["time_s"] - result.steps[warm_up_steps - 1]["time_s"]
    tokens = sum(row["tokens"] for row in steps)
    summary = result.summary
    lost = sum(event["kind"] == "worker lost" for event in result.events)
    return Yield(tokens / seconds, tokens / sum(row["usd"] for row in steps), summary["lost_tokens"], lost)


def mean_machines(values: Values, trace: str, share: float) -> float:
    """Mean number of the machines asked for that there were, over the hours that are simulated."""
    market = instance_type_trace(spot(values, BASE, trace, share).instance_types[0])
    if market is None:
        return 0.0
    end_s = values["hours"] * 3600
    times = [*(at_s for at_s in market.times_s if at_s < end_s), end_s]
    held = [min(int(count * share + 1e-9), values["machines"]) for count in market.counts]
    spans = zip(held, itertools.pairwise(times), strict=False)
    return float(sum(machines * (until_s - from_s) for machines, (from_s, until_s) in spans) / end_s)


def claim(assumed: dict[str, Values], *, sensitivity: bool = True) -> Claim:
    """Figures 8 to 10, on other markets; figure 14."""
    values = assumed["spot"]
    warm_up = values["warm_up_steps"]
    own = yielded(run(reserved_only(values, BASE)), warm_up)
    rows, figures = [], {"reserved only": own}
    for trace, share in values["traces"].items():
        machines = mean_machines(values, trace, share)
        simulated = spot(values, BASE, trace, share)
        found = figures[trace] = yielded(run(simulated), warm_up)
        again = figures[f"{trace}, recomputed"] = yielded(recompute(simulated), warm_up)
        paid = yielded(run(on_demand(values, BASE, round(machines))), warm_up)
        figures[f"{trace}, on demand"] = paid
        rows += _rows(f"{trace} ({machines:.1f} machines)", found, own, paid, again)
    for at_s in values["migration_at_s"]:
        rows.append(migration(values, at_s))
    varied = []
    trace, share = next(iter(values["traces"].items()))
    for variation in variations("boot", "throughput", "price") if sensitivity else ():
        base = own
        if variation.throughput != BASE.throughput:
            base = yielded(run(reserved_only(values, variation)), warm_up)
        found = yielded(run(spot(values, variation, trace, share)), warm_up)
        varied.append(Row(f"{trace}, {variation.name}", "1.51 to 1.97; 1.28 to 1.49", gains(found, base)))
    return Claim(
        "7. preemptible machines",
        "RLBoost, 6.2 and 6.4.3",
        tuple(rows),
        tuple(varied),
        (
            "Without seeding (claim 8): the learner's own GPUs sample nothing beside spot machines. "
            "And the learner is asynchronous (S = 3), RLBoost's is not. So these are not RLBoost's gains.",
            "Reserved only: the learner's machines sample, then train, S = 0 (veRL in the paper).",
            "On demand: as many machines as the market had on average, at the reserved price (Disagg.BAL).",
            "Claimed: at least the smallest of RLBoost's gains over its three models.",
        ),
        ("spot",),
        {
            name: {
                "tokens_per_s": one.tokens_per_s,
                "tokens_per_usd": one.tokens_per_usd,
                "lost_tokens": one.lost_tokens,
            }
            for name, one in figures.items()
        },
    )


def gains(found: Yield, base: Yield) -> str:
    """Tokens per second and per dollar, as multiples."""
    return f"{found.tokens_per_s / base.tokens_per_s:.2f}; {found.tokens_per_usd / base.tokens_per_usd:.2f}"


def _rows(name: str, found: Yield, own: Yield, paid: Yield, again: Yield) -> list[Row]:
    quick = found.tokens_per_s >= LEAST_THROUGHPUT * own.tokens_per_s
    cheap = found.tokens_per_usd >= LEAST_PER_USD * own.tokens_per_usd
    gain = found.tokens_per_s / again.tokens_per_s - 1
    return [
        Row(
            f"{name}: tokens/s; tokens/$ of reserved only",
            "1.51 to 1.97; 1.28 to 1.49",
            f"{gains(found, own)} ({found.tokens_per_s:,.0f} tokens/s)",
            quick and cheap,
        ),
        Row(
            f"{name}: tokens/s; tokens/$ of on demand",
            "about 1; 1.45 to 1.75",
            gains(found, paid),
            found.tokens_per_usd >= 1.45 * paid.tokens_per_usd,
        ),
        Row(
            f"{name}: tokens made again, migrated; recomputed",
            "fewer",
            f"{found.lost_tokens:,}; {again.lost_tokens:,} "
            f"({found.preemptions} machines lost; tokens/s {100 * gain:+.1f} %)",
            found.lost_tokens < again.lost_tokens,
        ),
    ]


def migration(values: Values, at_s: float) -> Row:
    """Half of the machines go in a step, and none comes: how much longer the step takes (figure 14)."""
    instance_types = [
        _instance_type(values, BASE, "machine", values["migration_machines"], 0.0, boot_s=NEVER_S)
    ]
    limits = {"steps": FAULT_STEP}

    def simulated(faults: list[Values]) -> Scenario:
        return market_scenario(
            values, 0, instance_types, fleet={"mode": "kept", "boot_limit_s": 1e6}, run=limits, faults=faults
        )

    base = run(simulated([]))
    begun_s = base.steps[FAULT_STEP - 2]["time_s"]
    fault = {"at_s": begun_s + at_s, "kind": "preempt", "count": values["migration_lost"]}
    ends = [result.steps[-1]["time_s"] for result in (run(simulated([fault])), recompute(simulated([fault])))]
    migrated_s, again_s = (end_s - base.steps[-1]["time_s"] for end_s in ends)
    saved = 1 - migrated_s / again_s
    paper = {100: "33 % less", 200: "76 % less"}.get(round(at_s), "-")
    ours = f"{100 * saved:.0f} % less ({migrated_s:.0f} s for {again_s:.0f} s)"
    return Row(f"3 of 6 lost after {at_s} s: the step's delay, migrated", paper, ours, saved > 0)
