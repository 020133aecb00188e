"""Loop of a fleet that follows price and need: carries out the decisions of `fleet.reconciler`.

The loop observes the run as an `Observer`, sees the machines through an `Actuator`, and has the runner start
and end workers. It starts a worker once a machine for it is up, on that machine.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from statistics import median
from typing import Any, Protocol

from echo_planes.cluster.clock import Clock
from echo_planes.config.fleet import WorkerConfig
from echo_planes.config.schema import Config
from echo_planes.errors import RefusedError, RunError
from echo_planes.fleet.actuators.actuator import Actuator, Machine
from echo_planes.fleet.capacity import Need, Pace, UninformativeShare, useful_instances
from echo_planes.fleet.estimates import LEARNER_WINDOW, CapacityModel, ThroughputSample
from echo_planes.fleet.instance_types import InstanceType, Limits
from echo_planes.fleet.provisioner import Provisioner
from echo_planes.fleet.reconciler import Reconciler
from echo_planes.fleet.record import FleetRecord
from echo_planes.fleet.workers import Activate, Cause, FleetAction, Launch, Leave, Park
from echo_planes.loop.observers import QuietObserver
from echo_planes.reporting.broadcasts import BroadcastLog
from echo_planes.types import (
    BufferCounts,
    InstallReport,
    Manifest,
    SeedReport,
    StepStats,
    TrainBatch,
    WorkerInfo,
    WorkerStats,
)

NODE_LABEL = "ray.io/node-id"  # label that Ray sets on every node
UNKNOWN_MU = 1.0  # trajectories/s: if no `mu` is set, all types count as equally fast; the cheapest is first
RELEASE_TIMES = 10  # a surplus must last this many times as long as a shortage: machines take minutes to boot
RATE_FACTORS = 20  # newest steps whose factors of drift control count
NOTICE_S = 30.0  # left to a worker whose machine announced its end without a time
GONE_S = 1.0  # left to a worker whose machine is gone already
MAX_FAILED_LOOKS = 5  # looks at the machines that may fail in a row; one more ends the run


class WorkerControl(Protocol):
    """Interface of the runner that starts and ends workers (`runner.Runner`)."""

    @property
    def refused(self) -> Mapping[str, str]: ...  # instance types that cannot serve, and why
    def want_worker(self, info: WorkerInfo) -> None: ...
    def unwant_worker(self, worker_id: str, reason: str, limit_s: float) -> None: ...
    async def collect_worker_stats(self) -> None: ...


class Parking(Protocol):
    """Interface of the data plane that parks workers (`planes.DataPlane`)."""

    async def park(self, worker_id: str, parked: bool) -> None: ...


class Roster(Protocol):
    """Interface of the planes that accepts a new worker's settings and parks it (`launch.RayPlanes`)."""

    @property
    def data(self) -> Parking: ...
    def enlist(self, worker_id: str, worker_config: WorkerConfig) -> None: ...


