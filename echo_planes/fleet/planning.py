"""Planning command: the learner's need and the fleets that meet it (ECHO-2, section 3.3).

In: sizes, speeds and prices. The module uses no clock and no network; it reads the price list and the model's
folder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from echo_planes.config.files import user_path
from echo_planes.config.hub import pinned
from echo_planes.config.schema import ModelConfig
from echo_planes.errors import ConfigError, DataError, nearest
from echo_planes.fleet.advice import advise
from echo_planes.fleet.capacity import Need, predicted_bubble, staleness_bound
from echo_planes.fleet.exact import exact
from echo_planes.fleet.instance_types import FleetPlan, InstanceType, Limits, Shortfall
from echo_planes.fleet.plan_config import PlanConfig
from echo_planes.fleet.prices import PriceRow, dear_spot, instance_types_from_prices, read_prices
from echo_planes.fleet.provisioner import greedy
from echo_planes.fleet.sku_facts import SKU_FACTS
from echo_planes.fleet.throughput import (
    Answers,
    ModelSize,
    Source,
    Throughput,
    estimated_t_train_s,
    estimated_tokens_per_s,
    mu_of_sku,
    size_of_folder,
    size_of_params,
)
from echo_planes.weights.chain.plan import ideal_broadcast_s, num_chains

BYTES_PER_CHANGED_WEIGHT = 1.27  # of a patch in the fast codec; the compact one needs about 0.9
BEST = "fastest within the limits"  # title if no fleet reaches the target
MBIT_BYTES = 1e6 / 8
SWEEP = tuple(share / 20 for share in range(2, 27))  # shares of mu_target, for the plot

Solver = Callable[[Sequence[InstanceType], float, Limits, Mapping[str, int]], FleetPlan | Shortfall]
Method = Literal["greedy", "exact"]
SOLVERS: Mapping[Method, Solver] = {"greedy": greedy, "exact": exact}


@dataclass(frozen=True, slots=True)
class Figure:
    """Number with its source."""

    value: float
    source: Source


@dataclass(frozen=True, slots=True)
class Fleet:
    """Fleet with the expected course of a run on it. All figures but the plan's prices are estimates."""

    title: str
    method: Method
    plan: FleetPlan
    t_bcast_s: float
    bubble: float  # T_idle / (T_idle + T_train), 0 to 1
    staleness: int | None  # bound on t - v; None: no bound
    step_s: float  # T_train and the learner's wait
    usd_per_step: float  # learner included
    usd_run: float
    hours: float
    within_total: bool  # usd_run is at most the rest of the total budget


@dataclass(frozen=True, slots=True)
class Planned:
    """Result of the planning command."""

    config: PlanConfig
    size: ModelSize
    payload_bytes: Figure
    t_train_s: Figure
    num_chains: int
    instance_types: tuple[InstanceType, ...]
    sources: Mapping[str, Source]  # of mu, by SKU
    need: Need  # with the cheapest fleet; without one, the need that no fleet meets
    limits: Limits
    fleets: Sequence[Fleet]
    sweep: tuple[Fleet, ...]  # fleets of growing throughput, for the plot
    advice: tuple[str, ...] | None  # None if a fleet reaches the target
    notes: tuple[str, ...]  # rows that were left out, and fleets that were not found, with the reason
    dear_spot: tuple[str, ...] = ()  # sentences on spot prices above those on demand
    learner_memory: str = ""  # of one of its GPUs, where it can be told
    sparse: tuple[str, ...] = ()  # sentences on what a schedule of KV budgets saves


# --- from settings to a plan ---------------------------------------------------------------------


