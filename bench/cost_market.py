"""Market of `bench.cost`: assumptions, single-GPU types of a price list, and recorded spot markets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from echo_planes.config.fields import Section
from echo_planes.fleet.capacity import Need
from echo_planes.fleet.instance_types import InstanceType
from echo_planes.fleet.prices import PriceRow
from echo_planes.fleet.sku_facts import SKU_FACTS
from echo_planes.fleet.throughput import (
    BYTES_PER_WEIGHT,
    ENGINE_EFFICIENCY,
    MEMORY_SHARE,
    estimated_t_train_s,
)
from echo_planes.sim.lengths import LengthModel
from echo_planes.sim.scaling import GroupShape, expected_mu
from echo_planes.sim.scenario import InstanceTypeModel, Scenario, parse_scenario
from echo_planes.sim.spot import SpotTrace, read_trace

ASSUMPTIONS = Path(__file__).with_name("cost_assumptions.yaml")
GIB = 2**30
PATCH_BYTES_PER_CHANGED_WEIGHT = 1.27  # fast codec
BOOT_LIMIT_BOOTS = 3.0  # slow machines are not given up for what is usual for them
SETUP_BCAST_S = 2.0  # T_bcast of a patch before any is measured: for quotas only


class Workload(Section):
    """The model, and what is sampled for a step."""

    num_params: float
    kv_bytes_per_token: float
    prompts_per_step: int
    samples_per_prompt: int
    prompt_tokens: int
    median_tokens: float
    sigma: float
    max_tokens: int
    max_num_seqs: int


class Staleness(Section):
    max_staleness: int
    queue_batches: float
    gamma: float


class Learner(Section):
    sku: str
    gpus: int
    usd_per_hour: float


class Links(Section):
    uplink_mbit: float
    worker_mbit: float
    rtt_s: float
    changed_share: float


class FleetTimes(Section):
    boot_s: float
    boot_limit_s: float
    tick_s: float
    sustain_s: float


class MarketShape(Section):
    spot_share: float
    on_demand_share: float
    notice_s: float
    phase: float


class Bars(Section):
    below_on_demand: float
    above_optimum: float
    total_above_optimum: float  # learner and fleet: a fleet that lets the learner wait is no saving


class Assumptions(Section):
    """cost_assumptions.yaml."""

    workload: Workload
    staleness: Staleness
    learner: Learner
    network: Links
    fleet: FleetTimes
    market: MarketShape
    traces: dict[str, str]
    random_seeds: int
    seed: int
    bars: Bars

    @property
    def per_step(self) -> int:
        """R, trajectories of a step."""
        return self.workload.prompts_per_step * self.workload.samples_per_prompt

    @property
    def lengths(self) -> LengthModel:
        work = self.workload
        return LengthModel(
            self.seed,
            num_samples=work.samples_per_prompt,
            median_tokens=work.median_tokens,
            sigma=work.sigma,
            max_tokens=work.max_tokens,
        )

    @property
    def t_train_s(self) -> float:
        """T_train, estimated from the arithmetic of a step."""
        tokens = self.per_step * (self.workload.prompt_tokens + self.lengths.mean_tokens)
        facts = SKU_FACTS[self.learner.sku]
        return estimated_t_train_s(self.workload.num_params, tokens, facts, self.learner.gpus)

    def need(self, t_bcast_s: float) -> Need:
        """Need of the learner, for a broadcast of `t_bcast_s`."""
        stale = self.staleness
        kappa = max(1, stale.max_staleness - 1)
        return Need(stale.max_staleness, kappa, self.per_step, self.t_train_s, t_bcast_s, stale.gamma)


@dataclass(frozen=True, slots=True)
class Listed:
    """One instance type: as the simulator has it, and as the rule sees it."""

    model: InstanceTypeModel
    instance_type: InstanceType


@dataclass(frozen=True, slots=True)
class Case:
    """A market in which the provisioner is tried.

    Args:
        throughput: factor on every engine's peak.
        spot_price: factor on every spot price.
        boot_s: instead of the assumed one.
        in_step: all spot instance types follow the trace at the same time.
        shift: of all traces, as a share of the recording.
    """

    trace: str
    throughput: float = 1.0
    spot_price: float = 1.0
    boot_s: float | None = None
    in_step: bool = False
    shift: float = 0.0


def read_assumptions(path: Path = ASSUMPTIONS) -> Assumptions:
    return Assumptions.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))


def engine_fields(work: Workload, row: PriceRow, throughput: float) -> dict[str, float] | None:
    """An engine on one GPU as the simulator's curve; None where it cannot hold the samples of one prompt.

    It is `estimated_tokens_per_s` as a function of the batch. With W bytes of weights, k bytes of context a
    sample: 0.6 b / ((W + b k) / bandwidth) is peak b / (b + half): peak = 0.6 bandwidth / k, half = W / k.
    """
    facts, memory_gib = SKU_FACTS[row.sku], row.gpu_mem_gib
    if not facts.has_bf16 or memory_gib is None:
        return None
    mean_tokens = work.median_tokens * math.exp(work.sigma**2 / 2)
    context_bytes = work.kv_bytes_per_token * (work.prompt_tokens + min(mean_tokens, work.max_tokens) / 2)
    weight_bytes = work.num_params * BYTES_PER_WEIGHT
    batch = min(work.max_num_seqs, (MEMORY_SHARE * memory_gib * GIB - weight_bytes) // context_bytes)
    if batch < work.samples_per_prompt:
        return None
    return {
        "peak_tokens_per_s": throughput * ENGINE_EFFICIENCY * facts.bandwidth_gb_s * 1e9 / context_bytes,
        "half_batch": weight_bytes / context_bytes,
        "max_groups": int(batch // work.samples_per_prompt),
    }


def listed(assumptions: Assumptions, rows: Sequence[PriceRow], case: Case) -> tuple[Listed, ...]:
    """Single-GPU instance types of a price list with their quotas."""
    target = assumptions.need(SETUP_BCAST_S).mu_target or math.inf
    shape, group, found = assumptions.market, GroupShape.of(assumptions.lengths), []
    boot_s = assumptions.fleet.boot_s if case.boot_s is None else case.boot_s
    for row in rows:
        engine = engine_fields(assumptions.workload, row, case.throughput) if row.gpus == 1 else None
        for spot, usd in ((False, row.usd_per_hour), (True, row.spot_usd_per_hour)):
            if engine is None or usd is None:
                continue
            fields: dict[str, Any] = {
                "name": f"{row.provider}/{row.sku}/{'spot' if spot else 'on_demand'}",
                "sku": row.sku,
                "region": f"{row.provider}/{row.region}",
                "market": "spot" if spot else "on_demand",
                "usd_per_hour": usd * (case.spot_price if spot else 1.0),
                "boot_s": boot_s,
                "notice_s": shape.notice_s if spot else 0.0,
                **engine,
            }
            mu = expected_mu(InstanceTypeModel(max_count=1, **fields), group)
            share = shape.spot_share if spot else shape.on_demand_share
            model = InstanceTypeModel(max_count=max(1, math.ceil(share * target / mu)), **fields)
            found.append(Listed(model, as_instance_type(model, mu)))
    return tuple(found)


def snapshot_s(assumptions: Assumptions) -> float:
    """Seconds that a new worker takes to receive all weights."""
    weight_bytes = assumptions.workload.num_params * BYTES_PER_WEIGHT
    return weight_bytes / (min(assumptions.network.worker_mbit, assumptions.network.uplink_mbit) * 1e6 / 8)


def as_instance_type(model: InstanceTypeModel, mu: float) -> InstanceType:
    """An instance type of the simulator as the rule sees it."""
    return InstanceType(
        name=model.name,
        sku=model.sku,
        usd_per_hour=model.usd_per_hour,
        mu=mu,
        max_count=model.quota,
        region=model.region,
        market=model.market,
        boot_s=model.boot_s,
    )


# --- recorded spot markets -----------------------------------------------------------------------


def from_first_machine(trace: SpotTrace) -> SpotTrace:
    """The recording without the time before its first machine; it repeats."""
    first = next(at for at, count in zip(trace.times_s, trace.counts, strict=True) if count)
    points = [(at - first, n) for at, n in zip(trace.times_s, trace.counts, strict=True) if at >= first]
    times, counts = zip(*points, strict=True)
    return SpotTrace(trace.name, times, counts, trace.end_s - first, "repeat")


def shifted(trace: SpotTrace, share: float) -> SpotTrace:
    """The same market, looked at from another moment of its recording on."""
    offset_s = (share % 1.0) * trace.end_s
    points = {0.0: trace.count(offset_s)}
    for at, count in zip(trace.times_s, trace.counts, strict=True):
        points[(at - offset_s) % trace.end_s] = count
    times, counts = zip(*sorted(points.items()), strict=True)
    return SpotTrace(trace.name, times, counts, trace.end_s, "repeat")


@dataclass(frozen=True, slots=True)
class SpotMarket:
    """Market with the machines that there are at each moment.

    Args:
        instance_types: all of them.
        traces: of the spot instance types, by name; at its peak a trace fills the instance type's quota.
    """

    instance_types: tuple[InstanceType, ...]
    traces: Mapping[str, SpotTrace]

    def share(self, name: str) -> float:
        """Of the machines in the trace that are there for this run."""
        quota = next(
            instance_type.max_count for instance_type in self.instance_types if instance_type.name == name
        )
        return quota / max(self.traces[name].counts)

    def at(self, now_s: float) -> tuple[InstanceType, ...]:
        """The instance types with what can be had of them now: what the simulator's market would give."""
        there = []
        for instance_type in self.instance_types:
            if instance_type.name in self.traces:
                count = math.floor(
                    self.traces[instance_type.name].count(now_s) * self.share(instance_type.name) + 1e-9
                )
                instance_type = replace(instance_type, max_count=min(count, instance_type.max_count))
            there.append(instance_type)
        return tuple(there)

    def moments(self, until_s: float) -> list[float]:
        """Times at which something may change, from 0 on, in order."""
        found = {0.0}
        for trace in self.traces.values():
            now_s = 0.0
            while (now_s := trace.next_change_s(now_s)) < until_s:
                found.add(now_s)
        return sorted(found)