class ReconcileLoop(QuietObserver):
    """Reconcile loop of one run, where its fleet follows price and need.

    Args:
        config: the run's settings.
        actuator: requests, lists and releases machines.
        roster: receives the settings of a new worker, and whether it is parked, before the worker starts.
        broadcasts: log that measures T_bcast.
        clock: the run's clock, seconds.
        tell: called with a kind of event and a text about every decision.
        usd_left: returns the dollars left of the budget, before every decision; None: there is no budget.
        record: called with a text and numbers at every action, and at intervals (`FleetRecord`).
    """

    def __init__(
        self,
        config: Config,
        actuator: Actuator,
        roster: Roster,
        broadcasts: BroadcastLog,
        clock: Clock,
        tell: TellDecision,
        usd_left: Callable[[], float | None] | None = None,
        record: Callable[[str, Mapping[str, Any]], None] | None = None,
    ) -> None:
        self._config = config
        self._actuator = actuator
        self._roster = roster
        self._broadcasts = broadcasts
        self._clock = clock
        self._tell = tell
        self._usd_left = usd_left
        self._record = record
        self._worker_configs = {
            worker_config.instance_type: worker_config for worker_config in config.fleet.workers
        }
        self._model = CapacityModel()
        self._pace = Pace(config.run.steps)
        self._uninformative = UninformativeShare(config.sampling.trajectories_per_step)
        self._rate_factors: deque[float] = deque(maxlen=RATE_FACTORS)
        self._known_bcast: int | None = None  # newest version whose T_bcast was used, or skipped
        self._waiting: dict[str, str] = {}  # workers without a machine yet -> their instance type
        self._nodes: dict[str, Machine] = {}  # machines as last seen, by worker
        self._notices: dict[str, float] = {}  # workers whose machine announced its end -> when, run's clock
        self._wanted: Mapping[str, int] | None = None  # newest request; None: maybe an earlier run's
        self._releases: dict[str, asyncio.Task[None]] = {}  # node id -> its release
        self._not_released: RunError | None = None  # error of a release, until `_look` raises it
        self._published = False
        self._num_served = 0  # workers that served when the last step ended
        self._seeded: SeedReport | None = None  # of the present step
        self._useful: deque[int] = deque(maxlen=LEARNER_WINDOW)  # S = 0: N_prem of each step
        self._said = ""
        self._stuck: tuple[object, ...] = ()  # limits that prevent a sufficient fleet, as last reported
        # A cluster removes a draining node by itself; the release of a static machine parks it.
        self._releasable = ("up", "draining") if config.fleet.scale == "static" else ("up",)
        self.fleet = Reconciler(
            instance_types_of(config),
            {
                worker_config.instance_type: worker_config.count
                for worker_config in config.fleet.workers
                if worker_config.count
            },
            provisioner=Provisioner(
                limits_of(config),
                sustain_s=config.fleet.sustain_s,
                release_sustain_s=RELEASE_TIMES * config.fleet.sustain_s,
            ),
            model=self._model,
            boot_limit_s=config.fleet.boot_limit_s,
            ask_limit_s=config.fleet.ask_limit_s,
            guesses=[
                worker_config.instance_type
                for worker_config in config.fleet.workers
                if worker_config.mu is None
            ],
            standby=config.fleet.standby,
        )
        self._fleet_record = FleetRecord(self.fleet)

    # --- loop ------------------------------------------------------------------------------------

    async def run(self, hands: WorkerControl) -> None:
        """Reconcile at intervals until cancelled.

        Raises:
            RunError: more than MAX_FAILED_LOOKS looks at the machines failed in a row, or no instance type is
                left that can serve.
            ClusterError: the cluster can never provide the machines that the fleet's settings permit.
        """
        failed = 0
        try:
            first = self.fleet.begin(self._clock.now_s())
            self._fleet_record.begun(first)
            await self._act(hands, first)
            while True:
                try:
                    await self._look(hands)
                    failed = 0
                except RunError as why:  # the next look repeats what this one did not complete
                    failed += 1
                    if failed > MAX_FAILED_LOOKS:
                        raise RunError(f"fleet: {failed} looks at machines in a row failed: {why}") from why
                    self._tell("fleet", f"the machines could not be looked at ({failed} in a row): {why}")
                await asyncio.sleep(self._config.fleet.tick_s)
                await hands.collect_worker_stats()
                self._refuse(hands.refused)
                self.fleet.limits = self._limits()
                need, useful, now_s = self._need(), self._num_useful(), self._clock.now_s()
                actions = self.fleet.tick(now_s, need, published=self._published, useful=useful)
                await self._act(hands, actions)
                self._explain()
                written = self._fleet_record.tick(need, actions, now_s)
                if written is not None and self._record is not None:
                    self._record(*written)
        finally:
            for task in self._releases.values():
                task.cancel()
            await asyncio.gather(*self._releases.values(), return_exceptions=True)
            with suppress(RunError):  # the cluster may be gone, which is what ended the run
                await self._actuator.close()

    def _refuse(self, refused: Mapping[str, str]) -> None:
        """Buy no more machines of the instance types whose engines cannot start."""
        for instance_type, why in refused.items():
            self.fleet.refuse(instance_type)
            if self._worker_configs.keys() <= refused.keys():
                raise RunError(f"no instance type is left that can serve; {instance_type}: {why}")

    async def _act(self, hands: WorkerControl, actions: list[FleetAction]) -> None:
        for action in actions:
            match action:
                case Launch(worker_id, instance_type):
                    self._waiting[worker_id] = instance_type
                case Leave(worker_id, reason, limit_s):
                    if self._waiting.pop(worker_id, None) is None:
                        hands.unwant_worker(worker_id, reason, limit_s)
                case Park(worker_id):
                    await self._roster.data.park(worker_id, parked=True)
                    self._tell("fleet", f"{worker_id} is to be a standby")
                case Activate(worker_id, reason):
                    await self._roster.data.park(worker_id, parked=False)
                    self._tell("fleet", f"standby {worker_id} takes part: {reason}")

    async def _look(self, hands: WorkerControl) -> None:
        """Start workers on new machines, have workers leave machines that go, and release unused machines."""
        self._forget_releases()
        await self._ask()
        now_s = self._clock.now_s()
        nodes = await self._actuator.nodes()
        self._nodes = {node.worker_id: node for node in nodes if node.worker_id}
        # A machine whose release ended during the call may still be listed in its earlier state.
        kept = [node for node in nodes if node.node_id not in self._releases]
        free = [node for node in kept if node.state == "up" and not node.worker_id]
        for worker_id, instance_type in list(self._waiting.items()):
            node = next((one for one in free if one.instance_type_name == instance_type), None)
            if node is not None:
                free.remove(node)
                self._begin(hands, worker_id, node, now_s)
        for worker_id, node in self._nodes.items():
            told_s = self._notices.pop(worker_id, None)
            if node.state != "up" or told_s is not None:
                deadline_s = node.notice_deadline_s if told_s is None else told_s
                left_s = NOTICE_S if deadline_s is None else max(GONE_S, deadline_s - now_s)
                left_s = GONE_S if node.state == "dead" else left_s
                await self._act(hands, self.fleet.notice(worker_id, left_s, now_s))
            if told_s is not None and node.state == "up":  # keeps Ray from placing anything there
                await self._actuator.notice(node.node_id, told_s)
        await self._ask()  # before the releases, otherwise other machines would replace the released ones
        for worker_id, node in self._nodes.items():
            is_unused = self.fleet.instance_type_of(worker_id) is None and node.state in self._releasable
            if is_unused and node.node_id not in self._releases:
                # In a task, because the call repeats its request for a while if the cluster refuses.
                self._releases[node.node_id] = asyncio.create_task(self._actuator.release(node.node_id))
        why, self._not_released = self._not_released, None
        if why is not None:
            raise why

    def _forget_releases(self) -> None:
        """Forget releases that are over; keep the error of one, which `_look` raises at its end."""
        for node_id, task in list(self._releases.items()):
            if task.done():
                del self._releases[node_id]
                try:
                    task.result()
                except RunError as why:
                    self._not_released = why

    async def _ask(self) -> None:
        """Request the machines that the fleet uses, if that differs from the newest request.

        While a worker waits, repeat the request: its machine may have been in use until now.
        """
        wanted = self.fleet.machines
        if self._waiting or wanted != self._wanted:
            await self._actuator.want(wanted)
            self._wanted = wanted

    def _begin(self, hands: WorkerControl, worker_id: str, node: Machine, now_s: float) -> None:
        del self._waiting[worker_id]
        self._actuator.assign(node.node_id, worker_id)
        self.fleet.came(worker_id, now_s)
        worker_config = self._worker_configs[node.instance_type_name]
        if self._config.fleet.brings_nodes:
            labels = {**worker_config.labels, NODE_LABEL: node.node_id}
            unit = (
                {worker_config.instance_type: 1.0} if self._config.fleet.scale == "ray" else {}
            )  # custom resource of which each node has one unit
            worker_config = worker_config.model_copy(
                update={"labels": labels, "resources": {**worker_config.resources, **unit}}
            )
        self._roster.enlist(worker_id, worker_config)
        self._tell("machine", f"{worker_id} {worker_config.instance_type} {node.node_id}")
        hands.want_worker(worker_info(worker_id, worker_config, epoch=0))

    def _need(self) -> Need | None:
        staleness = self._config.staleness
        return self._model.need(
            max_staleness=staleness.max_staleness,
            kappa=staleness.kappa,
            per_step=self._config.sampling.trajectories_per_step,
            gamma=self._config.fleet.gamma,
            mu_first=self.fleet.mu_first(self._clock.now_s()),
            uninformative=self._uninformative.share,
            rate_factor=round(median(self._rate_factors), 1) if self._rate_factors else 1.0,
        )

    def _limits(self) -> Limits:
        """Return the configured limits, with the dollars left of the budget and the seconds of the run."""
        usd_left = None if self._usd_left is None else self._usd_left()
        seconds_left = self._pace.left_s(self._clock.now_s())
        return replace(limits_of(self._config), usd_left=usd_left, seconds_left=seconds_left)

    def _num_useful(self) -> int | None:
        """Return how many workers shorten a step at S = 0; None: S is larger, or no step has ended."""
        return max(1, math.ceil(median(self._useful))) if self._useful else None

    def _explain(self) -> None:
        """Report a decision, or the limits that prevent a sufficient fleet, when either is new."""
        decision = self.fleet.decision
        if decision is None:
            return
        binding = decision.shortfall.binding if decision.shortfall else ()
        stuck = (*binding, *(advice.change for advice in decision.advice))
        is_news = bool(stuck) and stuck != self._stuck
        self._stuck = stuck or self._stuck
        if is_news or ((decision.launch or decision.release) and decision.reason != self._said):
            self._said = decision.reason
            self._tell("fleet", decision.reason)

    # --- Observer --------------------------------------------------------------------------------

    def on_prices(self, usd_per_hour: Mapping[str, float]) -> None:
        """Apply new prices, dollars an hour by instance type, from now on."""
        self.fleet.reprice(usd_per_hour)

    def on_worker(self, info: WorkerInfo, *, alive: bool) -> None:
        if not alive:
            self._notices.pop(info.worker_id, None)
            self.fleet.gone(info.worker_id, self._cause(info.worker_id), self._clock.now_s())

    def on_published(self, manifest: Manifest, seconds: float) -> None:
        self._published = True

    def on_installed(self, report: InstallReport) -> None:
        if report.ok:
            self.fleet.serving(report.worker_id, self._clock.now_s())
            if self._known_bcast is None:
                self._known_bcast = report.version  # skipped: its T_bcast includes the start of the engines

    def on_stats(self, epoch: int, stats: WorkerStats) -> None:
        if stats.leaves_in_s is not None:
            self._notices[stats.worker_id] = self._clock.now_s() + stats.leaves_in_s
        sample = ThroughputSample(stats.full_tokens, stats.full_s, stats.tokens, stats.trajectories)
        try:
            self.fleet.measured(stats.worker_id, sample, self._clock.now_s())
        except RefusedError as why:
            self._tell("refused", str(why))

    def on_seeding(self, report: SeedReport) -> None:
        self._seeded = report

    def on_step(self, batch: TrainBatch, stats: StepStats, idle_s: float, counts: BufferCounts) -> None:
        self._model.observe_step(stats.t_train_s)
        self._uninformative.observe(counts.uninformative)
        self._rate_factors.append(stats.rate_factor)
        self._pace.observe(stats.step + 1, stats.t_train_s + idle_s, self._clock.now_s())
        newest = self._broadcasts.newest()
        if newest and newest["published_version"] != self._known_bcast:
            self._known_bcast = newest["published_version"]
            self._model.observe_broadcast(newest["t_bcast_s"])
        if self._config.staleness.max_staleness == 0:
            seeded = self._seeded
            # Nothing overlaps: the learner waited for the broadcast, then for the samples.
            t_remote_s = idle_s if seeded is None else seeded.remote_s
            t_remote_s = max(0.0, t_remote_s - (newest["t_bcast_s"] if newest else 0.0))
            num_now = self.fleet.num_serving
            num_mean = ((self._num_served or num_now) + num_now) / 2
            t_seed_s, num_reserved = 0.0, 0
            if seeded is not None:
                num_mean, t_seed_s, num_reserved = seeded.mean_remote, seeded.seeded_s, seeded.num_reserved
            useful = useful_instances(t_remote_s, num_mean, t_seed_s, num_reserved, stats.t_train_s)
            self._useful.append(useful)
        self._num_served = self.fleet.num_serving

    def _cause(self, worker_id: str) -> Cause:
        node = self._nodes.get(worker_id)
        return "preempted" if node is not None and node.state in ("draining", "dead") else "died"


