"""The loop that keeps a fleet as it should be: does what `fleet.reconciler` decides, tells it what happens.

It listens to the run as an `Observer`, looks at the machines through an `Actuator`, and has the runner start
and end workers. A worker is started when a machine for it is there, on that machine.
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
from echo_planes.config.schema import Config, WorkerConfig
from echo_planes.errors import RefusedError, RunError
from echo_planes.fleet.actuators.actuator import Actuator, Machine
from echo_planes.fleet.capacity import Need, UninformativeShare, useful_instances
from echo_planes.fleet.estimates import LEARNER_WINDOW, CapacityModel, ThroughputSample
from echo_planes.fleet.instance_types import Limits, Offer
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
    StepStats,
    TrainBatch,
    WorkerInfo,
    WorkerStats,
)

NODE_LABEL = "ray.io/node-id"  # Ray gives it to every node
UNKNOWN_MU = 1.0  # before anything is measured all kinds count as equally fast: the cheapest is tried first
RELEASE_TIMES = 10  # a surplus must last so many times as long as a shortage: machines take minutes to boot
RATE_FACTORS = 20  # steps whose factors of drift control are looked at
NOTICE_S = 30.0  # of a machine that goes without saying when
GONE_S = 1.0  # for a worker whose machine is gone already
MAX_FAILED_LOOKS = 5  # at the machines, in a row; after one more the run ends


class WorkerControl(Protocol):
    """Has a runner start and end workers (`runner.Runner`)."""

    def want_worker(self, info: WorkerInfo) -> None: ...
    def unwant_worker(self, worker_id: str, reason: str, limit_s: float) -> None: ...
    async def collect_worker_stats(self) -> None: ...


class Parking(Protocol):
    """Data plane as far as it parks workers (`planes.DataPlane`)."""

    async def park(self, worker_id: str, parked: bool) -> None: ...


class Roster(Protocol):
    """Planes as far as they must know the kind of a new worker and park it (`launch.RayPlanes`)."""

    @property
    def data(self) -> Parking: ...
    def enlist(self, worker_id: str, kind: WorkerConfig) -> None: ...


class ReconcileLoop(QuietObserver):
    """One per run whose fleet follows price and need.

    Args:
        config: the run's settings.
        actuator: where machines come from.
        roster: told what kind a new worker is, and that it is parked, before it is started.
        broadcasts: where T_bcast is measured.
        clock: seconds.
        tell: called with a kind and a text about every decision.
        usd_left: dollars that are left of the budget, asked before every decision; None: there is no budget.
        record: called with a text and numbers when something is done, and now and then (`FleetRecord`).
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
        self._kinds = {kind.offer: kind for kind in config.fleet.workers}
        self._model = CapacityModel()
        self._uninformative = UninformativeShare(config.sampling.trajectories_per_step)
        self._rate_factors: deque[float] = deque(maxlen=RATE_FACTORS)
        self._known_bcast: int | None = None  # version whose T_bcast was taken in
        self._waiting: dict[str, str] = {}  # workers without a machine yet -> their offer
        self._nodes: dict[str, Machine] = {}  # machines as last seen, by worker
        self._notices: dict[str, float] = {}  # workers whose machine announced its end -> when, run's clock
        self._wanted: Mapping[str, int] | None = None  # machines asked for last; None: maybe by a dead run
        self._releases: dict[str, asyncio.Task[None]] = {}  # machines that are let go
        self._not_released: RunError | None = None  # why one could not be, until a look tells it
        self._published = False
        self._num_served = 0  # workers that served when the last step ended
        self._useful: deque[int] = deque(maxlen=LEARNER_WINDOW)  # S = 0: N_prem of each step
        self._said = ""
        self._stuck: tuple[object, ...] = ()  # what stood in the way of a fleet that is enough, as last said
        # A node that drains on a cluster goes by itself; a machine that is there anyway is parked.
        self._releasable = ("up", "draining") if config.fleet.scale == "static" else ("up",)
        self.fleet = Reconciler(
            offers_of(config),
            {kind.offer: kind.count for kind in config.fleet.workers if kind.count},
            provisioner=Provisioner(
                limits_of(config),
                sustain_s=config.fleet.sustain_s,
                release_sustain_s=RELEASE_TIMES * config.fleet.sustain_s,
            ),
            model=self._model,
            boot_limit_s=config.fleet.boot_limit_s,
            ask_limit_s=config.fleet.ask_limit_s,
            guesses=[kind.offer for kind in config.fleet.workers if kind.mu is None],
            standby=config.fleet.standby,
        )
        self._fleet_record = FleetRecord(self.fleet)

    # --- what it does ----------------------------------------------------------------------------

    async def run(self, hands: WorkerControl) -> None:
        """Until it is cancelled.

        Raises:
            RunError: the machines could not be seen or asked for, several times in a row.
            ClusterError: the cluster can never give what the fleet's settings permit.
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
                except RunError as why:  # what was not done is done at the next look
                    failed += 1
                    if failed > MAX_FAILED_LOOKS:
                        raise RunError(f"fleet: {failed} looks at machines in a row failed: {why}") from why
                    self._tell("fleet", f"the machines could not be looked at ({failed} in a row): {why}")
                await asyncio.sleep(self._config.fleet.tick_s)
                await hands.collect_worker_stats()
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

    async def _act(self, hands: WorkerControl, actions: list[FleetAction]) -> None:
        for action in actions:
            match action:
                case Launch(worker_id, offer):
                    self._waiting[worker_id] = offer
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
        """See which machines came, which are about to go, and which are no longer used."""
        self._forget_releases()
        await self._ask()
        now_s = self._clock.now_s()
        nodes = await self._actuator.nodes()
        self._nodes = {node.worker_id: node for node in nodes if node.worker_id}
        # One whose release ended while they were looked at may still be seen as it was before.
        kept = [node for node in nodes if node.node_id not in self._releases]
        free = [node for node in kept if node.state == "up" and not node.worker_id]
        for worker_id, offer in list(self._waiting.items()):
            node = next((one for one in free if one.offer_name == offer), None)
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
            if told_s is not None and node.state == "up":  # Ray is to put nothing there any more
                await self._actuator.notice(node.node_id, told_s)
        await self._ask()  # before machines are released: else others come in their place
        for worker_id, node in self._nodes.items():
            is_unused = self.fleet.offer_of(worker_id) is None and node.state in self._releasable
            if is_unused and node.node_id not in self._releases:
                # Beside the looks: a cluster that refuses for a while is asked again until the call's limit.
                self._releases[node.node_id] = asyncio.create_task(self._actuator.release(node.node_id))
        why, self._not_released = self._not_released, None
        if why is not None:
            raise why

    def _forget_releases(self) -> None:
        """Of machines whose release is over. Its error ends the look, once all else of it is done."""
        for node_id, task in list(self._releases.items()):
            if task.done():
                del self._releases[node_id]
                try:
                    task.result()
                except RunError as why:
                    self._not_released = why

    async def _ask(self) -> None:
        """Ask for the machines that the fleet uses, where that is not what was asked for last.

        While a worker waits, every time: its machine may have been in use until now.
        """
        wanted = self.fleet.machines
        if self._waiting or wanted != self._wanted:
            await self._actuator.want(wanted)
            self._wanted = wanted

    def _begin(self, hands: WorkerControl, worker_id: str, node: Machine, now_s: float) -> None:
        del self._waiting[worker_id]
        self._actuator.assign(node.node_id, worker_id)
        self.fleet.came(worker_id, now_s)
        kind = self._kinds[node.offer_name]
        if self._config.fleet.brings_nodes:
            labels = {**kind.labels, NODE_LABEL: node.node_id}
            unit = {kind.offer: 1.0} if self._config.fleet.scale == "ray" else {}  # of which a node has one
            kind = kind.model_copy(update={"labels": labels, "resources": {**kind.resources, **unit}})
        self._roster.enlist(worker_id, kind)
        self._tell("machine", f"{worker_id} {kind.offer} {node.node_id}")
        hands.want_worker(worker_info(worker_id, kind, epoch=0))

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
        """As set, with what is left of the budget."""
        limits = limits_of(self._config)
        return limits if self._usd_left is None else replace(limits, usd_left=self._usd_left())

    def _num_useful(self) -> int | None:
        """At S = 0, no more workers than that shorten a step."""
        return max(1, math.ceil(median(self._useful))) if self._useful else None

    def _explain(self) -> None:
        """Say what is done, and what is in the way of a fleet that is enough, each when it is new."""
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

    # --- what it hears ---------------------------------------------------------------------------

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
                self._known_bcast = report.version  # it waited for engines to be built, not for the network

    def on_stats(self, epoch: int, stats: WorkerStats) -> None:
        if stats.leaves_in_s is not None:
            self._notices[stats.worker_id] = self._clock.now_s() + stats.leaves_in_s
        sample = ThroughputSample(stats.full_tokens, stats.full_s, stats.tokens, stats.trajectories)
        try:
            self.fleet.measured(stats.worker_id, sample, self._clock.now_s())
        except RefusedError as why:
            self._tell("refused", str(why))

    def on_step(self, batch: TrainBatch, stats: StepStats, idle_s: float, counts: BufferCounts) -> None:
        self._model.observe_step(stats.t_train_s)
        self._uninformative.observe(counts.uninformative)
        self._rate_factors.append(stats.rate_factor)
        newest = self._broadcasts.newest()
        if newest and newest["published_version"] != self._known_bcast:
            self._known_bcast = newest["published_version"]
            self._model.observe_broadcast(newest["t_bcast_s"])
        if self._config.staleness.max_staleness == 0:
            # Nothing overlaps: the learner waited for the broadcast, then for the samples.
            t_remote_s = max(0.0, idle_s - (newest["t_bcast_s"] if newest else 0.0))
            num_now = self.fleet.num_serving
            num_mean = ((self._num_served or num_now) + num_now) / 2
            self._useful.append(useful_instances(t_remote_s, num_mean, 0.0, 0, stats.t_train_s))
        self._num_served = self.fleet.num_serving

    def _cause(self, worker_id: str) -> Cause:
        node = self._nodes.get(worker_id)
        return "preempted" if node is not None and node.state in ("draining", "dead") else "died"


class TellDecision(Protocol):
    """Callback that is told a decision."""

    def __call__(self, kind: str, text: str) -> None: ...


def worker_info(worker_id: str, kind: WorkerConfig, epoch: int) -> WorkerInfo:
    """Make the `WorkerInfo` of a worker of a kind."""
    return WorkerInfo(worker_id, kind.sku, kind.usd_per_hour, epoch, kind.market, kind.offer)


def offers_of(config: Config) -> tuple[Offer, ...]:
    """The kinds of workers of a fleet, as offers."""
    known = [kind.mu for kind in config.fleet.workers if kind.mu is not None]
    mu = min(known) if known else UNKNOWN_MU
    return tuple(
        Offer(
            name=kind.offer,
            sku=kind.sku,
            usd_per_hour=kind.usd_per_hour,
            mu=kind.mu if kind.mu is not None else mu,
            max_count=kind.quota,
            min_count=kind.min_count,
            region=kind.region,
            market=kind.market,
            interruptions_per_hour=kind.interruptions_per_hour,
        )
        for kind in config.fleet.workers
    )


def limits_of(config: Config) -> Limits:
    """Return the limits on the size and cost of the fleet."""
    fleet = config.fleet
    return Limits(
        usd_per_hour=fleet.usd_per_hour,
        interruptions_per_hour=fleet.interruptions_per_hour,
        max_workers=fleet.max_workers,
    )