def plan(config: PlanConfig, read_tokens: float | None = None) -> Planned:
    """Plan the fleets for these settings.

    Args:
        config: the settings.
        read_tokens: tokens whose KV a sampled token reads, mean, where engines decode sparsely; None: all.

    Raises:
        ConfigError: settings that contradict one another, a budget that is spent, links that are too slow.
        DataError: the price list is damaged, has no usable machine, or has an unknown SKU.
        ModelError: the model's folder cannot be used.
    """
    size, notes = _size(config), list[str]()
    rows = _chosen_rows(config, notes)
    answers = replace(config.answers, read_tokens=read_tokens)
    mus = _throughputs(config, size, answers, rows, notes)
    instance_types = instance_types_from_prices(
        rows,
        lambda row: mus[row.line].mu if row.line in mus else None,
        max_count=config.max_per_instance_type,
        max_counts=config.quota,
        min_counts=config.minimum,
        spot_interruptions_per_hour=config.spot_interruptions_per_hour,
    )
    if not config.spot:
        instance_types = tuple(
            instance_type for instance_type in instance_types if instance_type.market != "spot"
        )
    if not instance_types:
        raise DataError(
            f"{config.prices} has no machine that can be used: {'; '.join(notes) or 'none is left'}"
        )
    planner = _Planner(config, _payload(config, size), _t_train(config, size))
    limits = planner.limits()
    smallest = planner.need(max(1, config.min_workers))
    if smallest.mu_target is None:
        raise ConfigError(planner.too_slow(smallest))
    reached, need = planner.solve("exact", instance_types, limits)
    advice = None
    if isinstance(reached, FleetPlan):
        need = planner.need(reached.num_workers)
    else:
        advice = tuple(one.text for one in advise(need, instance_types, limits))
    fleets = _fleets(planner, instance_types, limits, notes, advice is None)
    return Planned(
        config=config,
        size=size,
        payload_bytes=planner.payload_bytes,
        t_train_s=planner.t_train_s,
        num_chains=planner.num_chains,
        instance_types=instance_types,
        sources={row.sku: mus[row.line].source for row in rows if row.line in mus},
        need=need,
        limits=limits,
        fleets=fleets,
        sweep=_sweep(planner, instance_types, limits, need.mu_target or smallest.mu_target),
        advice=advice,
        notes=tuple(notes),
        dear_spot=dear_spot(rows),
    )


class _Planner:
    """Constants of the run, and the estimates of a fleet that follow from them."""

    def __init__(self, config: PlanConfig, payload_bytes: Figure, t_train_s: Figure) -> None:
        self._config = config
        self.payload_bytes, self.t_train_s = payload_bytes, t_train_s
        self.num_chains = num_chains(config.uplink_mbit, config.worker_mbit)

    def t_bcast_s(self, num_workers: int) -> float:
        """Return the seconds until 1/gamma of the workers have a publication; chains have equal lengths."""
        config = self._config
        served = math.ceil(num_workers / config.gamma - 1e-9)  # a rounding error is no worker
        # Either the uplink feeds all chains at a worker's rate, or it is slower than a single worker.
        rate = MBIT_BYTES * min(config.worker_mbit, config.uplink_mbit)
        hops = math.ceil(served / self.num_chains)
        chunk_bytes = min(config.chunk_kib * 1024, self.payload_bytes.value)
        return ideal_broadcast_s(self.payload_bytes.value, hops, chunk_bytes, rate, config.rtt_ms / 1e3)

    def need(self, num_workers: int) -> Need:
        """Return the learner's need if the weights go to `num_workers` workers."""
        config = self._config
        return Need(
            max_staleness=config.max_staleness,
            kappa=config.kappa,
            per_step=config.per_step,
            t_train_s=self.t_train_s.value,
            t_bcast_s=self.t_bcast_s(num_workers),
            gamma=config.gamma,
        )

    def usd_left(self) -> float | None:
        """Return the dollars left of the total budget; None without such a budget."""
        config = self._config
        return None if config.usd_total is None else config.usd_total - config.usd_spent

    def limits(self) -> Limits:
        """Return the limits, with the total budget as a limit per hour of a run whose learner never waits.

        Raises:
            ConfigError: the total budget is spent, or does not pay for the learner alone.
        """
        config = self._config
        per_hour, left = config.usd_per_hour, self.usd_left()
        if left is not None:
            if left <= 0:
                raise ConfigError(
                    f"usd_total={config.usd_total:g}: the budget is spent already "
                    f"(usd_spent={config.usd_spent:g}); raise it, or stop here"
                )
            hours = config.steps * self.t_train_s.value / 3600
            room = left / hours - config.learner_usd_per_hour
            if room <= 0:
                raise ConfigError(
                    f"usd_total={config.usd_total:g}: the learner alone costs "
                    f"${hours * config.learner_usd_per_hour:,.2f} for {config.steps} steps of "
                    f"{self.t_train_s.value:.3g} s, and ${left:,.2f} are left; make fewer steps or raise it"
                )
            per_hour = room if per_hour is None else min(per_hour, room)
        return Limits(
            usd_per_hour=per_hour,
            usd_left=left,
            interruptions_per_hour=config.interruptions_per_hour,
            min_workers=config.min_workers,
            max_workers=config.max_workers,
        )

    def too_slow(self, need: Need) -> str:
        """Explain why no fleet is enough: a publication takes at least as long as the steps made on it."""
        kappa = math.floor(need.t_bcast_s / need.t_train_s) + 1
        return (
            f"kappa T_train = {need.kappa} x {need.t_train_s:.4g} s is not above T_bcast = "
            f"{need.t_bcast_s:.4g} s for {self.payload_bytes.value / 2**20:,.0f} MiB: no fleet is enough; "
            "send patches (changed_share), use faster links, or give "
            f"max_staleness={kappa + 1} publish_every={kappa}"
        )

    def fleet(self, title: str, method: Method, chosen: FleetPlan) -> Fleet:
        """Estimate a run on `chosen`: its bubble, staleness, times and cost."""
        config, need = self._config, self.need(chosen.num_workers)
        bound = staleness_bound(need, chosen.mu)
        bubble = predicted_bubble(need, chosen.mu)
        step_s = self.t_train_s.value / (1 - bubble)
        usd_per_step = (chosen.usd_per_hour + config.learner_usd_per_hour) * step_s / 3600
        usd_run, usd_left = usd_per_step * config.steps, self.usd_left()
        return Fleet(
            title=title,
            method=method,
            plan=chosen,
            t_bcast_s=need.t_bcast_s,
            bubble=bubble,
            # A run never exceeds S: where the bound is above it, the learner waits or groups are dropped.
            staleness=None if bound is None else min(bound, need.max_staleness),
            step_s=step_s,
            usd_per_step=usd_per_step,
            usd_run=usd_run,
            hours=step_s * config.steps / 3600,
            within_total=usd_left is None or usd_run <= usd_left * (1 + 1e-9),
        )

    def solve(
        self, method: Method, instance_types: Sequence[InstanceType], limits: Limits
    ) -> tuple[FleetPlan | Shortfall | None, Need]:
        """Return the fleet that reaches mu_target with the T_bcast of its own size, and its need.

        The fleet is None if T_bcast is too long for any fleet.
        """
        workers = max(1, limits.min_workers)
        while True:  # ends: T_bcast grows with the fleet and the target with T_bcast, so the size only rises
            need = self.need(workers)
            if need.mu_target is None:
                return None, need
            found = SOLVERS[method](instance_types, need.mu_target, limits, {})
            if isinstance(found, Shortfall) or found.num_workers <= workers:
                return found, need
            workers = found.num_workers


