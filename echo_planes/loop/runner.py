"""Runner of one run: carries out the controller's actions and reports events to it, on Ray and on fakes.

The runner calls the planes through the small interfaces of `planes.py`. A call to a worker that died or hangs
raises a `RunError`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from echo_planes.cluster.clock import Clock
from echo_planes.config.schema import Config
from echo_planes.data.claims import Rules, answers_fault, rules_of, stats_fault
from echo_planes.errors import (
    ClusterError,
    ConfigError,
    EchoPlanesError,
    EngineStartError,
    LeaseError,
    ModelError,
    RunError,
    UserError,
    WaitTimeoutError,
    WeightsError,
)
from echo_planes.loop import events as ev
from echo_planes.loop.controller import Controller
from echo_planes.loop.ending import end_planes
from echo_planes.loop.evaluation import comparable, eval_draw, report_of
from echo_planes.loop.planes import DataPlane, LearnerPlane, Observer, Planes, Worker
from echo_planes.loop.sparsity import Keeper
from echo_planes.loop.watch import Progress, Watch
from echo_planes.reporting.formats import count, ranges
from echo_planes.types import BufferCounts, Manifest, TrainBatch, Trajectory, WorkerInfo
from echo_planes.weights.sparse_adapter import SparseAdapter

T = TypeVar("T")

STATS_EVERY_STEPS = 5
STATS_S = 10.0  # longest wait for a worker's counters
PAUSE_S = 30.0  # longest wait for a seeder to hand over its leases
QUIET = ("learner start", "engine start")  # compiling, they may neither read nor write for a minute
LEARNER = ""
LEAVE_SHARE = 0.7  # of a leaving worker's time limit, to finish scoring its answers


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a run."""

    status: ev.EndStatus
    error: str
    counts: BufferCounts


