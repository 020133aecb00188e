"""The whole loop in one process on a virtual clock.

`Simulation` runs the real `Controller`, `Runner`, `DataService`, `ReplayBuffer` and `RolloutWorker`; only
the engines, the weights, the learner (`fakes.py`) and time are modelled. Two runs with equal arguments give
equal traces. All figures are simulated, and say nothing about hardware.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from echo_planes.cluster.clock import Clock
from echo_planes.config.fleet import WorkerConfig
from echo_planes.config.schema import Config
from echo_planes.data.claims import LARGEST_INT32, Rules
from echo_planes.data.replay.dispatch import policy_named
from echo_planes.data.service import DataService
from echo_planes.data.store.files import REPLAY_FOLDER
from echo_planes.data.tasks.adapter import TaskAdapter, TaskOptions
from echo_planes.fleet.actuators.actuator import Actuator, StaticActuator
from echo_planes.loop.checkpoint import CheckpointMeta, save_checkpoint
from echo_planes.loop.observers import Observers, QuietObserver
from echo_planes.loop.planes import Accepted, Observer
from echo_planes.loop.reconcile import ReconcileLoop
from echo_planes.loop.runner import Outcome, Runner
from echo_planes.loop.sparsity import Keeper
from echo_planes.reporting.broadcasts import BroadcastLog
from echo_planes.rollout.worker import RolloutWorker
from echo_planes.testing.fakes import (
    FakeEngine,
    FakeLearner,
    FakeTask,
    FakeTokenizer,
    FakeWeights,
    Faults,
    InlineScorer,
)
from echo_planes.testing.virtual_time import VirtualTimeLoop, run_virtual
from echo_planes.types import (
    BroadcastStats,
    BufferCounts,
    EvalReport,
    GuardReport,
    InstallReport,
    Manifest,
    SeedReport,
    StepStats,
    TrainBatch,
    WorkerInfo,
    WorkerStats,
)


@dataclass
class Trace:
    """Trace of a simulation: an `Observer` that records its calls in order."""

    lines: list[str] = field(default_factory=list)
    batches: list[TrainBatch] = field(default_factory=list)
    evals: list[EvalReport] = field(default_factory=list)
    mismatches: list[float | None] = field(default_factory=list)  # one per evaluation
    counts: list[BufferCounts] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    guard: list[GuardReport] = field(default_factory=list)
    seeding: list[SeedReport] = field(default_factory=list)  # one per step
    idle_s: float = 0.0
    train_s: float = 0.0

    def on_event(self, kind: str, text: str, *, worker: str = "", version: int | None = None) -> None:
        self.lines.append(f"{kind} {worker} {version} {text}")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.lines.append(f"phase {name}")
        yield

    def on_worker(self, info: WorkerInfo, *, alive: bool) -> None:
        self.lines.append(f"worker {info.worker_id}.{info.epoch} alive={alive}")

    def on_stats(self, epoch: int, stats: WorkerStats) -> None:
        self.lines.append(f"stats {stats.worker_id}.{epoch} {stats.trajectories}")

    def on_accepted(self, accepted: Accepted) -> None:
        return None

    def on_published(self, manifest: Manifest, seconds: float) -> None:
        self.versions.append(manifest.version)
        self.lines.append(f"published {manifest.version}")

    def on_broadcasts(self, stats: Sequence[BroadcastStats]) -> None:
        return None

    def on_installed(self, report: InstallReport) -> None:
        self.lines.append(f"installed {report.worker_id} {report.version} {report.ok}")

    def on_step(self, batch: TrainBatch, stats: StepStats, idle_s: float, counts: BufferCounts) -> None:
        self.batches.append(batch)
        self.counts.append(counts)
        self.idle_s += idle_s
        self.train_s += stats.t_train_s
        staleness = batch.step - batch.versions
        self.lines.append(f"step {batch.step} {staleness.max()} {batch.rewards.mean():.4f} {idle_s:.4f}")

    def on_eval(self, report: EvalReport, mismatch: float | None) -> None:
        self.evals.append(report)
        self.mismatches.append(mismatch)
        self.lines.append(f"eval {report.step} {report.version} {report.accuracy:.4f}")

    def on_guard(self, report: GuardReport) -> None:
        self.guard.append(report)

    def on_audited(self, drift: float) -> None:
        self.lines.append(f"audited {drift}")

    def on_seeding(self, report: SeedReport) -> None:
        self.seeding.append(report)
        self.lines.append(f"seeding {report}")


class _LossyWorker(RolloutWorker):
    """Worker that may lose requests to install."""

    def __init__(self, worker_id: str, epoch: int, lineage: str, *, faults: Faults, **parts: Any) -> None:
        super().__init__(worker_id, epoch, lineage, **parts)
        self._worker_id = worker_id
        self._faults = faults

    async def install(self, manifest: Manifest, fresh: bool) -> InstallReport:
        key = (self._worker_id, manifest.version)
        if key in self._faults.lose_installs:
            self._faults.lose_installs.discard(key)
            await asyncio.get_running_loop().create_future()  # never answers
        return await super().install(manifest, fresh)


class LocalPlanes:
    """The three planes in one process."""

    def __init__(self, simulation: Simulation, data: DataService, lineage: str) -> None:
        self._simulation = simulation
        self._lineage = lineage
        self.data = data
        self.learner = FakeLearner(simulation.t_train_s, simulation.faults, lineage)

    async def spawn_worker(self, worker_id: str, epoch: int) -> RolloutWorker:
        simulation = self._simulation
        if worker_id in simulation.config.seeding.workers():
            seconds_per_token = simulation.seeder_seconds_per_token
        else:
            index = int(worker_id.removeprefix("w")) % len(simulation.seconds_per_token)
            seconds_per_token = simulation.seconds_per_token[index]
        return _LossyWorker(
            worker_id,
            epoch,
            self._lineage,
            faults=simulation.faults,
            engine=FakeEngine(worker_id, epoch, seconds_per_token, simulation.faults, simulation.seed),
            task=simulation.task,
            scorer=InlineScorer(simulation.task),
            source=self.data,
            weights=FakeWeights(),
            kind=WorkerConfig(max_groups=simulation.max_groups),
            sampling=simulation.config.sampling,
            clock=asyncio.get_running_loop(),
        )

    async def kill_worker(self, worker_id: str) -> None:
        return None

    def enlist(self, worker_id: str, kind: WorkerConfig) -> None:
        """Do nothing: all kinds are alike here, and a worker's number determines its speed."""