def _fleets(
    planner: _Planner,
    instance_types: Sequence[InstanceType],
    limits: Limits,
    notes: list[str],
    is_reached: bool,
) -> list[Fleet]:
    """Return the fleets of the table: those that reach the target, or the fastest if none does."""
    kinds = [("cheapest", instance_types)]
    steady = [instance_type for instance_type in instance_types if instance_type.market != "spot"]
    if steady and len(steady) < len(instance_types):
        kinds.append(("cheapest without spot", steady))
    fleets = []
    for title, among in kinds:
        for method in SOLVERS:
            found, _ = planner.solve(method, among, limits)
            if isinstance(found, FleetPlan):
                fleets.append(planner.fleet(title, method, found))
            elif is_reached:
                notes.append(f"{title}, {method}: no such fleet within the limits reaches mu_target")
            elif isinstance(found, Shortfall) and among is instance_types and found.best.mu > 0:
                fleets.append(planner.fleet(BEST, method, found.best))
    return fleets


def _sweep(
    planner: _Planner, instance_types: Sequence[InstanceType], limits: Limits, mu_target: float
) -> tuple[Fleet, ...]:
    """Return each method's fleets for growing shares of the target (`SWEEP`), without the budgets."""
    limits = replace(limits, usd_per_hour=None, usd_left=None)
    fleets: dict[tuple[Method, tuple[tuple[str, int], ...]], Fleet] = {}
    for share in SWEEP:
        for method, solver in SOLVERS.items():
            found = solver(instance_types, share * mu_target, limits, {})
            if isinstance(found, FleetPlan) and found.num_workers:
                key = (method, tuple(sorted(found.counts.items())))
                fleets.setdefault(key, planner.fleet(f"{share:.0%} of mu_target", method, found))
    return tuple(fleets.values())