class TellDecision(Protocol):
    """Callback for decisions: takes a kind of event and a text."""

    def __call__(self, kind: str, text: str) -> None: ...


def worker_info(worker_id: str, worker_config: WorkerConfig, epoch: int) -> WorkerInfo:
    """Make the `WorkerInfo` of a worker with these settings."""
    return WorkerInfo(
        worker_id,
        worker_config.sku,
        worker_config.usd_per_hour,
        epoch,
        worker_config.market,
        worker_config.instance_type,
    )


def instance_types_of(config: Config) -> tuple[InstanceType, ...]:
    """Return the instance types of the fleet's settings. A type without `mu` has the lowest one given."""
    known = [worker_config.mu for worker_config in config.fleet.workers if worker_config.mu is not None]
    mu = min(known) if known else UNKNOWN_MU
    return tuple(
        InstanceType(
            name=worker_config.instance_type,
            sku=worker_config.sku,
            usd_per_hour=worker_config.usd_per_hour,
            mu=worker_config.mu if worker_config.mu is not None else mu,
            max_count=worker_config.quota,
            min_count=worker_config.min_count,
            region=worker_config.region,
            market=worker_config.market,
            interruptions_per_hour=worker_config.interruptions_per_hour,
        )
        for worker_config in config.fleet.workers
    )


def limits_of(config: Config) -> Limits:
    """Return the limits on the size and cost of the fleet."""
    fleet = config.fleet
    return Limits(
        usd_per_hour=fleet.usd_per_hour,
        interruptions_per_hour=fleet.interruptions_per_hour,
        max_workers=fleet.max_workers,
    )
