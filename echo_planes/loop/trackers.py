"""Trackers of other projects, each an optional extra: tensorboard, wandb, trackio.

Each gets every number of a step under the name that metrics.jsonl has; an entry of a table is `name/key`.
Events stay in events.jsonl.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from echo_planes.config.schema import Config
from echo_planes.errors import ConfigError
from echo_planes.reporting.metrics import write_atomic

PROJECT = "echo_planes"
WANDB_ID = "wandb_id.txt"  # in the run folder
PACKAGES = ("tensorboard", "wandb", "trackio")  # and extras of the same names


def check_installed(name: str) -> None:
    """Check that the package of a tracker is there.

    Raises:
        ConfigError: says how to install it.
    """
    if name in PACKAGES and find_spec(name) is None:
        raise ConfigError(
            f"run.tracker={name}: the package {name} is missing; pip install 'echo_planes[{name}]'"
        )


def scalars(numbers: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a step by name; those of a table by `name/key`."""
    found: dict[str, float] = {}
    for name, value in numbers.items():
        if isinstance(value, Mapping):
            found |= {f"{name}/{key}": one for key, one in scalars(value).items()}
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            found[name] = value
    return found


class _Steps:
    """Tracker of steps alone, from a function that logs and one that finishes."""

    def __init__(self, log: Callable[[dict[str, float], int], None], finish: Callable[[], None]) -> None:
        self._log = log
        self.close = finish

    def step(self, numbers: Mapping[str, Any]) -> None:
        found = scalars(numbers)
        self._log(found, int(found.pop("step")))

    def event(self, record: Mapping[str, Any]) -> None:
        """Leave it to events.jsonl."""


def tensorboard(config: Config, folder: Path) -> _Steps:
    """Return a tracker that writes event files to the run's folder `tensorboard`."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder / "tensorboard"))
    last = math.inf  # so that the first step of a resumed run begins a session

    def log(numbers: dict[str, float], step: int) -> None:
        nonlocal last
        if step <= last:  # steps repeat: the start of a session takes the place of all from its step on
            started = SessionLog(status=SessionLog.START)
            writer.add_event(Event(wall_time=time.time(), step=step, session_log=started))
        last = step
        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        writer.flush()

    return _Steps(log, writer.close)


def wandb(config: Config, folder: Path) -> _Steps:
    """Return a tracker of Weights & Biases, which obeys its own variables (WANDB_MODE, WANDB_PROJECT).

    A resume goes on with the run whose id is in the run folder.
    """
    import wandb as package

    path = folder / WANDB_ID
    known = path.read_text(encoding="utf-8").strip() if path.exists() else None
    run = package.init(
        id=known,
        resume="allow" if known else None,
        project=None if "WANDB_PROJECT" in os.environ else PROJECT,
        name=folder.name,
        dir=str(folder),
        config=config.model_dump(mode="json"),
    )
    write_atomic(path, f"{run.id}\n")
    # After a rollback or a resume steps repeat, and wandb's own counter never goes back.
    run.define_metric("*", step_metric="step")
    return _Steps(lambda numbers, step: run.log(numbers | {"step": step}), run.finish)


def trackio(config: Config, folder: Path) -> _Steps:
    """Return a tracker of trackio, whose database lies in TRACKIO_DIR or its own cache."""
    import trackio as package

    run = package.init(
        project=PROJECT,
        name=folder.name,
        config=config.model_dump(mode="json"),
        resume="allow" if config.run.resume else "never",
        auto_log_gpu=False,
    )
    return _Steps(lambda numbers, step: run.log(numbers, step=step), package.finish)
