"""Settings that a resume changes: listed if they may change, refused if not, before any process starts.

The comparison is between the run's config.yaml and the settings to continue with. A setting declared `Fixed`
must not change, nor an option of the task unless the task declares it `Free`. Settings whose default depends
on other settings are compared by their effective values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from echo_planes.config.conditions import COMES_TO
from echo_planes.config.fields import on_resume
from echo_planes.config.schema import Config, TaskConfig
from echo_planes.errors import ConfigError

MOST_CHARS = 80  # of a value that is shown
# Settings of one call, not of the run.
_OF_A_CALL = ("run.resume", "run.dir")
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
    """Setting that differs from the run's config.yaml."""

    path: str  # "learner.lr"
    before: Any
    now: Any
    is_fixed: bool

    def __str__(self) -> str:
        return f"{self.path} {_shown(self.before)} -> {_shown(self.now)}"


def changes_of(before: Config, now: Config, options: Callable[[TaskConfig], BaseModel]) -> list[Change]:
    """Return every setting that differs.

    Args:
        before: the run's recorded settings.
        now: the settings to continue with.
        options: returns the validated options of a task, its defaults filled in.
    """
    found = list(_compared("", before, now))
    for path, comes_to in COMES_TO.items():
        found = [change for change in found if change.path != path]
        if comes_to(before) != comes_to(now):
            found.append(Change(path, comes_to(before), comes_to(now), is_fixed=False))
    if before.task.adapter == now.task.adapter:
        found += _compared("task", options(before.task), options(now.task), is_task=True)
    return [change for change in found if change.path not in _OF_A_CALL]


def check_changes(changes: Sequence[Change], folder: str) -> None:
    """Check that no fixed setting has changed.

    Raises:
        ConfigError: one has.
    """
    for change in changes:
        if change.is_fixed:
            why = _INSTEAD.get(change.path, _TASK if change.path.startswith("task.") else _SAMPLED)
            raise ConfigError(
                f"run.resume={folder}: {change.path} was {_shown(change.before)} and is now "
                f"{_shown(change.now)}: {why}; leave it out, or start a new run with it"
            )


def check_unfinished(config: Config, step: int, status: str, *, is_stored: bool = True) -> None:
    """Check that a resumed run has work left.

    Args:
        config: the settings to continue with.
        step: of the newest checkpoint.
        status: of the run's summary.json; "" if it has none.
        is_stored: whether the store has the weights of that step; else a resume publishes them again.

    Raises:
        ConfigError: `step` is beyond run.steps, or equals it and the run ended as done or collapsed.
    """
    steps = config.run.steps
    if step > steps or (step == steps and is_stored and status in ("done", "collapsed")):
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
    """Return whether a value is a non-empty list of sections."""
    return isinstance(value, list) and bool(value) and all(isinstance(one, BaseModel) for one in value)


def _shown(value: Any) -> str:
    """Return a value as on the command line, on one line; of a list of sections, their number."""
    if _is_many(value):
        return f"{len(value)} instance type{'s' if len(value) > 1 else ''}"
    text = value if isinstance(value, str) else _json(value)
    return text if len(text) <= MOST_CHARS else f"{text[: MOST_CHARS - 1]}…"


def _json(value: Any) -> str:
    return json.dumps(value.model_dump(mode="json") if isinstance(value, BaseModel) else value, default=str)