class Runner:
    """One run, from the first engine to the last checkpoint.

    Args:
        config: the run's settings.
        planes: the data plane, the learner and the workers.
        observer: receives the run's events, for the accounting.
        fleet: the first workers, by id.
        save_checkpoint: writes one checkpoint, given its step, the data plane and the learner.
        clock: the run's clock, seconds.
        first_epoch: incarnation number of the first workers.
        resume_dir: checkpoint to continue from.
        guard: the guard's record in that checkpoint.
        beside: coroutine that runs as long as the run, such as the fleet's loop; its error ends the run.
        rules: for the check of answers to held-out prompts; default: those of the model.
        keeper: of the schedule of KV budgets; None: attention is dense.
    """

    def __init__(
        self,
        config: Config,
        planes: Planes,
        observer: Observer,
        *,
        fleet: dict[str, WorkerInfo],
        save_checkpoint: Callable[[int, DataPlane, LearnerPlane], Awaitable[None]],
        clock: Clock,
        first_epoch: int = 0,
        resume_dir: Path | None = None,
        guard: Mapping[str, Any] | None = None,
        beside: Callable[[Runner], Coroutine[Any, Any, None]] | None = None,
        rules: Rules | None = None,
        keeper: Keeper | None = None,
    ) -> None:
        self._config = config
        self._rules = rules or rules_of(config)
        self._planes = planes
        self._observer = observer
        self._fleet = fleet
        self._seeders = config.seeding.workers().keys()
        self._save_checkpoint = save_checkpoint
        self._clock = clock
        self._resume_dir = resume_dir
        self.controller = Controller(config, list(fleet), first_epoch, guard)
        self._events: asyncio.Queue[ev.Event] = asyncio.Queue()
        self._workers: dict[str, tuple[int, Worker]] = {}
        self._epochs: dict[str, int] = {}  # newest incarnation of each worker
        self._built: set[tuple[str, int]] = set()  # incarnations whose engine is ready
        self._ended: set[tuple[str, int]] = set()  # incarnations that have ended
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: EchoPlanesError | None = None
        self._mistake: UserError | None = None  # by which a worker could not start
        self.refused: dict[str, str] = {}  # kinds of workers (`_kind_of`) of which none can start, and why
        self._free_since_s = 0.0  # when the learner became idle
        self._idle_s = 0.0  # waits of the learner since its last step, without the current one
        self._manifest: Manifest | None = None  # of the newest publication
        self._steps_begun = 0  # version that the learner holds, or is making
        self._serving = False  # some worker serves a published version
        self._beside = beside
        self._keeper = keeper
        self._adapter: SparseAdapter | None = None  # the newest
        self._ending = False
        self.unstored: tuple[int, ...] = ()  # published versions that the store lacks at the end
        self.stop_requested: ev.StopRequested | None = None  # the first request
        self._watch = Watch(
            clock,
            self._ask_for_progress,
            lambda text, who: observer.on_event("stalled", text, worker=who),
        )
        self._collecting = asyncio.Lock()  # two collections at once could report counters in the wrong order

    def request_stop(self, reason: str, status: Literal["stopped", "spent"] = "stopped") -> None:
        """Finish the current step, checkpoint, and end. Safe to call from a signal handler of this loop."""
        request = ev.StopRequested(reason, status)
        self.stop_requested = self.stop_requested or request
        self._events.put_nowait(request)

    def want_worker(self, info: WorkerInfo) -> None:
        """Start another worker, under an id that was never used before."""
        self._fleet[info.worker_id] = info
        self._events.put_nowait(ev.WorkerWanted(info.worker_id))

    def unwant_worker(self, worker_id: str, reason: str, limit_s: float) -> None:
        """Have a worker hand over its leases and leave, within `limit_s` seconds."""
        self._observer.on_event("worker leaves", reason, worker=worker_id)
        self._events.put_nowait(ev.WorkerUnwanted(worker_id, reason, limit_s))

    async def run(self) -> Outcome:
        """Run to the end, and return the outcome.

        Raises:
            EchoPlanesError: the learner, the data plane or `beside` failed; the run closes everything first.
        """
        finish: ev.Finish | None = None
        try:
            self._spawn(self._watch.run())
            self._spawn(self._start_learner())
            if self._beside:
                self._spawn(self._beside(self))
            for action in self.controller.begin():
                self._spawn(self._carry_out(action))
            while finish is None:
                event = await self._next_event()
                if self._failure:
                    raise self._failure
                for action in self.controller.handle(event, self._clock.now_s()):
                    if isinstance(action, ev.Finish):
                        finish = action
                    elif isinstance(action, ev.TellGuard):
                        if action.text:
                            self._observer.on_event("guard", action.text)
                        self._observer.on_guard(action.report)
                    else:
                        self._spawn(self._carry_out(action))
            if finish.status == "failed" and self._mistake and not self._built:
                raise self._mistake
            if finish.status == "done" and (missing := self.controller.missing_evaluations):
                told = f"that of step {ranges(missing)} is left out: no worker began it within"
                self._observer.on_event("evaluation", f"{told} {self._config.run.wait_limit_s:.0f} s")
            counts = await self._within("closing the replay buffer", 60.0, self._planes.data.close())
            await self._collect_stats()
            if self._keeper is not None:
                await self._look_at_audits(self._keeper)
                self._keeper.close()
        finally:
            await self._end(self._config.run.wait_limit_s if finish else 0.0)
        return Outcome(finish.status, finish.error, counts)

    async def _next_event(self) -> ev.Event:
        """Return the next event. Nothing but an evaluation due may be waited for without end."""
        try:
            async with asyncio.timeout(
                self._config.run.wait_limit_s if self.controller.missing_evaluations else None
            ):
                return await self._events.get()
        except TimeoutError:
            return ev.NothingHeard()

    # --- actions ---------------------------------------------------------------------------------

    async def _carry_out(self, action: ev.Action) -> None:
        match action:
            case ev.StartWorker(worker_id, epoch, delay_s):
                await self._start_worker(worker_id, epoch, delay_s)
            case ev.LeaveWorker(worker_id, epoch, limit_s):
                await self._leave(worker_id, epoch, limit_s)
            case ev.StopWorker(worker_id):
                self._gone(worker_id, self._epochs[worker_id])
                await self._end_worker(worker_id)
            case ev.Install(worker_id, epoch, fresh):
                await self._install(worker_id, epoch, fresh)
            case ev.Publish(version):
                await self._publish(version)
            case ev.FormBatch(step, wait_s, whole):
                asked = self._planes.data.next_batch(step, wait_s, whole)
                limit_s = wait_s + self._config.run.wait_limit_s  # it is to answer within wait_s
                batch = await self._within("replay buffer", limit_s, asked)
                await self._hear_complaints()
                if isinstance(batch, TrainBatch):
                    self._events.put_nowait(ev.BatchReady(batch))
                else:
                    self._events.put_nowait(ev.BatchNotReady(batch.reason, batch.detail, batch.moves))
            case ev.OpenWindow(seeders):
                await asyncio.gather(*(self._let_sample(one, sample=True) for one in seeders))
            case ev.CloseWindow(seeders):
                await asyncio.gather(*(self._let_sample(one, sample=False) for one in seeders))
                self._events.put_nowait(ev.SeedersParked())
            case ev.Train(batch, all_parts):
                await self._train(batch, all_parts)
            case ev.Evaluate(step, worker_ids):
                await self._evaluate(step, worker_ids)
            case ev.Checkpoint(step):
                saving = self._save_checkpoint(step, self._planes.data, self._planes.learner)
                await self._moving("checkpoint", saving)
                self._observer.on_event("checkpoint", f"step {step} saved")
                self._free_since_s = self._clock.now_s()
                self._events.put_nowait(ev.Checkpointed(step))
            case ev.AdjustLearner(adjustment):
                await self._moving("learner adjustment", self._planes.learner.adjust(adjustment))
                self._events.put_nowait(ev.Adjusted())
            case ev.LimitStaleness(max_staleness):
                await self._planes.data.limit_staleness(max_staleness)
                self._events.put_nowait(ev.Adjusted())

    async def _hear_complaints(self) -> None:
        """Report malformed messages that the data plane refused, and end workers that it fenced for them."""
        for one in await self._planes.data.complaints():
            messages = count(one.count, "malformed message")
            text = f"{messages} refused, the last one: {one.reason} ({one.detail})"
            self._observer.on_event("malformed", text, worker=one.worker_id)
            if one.is_fenced:
                self._lost(one.worker_id, one.epoch, f"too many in a row: {text}")

    async def _start_learner(self) -> None:
        limit_s, data, learner = self._config.run.wait_limit_s, self._planes.data, self._planes.learner
        with self._observer.phase("replay buffer"):
            await self._within("replay buffer start", limit_s, data.ready())
        with self._observer.phase("learner"):
            step, about = await self._moving("learner start", learner.start(self._resume_dir))
        self._observer.on_event("learner", about)
        self._steps_begun, self._free_since_s = step, self._clock.now_s()
        self._events.put_nowait(ev.LearnerReady(step))

    async def _start_worker(self, worker_id: str, epoch: int, delay_s: float) -> None:
        info = self._fleet[worker_id]
        self._epochs[worker_id] = epoch
        await self._end_worker(worker_id)
        await asyncio.sleep(delay_s)
        if (worker_id, epoch) in self._ended:
            return
        self._observer.on_worker(replace(info, epoch=epoch), alive=True)
        try:
            with self._observer.phase(f"rollout worker {worker_id} ({info.sku})"):
                worker = await self._planes.spawn_worker(worker_id, epoch)
                self._workers[worker_id] = (epoch, worker)
                if (worker_id, epoch) not in self._ended:
                    about = await self._moving("engine start", worker.start(), worker=worker_id)
                    self._observer.on_event("engine", about, worker=worker_id)
            if (worker_id, epoch) not in self._ended:
                await self._planes.data.register(worker_id, epoch)
                if worker_id in self._seeders:  # until a window opens
                    await self._planes.data.park(worker_id, parked=True)
            if (worker_id, epoch) in self._ended:  # the incarnation ended during its start
                await self._end_worker(worker_id)
                return
            self._built.add((worker_id, epoch))
            if self._keeper is not None:
                await self._tell("KV budgets", worker_id, worker.set_schedule(self._keeper.schedule))
            if self._adapter is not None:
                await self._tell("sparse adapter", worker_id, worker.set_adapter(self._adapter))
            self._events.put_nowait(ev.WorkerReady(worker_id, epoch))
            with self._watch.over("sampling", worker_id), self._watch.over("reward", worker_id):
                await worker.run()
        except (ConfigError, ModelError) as why:  # settings or a model that this worker cannot serve
            self._mistake = why
            self._lost(worker_id, epoch, str(why), is_final=True)
        except EngineStartError as why:
            has_started = self._kind_of(worker_id) in {self._kind_of(one) for one, _ in self._built}
            self._lost(worker_id, epoch, str(why), is_final=why.is_final and not has_started)
        # LeaseError: the data plane fenced the worker
        except (RunError, LeaseError, ClusterError, WeightsError) as why:
            await self._hear_complaints()
            self._lost(worker_id, epoch, str(why))

    async def _leave(self, worker_id: str, epoch: int, limit_s: float) -> None:
        """Have a worker hand over its leases, then end it. Leases that it keeps return to the data plane."""
        current = self._workers.get(worker_id)
        if current is not None and current[0] == epoch:
            try:
                handed = await self._within(
                    "leaving", limit_s, current[1].leave(LEAVE_SHARE * limit_s), worker=worker_id
                )
                self._observer.on_event("worker left", f"{handed} prompts go on elsewhere", worker=worker_id)
            except RunError as why:
                self._observer.on_event("worker left", f"without a word: {why}", worker=worker_id)
        self._gone(worker_id, epoch)
        self._events.put_nowait(ev.WorkerLeft(worker_id, epoch))

    async def _let_sample(self, worker_id: str, *, sample: bool) -> None:
        """Have a seeder sample, or hand over its leases and sample no more; it is lost if it does neither."""
        epoch, worker = self._workers.get(worker_id, (-1, None))
        if worker is None:
            return
        # Parked first: else a pull on its way would bring new leases. Of an incarnation that is gone since,
        # the successor is parked at its start.
        await self._planes.data.park(worker_id, parked=not sample)
        wait: Awaitable[object] = worker.resume() if sample else worker.pause()
        try:
            await self._within("seeding", PAUSE_S, wait, worker=worker_id)
        except RunError as why:
            self._lost(worker_id, epoch, str(why))

    async def _end_worker(self, worker_id: str) -> None:
        """Fence the worker's incarnation, give its prompts back, and end its process."""
        await self._planes.data.lose(worker_id)
        if self._workers.pop(worker_id, None):
            await self._planes.kill_worker(worker_id)

    async def _publish(self, version: int) -> None:
        begun_s = self._clock.now_s()
        self._idle_s += begun_s - self._free_since_s  # a starved learner publishes while it waits
        is_first = self._manifest is None
        with self._observer.phase("first publication") if is_first else nullcontext():
            manifest = await self._moving(
                "publication", self._planes.learner.publish(version), version=version
            )
            # The data plane must know a version before any worker can have it.
            await self._planes.data.publish(manifest.version, manifest.digest)
            await self._moving("commit", self._planes.learner.commit(version), version=version)
        self._manifest = manifest
        self._observer.on_published(manifest, self._clock.now_s() - begun_s)
        self._free_since_s = self._clock.now_s()
        self._events.put_nowait(ev.Published(manifest))
        if self._keeper is not None and self._config.sparse.distill_rank:
            await self._distil(self._keeper, version)

    async def _distil(self, keeper: Keeper, version: int) -> None:
        """Train the sparse adapter towards the weights just published, and give it to all workers."""
        asked = self._planes.learner.distil(keeper.schedule, version)
        distilled = await self._moving("distillation", asked, version=version)
        self._free_since_s = self._clock.now_s()
        if distilled is None:
            return
        self._adapter = distilled.adapter
        keeper.hear_distilled(distilled)
        await self._tell_all("sparse adapter", lambda worker: worker.set_adapter(distilled.adapter))

    async def _install(self, worker_id: str, epoch: int, fresh: bool) -> None:
        manifest, current = self._manifest, self._workers.get(worker_id)
        if manifest is None or current is None or current[0] != epoch:
            return
        version = manifest.version
        try:
            report = await self._moving(
                "weight install", current[1].install(manifest, fresh), worker=worker_id, version=version
            )
        except RunError as why:
            self._lost(worker_id, epoch, str(why))
            return
        now = self._workers.get(worker_id)
        if now is None or now[0] != epoch:
            return  # a late report of an incarnation that its successor has replaced
        await self._planes.data.installed(worker_id, report.version)
        if report.ok and not self._serving:
            self._serving = True
            self._free_since_s = self._clock.now_s()  # start-up is not the learner's idle time
            self._idle_s = 0.0
        self._observer.on_installed(report)
        if not report.ok:
            self._observer.on_event("refused", report.error, worker=worker_id, version=version)
        self._events.put_nowait(ev.Installed(report, epoch))

    async def _train(self, batch: TrainBatch, whole: TrainBatch) -> None:
        learner = self._planes.learner
        self._idle_s += self._clock.now_s() - self._free_since_s
        if not batch.last:
            await self._moving("learner step", learner.train_part(batch))
            self._free_since_s = self._clock.now_s()
            self._events.put_nowait(ev.PartDone())
            return
        idle_s, self._idle_s = self._idle_s, 0.0
        self._steps_begun = batch.step + 1
        stats = await self._moving("learner step", learner.train_step(batch))
        self._free_since_s = self._clock.now_s()
        # Report before any action on the step, so that its figures show the settings it was trained with.
        if self.controller.seeding is not None:
            self._observer.on_seeding(self.controller.seeding.report(self._clock.now_s()))
        self._observer.on_step(whole, stats, idle_s, await self._planes.data.counts())
        self._events.put_nowait(ev.StepDone(stats))
        if self._keeper is not None:
            await self._look_at_audits(self._keeper)
        if (batch.step + 1) % STATS_EVERY_STEPS == 0:
            await self._collect_stats()

    async def _evaluate(self, step: int, worker_ids: tuple[str, ...]) -> None:
        settings = self._config.eval
        shares = [list(range(i, settings.num_prompts, len(worker_ids))) for i in range(len(worker_ids))]
        answers: list[Trajectory] = []
        for result in await asyncio.gather(
            *(self._evaluate_on(w, share) for w, share in zip(worker_ids, shares, strict=True))
        ):
            if result is None:
                self._events.put_nowait(ev.EvaluationLost(step))
                return
            answers += result
        report = report_of(step, settings, answers)
        compared = comparable(self._config, report, answers, self._steps_begun)
        mismatch = await self._planes.learner.mismatch(compared) if compared else None
        self._observer.on_eval(report, mismatch)
        self._events.put_nowait(ev.Evaluated(report, mismatch))

    async def _evaluate_on(self, worker_id: str, share: list[int]) -> list[Trajectory] | None:
        current = self._workers.get(worker_id)
        if current is None:
            return None
        epoch, worker = current
        num_samples = self._config.eval.samples_per_prompt
        try:
            asked = worker.evaluate(share, num_samples, eval_draw(self._config))
            answers = await self._moving("evaluation", asked, worker=worker_id)
        except RunError as why:
            self._lost(worker_id, epoch, str(why))
            return None
        fault = answers_fault(answers, share, num_samples, worker_id, self._rules)
        if fault is not None:
            self._lost(worker_id, epoch, f"malformed answers: {fault.reason} ({fault.detail})")
            return None
        return answers

    # --- inside ----------------------------------------------------------------------------------

    def _lost(self, worker_id: str, epoch: int, reason: str, *, is_final: bool = False) -> None:
        if (worker_id, epoch) in self._ended:
            return  # several pending calls report the same loss
        self._gone(worker_id, epoch)
        told = reason
        if is_final:
            kind = self._kind_of(worker_id)
            self.refused[kind] = reason
            told = f"{reason}; {kind} is not started again: it would fail alike"
        self._observer.on_event("worker lost", told, worker=worker_id)
        self._events.put_nowait(ev.WorkerLost(worker_id, epoch, reason, is_final))

    def _kind_of(self, worker_id: str) -> str:
        """Return what starts alike: a worker, and in a fleet that buys its machines their instance type."""
        is_own = self._config.fleet.scale == "fixed" or worker_id in self._seeders
        return worker_id if is_own else self._fleet[worker_id].instance_type

    def _gone(self, worker_id: str, epoch: int) -> None:
        """Mark an incarnation as ended: later failures of it are no loss, and it costs nothing more."""
        if (worker_id, epoch) in self._ended:
            return
        self._ended.add((worker_id, epoch))
        self._observer.on_worker(replace(self._fleet[worker_id], epoch=epoch), alive=False)

    async def collect_worker_stats(self) -> None:
        """Ask every worker for its counters, and report them to the accounting.

        The counts of accepted tokens and trajectories come from the data plane, not from the worker.
        """

        async def ask(worker_id: str, epoch: int, worker: Worker) -> None:
            with suppress(RunError):  # the worker's run() reports its loss
                stats = await self._within("worker statistics", STATS_S, worker.stats(), worker=worker_id)
                if fault := stats_fault(stats, worker_id):
                    self._lost(worker_id, epoch, f"malformed counters: {fault.reason} ({fault.detail})")
                    return
                tokens, trajectories = accepted.get((worker_id, epoch), (0, 0))
                self._observer.on_stats(epoch, replace(stats, tokens=tokens, trajectories=trajectories))

        async with self._collecting:
            accepted = await self._planes.data.accepted()
            self._observer.on_accepted(accepted)
            await self._with_all(ask)

    async def _look_at_audits(self, keeper: Keeper) -> None:
        """Ask every worker for its audits, and give all of them the schedule that these call for."""

        async def ask(worker_id: str, epoch: int, worker: Worker) -> None:
            try:
                audits = await self._within("audits", STATS_S, worker.audits(), worker=worker_id)
            except RunError as why:  # the worker's run() reports its loss, if it is lost
                self._observer.on_event("sparse audit", f"none of {worker_id} this time: {why}")
                return
            if fault := keeper.hear(audits):
                self._lost(worker_id, epoch, fault)

        await self._with_all(ask)
        if keeper.change() is not None:
            await self._tell_all("KV budgets", lambda worker: worker.set_schedule(keeper.schedule))

    async def _tell_all(self, phase: str, tell: Callable[[Worker], Awaitable[None]]) -> None:
        """Make a call to every worker whose engine is ready; one that cannot follow is lost."""

        async def call(worker_id: str, epoch: int, worker: Worker) -> None:
            try:
                await self._tell(phase, worker_id, tell(worker))
            except (RunError, WeightsError) as why:
                self._lost(worker_id, epoch, str(why))

        await self._with_all(call)

    async def _tell(self, phase: str, worker_id: str, wait: Awaitable[None]) -> None:
        # An install may be in progress.
        await self._within(phase, self._config.run.wait_limit_s, wait, worker=worker_id)

    async def _with_all(self, call: Callable[[str, int, Worker], Awaitable[None]]) -> None:
        """Make a call with id, epoch and worker of each whose engine is ready, all at once."""
        built = [(w, *current) for w, current in self._workers.items() if (w, current[0]) in self._built]
        await asyncio.gather(*(call(*one) for one in built))

    async def _collect_stats(self) -> None:
        await self.collect_worker_stats()
        with suppress(RunError):  # the next call that needs the learner reports its loss
            # The learner answers only between two steps, and a step may be long.
            asked = self._planes.learner.broadcasts()
            self._observer.on_broadcasts(await self._moving("broadcast statistics", asked))

    async def _within(
        self, phase: str, limit_s: float, wait: Awaitable[T], *, worker: str = "-", version: int | None = None
    ) -> T:
        try:
            async with asyncio.timeout(limit_s):  # wait_for may swallow a cancellation before Python 3.12
                return await wait
        except TimeoutError as why:
            raise WaitTimeoutError(phase, limit_s, worker=worker, version=version) from why

    async def _moving(
        self, phase: str, wait: Awaitable[T], *, worker: str = LEARNER, version: int | None = None
    ) -> T:
        """Wait for the learner, or a worker, as long as it moves: `run.wait_limit_s` is without progress."""
        limit_s = self._config.run.wait_limit_s
        progress: Progress | None = None
        try:
            async with asyncio.timeout(limit_s) as deadline:
                named = phase not in QUIET
                with self._watch.over(phase, worker, deadline, limit_s, named=named) as progress:
                    return await wait
        except TimeoutError as why:
            seen = progress.seen if progress else ""
            raise WaitTimeoutError(phase, limit_s, worker=worker or "-", version=version, seen=seen) from why

    async def _ask_for_progress(self, who: str) -> Mapping[str, str]:
        if who == LEARNER:
            return await self._planes.learner.progress()
        current = self._workers.get(who)
        return await current[1].progress() if current else {}

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if task.cancelled() and not self._ending:  # by code outside the runner; that would end silently
            error = RunError(f"a part of the run was cancelled from outside: {task.get_coro()}")
        if error is None:
            return
        self._failure = self._failure or (
            error if isinstance(error, EchoPlanesError) else RunError(f"{type(error).__name__}: {error}")
        )
        self._failure.__cause__ = self._failure.__cause__ or error
        self._events.put_nowait(ev.StopRequested("failure"))  # wakes `run`, which raises the failure

    async def _end(self, upload_limit_s: float) -> None:
        """Cancel all tasks, then stop the workers and, after its last uploads, the learner (`ending`)."""
        self._ending = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        workers, learner = [worker for _, worker in self._workers.values()], self._planes.learner
        gone = [partial(self._gone, worker_id, epoch) for worker_id, (epoch, _) in self._workers.items()]
        limit_s = upload_limit_s if self._manifest else None
        self.unstored = await end_planes(workers, gone, learner, self._clock, limit_s, self._observer)
