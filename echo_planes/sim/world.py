"""Shell of a simulated run: the counterpart of `loop/runner.py` for modelled planes.

`Controller`, `ReplayBuffer`, `LeaseTable`, chain planner and fleet are the real ones. `World` carries out the
controller's actions in virtual time and returns their results to the controller as events.

Not modelled: the duration of evaluations and rewards, and the results of evaluations.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from echo_planes.config.fleet import FleetConfig, SeedingConfig, WorkerConfig
from echo_planes.config.schema import (
    CheckpointConfig,
    Config,
    EvalConfig,
    LearnerConfig,
    RunConfig,
    SamplingConfig,
)
from echo_planes.data.replay.buffer_state import Accepted, NotReady
from echo_planes.errors import RunError
from echo_planes.loop import events as ev
from echo_planes.loop.controller import Controller
from echo_planes.sim.context import Context
from echo_planes.sim.data_plane import SimDataPlane
from echo_planes.sim.faults import Faults
from echo_planes.sim.kernel import Kernel
from echo_planes.sim.scenario import Scenario, instance_type_trace
from echo_planes.sim.trace import LEARNER, Record, Trace, dump_lines
from echo_planes.sim.worker import Answers
from echo_planes.sim.workers import SimWorkers
from echo_planes.types import EvalReport, Lease, Manifest, StepStats, TrainBatch

LINEAGE = "sim"
MB = 1_000_000


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a simulation; all its figures are simulated."""

    summary: Record
    steps: Sequence[Record]
    events: Sequence[Record]

    def lines(self) -> str:
        """Return the whole trace as JSON lines; equal scenarios and seeds give equal bytes."""
        return dump_lines([{"kind": "summary", **self.summary}, *self.events, *self.steps])