def _size(config: PlanConfig) -> ModelSize:
    kv_bytes = None if config.kv_kib_per_token is None else config.kv_kib_per_token * 1024
    if config.model is None:
        return size_of_params((config.params_b or 0.0) * 1e9, kv_bytes)
    size = size_of_folder(ModelConfig(path=pinned(config.model)).folder)
    return size if kv_bytes is None else size_of_params(size.num_params, kv_bytes)


def _payload(config: PlanConfig, size: ModelSize) -> Figure:
    if config.payload_mib is not None:
        return Figure(config.payload_mib * 2**20, "given")
    if config.changed_share is not None:
        return Figure(size.num_params * config.changed_share * BYTES_PER_CHANGED_WEIGHT, "estimated")
    return Figure(size.weight_bytes, "given")


def _t_train(config: PlanConfig, size: ModelSize) -> Figure:
    if config.t_train_s is not None:
        return Figure(config.t_train_s, "given")
    sku = config.learner_sku or ""
    if sku not in SKU_FACTS:
        hint = nearest(sku, SKU_FACTS) or f"; known: {', '.join(SKU_FACTS)}"
        raise ConfigError(f"learner_sku={sku}: unknown GPU{hint}; or give t_train_s")
    tokens = config.per_step * (config.prompt_tokens + config.answer_tokens)
    seconds = estimated_t_train_s(size.num_params, tokens, SKU_FACTS[sku], config.learner_gpus)
    return Figure(seconds, "estimated")


def _chosen_rows(config: PlanConfig, notes: list[str]) -> list[PriceRow]:
    """Return the rows that the settings allow, and note how many have another number of GPUs."""
    rows = list(read_prices(user_path(config.prices)))
    skus = {row.sku for row in rows}
    for setting, named in (("mu", config.mu), ("tokens_per_s", config.tokens_per_s)):
        for sku in named:
            _known(f"{setting}.{sku}", sku, skus)
    for setting, text, column in (("skus", config.skus, "sku"), ("providers", config.providers, "provider")):
        wanted = [name.strip() for name in text.split(",") if name.strip()]
        for name in wanted:
            _known(f"{setting}={name}", name, {getattr(row, column) for row in rows})
        if wanted:
            rows = [row for row in rows if getattr(row, column) in wanted]
    chosen = [row for row in rows if row.gpus == config.gpus_per_worker]
    if len(chosen) < len(rows):
        notes.append(
            f"{len(rows) - len(chosen)} of {len(rows)} machines: another number of GPUs than "
            f"gpus_per_worker={config.gpus_per_worker}"
        )
    return chosen


def _known(what: str, name: str, known: Iterable[str]) -> None:
    names = sorted(known)
    if name not in names:
        raise ConfigError(
            f"{what}: not in the list of prices{nearest(name, names) or '; it has ' + ', '.join(names)}"
        )


def _throughputs(
    config: PlanConfig, size: ModelSize, answers: Answers, rows: Sequence[PriceRow], notes: list[str]
) -> dict[int, Throughput]:
    """Return mu by the row's line. Leave out a machine that the model does not run on, and note it."""
    mus: dict[int, Throughput] = {}
    for row in rows:
        facts, memory_gib, estimate = SKU_FACTS.get(row.sku), row.gpu_mem_gib, None
        why = f"{size.num_params / 1e9:.3g} B weights do not fit (estimated)"
        if facts is not None and not facts.has_bf16:
            why = f"no bf16 arithmetic; give mu.{row.sku}=TRAJECTORIES_PER_S if your engine runs on it"
        elif facts is not None and memory_gib is not None:
            estimate = estimated_tokens_per_s(size, answers, facts, memory_gib, row.gpus)
        elif row.sku not in config.mu and row.sku not in config.tokens_per_s:
            raise DataError(
                f"{config.prices}:{row.line}: nothing is known of SKU '{row.sku}'"
                f"{nearest(row.sku, SKU_FACTS)}; give mu.{row.sku}=TRAJECTORIES_PER_S, or leave it out "
                "with skus="
            )
        mu = mu_of_sku(row.sku, config.mu, config.tokens_per_s, estimate, config.answer_tokens)
        if mu is not None:
            mus[row.line] = mu
        else:
            notes += [] if (note := f"{row.sku}: {why}") in notes else [note]
    return mus
