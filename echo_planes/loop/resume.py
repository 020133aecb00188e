"""Changes that a resume makes to a run: told where they may be, refused where not, before anything starts.

Compared are the settings that the run recorded (its config.yaml) and those it is to go on with. A setting
that is declared `Fixed` is the run's for good; the options of its task are, too, unless the task declares one
`Free`. Of settings that have a default of their own, what they come to counts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from echo_planes.config.fields import on_resume
from echo_planes.config.schema import Config, TaskConfig
from echo_planes.errors import ConfigError

MOST_CHARS = 80  # of a value that is shown
# Settings of a call, not of the run; and those without a value of their own.
_OF_A_CALL = ("run.resume", "run.dir")
_COMES_TO: Mapping[str, Callable[[Config], Any]] = {
    "learner.lr": lambda config: config.lr,
    "sampling.refill": lambda config: config.refill,
    "sampling.overlong": lambda config: config.overlong,
    "staleness.publish_every": lambda config: config.staleness.kappa,
    "objective.anchor": lambda config: config.objective.ratio_anchor,
}
_INSTEAD = {
    "model.path": "a resume goes on with the same model",
    "task.name": "a resume goes on with the same task",
    "task.adapter": "a resume goes on with the same task",
    "run.seed": "a resume goes on with the same prompts, in the same order",
    "learner.num_ranks": "the checkpoint is laid out for as many ranks",
    "learner.zero_stage": "the checkpoint is laid out for one stage",
    "learner.dtype": "the checkpoint is laid out for one type",
}
_TASK = "a resume goes on with the same task, of the same rows"
_SAMPLED = "what the run has sampled was sampled, and is trained, under it"


@dataclass(frozen=True, slots=True)
class Change:
    """A setting that is not what the run recorded."""

    path: str  # "learner.lr"
    before: Any
    now: Any
    is_fixed: bool

    def __str__(self) -> str:
        return f"{self.path} {_shown(self.before)} -> {_shown(self.now)}"


def changes_of(before: Config, now: Config, options: Callable[[TaskConfig], BaseModel]) -> list[Change]:
    """Every setting that differs.

    Args:
        before: as the run recorded it.
        now: as it is to go on.
        options: the validated options of a task, its defaults filled in.
    """
    found = list(_compared("", before, now))
    for path, comes_to in _COMES_TO.items():
        found = [change for change in found if change.path != path]
        if comes_to(before) != comes_to(now):
            found.append(Change(path, comes_to(before), comes_to(now), is_fixed=False))
    if before.task.adapter == now.task.adapter:
        found += _compared("task", options(before.task), options(now.task), is_task=True)
    return [change for change in found if change.path not in _OF_A_CALL]


def check_changes(changes: Sequence[Change], folder: str) -> None:
    """Nothing that is the run's for good was changed.

    Raises:
        ConfigError: something was.
    """
    for change in changes:
        if change.is_fixed:
            why = _INSTEAD.get(change.path, _TASK if change.path.startswith("task.") else _SAMPLED)
            raise ConfigError(
                f"run.resume={folder}: {change.path} was {_shown(change.before)} and is now "
                f"{_shown(change.now)}: {why}; leave it out, or start a new run with it"
            )


def check_unfinished(config: Config, step: int, status: str) -> None:
    """There is something left to do.

    Args:
        config: settings to go on with.
        step: of the newest checkpoint.
        status: how the run says that it ended; "" where it does not.

    Raises:
        ConfigError: all steps are made.
    """
    steps = config.run.steps
    if step > steps or (step == steps and status in ("done", "collapsed")):
        raise ConfigError(
            f"run.resume={config.run.resume}: nothing is left to do: the run ({status or 'unfinished'}) has "
            f"made {step} steps, and run.steps={steps}; give a larger run.steps to go on"
        )


def _compared(prefix: str, before: BaseModel, now: BaseModel, *, is_task: bool = False) -> Iterator[Change]:
    for name, field in type(now).model_fields.items():
        path = f"{prefix}.{name}" if prefix else name
        old, new = getattr(before, name), getattr(now, name)
        is_fixed = on_resume(field) == "fixed" or (is_task and on_resume(field) != "free")
        if _is_many(old) and _is_many(new) and len(old) == len(new):
            for number, pair in enumerate(zip(old, new, strict=True)):
                yield from _compared(f"{path}.{number}", *pair)
        elif isinstance(old, BaseModel) and type(old) is type(new):
            yield from _compared(path, old, new, is_task=is_task)
        elif old != new:
            yield Change(path, old, new, is_fixed)


def _is_many(value: object) -> bool:
    """Whether it is a list of sections."""
    return isinstance(value, list) and bool(value) and all(isinstance(one, BaseModel) for one in value)


def _shown(value: Any) -> str:
    """A value in a line, as it would be written on the command line."""
    if _is_many(value):
        return f"{len(value)} kind{'s' if len(value) > 1 else ''}"
    text = value if isinstance(value, str) else _json(value)
    return text if len(text) <= MOST_CHARS else f"{text[: MOST_CHARS - 1]}…"


def _json(value: Any) -> str:
    return json.dumps(value.model_dump(mode="json") if isinstance(value, BaseModel) else value, default=str)