class World:
    """Simulated run.

    Args:
        scenario: settings of the run.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.config = run_config(scenario)
        self.kernel = Kernel()
        self.trace = Trace(scenario)
        self.rng = random.Random(f"{scenario.seed}/world")
        self.answers = Answers(LINEAGE)
        self.lengths = scenario.length_model()
        self.manifest: Manifest | None = None
        self._events: deque[ev.Event] = deque()
        self._handling = False
        self._free_since_s = 0.0  # time at which the learner's last work ended
        self._idle_s = 0.0  # seconds that the learner has waited since its last step
        self._finish: ev.Finish | None = None
        self._published = -1
        self._chosen: list[Accepted] = []  # groups of the current step, in all its parts
        self._num_new = 0  # of them in the newest part
        self._t_train_s = 0.0  # seconds of the parts of the current step
        traces = {
            o.name: trace for o in scenario.instance_types if (trace := instance_type_trace(o)) is not None
        }
        self.data = self.make_data_plane()
        context = Context(
            scenario,
            self.kernel,
            self.trace,
            self.rng,
            self.lengths,
            self.answers,
            tell=self.tell,
            manifest=lambda: self.manifest,
        )
        self.workers = SimWorkers(context, self.data, traces)
        fixed = self.config.fleet.fixed()
        instance_types = [
            instance_type for instance_type in scenario.instance_types for _ in range(instance_type.count)
        ]
        self._first = dict(zip(fixed, instance_types, strict=True)) if fixed else {}
        self._first |= dict.fromkeys(self.config.seeding.workers(), scenario.seeding.instance_type)
        self.controller = Controller(self.config, list(self._first))
        Faults(scenario.faults, self.kernel, self.workers, self.trace, self.rng)

    def make_data_plane(self) -> SimDataPlane:
        """Make the data plane of this run."""
        return SimDataPlane(
            self.scenario,
            self.kernel,
            LINEAGE,
            on_leases=self._on_leases,
            on_dropped=self.trace.dropped,
            on_uninformative=self.trace.uninformative,
        )

    def _on_leases(self, worker_id: str, leases: Sequence[Lease]) -> None:
        self.workers.on_leases(worker_id, leases)

    def run(self) -> Result:
        """Run to the end.

        Raises:
            DataError: a spot trace with at_end "error" has ended.
            RunError: trajectories were lost, which is an error in the decision code.
        """
        learner = self.scenario.learner
        self.trace.money.start(LEARNER, learner.usd_per_hour, 0.0, sku=LEARNER, role="learner")
        self.workers.begin(self._first)
        self.tell(ev.LearnerReady(0))
        for action in self.controller.begin():
            self._carry_out(action)
        until_s = self.scenario.run.hours * 3600.0
        self.kernel.run(until_s)
        counts = self.data.counts
        if counts.lost:
            raise RunError(
                f"{counts.lost} trajectories are nowhere at {self.kernel.now_s:.0f} s of virtual time"
            )
        now_s = self.kernel.now_s
        self.workers.end()
        finish = self._finish or ev.Finish("done")
        status = finish.status if self._finish else "time is up"
        more = {"num_events": self.kernel.num_events, **self.workers.summary()}
        summary = self.trace.summary(now_s, status=status, error=finish.error, counts=counts, more=more)
        return Result(summary, self.trace.steps, self.trace.events)

    def tell(self, event: ev.Event) -> None:
        """Pass an event to the controller, after the events that it is still handling."""
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        while self._events:
            for action in self.controller.handle(self._events.popleft(), self.kernel.now_s):
                self._carry_out(action)
        self._handling = False

    # --- actions ---------------------------------------------------------------------------------

    def _carry_out(self, action: ev.Action) -> None:
        match action:
            case ev.FormBatch(step, wait_s, whole):
                if self.controller.seeding is None:
                    wait_s = self.scenario.run.batch_wait_s
                self.data.ask_batch(step, wait_s, whole, partial(self._on_batch, step))
            case ev.Train(batch):
                self._train(batch)
            case ev.Publish(version):
                self._begin_work()
                publish_s = self.scenario.learner.publish_s
                self.kernel.after(publish_s, lambda: self._publish(version, publish_s))
            case ev.Checkpoint(step):
                self._begin_work()
                self.kernel.after(self.scenario.learner.checkpoint_s, lambda: self._checkpointed(step))
            case ev.Evaluate(step, _):
                self.kernel.after(0.0, lambda: self.tell(ev.Evaluated(self._evaluation(step))))
            case ev.Finish():
                self._finish = action
                self.trace.event(self.kernel.now_s, "end", action.error or action.status)
                self.kernel.stop()
            case _:
                self.workers.carry_out(action)

    def _on_batch(self, step: int, found: list[Accepted] | NotReady) -> None:
        if isinstance(found, NotReady):
            self.tell(ev.BatchNotReady(found.reason, found.detail, found.moves))
            return
        self._chosen += found
        self._num_new = len(found)
        waited_s = self.kernel.now_s - self.data.accepted_s
        batch = _batch(step, found)
        self.tell(ev.BatchReady(replace(batch, last=self.data.step > step, waited_s=waited_s)))

    def _train(self, batch: TrainBatch) -> None:
        learner = self.scenario.learner
        self._begin_work()
        share = self._num_new / self.scenario.sampling.prompts_per_step
        part_s = share * learner.t_train_s * (1 + learner.jitter * self.rng.uniform(-1, 1))
        self._t_train_s += part_s

        def done() -> None:
            self._free_since_s = self.kernel.now_s
            if not batch.last:
                self.tell(ev.PartDone())
                return
            idle_s, self._idle_s = self._idle_s, 0.0
            t_train_s, self._t_train_s = self._t_train_s, 0.0
            chosen, self._chosen = self._chosen, []
            counts = self.data.counts
            seeding = self.controller.seeding
            report = None if seeding is None else seeding.report(self.kernel.now_s)
            self.trace.trained(self.kernel.now_s, batch.step, chosen, t_train_s, idle_s, counts, report)
            if self.workers.scaling is not None:
                self.workers.scaling.on_step(batch.step + 1, t_train_s, idle_s, counts.uninformative)
            self.tell(ev.StepDone(_stats(batch.step, t_train_s)))

        self.kernel.after(part_s, done)

    def _begin_work(self) -> None:
        """Add the learner's wait until now. The time before the first worker serves does not count."""
        since_s = max(self._free_since_s, self.workers.first_served_s)
        self._idle_s += max(self.kernel.now_s - since_s, 0.0)

    def _publish(self, version: int, seconds: float) -> None:
        network = self.scenario.network
        full = version <= self._published or self._published < 0 or network.patch_mb is None
        megabytes = network.snapshot_mb if full or network.patch_mb is None else network.patch_mb
        base = -1 if full else self._published
        self._published = version
        self.manifest = Manifest(
            lineage=LINEAGE,
            version=version,
            num_updates=version,
            codec="full" if full else "compact",
            base_version=base,
            base_digest=self.answers.digest(base) if base >= 0 else "",
            digest=self.answers.digest(version),
            payload_digest="",
            payload_bytes=round(megabytes * MB),
            dense_bytes=round(network.snapshot_mb * MB),
            changed_elements=0,
            total_elements=0,
        )
        self.data.publish(version, self.manifest.digest)
        self.trace.published(self.kernel.now_s, self.manifest, seconds)
        self.workers.broadcast(self.manifest)
        self._free_since_s = self.kernel.now_s
        self.tell(ev.Published(self.manifest))

    def _checkpointed(self, step: int) -> None:
        self._free_since_s = self.kernel.now_s
        self.tell(ev.Checkpointed(step))

    def _evaluation(self, step: int) -> EvalReport:
        accuracy = self.scenario.sampling.accuracy
        return EvalReport(step, step, 0, 0, accuracy, accuracy)


