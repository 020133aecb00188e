"""ECHO-2, table 4: one fault at a time among eight workers that just saturate the learner."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from bench.papers_base import BASE, Claim, Row, Values, Variation, instance_type, run, scenario, variations
from echo_planes.fleet.capacity import needed_capacity
from echo_planes.sim.scenario import Scenario
from echo_planes.sim.world import Result, World

STALENESS = 3
MBIT_S = 8.0  # Mbit of a MB
PAPER = {  # drop, recovery in s, bubble increase
    "broadcast: forwarder slows 0.5x": (8.94, 312, 1.56),
    "broadcast: forwarder drops out": (16.45, 312, 2.63),
    "rollout: worker slows 0.5x": (6.80, 240, 0.97),
    "rollout: worker drops out": (12.50, 240, 1.88),
}
SLOW_WORKER = "rollout: worker slows 0.5x"
ROLLOUT_FAULTS = (SLOW_WORKER, "rollout: worker drops out")
DROP_OUTS = ("broadcast: forwarder drops out", "rollout: worker drops out")


@dataclass(frozen=True, slots=True)
class Recovery:
    """Effect of one fault, and the time of recovery."""

    drop: float  # share of the capacity
    seconds: float | None  # until the capacity is back and the broadcast in hand is complete
    bubble: float  # extra idle share of the horizon


def claim(assumed: dict[str, Values], *, sensitivity: bool = True) -> Claim:
    """Table 4."""
    values = assumed["echo2"] | assumed["faults"]
    rows, figures = [], {}
    for in_place in values["receive_in_place"]:
        found = recoveries(values, BASE, in_place, PAPER)
        kind = "as ECHO-2 assumes" if in_place else "as built"
        figures[kind] = {
            name: [recovery.drop, recovery.seconds, recovery.bubble] for name, recovery in found.items()
        }
        rows += [_row(f"{kind}, {name}", name, one, not in_place) for name, one in found.items()]
    for name, one in recoveries(values | {"ready": 1}, BASE, False, ROLLOUT_FAULTS).items():
        rows.append(_row(f"with one standby, {name}", name, one, False))
    (slow,) = recoveries(values | {"fleet": "provisioned"}, BASE, False, [SLOW_WORKER]).values()
    rows.append(_row(f"provisioned, {SLOW_WORKER}", SLOW_WORKER, slow, False))
    varied = []
    for variation in variations("boot", "throughput") if sensitivity else ():
        for name, one in recoveries(values, variation, False, DROP_OUTS).items():
            varied.append(_row(f"{variation.name}, {name}", name, one, False))
    return Claim(
        "4. one fault among eight workers",
        "ECHO-2, table 4",
        tuple(rows),
        tuple(varied),
        (
            f"A replacement boots for {values['boot_s']} s and then fetches 16.38 GB at "
            f"{values['worker_mbit']} Mbit/s. Claimed: recovery and bubble no worse than the paper's.",
            "Recovery ends when the capacity is what it was and the broadcast in hand is complete at all who "
            "live. A slow worker is told from the others over 240 s of full work; then another boots, or, "
            "with one standby (fleet.standby=1) that one takes its place at once.",
            "Drop: of what those who serve can make, standing still or not: the cascade is in the bubble.",
            "Bubble increase: idle seconds beyond those without a fault, over one step.",
            "provisioned: at gamma = 1.0 the provisioner does not stay at eight workers: its estimates of "
            "throughput vary by more than half a worker.",
            "Throughput x0.5 or x2: eight workers saturate a learner that is as much slower or quicker.",
            "Prices do not matter here.",
        ),
        ("echo2", "faults"),
        figures,
    )


def _row(what: str, name: str, found: Recovery, claimed: bool) -> Row:
    drop, seconds, bubble = PAPER[name]
    holds = None
    if claimed:
        quick = found.seconds is not None and found.seconds <= seconds
        holds = quick and 100 * found.bubble <= bubble
    after = "never" if found.seconds is None else f"{found.seconds:.0f} s"
    ours = f"{100 * found.drop:.2f} %, {after}, {100 * found.bubble:.2f} %"
    return Row(f"{what}: drop, recovery, bubble", f"{drop:.2f} %, {seconds} s, {bubble:.2f} %", ours, holds)


def recoveries(
    values: Values, variation: Variation, in_place: bool, names: Iterable[str]
) -> dict[str, Recovery]:
    """The named faults, each in a run of its own."""
    values = values | {"t_train_s": values["t_train_s"] / variation.throughput}
    plain = _scenario(values, variation, in_place, [], {})
    base = run(plain)
    step_s = base.steps[values["fault_step"] - 1]["time_s"]
    published_s = next(
        event["time_s"]
        for event in base.events
        if event["kind"] == "publication" and event["time_s"] > step_s
    )
    bcast_s = base.summary["t_bcast_s_median"]
    relay = _relay(_scenario(values, variation, in_place, [], {"hours": (published_s + 1) / 3600}))
    later_s = published_s + bcast_s + 0.3 * values["t_train_s"]
    slow = {"factor": 0.5, "duration_s": values["slow_s"]}
    faults: dict[str, tuple[float, Values]] = {
        "broadcast: forwarder slows 0.5x": (published_s - 1, {"kind": "slow_link", **slow}),
        "broadcast: forwarder drops out": (published_s + bcast_s / 2, {"kind": "kill"}),
        "rollout: worker slows 0.5x": (later_s, {"kind": "slow", **slow}),
        "rollout: worker drops out": (later_s, {"kind": "kill"}),
    }
    found = {}
    for name in names:
        at_s, what = faults[name]
        fault = {"at_s": at_s, "worker": relay, **what}
        result = run(_scenario(values, variation, in_place, [fault], {}))
        complete_s = 0.0
        if name.startswith("broadcast"):
            looked_s = max(at_s, published_s) + values["detection_s"] + 1
            cut = _scenario(values, variation, in_place, [fault], {"hours": looked_s / 3600})
            complete_s = _complete_s(cut) - at_s
        found[name] = _recovery(base, result, complete_s, values)
    return found


def _recovery(base: Result, result: Result, complete_s: float, values: Values) -> Recovery:
    (fault,) = result.summary["faults"]
    after_s = fault["recovered_after_s"]
    extra_s = max(result.summary["t_idle_s_total"] - base.summary["t_idle_s_total"], 0.0)
    seconds = None if after_s is None else max(after_s, complete_s)
    horizon_s = values["horizon_steps"] * values["t_train_s"]
    return Recovery(fault["capacity_drop"], seconds, extra_s / (horizon_s + extra_s))


def _scenario(
    values: Values, variation: Variation, in_place: bool, faults: list[Values], limits: dict[str, Any]
) -> Scenario:
    t_bcast_s = values["snapshot_mb"] * MBIT_S / values["worker_mbit"] + values["install_s"]
    per_step = values["prompts_per_step"] * values["samples_per_prompt"]
    mu_min = needed_capacity(STALENESS - 1, per_step, values["t_train_s"], t_bcast_s) or 0.0
    keys = ("worker_mbit", "uplink_mbit", "rtt_s", "snapshot_mb", "install_s", "detection_s")
    return scenario(
        values,
        staleness={"max_staleness": STALENESS, "queue_batches": STALENESS + 1.0},
        network={**{key: values[key] for key in keys}, "receive_in_place": in_place},
        fleet={"mode": values["fleet"], "gamma": values["gamma"], "standby": values["ready"]},
        run={"steps": values["steps"], **limits},
        instance_types=[
            instance_type(
                values,
                "worker",
                mu_min / values["margin"] / values["workers"],
                usd_per_hour=values["worker_usd_per_hour"],
                count=values["workers"],
                max_count=values["workers"] + values["standby"],
                boot_s=values["boot_s"] * variation.boot,
            )
        ],
        faults=faults,
    )


def _relay(cut: Scenario) -> str:
    """The first of the workers that others get the broadcast in hand through."""
    world = World(cut)
    world.run()
    names = [member.name for member in world.workers.serving()]
    upstream = {
        name for other in names if (part := world.workers.network.transfer(other)) for name in part.upstream
    }
    return min(upstream)


def _complete_s(cut: Scenario) -> float:
    """Time when all that serve at the end of `cut` have the broadcast in hand, whole and installed."""
    world = World(cut)
    world.run()
    parts = [world.workers.network.transfer(member.name) for member in world.workers.serving()]
    return max(part.arrives_s for part in parts if part) + cut.network.install_s
