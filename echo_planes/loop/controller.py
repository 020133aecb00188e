"""The loop, as a pure state machine: events in, actions out. No Ray, no clock, no waiting.

::

          WorkerReady              Installed                    BatchReady            StepDone
    StartWorker ----> Install(v) ----------> (workers pull) FormBatch ----> Train ----------> t + 1
         ^                ^                                     ^  |                            |
         | WorkerLost     | Published(v)                        |  | NotReady("starved")        |
         |                +---- Publish <-----------------------+--+----- every kappa steps ----+
         |                                                      |                               |
      restart, with a new epoch and a growing delay             +---- Checkpoint, Evaluate <----+

          WorkerWanted               WorkerUnwanted              WorkerLeft
               +----> StartWorker          +----> LeaveWorker         +----> StopWorker

`runner.py` carries out the actions on real actors or fakes and reports the events. At most one FormBatch,
Train, Publish, Checkpoint or adjustment is pending at a time, because the learner does one thing at a time.
Installs, evaluations and restarts run concurrently. After a step the adjustments of the guard
(`learning.guard`) precede the publication and the checkpoint. A worker that evaluates installs no newer
weights before the evaluation ends, so that all answers are of one version, unless the learner starves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from echo_planes.config.schema import Config
from echo_planes.learning.guard import Guard, GuardFigures, figures_of
from echo_planes.learning.packing import joined_batch
from echo_planes.loop.events import (
    Action,
    Adjusted,
    AdjustLearner,
    BatchNotReady,
    BatchReady,
    Checkpoint,
    Checkpointed,
    EndStatus,
    Evaluate,
    Evaluated,
    EvaluationLost,
    Event,
    Finish,
    FormBatch,
    Install,
    Installed,
    LearnerReady,
    LeaveWorker,
    LimitStaleness,
    NothingHeard,
    OpenWindow,
    PartDone,
    Publish,
    Published,
    SeedersParked,
    StartWorker,
    StepDone,
    StopRequested,
    StopWorker,
    TellGuard,
    Train,
    WorkerLeft,
    WorkerLost,
    WorkerReady,
    WorkerUnwanted,
    WorkerWanted,
)
from echo_planes.loop.seeding import Present, Seeding
from echo_planes.types import InstallReport, Manifest, StepStats, TrainBatch

STARVED_AGAIN_S = 2.0  # of starvation before the learner publishes again; doubles with each repetition
MOST_STARVED_AGAIN_S = 120.0  # upper limit of that time
MAX_INSTALL_FAILURES = 3  # in a row; one more replaces the worker
MOST_RESTART_DELAY_S = 60  # a lost worker restarts after 0, 1, 3, 7, ... seconds, at most after this many
STEADY_S = 600.0  # a worker that was up this long before a loss begins a new row of restarts


@dataclass
class _Worker:
    epoch: int = 0
    up: bool = False
    version: int = -1
    installing: int = -1  # version that an install is pending for; -1: none
    failures: int = 0  # installs refused in a row
    restarts: int = 0
    in_a_row: int = 0  # restarts without `STEADY_S` of work in between
    ready_s: float | None = None  # when this incarnation became ready
    given_up: bool = False
    leaving: bool = False  # takes no new prompts
    evaluating: bool = False  # answers an evaluation; newer weights wait


class Controller:
    """State machine of one run, which decides the next actions of the three planes.

    Args:
        config: the run's settings.
        worker_ids: workers of the first fleet.
        first_epoch: incarnation number of the first workers (larger after a resume).
        guard: the guard's record in the checkpoint to continue from, if any.
    """

    def __init__(
        self,
        config: Config,
        worker_ids: list[str],
        first_epoch: int = 0,
        guard: Mapping[str, Any] | None = None,
    ) -> None:
        self._config = config
        self.guard = Guard(config.guard, config.staleness.max_staleness, guard)
        self._first_epoch = first_epoch
        self._workers = {worker_id: _Worker(epoch=first_epoch) for worker_id in worker_ids}
        self._past_restarts: dict[str, int] = {}  # of workers that have left
        self._step = -1
        self._saved_step = -1  # step of the newest checkpoint, or the first step of this part
        self._manifest: Manifest | None = None
        self._busy = False  # FormBatch, Train, Publish, Checkpoint or an adjustment is pending
        self._parts: list[TrainBatch] = []  # of the present step, given to the learner
        self._todo: list[Action] = []  # actions that wait for the learner, in order
        self._starved_since_s: float | None = None
        self._starved_again_s = STARVED_AGAIN_S
        self._waiting_since_s: float | None = None  # for a batch, without progress
        self._asked_s = 0.0  # when a batch was last asked for
        self._moves = 0  # of the data plane, when no batch was ready
        self._evaluations_due: set[int] = set()
        self._evaluating = False
        self._complete_since_s: float | None = None
        self._stop: StopRequested | None = None  # the first request, which gives the run's end status
        self._over = False
        self.digest_mismatches = 0
        self.seeding = Seeding(config.seeding) if config.seeding.engines else None
        self._seeders = config.seeding.workers().keys()

    @property
    def restarts(self) -> dict[str, int]:
        """Number of restarts of each worker."""
        return self._past_restarts | {w: worker.restarts for w, worker in self._workers.items()}

    @property
    def _kappa(self) -> int:
        """Steps between publications at present; 1 while the guard limits staleness."""
        return 1 if self.guard.limits_staleness else self._config.staleness.kappa

    @property
    def missing_evaluations(self) -> tuple[int, ...]:
        """Steps whose evaluation is due, once all steps are done; () before."""
        return tuple(sorted(self._evaluations_due)) if self._is_complete else ()

    @property
    def _is_complete(self) -> bool:
        return self._step >= self._config.run.steps and not self._busy and not self._todo

    def begin(self) -> list[Action]:
        """Return the first actions."""
        return [StartWorker(worker_id, worker.epoch, 0.0) for worker_id, worker in self._workers.items()]

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Return the actions that follow from an event."""
        if self._over:
            return []
        match event:
            case LearnerReady(step):
                self._step = self._saved_step = step
                if step:  # a resume: the guard's adjustments stay in force
                    self._todo += self._adjustments() if self.guard.report.rung else []
                    self.guard.saved(step)
                self._todo.append(Publish(step))
                if not step and self._config.guard.mode == "act" and self._config.checkpoint.every:
                    # After a rollback to the start that checkpoint exists already.
                    self._todo += [] if self.guard.report.good_step == step else [Checkpoint(step)]
                self._evaluations_due.add(step)
                actions = self._learner_free(now_s)
                if self.guard.report.alarms:
                    actions.insert(0, TellGuard(self.guard.report, ""))
            case Published(manifest):
                actions = self._on_published(manifest, now_s)
            case WorkerReady():
                actions = self._on_worker_ready(event, now_s)
            case WorkerLost():
                actions = self._on_worker_lost(event, now_s)
            case WorkerWanted(worker_id):
                self._workers[worker_id] = _Worker(epoch=self._first_epoch)
                actions = [StartWorker(worker_id, self._first_epoch, 0.0)]
            case WorkerUnwanted():
                actions = self._on_worker_unwanted(event)
            case WorkerLeft(worker_id, epoch):
                actions = self._on_worker_left(worker_id, epoch)
            case Installed(report, epoch):
                actions = self._on_installed(report, epoch, now_s)
            case BatchReady(batch):
                self._starved_since_s = self._waiting_since_s = None
                self._starved_again_s = STARVED_AGAIN_S
                self._parts.append(batch)
                if batch.last:
                    self._parts = [joined_batch(self._parts)]
                train = Train(batch, self._parts[-1])
                actions = [train]
                if self.seeding is not None:
                    actions = self.seeding.batch_ready(batch, train, self._present(), now_s)
            case PartDone():
                if self.seeding is not None:
                    self.seeding.part_done(now_s)
                actions = self._learner_free(now_s)
            case SeedersParked():
                held = self.seeding.parked(now_s) if self.seeding is not None else []
                actions = held or self._learner_free(now_s)
            case BatchNotReady():
                actions = self._on_not_ready(event, now_s)
            case StepDone(stats):
                actions = self._on_step_done(stats, now_s)
            case Checkpointed(step):
                self._saved_step = step
                self.guard.saved(step)
                actions = self._learner_free(now_s)
            case Adjusted():
                actions = self._learner_free(now_s)
            case Evaluated(report, mismatch):
                self._evaluations_due.discard(report.step)
                is_first = report.step == 0 and self._config.sparse.schedule
                actions = self._compare_sparse(mismatch) if is_first else []
                actions += self._on_evaluation_over() + self._finish_if_complete()
            case EvaluationLost():
                actions = self._on_evaluation_over()
            case NothingHeard():
                actions = []
            case StopRequested(reason, status):
                self._stop = self._stop or event
                actions = [] if self._busy else self._finish(status, reason)
        if self.seeding is not None:
            self.seeding.look(self._present(), now_s)
        return actions + self._give_up_evaluations(now_s)

    # --- learner ---------------------------------------------------------------------------------

    def _learner_free(self, now_s: float) -> list[Action]:
        """Return the next action of the learner, which is idle now."""
        self._busy = False
        if self._todo:
            self._busy = True
            return [self._todo.pop(0)]
        if self._parts:  # a step that is begun comes to its end, also before a stop
            return self._form_batch(now_s)
        if self._stop and self._saved_step == self._step:
            return self._finish(self._stop.status, self._stop.reason)
        if self._stop:
            self._busy = True
            return [Checkpoint(self._step)]
        if self._step >= self._config.run.steps:
            return self._finish_if_complete()
        return self._form_batch(now_s)

    def _form_batch(self, now_s: float) -> list[Action]:
        self._busy = True
        self._asked_s = now_s
        self._waiting_since_s = self._waiting_since_s if self._waiting_since_s is not None else now_s
        if self.seeding is None:
            return [FormBatch(self._step)]
        return self.seeding.form_batch(self._step, now_s, self._present(), in_parts=bool(self._parts))

    def _present(self) -> Present:
        """Return the workers whose engine is ready, and which of them serve the version of the step."""
        up = {worker_id: w for worker_id, w in self._workers.items() if w.up and not w.leaving}
        seeders = tuple(worker_id for worker_id in up if worker_id in self._seeders)
        serving = {worker_id for worker_id, worker in up.items() if worker.version == self._step}
        return Present(
            num_remote=len(up) - len(seeders),
            num_serving=len(serving - self._seeders),
            seeders=seeders,
            seeder_serves=not serving.isdisjoint(self._seeders),
        )

    def _on_step_done(self, stats: StepStats, now_s: float) -> list[Action]:
        self._step += 1
        is_sparse = bool(self._config.sparse.schedule)
        figures = GuardFigures()
        if self._parts:
            cuts_weight = self._config.objective.name == "cispo"
            figures = figures_of(self._parts[-1], stats, is_sparse=is_sparse, cuts_weight=cuts_weight)
        self._parts.clear()
        if self.seeding is not None:
            self.seeding.step_done(now_s)
        # A batch that was sampled sparsely differs by that; then the first evaluation, which is dense, tells.
        is_first = stats.step == 0 and not is_sparse
        told = self._compare(stats.mismatch_mean) if is_first else []
        if not self._over:
            told += self._guarded(figures)
        if self._over:
            return told
        last = self._step >= self._config.run.steps
        if self._step % self._kappa == 0 or last:
            self._todo.append(Publish(self._step))
        every = self._config.checkpoint.every
        if last or (every and self._step % every == 0):
            self._todo.append(Checkpoint(self._step))
        every = self._config.eval.every
        if last or (every and self._step % every == 0):
            self._evaluations_due.add(self._step)
        return told + self._learner_free(now_s)

    # --- guard -----------------------------------------------------------------------------------

    def _guarded(self, figures: GuardFigures) -> list[Action]:
        """Return the guard's actions after a step; put its adjustments ahead of the waiting actions."""
        verdict = None if self._stop else self.guard.observe(figures)  # a requested stop takes precedence
        if verdict is None:
            return []
        told: list[Action] = [TellGuard(self.guard.report, verdict.text)]
        match verdict.rung:
            case "rollback":
                return told + self._finish("rollback", verdict.text)
            case "stop":
                return told + self._finish("collapsed", verdict.text)
        if self._config.guard.mode == "act":
            self._todo = self._adjustments() + self._todo
        return told

    def _adjustments(self) -> list[Action]:
        return [AdjustLearner(self.guard.adjustment), LimitStaleness(self.guard.max_staleness)]

    def _compare(self, mismatch: float | None) -> list[Action]:
        """Return actions if learner and sampler disagree on what the first version sampled; None: unknown."""
        trouble = "" if mismatch is None else self.guard.compare(mismatch)
        if not trouble:
            return []
        told: list[Action] = [TellGuard(self.guard.report, trouble)]
        return told + (self._finish("failed", trouble) if self._config.guard.mode == "act" else [])

    def _compare_sparse(self, mismatch: float | None) -> list[Action]:
        """Return `_compare` of the first evaluation, or say that it could not be compared."""
        if mismatch is not None or self._config.guard.mode == "off":
            return self._compare(mismatch)
        text = (
            "learner and engine were not compared on the same weights: training began before the first "
            "evaluation had ended, or that samples otherwise; lower eval.num_prompts, and leave out "
            "eval.temperature and eval.top_p"
        )
        return [TellGuard(self.guard.report, text)]

    # --- publications and batches ----------------------------------------------------------------

    def _on_published(self, manifest: Manifest, now_s: float) -> list[Action]:
        self._manifest = manifest
        installs = [
            action
            for worker_id, worker in self._workers.items()
            if _takes_weights(worker)  # the others install it once they are free
            for action in self._install(worker_id, worker)
        ]
        return installs + self._learner_free(now_s)

    def _on_not_ready(self, event: BatchNotReady, now_s: float) -> list[Action]:
        starting = not any(worker.up for worker in self._workers.values())
        # Engines start, and weights arrive, within limits of their own.
        elsewhere = starting and self._config.fleet.scale == "fixed"
        elsewhere = elsewhere or any(worker.installing >= 0 for worker in self._workers.values())
        since_s = self._waiting_since_s
        if since_s is None or event.moves != self._moves:
            since_s = now_s
        self._waiting_since_s = min(now_s, since_s + (now_s - self._asked_s if elsewhere else 0.0))
        self._moves = event.moves
        waited_s = now_s - self._waiting_since_s
        if waited_s > self._config.run.wait_limit_s:
            return self._finish(
                "failed",
                f"timed out after {waited_s:.0f} s without progress, waiting for the batch of step "
                f"{self._step + 1} ({event.reason}: {event.detail}); on a slow machine raise "
                "run.wait_limit_s",
            )
        if self._stop and not self._parts:
            return self._learner_free(now_s)
        if event.reason != "starved" or starting:
            self._starved_since_s = None
        elif self._starved_since_s is None:
            self._starved_since_s = now_s
        elif now_s - self._starved_since_s >= self._starved_again_s:
            self._starved_since_s = now_s
            if held := self._let_go():  # an evaluation of two versions costs less than a waiting learner
                return held + self._learner_free(now_s)
            # Either all served versions are too old (kappa), or a publication is lost or still in transit.
            self._starved_again_s = min(2 * self._starved_again_s, MOST_STARVED_AGAIN_S)
            for worker in self._workers.values():
                worker.installing = -1
            self._todo.append(Publish(self._step))
        return self._learner_free(now_s)

    # --- workers ---------------------------------------------------------------------------------

    def _living(self, worker_id: str, epoch: int) -> _Worker | None:
        """Return the worker if `epoch` is its current incarnation, else None."""
        worker = self._workers.get(worker_id)
        return worker if worker is not None and worker.epoch == epoch else None

    def _on_worker_unwanted(self, event: WorkerUnwanted) -> list[Action]:
        worker = self._workers.get(event.worker_id)
        if worker is None or worker.leaving:
            return []
        if not worker.up:
            return self._forget(event.worker_id)
        worker.leaving = True
        return [LeaveWorker(event.worker_id, worker.epoch, event.limit_s)]

    def _on_worker_left(self, worker_id: str, epoch: int) -> list[Action]:
        return self._forget(worker_id) if self._living(worker_id, epoch) else []

    def _forget(self, worker_id: str) -> list[Action]:
        self._past_restarts[worker_id] = self._workers.pop(worker_id).restarts
        return [StopWorker(worker_id)]

    def _on_worker_ready(self, event: WorkerReady, now_s: float) -> list[Action]:
        worker = self._living(event.worker_id, event.epoch)
        if worker is None:
            return []
        worker.up, worker.version, worker.installing, worker.evaluating = True, -1, -1, False
        worker.ready_s = now_s
        actions: list[Action] = self._install(event.worker_id, worker) if self._manifest else []
        if event.worker_id in self._seeders and self.seeding is not None and self.seeding.is_open:
            actions.append(OpenWindow((event.worker_id,)))  # it starts parked
        return actions

    def _on_worker_lost(self, event: WorkerLost, now_s: float) -> list[Action]:
        worker = self._living(event.worker_id, event.epoch)
        if worker is None:
            return []
        return self._replace(event.worker_id, worker, event.reason, now_s, is_final=event.is_final)

    def _replace(
        self, worker_id: str, worker: _Worker, reason: str, now_s: float, *, is_final: bool = False
    ) -> list[Action]:
        is_of_fleet = self._config.fleet.scale != "fixed" and worker_id not in self._seeders
        if worker.leaving or is_of_fleet:
            return self._forget(worker_id)  # the reconciler decides whether another one starts
        worker.up, worker.version, worker.installing, worker.failures = False, -1, -1, 0
        worker.epoch += 1
        if worker.ready_s is not None and now_s - worker.ready_s >= STEADY_S:
            worker.in_a_row = 0
        worker.ready_s = None
        if is_final or worker.in_a_row >= self._config.fleet.restarts:
            worker.given_up = True
            # With another scale machines may be booting; the wait for a batch has its limit.
            is_last = all(w.given_up for w in self._workers.values())
            if is_last and self._config.fleet.scale == "fixed":
                return self._finish("failed", f"no worker is left; the last one, {worker_id}: {reason}")
            return [StopWorker(worker_id)]
        worker.restarts += 1
        worker.in_a_row += 1
        delay_s = min(2 ** (worker.in_a_row - 1) - 1, MOST_RESTART_DELAY_S)
        return [StartWorker(worker_id, worker.epoch, float(delay_s))]

    def _install(self, worker_id: str, worker: _Worker) -> list[Action]:
        if self._manifest is None:
            return []
        worker.installing = self._manifest.version
        return [Install(worker_id, worker.epoch, fresh=worker.failures > 0)]

    def _on_installed(self, report: InstallReport, epoch: int, now_s: float) -> list[Action]:
        worker = self._living(report.worker_id, epoch)
        if worker is None or self._manifest is None:
            return []
        worker.version, worker.installing = report.version, -1
        self.digest_mismatches += report.digest_mismatches
        if worker.leaving:
            return []
        if report.ok:
            worker.failures = 0
            # Evaluate before the next install; otherwise a worker that is always behind would never evaluate.
            actions = self._evaluate_if_due()
            if report.version < self._manifest.version and not worker.evaluating:
                actions += self._install(report.worker_id, worker)
            return actions
        worker.failures += 1
        if worker.failures > MAX_INSTALL_FAILURES:
            return self._replace(report.worker_id, worker, f"install refused: {report.error}", now_s)
        return self._install(report.worker_id, worker)

    # --- evaluation and the end ------------------------------------------------------------------

    def _evaluate_if_due(self) -> list[Action]:
        """Start the oldest evaluation that is due, once a free worker serves its version or a newer one.

        All free workers that serve the newest such version take part. They install no other one meanwhile.
        """
        if not self._evaluations_due or self._evaluating:
            return []
        step = min(self._evaluations_due)
        # A step between two publications is evaluated with the snapshot published before it, or a newer one.
        wanted = step - step % self._kappa if step < self._config.run.steps else step
        # Seeders have the learner's devices: they answer where there is no other worker.
        up = {w for w, worker in self._workers.items() if worker.up and not worker.leaving}
        free = up - self._seeders or up
        able = {w: one for w, one in self._workers.items() if w in free and _can_answer(one, wanted)}
        if not able:
            return []
        newest = max(worker.version for worker in able.values())
        asked = tuple(worker_id for worker_id, worker in able.items() if worker.version == newest)
        for worker_id in asked:
            able[worker_id].evaluating = True
        self._evaluating = True
        return [Evaluate(step, asked)]

    def _on_evaluation_over(self) -> list[Action]:
        self._evaluating = False
        return self._let_go() + self._evaluate_if_due()

    def _let_go(self) -> list[Action]:
        """Return the installs that waited for the evaluation; it delays no install from now on."""
        newest = self._manifest.version if self._manifest else -1
        actions: list[Action] = []
        for worker_id, worker in self._workers.items():
            if worker.evaluating:
                worker.evaluating = False
                if worker.version < newest and _takes_weights(worker):
                    actions += self._install(worker_id, worker)
        return actions

    def _finish_if_complete(self) -> list[Action]:
        if self._is_complete and not self._evaluations_due:
            return self._finish("done")
        return []

    def _give_up_evaluations(self, now_s: float) -> list[Action]:
        """End the run without the evaluations that no worker has begun within the limit since its last step.

        A fleet may have no worker left and get no other one.
        """
        if self._over or not self._is_complete or self._evaluating:
            return []
        if self._complete_since_s is None:
            self._complete_since_s = now_s
        return self._finish("done") if now_s - self._complete_since_s >= self._config.run.wait_limit_s else []

    def _finish(self, status: EndStatus, error: str = "") -> list[Action]:
        self._over = True
        return [Finish(status, error)]


def _can_answer(worker: _Worker, version: int) -> bool:
    """Return whether the worker can evaluate that version, or a newer one, now."""
    return _takes_weights(worker) and worker.version >= version


def _takes_weights(worker: _Worker) -> bool:
    """Return whether the worker can begin an install now."""
    return worker.up and not worker.leaving and worker.installing < 0 and not worker.evaluating
