"""Workers of a simulated run: their machines, engines, installs and ends.

`SimWorkers` carries out the controller's actions on workers. A lost worker sends nothing after its last
stream. The controller learns of the loss after the network's `detection_s`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

from echo_planes.fleet.estimates import ThroughputSample
from echo_planes.fleet.workers import Activate, FleetAction, Launch, Leave, Park
from echo_planes.loop import events as ev
from echo_planes.sim.context import Context
from echo_planes.sim.data_plane import SimDataPlane
from echo_planes.sim.flow import Flow, SimMember
from echo_planes.sim.market import Market
from echo_planes.sim.network import Links, Network
from echo_planes.sim.scaling import Scaling
from echo_planes.sim.scenario import MBIT, SEEDER, InstanceTypeModel
from echo_planes.sim.spot import SpotTrace
from echo_planes.sim.worker import SimWorker
from echo_planes.types import InstallReport, Lease, Manifest

MB = 1_000_000


class SimWorkers:
    """All workers of a simulated run.

    Args:
        run: shared parts of the run.
        data: its data plane.
        traces: recorded spot markets, by instance type.
    """

    def __init__(self, run: Context, data: SimDataPlane, traces: Mapping[str, SpotTrace]) -> None:
        scenario = run.scenario
        self._run = run
        self._kernel = run.kernel
        self._trace = run.trace
        self._data = data
        self._settings = network = scenario.network
        self._instance_types = {
            instance_type.name: instance_type for instance_type in scenario.instance_types
        }
        if scenario.seeding.engines:
            self._instance_types[SEEDER] = scenario.seeding.instance_type
        self.network = Network(
            Links(
                network.mode,
                network.uplink_mbit * MBIT,
                network.worker_mbit * MBIT,
                network.rtt_s,
                network.chunk_kib * 1024,
                network.detection_s,
            )
        )
        self.flow = Flow(scenario.sampling, run.kernel, run.trace, data)
        self.market = Market(self._instance_types, traces, self._kernel, self, run.rng)
        self.members: dict[str, SimMember] = {}
        self.first_served_s = math.inf
        self._serving: set[str] = set()
        self._most = 0  # most workers that served at once
        self._num_lost = 0
        self._tick_s = scenario.sampling.stream_s
        if scenario.sampling.router != "pull":
            self._kernel.after(self._tick_s, self._tick)
        self.scaling = None if scenario.fleet.mode == "fixed" else Scaling(run)

    def begin(self, instance_types: Mapping[str, InstanceTypeModel]) -> None:
        """Begin with the workers that the controller knows by name, or with those that the fleet launches."""
        for name, instance_type in instance_types.items():
            self.members[name] = SimMember(name, instance_type)
        if self.scaling is not None:
            self._scale(self.scaling.begin())
            self._kernel.after(self._run.scenario.fleet.tick_s, partial(self._tick_fleet, self.scaling))

    def end(self) -> None:
        """Account for the unfinished tokens at the end of the run."""
        for member in self.members.values():
            if member.engine is not None:
                self.flow.advance(member)
                begun = [member.engine.drop(lease_id) for lease_id in list(member.engine.work)]
                for work in begun + member.finished:
                    self._trace.money.made(member.name, work.made)

    def summary(self) -> dict[str, int]:
        """Return the numbers of workers for summary.json."""
        return {"workers_most": self._most, "workers_lost": self._num_lost}

    def serving(self) -> list[SimMember]:
        """Return the workers that serve a version, without standbys, in the order of their requests."""
        served = [member for name, member in self.members.items() if name in self._serving]
        return [member for member in served if not member.parked]

    # --- actions of the controller ---------------------------------------------------------------

    def carry_out(self, action: ev.Action) -> None:
        """Carry out an action that concerns a worker."""
        match action:
            case ev.StartWorker(worker_id, epoch, delay_s):
                self._end(worker_id)
                if delay_s:
                    self._kernel.after(delay_s, partial(self._start, worker_id, epoch))
                else:
                    self._start(worker_id, epoch)
            case ev.LeaveWorker(worker_id, epoch, _):
                self._leave(worker_id, epoch)
            case ev.StopWorker(worker_id):
                self._end(worker_id)
                self._forget(worker_id)
            case ev.Install(worker_id, epoch, fresh):
                self._install(worker_id, epoch, fresh)
            case ev.OpenWindow(seeders):
                delay_s = self._run.scenario.seeding.switch_s
                self._kernel.after(delay_s, partial(self._let_sample, seeders, True))
            case ev.CloseWindow(seeders):
                self._let_sample(seeders, False)
                delay_s = self._run.scenario.seeding.switch_s
                self._kernel.after(delay_s, lambda: self._run.tell(ev.SeedersParked()))

    def _let_sample(self, seeders: Sequence[str], sample: bool) -> None:
        """Have seeders sample, or hand over what they sample."""
        for member in [self.members[name] for name in seeders]:
            if member.engine is None:
                continue
            member.parked = not sample
            self._data.park(member.name, member.parked)
            if sample:
                self.flow.ask(member)
            else:
                self.flow.hand_over(member)
                self.flow.plan(member)
            self.tell_capacity(member)

    # --- actions of the fleet --------------------------------------------------------------------

    def _tick_fleet(self, scaling: Scaling) -> None:
        self._scale(scaling.tick({member.name: self._sample(member) for member in self.serving()}))
        self._kernel.after(self._run.scenario.fleet.tick_s, partial(self._tick_fleet, scaling))

    def _sample(self, member: SimMember) -> ThroughputSample:
        self.flow.advance(member)
        engine = member.engine
        if engine is None:
            return ThroughputSample(0, 0.0, 0, 0)
        model = engine.engine
        return ThroughputSample(
            int(model.saturated_tokens), model.saturated_s, member.accepted_tokens, member.accepted
        )

    def _scale(self, actions: Sequence[FleetAction]) -> None:
        for action in actions:
            match action:
                case Launch(worker_id, instance_type):
                    self.members[worker_id] = SimMember(worker_id, self._instance_types[instance_type])
                    self.market.ask(worker_id, instance_type)
                case Leave(worker_id, reason, limit_s):
                    self.unwant(worker_id, reason, limit_s)
                case Park(worker_id):
                    self.park(worker_id, parked=True, reason="it is to be a standby")
                case Activate(worker_id, reason):
                    self.park(worker_id, parked=False, reason=reason)

    def unwant(self, worker_id: str, reason: str, limit_s: float) -> None:
        """Have a worker leave that the fleet no longer wants."""
        member = self.members.get(worker_id)
        if member is None:
            return
        member.cause = "left"
        if self.market.holds(worker_id):
            self._trace.event(self._kernel.now_s, "worker leaves", reason, worker=worker_id)
        if member.epoch >= 0:
            self._run.tell(ev.WorkerUnwanted(worker_id, reason, limit_s))
        else:
            self._forget(worker_id)

    def park(self, worker_id: str, *, parked: bool, reason: str) -> None:
        """Make a worker a standby, or activate it."""
        member = self.members[worker_id]
        member.parked = parked
        self._trace.event(self._kernel.now_s, "standby" if parked else "takes part", reason, worker=worker_id)
        self._data.park(worker_id, parked)
        self.tell_capacity(member)
        self.flow.ask(member)

    def on_leases(self, worker_id: str, leases: Sequence[Lease]) -> None:
        """Pass issued leases on to a worker."""
        self.flow.begin(self.members[worker_id], leases)

    def broadcast(self, manifest: Manifest) -> None:
        """Broadcast a publication to the workers with an engine that have not received this version."""
        up = [name for name, member in self.members.items() if member.engine and not _is_local(member)]
        parts = {name: self.network.transfer(name) for name in up}
        there = [name for name in up if (part := parts[name]) is None or part.version < manifest.version]
        self.network.publish(manifest.version, manifest.payload_bytes, there, self._kernel.now_s)
        if self._settings.receive_in_place:
            for name in there:
                self._pause(self.members[name], True)

    def _tick(self) -> None:
        """Pass the workers' stats to the data plane, and renew the leases of workers with recalled ones."""
        self._kernel.after(self._tick_s, self._tick)
        told = [
            (member.epoch, self.flow.stats(member, member.engine))
            for member in self.members.values()
            if member.engine is not None and self._kernel.now_s >= member.silent_until_s
        ]
        for worker_id in self._data.tick(told):
            self.flow.renew_now(self.members[worker_id])

    def _start(self, worker_id: str, epoch: int) -> None:
        member = self.members[worker_id]
        first, member.epoch, member.starting = member.epoch < 0, epoch, True
        if not self.market.holds(worker_id):
            self.market.ask(worker_id, member.instance_type.name)
        elif first:
            self._engine_ready(member)  # its machine booted before the controller started it
        else:
            self._trace.money.mark(worker_id, "booting", self._kernel.now_s)
            self._trace.worker(self._kernel.now_s, worker_id, "booting", member.instance_type.name)
            self._kernel.after(member.instance_type.boot_s, partial(self._restarted, worker_id, epoch))

    def _restarted(self, worker_id: str, epoch: int) -> None:
        member = self.members.get(worker_id)
        if member is not None and member.epoch == epoch and self.market.holds(worker_id):
            self._engine_ready(member)

    def _engine_ready(self, member: SimMember) -> None:
        now_s = self._kernel.now_s
        member.starting, member.slowed = False, []  # a new list: earlier faults end in the old one
        member.engine = SimWorker(
            member.name,
            member.epoch,
            member.instance_type,
            lengths=self._run.lengths,
            answers=self._run.answers,
            now_s=now_s,
            prompt_tokens=self._run.scenario.lengths.prompt_tokens,
        )
        self.network.join(member.name, member.instance_type.region)
        self._data.register(member.name, member.epoch)
        if _is_local(member):
            member.parked = True  # until a window opens
            self._data.park(member.name, True)
        self._trace.money.mark(member.name, "idle", now_s)
        self._trace.event(now_s, "worker ready", member.instance_type.name, worker=member.name)
        self._run.tell(ev.WorkerReady(member.name, member.epoch))

    def _leave(self, worker_id: str, epoch: int) -> None:
        member = self.members[worker_id]
        member.leaving, member.cause = True, "left"
        handed = self.flow.hand_over(member)
        self.flow.plan(member)
        self._trace.event(
            self._kernel.now_s, "worker left", f"{handed} prompts go on elsewhere", worker=worker_id
        )
        self._run.tell(ev.WorkerLeft(worker_id, epoch))

    def _end(self, worker_id: str) -> None:
        """End a worker's incarnation, if it has one, and return its prompts to the data plane."""
        member = self.members[worker_id]
        if member.engine is not None:
            self._stop_engine(member)
        self._data.lose(worker_id)

    def _forget(self, worker_id: str) -> None:
        """Forget a worker and give its machine back."""
        member = self.members.pop(worker_id)
        self.market.release(worker_id)
        self._trace.money.stop(worker_id, self._kernel.now_s)
        self._trace.worker(self._kernel.now_s, worker_id, "gone", member.instance_type.name)
        self.network.forget(worker_id)
        if self.scaling is not None:
            self.scaling.gone(worker_id, member.cause or "died")

    # --- events of machines (market.Tenant) --------------------------------------------------------

    def on_granted(self, worker_id: str) -> None:
        instance_type = self.members[worker_id].instance_type
        self._trace.money.start(
            worker_id,
            instance_type.usd_per_hour,
            self._kernel.now_s,
            sku=instance_type.sku,
            market=instance_type.market,
        )
        self._trace.worker(self._kernel.now_s, worker_id, "booting", instance_type.name)
        if self.scaling is not None:
            self.scaling.came(worker_id)

    def on_up(self, worker_id: str) -> None:
        member = self.members[worker_id]
        if member.starting:
            self._engine_ready(member)
        else:
            self._run.tell(ev.WorkerWanted(worker_id))

    def on_notice(self, worker_id: str, limit_s: float) -> None:
        self._trace.event(self._kernel.now_s, "notice", f"goes in {limit_s:.0f} s", worker=worker_id)
        if self.scaling is not None:
            self._scale(self.scaling.notice(worker_id, limit_s))

    def on_taken(self, worker_id: str) -> None:
        member = self.members[worker_id]
        self._trace.money.stop(worker_id, self._kernel.now_s)
        member.cause = "preempted"
        if member.engine is not None:
            self.lose(member, "its machine was taken")
        elif member.epoch >= 0:
            self._trace.worker(self._kernel.now_s, worker_id, "gone", member.instance_type.name)
            self._told_lost(worker_id, member.epoch, "its machine was taken while it booted")
        else:  # the controller does not know it
            self._forget(worker_id)

    def lose(self, member: SimMember, reason: str) -> None:
        """End a worker's process without notice; the controller learns of it after `detection_s` seconds."""
        self._num_lost += 1
        self._trace.worker(self._kernel.now_s, member.name, "gone", member.instance_type.name)
        self._trace.event(self._kernel.now_s, "worker lost", reason, worker=member.name)
        self._stop_engine(member)
        noticed = partial(self._told_lost, member.name, member.epoch, reason)
        self._kernel.after(self._settings.detection_s, noticed)

    def _told_lost(self, worker_id: str, epoch: int, reason: str) -> None:
        self._run.tell(ev.WorkerLost(worker_id, epoch, reason))

    def _stop_engine(self, member: SimMember) -> None:
        engine, member.engine = member.engine, None
        if engine is None:
            return
        self.flow.die(member, engine)
        self._serving.discard(member.name)
        self._trace.capacity(self._kernel.now_s, member.name, 0.0)
        for name, arrives_s in self.network.leave(member.name, self._kernel.now_s).items():
            late = self.members[name]
            if late.install is not None and late.engine is not None:
                late.install.cancel()
                late.install = self._kernel.at(arrives_s, partial(self.arrived, late, late.engine))

    # --- weights ---------------------------------------------------------------------------------

    def _install(self, worker_id: str, epoch: int, fresh: bool) -> None:
        member, manifest = self.members.get(worker_id), self._run.manifest()
        if member is None or member.engine is None or member.epoch != epoch or manifest is None:
            return
        now_s = self._kernel.now_s
        transfer = self.network.transfer(worker_id)
        if _is_local(member):
            arrives_s = now_s
        elif fresh or transfer is None or transfer.version < manifest.version:
            arrives_s = self.network.fetch(
                worker_id, manifest.version, self._settings.snapshot_mb * MB, now_s
            )
            if self._settings.receive_in_place:
                self._pause(member, True)
        else:
            arrives_s = max(transfer.arrives_s, now_s)
        member.install = self._kernel.at(arrives_s, partial(self.arrived, member, member.engine))
        member.wanted = manifest

    def arrived(self, member: SimMember, engine: SimWorker) -> None:
        """Begin the install of a publication that has arrived; the engine pauses until it is done."""
        if member.engine is not engine:
            return
        if self._kernel.now_s < member.silent_until_s:
            member.install = self._kernel.at(member.silent_until_s, partial(self.arrived, member, engine))
            return
        self._pause(member, True)
        member.install = self._kernel.after(
            self._settings.install_s, partial(self._installed, member, engine)
        )

    def _installed(self, member: SimMember, engine: SimWorker) -> None:
        member.install, manifest = None, member.wanted
        if member.engine is not engine or manifest is None:
            return
        ok, member.refuses = not member.refuses, False
        self.flow.advance(member)
        if ok and manifest.version > engine.version:
            engine.serve(manifest.version)
        transfer = self.network.transfer(member.name)
        receiving = transfer is not None and transfer.version > engine.version
        self._pause(member, self._settings.receive_in_place and receiving)
        now_s = self._kernel.now_s
        self._serves(member, engine)
        self._data.installed(member.name, engine.version)
        self.flow.ask(member)
        report = InstallReport(
            worker_id=member.name,
            version=engine.version,
            digest=self._run.answers.digest(engine.version),
            ok=ok,
            seconds=self._settings.install_s,
            digest_mismatches=int(not ok),
            error="" if ok else "the live digest is not the manifest's",
            pause_s=self._settings.install_s,
        )
        if ok:
            self._trace.installed(now_s, report, len(self._serving))
        else:
            self._trace.event(now_s, "refused", report.error, worker=member.name, version=manifest.version)
        self._run.tell(ev.Installed(report, member.epoch))

    def _serves(self, member: SimMember, engine: SimWorker) -> None:
        if engine.version < 0:
            return
        now_s = self._kernel.now_s
        if member.name not in self._serving:
            self._serving.add(member.name)
            self._trace.worker(now_s, member.name, "serving", member.instance_type.name)
            self._most = max(self._most, len(self._serving))
            self.first_served_s = min(self.first_served_s, now_s)
            if self.scaling is not None:
                self.scaling.serving(member.name)
        self.tell_capacity(member)

    def tell_capacity(self, member: SimMember) -> None:
        """Enter a worker's present throughput in the accounting."""
        able = member.name in self._serving and not member.parked
        able = able and self._kernel.now_s >= member.silent_until_s
        batch = member.instance_type.max_groups * self._run.scenario.sampling.samples_per_prompt
        full = member.instance_type.engine.tokens_per_s(batch) * member.speed
        self._trace.capacity(self._kernel.now_s, member.name, full if able else 0.0)

    def _pause(self, member: SimMember, paused: bool) -> None:
        if member.engine is not None:
            self.flow.advance(member)
            member.engine.engine.pause(paused)
            self.flow.plan(member)


def _is_local(member: SimMember) -> bool:
    """Return whether a worker is a seeder, which shares the learner's machine: weights need no network."""
    return member.instance_type.name == SEEDER