class _Broadcasts(QuietObserver):
    """Observer that measures T_bcast."""

    def __init__(self, book: BroadcastLog, clock: Clock) -> None:
        self._book = book
        self._clock = clock

    def on_published(self, manifest: Manifest, seconds: float) -> None:
        self._book.on_published(manifest, seconds, self._clock.now_s())

    def on_installed(self, report: InstallReport) -> None:
        self._book.on_installed(report, 1, self._clock.now_s())


@dataclass
class Simulation:
    """A run on fakes.

    Args:
        config: settings; `sampling`, `staleness`, `run`, `eval`, `checkpoint` and `sparse` are honored.
        folder: folder for trajectories and checkpoints.
        seconds_per_token: virtual seconds per token, one engine per entry; where the fleet's size changes,
            workers use the entries in turn.
        seeder_seconds_per_token: the same of each seeder.
        t_train_s: virtual seconds per learner step.
        max_groups: groups that a worker samples at once.
        faults: planned faults.
        stop_at_s: virtual time of a request to stop, as by Ctrl-C.
        actuator: source of machines where the fleet's size changes; default: static ones, up to the quotas.
        seed: seed of the engines' answers and speeds.
    """

    config: Config
    folder: Path
    seconds_per_token: tuple[float, ...] = (0.05, 0.2)
    seeder_seconds_per_token: float = 0.05
    t_train_s: float = 1.0
    max_groups: int = 8
    faults: Faults = field(default_factory=Faults)
    stop_at_s: float | None = None
    actuator: Actuator | None = None
    seed: int = 0
    task: TaskAdapter = field(default_factory=lambda: FakeTask(TaskOptions(), FakeTokenizer(), 0))

    def run(self, *, resume_dir: Path | None = None, lineage: str = "sim") -> tuple[Outcome, Trace]:
        """Run to the end in virtual time.

        Raises:
            RunError: the loop deadlocked, or the learner was killed.
        """
        trace = Trace()

        async def main(loop: VirtualTimeLoop) -> Outcome:
            rules = Rules(LARGEST_INT32 + 1, self.config.model.max_model_len)  # fake tokens have any id
            data = DataService(
                self.config,
                lineage,
                self.folder / REPLAY_FOLDER,
                resume_dir / "data" if resume_dir else None,
                adapter=self.task,
                clock=loop,
                dispatch=policy_named(self.config.sampling.router, self.config.sampling.theta),
                rules=rules,
            )
            seeders = {s: WorkerInfo(s, "seeder", 0.0, 0) for s in self.config.seeding.workers()}
            remote = {
                f"w{i}": WorkerInfo(f"w{i}", "fake", 1.0, 0) for i in range(len(self.seconds_per_token))
            }
            fleet = remote | seeders
            observer: Observer = trace
            reconcile: ReconcileLoop | None = None

            async def save(step: int, data_plane: Any, learner: Any) -> None:
                meta = CheckpointMeta(step, lineage_number=1, next_epoch=1)
                keep = self.config.checkpoint.keep
                await save_checkpoint(self.folder / "checkpoints", meta, data_plane, learner, keep=keep)

            planes = LocalPlanes(self, data, lineage)
            if self.config.fleet.scale != "fixed":
                fleet, broadcasts = seeders, BroadcastLog()
                actuator = self.actuator or StaticActuator(
                    {kind.instance_type: kind.quota for kind in self.config.fleet.workers}
                )
                reconcile = ReconcileLoop(self.config, actuator, planes, broadcasts, loop, trace.on_event)
                observer = Observers(trace, _Broadcasts(broadcasts, loop), reconcile)
            runner = Runner(
                self.config,
                planes,
                observer,
                fleet=fleet,
                save_checkpoint=save,
                clock=loop,
                resume_dir=resume_dir,
                beside=reconcile.run if reconcile else None,
                keeper=Keeper(self.config, self.folder, trace) if self.config.sparse.schedule else None,
                rules=rules,
            )
            if self.stop_at_s is not None:
                loop.call_later(self.stop_at_s, runner.request_stop, "Ctrl-C")
            try:
                return await runner.run()
            finally:
                await data.close()

        return run_virtual(main), trace


def tiny_config(*, steps: int = 20, max_staleness: int = 3, **staleness: Any) -> Config:
    """Return a small configuration for simulations: 4 groups of 2 samples a step."""
    base = Config()
    return Config(
        run=replace_section(base.run, steps=steps, wait_limit_s=300.0),
        sampling=replace_section(base.sampling, prompts_per_step=4, samples_per_prompt=2),
        staleness=type(base.staleness)(max_staleness=max_staleness, **staleness),
        eval=replace_section(base.eval, every=0, num_prompts=8, samples_per_prompt=2),
        checkpoint=replace_section(base.checkpoint, every=0),
    )


def replace_section(section: Any, **changes: Any) -> Any:
    """Return a copy of a settings section with some values changed, validated again."""
    return type(section).model_validate({**section.model_dump(), **changes})


__all__ = [
    "FakeEngine",
    "FakeLearner",
    "FakeTask",
    "FakeTokenizer",
    "FakeWeights",
    "Faults",
    "Simulation",
    "Trace",
    "tiny_config",
]
