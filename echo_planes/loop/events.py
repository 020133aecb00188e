"""Events that the controller receives, and actions that it returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from echo_planes.types import (
    Adjustment,
    EvalReport,
    GuardReport,
    InstallReport,
    Manifest,
    StepStats,
    TrainBatch,
)

# End of a run. `rollback`: the next part starts from an older checkpoint.
EndStatus = Literal["done", "stopped", "spent", "failed", "collapsed", "rollback"]

# --- events --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """An incarnation's engine is built; it serves nothing yet."""

    worker_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """An incarnation died, hung or failed."""

    worker_id: str
    epoch: int
    reason: str
    is_final: bool = False  # another one would fail alike


@dataclass(frozen=True, slots=True)
class WorkerWanted:
    """The fleet needs another worker. Its id was never used before."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class WorkerUnwanted:
    """A worker must leave: the fleet does not need it any more, or its machine is about to go."""

    worker_id: str
    reason: str
    limit_s: float  # seconds until it must be gone


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    """A leaving worker has handed over its leases, or failed to do so within its limit."""

    worker_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class LearnerReady:
    """The learner holds the weights after update `step`; 0: the initial ones."""

    step: int


@dataclass(frozen=True, slots=True)
class Published:
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Installed:
    """The outcome of an install, successful or refused."""

    report: InstallReport
    epoch: int


@dataclass(frozen=True, slots=True)
class BatchReady:
    batch: TrainBatch


@dataclass(frozen=True, slots=True)
class SeedersParked:
    """The seeders have handed over their leases, and sample no more in this window."""


@dataclass(frozen=True, slots=True)
class BatchNotReady:
    reason: Literal["starved", "holding", "filling"]
    detail: str
    moves: int = 0  # accepted groups and messages with tokens so far: another number renews the wait


@dataclass(frozen=True, slots=True)
class PartDone:
    """A part of a step, not the last, is in the gradient of its update."""


@dataclass(frozen=True, slots=True)
class StepDone:
    stats: StepStats


@dataclass(frozen=True, slots=True)
class Checkpointed:
    step: int


@dataclass(frozen=True, slots=True)
class Adjusted:
    """The learner or the data plane has applied an adjustment of the guard."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    report: EvalReport
    mismatch: float | None = None  # mean |log pi_learner - log pi_sampler|, where both had one version


@dataclass(frozen=True, slots=True)
class EvaluationLost:
    """A worker was lost during an evaluation, which the controller starts again."""

    step: int


@dataclass(frozen=True, slots=True)
class NothingHeard:
    """All steps are done, an evaluation is still due, and for `run.wait_limit_s` no event has come."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Request to end the run (Ctrl-C, SIGTERM, a spent budget); `status` becomes the run's end status."""

    reason: str
    status: Literal["stopped", "spent"] = "stopped"


Event = (
    WorkerReady
    | WorkerLost
    | WorkerWanted
    | WorkerUnwanted
    | WorkerLeft
    | LearnerReady
    | Published
    | Installed
    | BatchReady
    | BatchNotReady
    | SeedersParked
    | PartDone
    | StepDone
    | Checkpointed
    | Adjusted
    | Evaluated
    | EvaluationLost
    | NothingHeard
    | StopRequested
)


# --- actions -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start an incarnation after `delay_s` seconds. First end and fence the worker's older one, if any."""

    worker_id: str
    epoch: int
    delay_s: float


@dataclass(frozen=True, slots=True)
class LeaveWorker:
    """Have an incarnation take no new prompts and hand over its leases, within `limit_s` seconds."""

    worker_id: str
    epoch: int
    limit_s: float


@dataclass(frozen=True, slots=True)
class StopWorker:
    """End a worker for good, so that it neither costs money nor samples."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class Publish:
    """Publish the learner's weights as `version`."""

    version: int


@dataclass(frozen=True, slots=True)
class Install:
    """Install the newest publication on a worker. `fresh`: rewrite every weight, after a refused install."""

    worker_id: str
    epoch: int
    fresh: bool


@dataclass(frozen=True, slots=True)
class FormBatch:
    """Ask the data plane for the batch of update `step`, or for the next part of it.

    `wait_s`: longest wait for it, seconds; `whole`: form no part but the one that makes the batch whole.
    """

    step: int
    wait_s: float = 1.0
    whole: bool = False


@dataclass(frozen=True, slots=True)
class OpenWindow:
    """Have seeders sample."""

    seeders: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CloseWindow:
    """Have seeders hand over their leases, and sample no more."""

    seeders: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Train:
    """Train a batch, or a part of one. `whole`: all parts of the step until now, as one batch."""

    batch: TrainBatch
    whole: TrainBatch


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Evaluate for `step`, with the weights that these workers serve."""

    step: int
    worker_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    step: int


@dataclass(frozen=True, slots=True)
class AdjustLearner:
    """Have the learner train with other settings from its next step on."""

    adjustment: Adjustment


@dataclass(frozen=True, slots=True)
class LimitStaleness:
    """Have the data plane enforce another S from the next batch on, at most the configured one."""

    max_staleness: int


@dataclass(frozen=True, slots=True)
class TellGuard:
    """Report the guard's state, and as text what it did; "": nothing."""

    report: GuardReport
    text: str


@dataclass(frozen=True, slots=True)
class Finish:
    """End the run. `error` gives the reason; "" if the run is done."""

    status: EndStatus
    error: str = ""


Action = (
    StartWorker
    | LeaveWorker
    | StopWorker
    | Publish
    | Install
    | FormBatch
    | OpenWindow
    | CloseWindow
    | Train
    | Evaluate
    | Checkpoint
    | AdjustLearner
    | LimitStaleness
    | TellGuard
    | Finish
)