def run_config(scenario: Scenario) -> Config:
    """Return the settings of the real code for a scenario."""
    sampling, learner, fleet = scenario.sampling, scenario.learner, scenario.fleet
    kinds = [
        WorkerConfig(
            sku=instance_type.sku,
            usd_per_hour=instance_type.usd_per_hour,
            count=instance_type.count,
            region=instance_type.region,
        )
        for instance_type in scenario.instance_types
    ]
    return Config(
        run=RunConfig(steps=scenario.run.steps, wait_limit_s=scenario.run.wait_limit_s),
        sampling=SamplingConfig(
            prompts_per_step=sampling.prompts_per_step,
            samples_per_prompt=sampling.samples_per_prompt,
            lease_s=sampling.lease_s,
            stream_s=sampling.stream_s,
            refill=sampling.refill,
            refill_limit=sampling.refill_limit,
        ),
        staleness=scenario.staleness,
        seeding=SeedingConfig(
            engines=scenario.seeding.engines,
            first_s=scenario.seeding.first_s,
            eta=scenario.seeding.eta,
            max_groups=scenario.seeding.max_groups,
        ),
        learner=LearnerConfig(micro_batch_groups=scenario.learner.micro_batch_groups),
        eval=EvalConfig(every=0),
        checkpoint=CheckpointConfig(every=learner.checkpoint_every),
        fleet=FleetConfig(
            workers=kinds,
            restarts=fleet.restarts,
            scale="fixed" if fleet.mode == "fixed" else "static",
            gamma=fleet.gamma,
            tick_s=fleet.tick_s,
            sustain_s=fleet.sustain_s,
            boot_limit_s=fleet.boot_limit_s,
        ),
    )


def _batch(step: int, chosen: Sequence[Accepted]) -> TrainBatch:
    """Return a batch for the controller to pass on; it has versions, but no rows."""
    none, empty = np.zeros(0, np.int64), np.zeros(0, np.float32)
    flags = np.zeros(0, np.bool_)
    versions = np.array([group.version for group in chosen], np.int64)
    return TrainBatch(step, (), none, none, flags, empty, empty, none, empty, versions, flags, none, flags)


def _stats(step: int, t_train_s: float) -> StepStats:
    return StepStats(
        step=step,
        loss=None,
        grad_norm=None,
        learning_rate=None,
        t_train_s=t_train_s,
        tokens=0,
        tokens_forward=0,
        mismatch_mean=None,
        mismatch_p99=None,
        clip_fraction=None,
        tis_mean=None,
        entropy=None,
        kl_reference=None,
        groups_skipped=0,
        num_updates=step + 1,
    )