def spot_market(
    assumptions: Assumptions, instance_types: Sequence[InstanceType], case: Case, data: Path
) -> SpotMarket:
    """The recorded market of a case: each spot instance type follows it at a phase of its own."""
    whole = from_first_machine(read_trace(data / assumptions.traces[case.trace]))
    spot = [instance_type.name for instance_type in instance_types if instance_type.market == "spot"]
    phase = 0.0 if case.in_step else assumptions.market.phase
    traces = {name: shifted(whole, case.shift + number * phase) for number, name in enumerate(spot)}
    return SpotMarket(tuple(instance_types), traces)


# --- scenarios -----------------------------------------------------------------------------------


def scenario(
    assumptions: Assumptions,
    models: Sequence[InstanceTypeModel],
    counts: Mapping[str, int],
    *,
    mode: str,
    steps: int,
    market: SpotMarket | None = None,
    folder: Path | None = None,
) -> Scenario:
    """A simulated run of so many steps, with `counts` workers to begin with.

    Args:
        market: its traces are written to `folder`, which the simulator reads.
    """
    work, network, times = assumptions.workload, assumptions.network, assumptions.fleet
    instance_types = []
    for number, model in enumerate(models):
        fields = model.model_dump() | {"count": counts.get(model.name, 0)}
        if market is not None and folder is not None and model.name in market.traces:
            path, trace = folder / f"trace{number}.csv", market.traces[model.name]
            rows = [*zip(trace.times_s, trace.counts, strict=True), (trace.end_s, trace.count(0.0))]
            path.write_text("".join(f"{at},{n}\n" for at, n in rows), encoding="utf-8")
            fields |= {"trace": str(path), "trace_at_end": "repeat", "trace_share": market.share(model.name)}
        instance_types.append(fields)
    stale = assumptions.staleness
    weight_mb = work.num_params * BYTES_PER_WEIGHT / 1e6
    patch_mb = work.num_params * network.changed_share * PATCH_BYTES_PER_CHANGED_WEIGHT / 1e6
    return parse_scenario(
        {
            "name": "cost",
            "seed": assumptions.seed,
            "run": {"steps": steps, "hours": 24.0 * 365},
            "sampling": {
                "prompts_per_step": work.prompts_per_step,
                "samples_per_prompt": work.samples_per_prompt,
            },
            "lengths": {
                "median_tokens": work.median_tokens,
                "sigma": work.sigma,
                "max_tokens": work.max_tokens,
            },
            "staleness": {"max_staleness": stale.max_staleness, "queue_batches": stale.queue_batches},
            "learner": {"t_train_s": assumptions.t_train_s, "usd_per_hour": assumptions.learner.usd_per_hour},
            "network": {
                "uplink_mbit": network.uplink_mbit,
                "worker_mbit": network.worker_mbit,
                "rtt_s": network.rtt_s,
                "snapshot_mb": weight_mb,
                "patch_mb": patch_mb,
            },
            "fleet": {
                "mode": mode,
                "gamma": stale.gamma,
                "tick_s": times.tick_s,
                "sustain_s": times.sustain_s,
                "boot_limit_s": max(times.boot_limit_s, BOOT_LIMIT_BOOTS * max(o.boot_s for o in models)),
            },
            "instance_types": instance_types,
        }
    )
