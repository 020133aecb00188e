"""One run from its first engine to its report: connects the runner, the accounting and the checkpoints.

A run may have several parts. When the guard rolls back to a good checkpoint, the current part ends. The next
part starts from that checkpoint as a resume does, with a lineage of its own.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from echo_planes.cluster.clock import Clock
from echo_planes.config.fleet import WorkerConfig
from echo_planes.config.schema import Config
from echo_planes.errors import DataError, EchoPlanesError
from echo_planes.fleet.actuators.actuator import Actuator
from echo_planes.fleet.money import Budget
from echo_planes.loop.accounting import Journal
from echo_planes.loop.checkpoint import (
    CheckpointMeta,
    checkpoint_of,
    go_back,
    open_lineage,
    read_meta,
    resume_command,
    rewind_metrics,
    save_checkpoint,
)
from echo_planes.loop.events import StopRequested
from echo_planes.loop.loading import dump_config
from echo_planes.loop.observers import Observers
from echo_planes.loop.planes import DataPlane, LearnerPlane, Planes
from echo_planes.loop.price_watch import PriceWatch
from echo_planes.loop.reconcile import ReconcileLoop, Roster, worker_info
from echo_planes.loop.runner import Outcome, Runner
from echo_planes.loop.sparsity import Keeper
from echo_planes.loop.spending import BudgetGuard, open_budget
from echo_planes.loop.tracking import Tracking, TrackingNews, open_tracking
from echo_planes.reporting.metrics import MetricsWriter, write_atomic
from echo_planes.reporting.report import write_report
from echo_planes.reporting.terminal import View
from echo_planes.reporting.weights.run_sparsity import write_sparsity
from echo_planes.types import BufferCounts


class PlanesFactory(Protocol):
    """Factory of the planes, such as `launch.RayPlanes`."""

    def __call__(
        self,
        config: Config,
        lineage: str,
        run_dir: Path,
        resume_dir: Path | None,
        start_step: int,
        worker_configs: Mapping[str, WorkerConfig],
    ) -> FleetPlanes: ...


class FleetPlanes(Planes, Roster, Protocol):
    """Planes that also accept the settings of new workers."""


async def run_job(
    config: Config,
    folder: Path,
    view: View,
    clock: Clock,
    *,
    start_s: float,
    checkpoint: Path | None,
    meta: CheckpointMeta,
    changes: Sequence[str] = (),
    make_planes: PlanesFactory,
    make_actuator: Callable[[Config, Clock], Awaitable[Actuator]],
    worker_configs: Mapping[str, WorkerConfig],
    export: Callable[[Mapping[str, float]], None],
) -> Outcome:
    """Run to the end; write summary.json and report.html even if the runner fails.

    Args:
        config, folder: the settings, and the run folder's absolute path.
        view, clock: the terminal, and the run's clock (seconds).
        start_s: when the run began, on `clock`.
        checkpoint, meta: checkpoint to continue from; None and the first incarnation's numbers for a new run.
        changes: settings that a resume has changed, one line each.
        make_planes: `launch.RayPlanes`, or a test's planes.
        make_actuator: `launch.make_actuator`; called only where the fleet follows price and need.
        worker_configs: the fleet, one entry per worker; empty where it follows price and need.
        export: called with every step's numbers (Prometheus).

    Raises:
        EchoPlanesError: the budget was spent already, or the learner or the data plane failed.
    """
    tracking = open_tracking(config, folder)
    world = _World(folder, view, clock, make_planes, make_actuator, worker_configs, export, tracking)
    stop: StopRequested | None = None  # came too late for a part that the guard had ended already
    try:
        while True:
            outcome, runner = await _part(world, config, start_s, checkpoint, meta, changes, stop)
            if outcome.status != "rollback":
                return outcome
            stop = runner.stop_requested
            guard = runner.controller.guard
            config, checkpoint = _halved(config), checkpoint_of(folder, guard.report.good_step)
            meta = open_folder(config, folder, checkpoint, read_meta(checkpoint))
            start_s, changes = clock.now_s(), ()
    finally:
        if tracking is not None:
            tracking.close()  # no effect if the last part has closed it


def open_folder(
    config: Config, folder: Path, checkpoint: Path | None, meta: CheckpointMeta
) -> CheckpointMeta:
    """Make the run folder, or rewind that of a resumed run; return `meta` with a new lineage number."""
    folder.mkdir(parents=True, exist_ok=True)
    if checkpoint:
        rewind_metrics(folder, meta.step)
    write_atomic(folder / "config.yaml", dump_config(config))
    return open_lineage(folder, meta)


def _halved(config: Config) -> Config:
    """Return the settings after a rollback: half of S, and half of the learning rate."""
    staleness = config.staleness.limited(config.staleness.max_staleness // 2)
    learner = config.learner.model_copy(update={"lr": config.lr / 2})
    return config.model_copy(update={"staleness": staleness, "learner": learner})


def _next_epoch(meta: CheckpointMeta, runner: Runner) -> int:
    """Return a worker epoch that no incarnation has used."""
    return meta.next_epoch + sum(runner.controller.restarts.values()) + 1


@dataclass(frozen=True, slots=True)
class _World:
    """Arguments and tracker that all parts of a run share; see `run_job`."""

    folder: Path
    view: View
    clock: Clock
    make_planes: PlanesFactory
    make_actuator: Callable[[Config, Clock], Awaitable[Actuator]]
    worker_configs: Mapping[str, WorkerConfig]
    export: Callable[[Mapping[str, float]], None]
    tracking: Tracking | None


async def _part(
    world: _World,
    config: Config,
    start_s: float,
    checkpoint: Path | None,
    meta: CheckpointMeta,
    changes: Sequence[str],
    stop: StopRequested | None,
) -> tuple[Outcome, Runner]:
    """Run one part, from its planes to its summary; write the report unless another part follows."""
    folder, view, clock = world.folder, world.view, world.clock
    fleet = {
        w: worker_info(w, worker_config, meta.next_epoch) for w, worker_config in world.worker_configs.items()
    }
    tracking = world.tracking
    writer = MetricsWriter(folder, tracking.offer if tracking is not None else None)
    start_step = meta.step if checkpoint else None
    journal = Journal(config, writer, view, clock, world.export, start_s, start_step)
    if checkpoint:
        journal.on_event("resume", f"at step {meta.step}, as lineage L{meta.lineage_number}")
    for change in changes:
        journal.on_event("setting", change)
    followers = [journal.on_prices]
    budget = open_budget(config, journal.spending)
    planes = world.make_planes(
        config, f"L{meta.lineage_number}", folder, checkpoint, meta.step, world.worker_configs
    )
    watches: list[BudgetGuard | ReconcileLoop | PriceWatch] = []
    if budget is not None:
        watches.append(BudgetGuard(config, budget, clock, lambda w: runner.request_stop(w, "spent"), journal))
    if config.fleet.scale != "fixed":
        actuator = await world.make_actuator(config, clock)
        fleet_loop = _reconcile_loop(config, actuator, planes, journal, budget, clock)
        watches.append(fleet_loop)
        followers.append(fleet_loop.on_prices)
    if config.fleet.prices != "fixed":
        prices = PriceWatch(config, clock, journal, followers)
        await prices.look()  # before the run pays for its first worker
        watches.append(prices)
    news = [] if tracking is None else [TrackingNews(tracking, journal)]

    async def save(step: int, data: DataPlane, learner: LearnerPlane) -> None:
        guard = runner.controller.guard
        now = CheckpointMeta(step, meta.lineage_number + 1, _next_epoch(meta, runner), guard.record())
        checkpoints, keep = folder / "checkpoints", config.checkpoint.keep
        await save_checkpoint(checkpoints, now, data, learner, keep=keep, keep_steps=guard.kept_checkpoints)

    runner = Runner(
        config,
        planes,
        Observers(journal, *watches, *news),
        fleet=fleet,
        save_checkpoint=save,
        clock=clock,
        first_epoch=meta.next_epoch,
        resume_dir=checkpoint,
        guard=meta.guard,
        keeper=Keeper(config, folder, journal) if config.sparse.schedule else None,
        beside=lambda hands: _together([watch.run(hands) for watch in watches]),
    )
    if stop is not None:
        runner.request_stop(stop.reason, stop.status)
    outcome = Outcome("failed", "", BufferCounts())
    with _stop_on_signals(runner, view):
        try:
            outcome = _judged(await runner.run(), folder, runner, journal, meta)
        except EchoPlanesError as error:
            outcome = Outcome("failed", str(error), journal.counts)
            raise
        except asyncio.CancelledError:  # an early Ctrl-C, or a second one
            outcome = Outcome("stopped", "interrupted", journal.counts)
            raise
        finally:
            if tracking is not None and outcome.status != "rollback":
                for text in tracking.close():
                    journal.on_event("tracker", text)
            _close_books(folder, config, journal, runner, outcome, view, clock)
    return outcome, runner


def _judged(
    outcome: Outcome, folder: Path, runner: Runner, journal: Journal, meta: CheckpointMeta
) -> Outcome:
    """Return the outcome to report: a collapsed run is not `done`, and a rollback needs its checkpoint.

    Where the guard gave the policy up, the good checkpoint becomes the newest: the next part begins there,
    and so does a resume of a run that the guard stopped.
    """
    if outcome.status == "done" and (collapse := journal.collapse):
        return replace(outcome, status="collapsed", error=collapse)
    guard = runner.controller.guard
    good_step = guard.report.good_step
    if outcome.status == "rollback" or (outcome.status == "collapsed" and good_step >= 0):
        try:
            go_back(checkpoint_of(folder, good_step), _next_epoch(meta, runner), guard.record_after_rollback)
        except DataError as why:
            return replace(outcome, status="collapsed", error=f"{outcome.error}, but {why}")
    return outcome


def _close_books(
    folder: Path,
    config: Config,
    journal: Journal,
    runner: Runner,
    outcome: Outcome,
    view: View,
    clock: Clock,
) -> None:
    """Write the summary and, unless another part follows, the report."""
    summary = journal.summary(
        status=outcome.status,
        error=outcome.error,
        counts=outcome.counts,
        digest_mismatches=runner.controller.digest_mismatches,
        restarts=runner.controller.restarts,
        unstored=runner.unstored,
    )
    if outcome.status == "rollback":
        return
    write_sparsity(folder, config.weights.store)
    go_on = resume_command(folder) if outcome.status in ("spent", "stopped") else ""
    if outcome.status == "spent":
        budget = journal.spending.larger_budget(clock.now_s())
        go_on = f"{go_on} {budget}" if go_on else f"there is no checkpoint: start anew, with {budget} or more"
    view.final(summary, write_report(folder), go_on)


async def _together(works: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all coroutines; once one fails or the caller is cancelled, cancel the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _reconcile_loop(
    config: Config, actuator: Actuator, roster: Roster, journal: Journal, budget: Budget | None, clock: Clock
) -> ReconcileLoop:
    left = None if budget is None else lambda: budget.left(clock.now_s())
    return ReconcileLoop(
        config,
        actuator,
        roster,
        journal.broadcasts,
        clock,
        journal.on_event,
        usd_left=left,
        record=journal.on_fleet,
    )


@contextmanager
def _stop_on_signals(runner: Runner, view: View) -> Iterator[None]:
    """Stop the run on Ctrl-C or SIGTERM, after its step and a checkpoint. A second Ctrl-C ends it at once."""
    loop = asyncio.get_running_loop()

    def stop(name: str) -> None:
        view.event(f"{name}: finishing this step, then a checkpoint (again to leave at once)")
        runner.request_stop(name)
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, stop, "Ctrl-C")
    loop.add_signal_handler(signal.SIGTERM, stop, "SIGTERM")
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        loop.remove_signal_handler(signal.SIGTERM)
