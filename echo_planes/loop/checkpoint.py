"""One checkpoint covers all planes: learner, replay buffer and prompt cursor, as of the same step.

::

    checkpoints/step-000050/
      meta.json    step, lineage number, worker epoch, the guard's record
      learner/     weights, fp32 masters, moments, RNG (DeepSpeed)
      data/        buffered groups, prompt cursor, ledger, published digests, partial rollouts (Arrow)

`save_checkpoint` writes under a temporary name and renames the folder at the end: every step-N is complete.
One that takes the place of another of its step first renames that one to step-N.replaced, which is found, and
complete, until the new one is in place.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from echo_planes.config.files import SETTINGS_BYTES, read_json, read_text
from echo_planes.errors import ClusterError, ConfigError, DataError, shown
from echo_planes.reporting.metrics import METRICS_FILE, read_metrics, write_atomic

LINEAGE_FILE = "lineage"  # in the run folder: number of the newest incarnation


class Saver(Protocol):
    """Plane that can write its part of a checkpoint."""

    async def save(self, folder: Path) -> None: ...


@dataclass(frozen=True, slots=True)
class CheckpointMeta:
    """Metadata of a checkpoint, for the next incarnation of the run."""

    step: int
    lineage_number: int  # incarnations of the run so far; each has a lineage of its own
    next_epoch: int  # first worker epoch of the next incarnation
    guard: Mapping[str, Any] = field(default_factory=dict)  # `learning.guard.Guard.record`


async def save_checkpoint(
    folder: Path,
    meta: CheckpointMeta,
    data: Saver,
    learner: Saver,
    *,
    keep: int,
    keep_steps: Collection[int] = (),
) -> Path:
    """Write and return `folder`/step-N; remove the others except the `keep` newest and `keep_steps`.

    Raises:
        ClusterError: the disk is full or cannot be written.
    """
    target = folder / _name_of(meta.step)
    kept = {_name_of(step) for step in keep_steps}
    replaced = target.with_name(f"{target.name}.replaced")
    partial = folder / ".partial"  # one name for all steps, so that no crash leaves more than one behind
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        await learner.save(partial / "learner")
        await data.save(partial / "data")
        (partial / "meta.json").write_text(json.dumps(asdict(meta)))
        _sync(partial)
        if target.exists():
            _remove(replaced)
            target.rename(replaced)
        partial.rename(target)
        _remove(replaced)
        for old in sorted(folder.glob("step-*"), key=_age)[:-keep]:
            if old.name not in kept:
                _remove(old)
    except OSError as error:
        raise ClusterError(
            f"cannot write the checkpoint {target}: {error.strerror}; free some space or set run.dir"
        ) from error
    return target


def newest_checkpoint(run_dir: Path) -> tuple[Path, CheckpointMeta]:
    """Return the folder and the metadata of the newest checkpoint.

    Raises:
        ConfigError: there is none.
        DataError: its metadata is not readable.
    """
    found = sorted((path.parent for path in (run_dir / "checkpoints").glob("step-*/meta.json")), key=_age)
    if not found:
        raise ConfigError(
            f"run.resume={run_dir}: no checkpoint there; start anew, or give another run's folder"
        )
    return found[-1], read_meta(found[-1])


def resume_command(run_dir: Path) -> str:
    """Return the command that resumes a run from its newest checkpoint; "" if it has none."""
    if not any((run_dir / "checkpoints").glob("step-*/meta.json")):
        return ""
    return f"python -m echo_planes.run {shlex.quote(f'run.resume={run_dir}')}"


def checkpoint_of(run_dir: Path, step: int) -> Path:
    """Return the folder of the checkpoint of a step."""
    return run_dir / "checkpoints" / _name_of(step)


def read_meta(checkpoint: Path) -> CheckpointMeta:
    """Read the metadata of a checkpoint.

    Raises:
        DataError: meta.json is missing, not readable, or holds something else.
    """
    path = checkpoint / "meta.json"
    advice = "restore it, or remove the folder to resume from an older one"
    try:
        meta = CheckpointMeta(**read_json(path, SETTINGS_BYTES, advice=advice))
        numbers = (meta.step, meta.lineage_number, meta.next_epoch)
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise TypeError("its numbers are not whole")
        if not isinstance(meta.guard, dict):
            raise TypeError("the guard's record is not an object")
    except TypeError as error:
        raise DataError(f"{path} is not readable ({error}); {advice}") from error
    return meta


def go_back(
    checkpoint: Path, next_epoch: int, record: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> CheckpointMeta:
    """Make a checkpoint the newest one, by removing later ones; return its new metadata.

    Args:
        checkpoint: its folder.
        next_epoch: worker epoch that no incarnation has used.
        record: returns the guard's record to continue with, given that of the checkpoint, where it is written
            for a later resume.

    Raises:
        DataError: the checkpoint's metadata is not readable.
    """
    meta = read_meta(checkpoint)
    for later in (other for other in checkpoint.parent.glob("step-*") if _age(other) > _age(checkpoint)):
        _remove(later)
    meta = replace(meta, next_epoch=max(meta.next_epoch, next_epoch), guard=record(meta.guard))
    write_atomic(checkpoint / "meta.json", json.dumps(asdict(meta)))
    return meta


def open_lineage(run_dir: Path, meta: CheckpointMeta) -> CheckpointMeta:
    """Return `meta` with a lineage number that the run has not used yet, and write that number to disk.

    The number in the checkpoint is not enough: a run that died before its next checkpoint has used one more.

    Raises:
        DataError: the lineage file does not hold a number.
    """
    path = run_dir / LINEAGE_FILE
    number = meta.lineage_number
    if path.exists():
        advice = "write the number of the newest lineage into it"
        text = read_text(path, SETTINGS_BYTES, advice=advice).strip()
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise DataError(f"{path} holds {shown(text)}, not a number; {advice}")
        number = max(number, int(text) + 1)
    write_atomic(path, f"{number}\n")
    return replace(meta, lineage_number=number)


def rewind_metrics(run_dir: Path, step: int) -> int:
    """Remove the metrics rows of steps after `step`, which a resume repeats; return how many."""
    rows = read_metrics(run_dir)
    kept = [row for row in rows if (row.get("step") or 0) <= step]
    if len(kept) < len(rows):
        write_atomic(run_dir / METRICS_FILE, "".join(json.dumps(row) + "\n" for row in kept))
    return len(rows) - len(kept)


def _name_of(step: int) -> str:
    return f"step-{step:06d}"


def _age(checkpoint: Path) -> tuple[int, str, bool]:
    """Return a sort key, oldest first: a step may have more digits than names are padded to."""
    return len(checkpoint.stem), checkpoint.stem, not checkpoint.suffix


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint, if it is there; its name goes first, so that nobody finds a part of it."""
    removed = checkpoint.with_name(".removed")
    shutil.rmtree(removed, ignore_errors=True)
    if checkpoint.exists():
        checkpoint.rename(removed)
        shutil.rmtree(removed)


def _sync(folder: Path) -> None:
    """Flush all files and the names in all folders to disk, before the rename completes the checkpoint."""
    for path in (folder, *folder.rglob("*")):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
