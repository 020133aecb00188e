"""Keeps the fleet of a run: what `rollout/fleet.py` decides is done here, and what happens is told to it.

It listens to the run as an `Observer`, looks at the machines through an `Actuator`, and has the runner start
and end workers. A worker is started when a machine for it is there, on that machine.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Protocol

from echo_planes.broadcasts import BroadcastBook
from echo_planes.clock import Clock
from echo_planes.config import Config, WorkerConfig
from echo_planes.errors import RunError
from echo_planes.observers import QuietObserver
from echo_planes.rollout.actuator import Actuator, Node
from echo_planes.rollout.estimates import CapacityModel, ThroughputSample
from echo_planes.rollout.fleet import Cause, Fleet, FleetAction, Launch, Leave
from echo_planes.rollout.offers import Limits, Need, Offer
from echo_planes.rollout.provisioner import Provisioner
from echo_planes.types import BufferCounts, InstallReport, StepStats, TrainBatch, WorkerInfo, WorkerStats

NODE_LABEL = "ray.io/node-id"  # Ray gives it to every node
UNKNOWN_MU = 1.0  # before anything is measured all kinds count as equally fast: the cheapest is tried first
NOTICE_S = 30.0  # of a machine that goes without saying when


class Hands(Protocol):
    """What the keeper has the runner do (`runner.Runner`)."""

    def want_worker(self, info: WorkerInfo) -> None: ...
    def unwant_worker(self, worker_id: str, reason: str, limit_s: float) -> None: ...
    async def collect_worker_stats(self) -> None: ...


class Roster(Protocol):
    """Who must know what kind a new worker is (`launch.RayPlanes`)."""

    def enlist(self, worker_id: str, kind: WorkerConfig) -> None: ...


class FleetKeeper(QuietObserver):
    """One per run whose fleet follows price and need.

    Args:
        config: the run's settings.
        actuator: where machines come from.
        roster: told what kind a new worker is, before it is started.
        broadcasts: where T_bcast is measured.
        clock: seconds.
        tell: called with a kind and a text about every decision.
    """

    def __init__(
        self,
        config: Config,
        actuator: Actuator,
        roster: Roster,
        broadcasts: BroadcastBook,
        clock: Clock,
        tell: TellDecision,
    ) -> None:
        self._config = config
        self._actuator = actuator
        self._roster = roster
        self._broadcasts = broadcasts
        self._clock = clock
        self._tell = tell
        self._kinds = {kind.offer: kind for kind in config.fleet.workers}
        self._model = CapacityModel()
        self._known_bcast: int | None = None  # version whose T_bcast was taken in
        self._waiting: dict[str, str] = {}  # workers without a machine yet -> their offer
        self._nodes: dict[str, Node] = {}  # machines as last seen, by worker
        self._notices: dict[str, float] = {}  # workers whose machine announced its end -> when, run's clock
        self._said = ""
        # What is draining on a cluster goes by itself; a machine that is there anyway is parked.
        self._releasable = ("up", "draining") if config.fleet.scale == "static" else ("up",)
        self.fleet = Fleet(
            offers_of(config),
            {kind.offer: kind.count for kind in config.fleet.workers if kind.count},
            provisioner=Provisioner(limits_of(config), sustain_s=config.fleet.sustain_s),
            model=self._model,
            boot_limit_s=config.fleet.boot_limit_s,
            guesses=[kind.offer for kind in config.fleet.workers if kind.mu is None],
        )

    # --- what it does ----------------------------------------------------------------------------

    async def run(self, hands: Hands) -> None:
        """Until it is cancelled."""
        try:
            await self._act(hands, self.fleet.begin(self._clock.now_s()))
            while True:
                await self._look(hands)
                await asyncio.sleep(self._config.fleet.tick_s)
                await hands.collect_worker_stats()
                await self._act(hands, self.fleet.tick(self._clock.now_s(), self._need()))
                self._explain()
        finally:
            with suppress(RunError):  # the cluster may be gone, which is what ended the run
                await self._actuator.close()

    async def _act(self, hands: Hands, actions: list[FleetAction]) -> None:
        for action in actions:
            match action:
                case Launch(worker_id, offer):
                    self._waiting[worker_id] = offer
                case Leave(worker_id, reason, limit_s):
                    if self._waiting.pop(worker_id, None) is None:
                        hands.unwant_worker(worker_id, reason, limit_s)
        if actions:
            await self._actuator.want(self.fleet.machines)

    async def _look(self, hands: Hands) -> None:
        """See which machines came, which are about to go, and which are no longer used."""
        now_s = self._clock.now_s()
        nodes = await self._actuator.nodes()
        self._nodes = {node.worker_id: node for node in nodes if node.worker_id}
        free = [node for node in nodes if node.state == "up" and not node.worker_id]
        for worker_id, offer in list(self._waiting.items()):
            node = next((one for one in free if one.offer_name == offer), None)
            if node is not None:
                free.remove(node)
                self._begin(hands, worker_id, node, now_s)
        for worker_id, node in self._nodes.items():
            deadline_s = self._notices.pop(worker_id, None)
            if deadline_s is not None:  # its cloud told the worker; Ray is to put nothing there any more
                await self._actuator.notice(node.node_id, deadline_s)
            if node.state == "draining" or deadline_s is not None:
                deadline_s = node.notice_deadline_s if deadline_s is None else deadline_s
                left_s = NOTICE_S if deadline_s is None else max(1.0, deadline_s - now_s)
                await self._act(hands, self.fleet.notice(worker_id, left_s, now_s))
            if self.fleet.offer_of(worker_id) is None and node.state in self._releasable:
                await self._actuator.want(self.fleet.machines)  # first: else another comes in its place
                await self._actuator.release(node.node_id)
        if self._waiting:  # for a machine that was in use until now, perhaps
            await self._actuator.want(self.fleet.machines)

    def _begin(self, hands: Hands, worker_id: str, node: Node, now_s: float) -> None:
        del self._waiting[worker_id]
        self._actuator.assign(node.node_id, worker_id)
        self.fleet.came(worker_id, now_s)
        kind = self._kinds[node.offer_name]
        if self._config.fleet.scale == "ray":
            labels = {**kind.labels, NODE_LABEL: node.node_id}
            kind = kind.model_copy(
                update={"labels": labels, "resources": {**kind.resources, kind.offer: 1.0}}
            )
        self._roster.enlist(worker_id, kind)
        hands.want_worker(worker_info(worker_id, kind, epoch=0))

    def _need(self) -> Need | None:
        staleness = self._config.staleness
        return self._model.need(
            max_staleness=staleness.max_staleness,
            kappa=staleness.kappa,
            per_step=self._config.sampling.trajectories_per_step,
            gamma=self._config.fleet.gamma,
        )

    def _explain(self) -> None:
        decision = self.fleet.decision
        if decision is not None and (decision.launch or decision.release) and decision.reason != self._said:
            self._said = decision.reason
            self._tell("fleet", decision.reason)

    # --- what it hears ---------------------------------------------------------------------------

    def on_worker(self, info: WorkerInfo, *, alive: bool) -> None:
        if not alive:
            self.fleet.gone(info.worker_id, self._cause(info.worker_id), self._clock.now_s())

    def on_installed(self, report: InstallReport) -> None:
        if report.ok:
            self.fleet.serving(report.worker_id, self._clock.now_s())

    def on_stats(self, epoch: int, stats: WorkerStats) -> None:
        if stats.leaves_in_s is not None:
            self._notices[stats.worker_id] = self._clock.now_s() + stats.leaves_in_s
        sample = ThroughputSample(stats.full_tokens, stats.full_s, stats.tokens, stats.trajectories)
        self.fleet.measured(stats.worker_id, sample, self._clock.now_s())

    def on_step(self, batch: TrainBatch, stats: StepStats, idle_s: float, counts: BufferCounts) -> None:
        self._model.observe_step(stats.t_train_s)
        newest = self._broadcasts.newest()
        if newest and newest["published_version"] != self._known_bcast:
            self._known_bcast = newest["published_version"]
            self._model.observe_broadcast(newest["t_bcast_s"])

    def _cause(self, worker_id: str) -> Cause:
        """A spot worker that dies counts as preempted: clouds do not always say so first."""
        node, offer = self._nodes.get(worker_id), self.fleet.offer_of(worker_id)
        if offer is not None and offer.market == "spot":
            return "preempted"
        return "preempted" if node is not None and node.state in ("draining", "dead") else "died"


class TellDecision(Protocol):
    """How a decision is told."""

    def __call__(self, kind: str, text: str) -> None: ...


def worker_info(worker_id: str, kind: WorkerConfig, epoch: int) -> WorkerInfo:
    """Who a worker of a kind is."""
    return WorkerInfo(worker_id, kind.sku, kind.usd_per_hour, epoch, kind.market)


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
    """What the fleet may be and cost."""
    fleet = config.fleet
    return Limits(
        usd_per_hour=fleet.usd_per_hour,
        interruptions_per_hour=fleet.interruptions_per_hour,
        max_workers=fleet.max_workers,
    )
