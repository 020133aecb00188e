"""Events that the controller is told, and actions that it answers."""

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

# End of a run. `rollback`: it is opened again from an older checkpoint.
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


@dataclass(frozen=True, slots=True)
class WorkerWanted:
    """The fleet is to have another worker. Its name was never used before."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class WorkerUnwanted:
    """A worker is to leave: it is no longer needed, or its machine is about to go."""

    worker_id: str
    reason: str
    limit_s: float  # until it must be gone


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    """A worker that was to leave has handed everything over."""

    worker_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class LearnerReady:
    """The learner holds its weights; `step` updates are behind it."""

    step: int


@dataclass(frozen=True, slots=True)
class Published:
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Installed:
    """The outcome of an install, good or not."""

    report: InstallReport
    epoch: int


@dataclass(frozen=True, slots=True)
class BatchReady:
    batch: TrainBatch


@dataclass(frozen=True, slots=True)
class BatchNotReady:
    reason: Literal["starved", "holding", "filling"]
    detail: str


@dataclass(frozen=True, slots=True)
class StepDone:
    stats: StepStats


@dataclass(frozen=True, slots=True)
class Checkpointed:
    step: int


@dataclass(frozen=True, slots=True)
class Adjusted:
    """The learner, or the data plane, works as the guard wants it from now on."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    report: EvalReport


@dataclass(frozen=True, slots=True)
class EvaluationLost:
    """A worker was lost while it evaluated; the evaluation is done again."""

    step: int


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Ctrl-C or SIGTERM, or the budget is spent: `status` is what the run will have ended as."""

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
    | StepDone
    | Checkpointed
    | Adjusted
    | Evaluated
    | EvaluationLost
    | StopRequested
)


# --- actions -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start an incarnation after `delay_s`. Its older incarnation, if any, is ended and fenced first."""

    worker_id: str
    epoch: int
    delay_s: float


@dataclass(frozen=True, slots=True)
class LeaveWorker:
    """Have an incarnation take no new prompts and hand over what it has, within `limit_s`."""

    worker_id: str
    epoch: int
    limit_s: float


@dataclass(frozen=True, slots=True)
class StopWorker:
    """End a worker that will not be started again: it must neither cost nor sample any longer."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class Publish:
    """Publish the learner's weights as `version`."""

    version: int


@dataclass(frozen=True, slots=True)
class Install:
    """Make the newest publication serve at a worker. `fresh`: rewrite every weight, after a refusal."""

    worker_id: str
    epoch: int
    fresh: bool


@dataclass(frozen=True, slots=True)
class FormBatch:
    """Ask the data plane for the batch of update `step`."""

    step: int


@dataclass(frozen=True, slots=True)
class Train:
    batch: TrainBatch


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Evaluate with the weights these workers serve."""

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
    """Have the data plane keep to another S from the next batch on; never more than the configured one."""

    max_staleness: int


@dataclass(frozen=True, slots=True)
class TellGuard:
    """Tell where the guard stands, and in words what it did; "" where it did nothing."""

    report: GuardReport
    text: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The run is over. `error` says why, where it is not done."""

    status: EndStatus
    error: str = ""


Action = (
    StartWorker
    | LeaveWorker
    | StopWorker
    | Publish
    | Install
    | FormBatch
    | Train
    | Evaluate
    | Checkpoint
    | AdjustLearner
    | LimitStaleness
    | TellGuard
    | Finish
)
