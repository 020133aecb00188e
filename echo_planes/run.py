"""`python -m echo_planes.run task=math key=value ...`: one run, from the command line to the report."""

from __future__ import annotations

import asyncio
import datetime as dt
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil

from echo_planes.cluster.clock import Clock, MonotonicClock
from echo_planes.cluster.placement import cluster_address
from echo_planes.cluster.process import keep_ray_private, quieten_ray
from echo_planes.config.files import user_path
from echo_planes.config.hub import pinned
from echo_planes.config.schema import Config
from echo_planes.data.tasks.registry import adapter_options
from echo_planes.errors import CollapsedError, EchoPlanesError, RunError, StoppedError, UserError
from echo_planes.loop import memory, preflight
from echo_planes.loop.checkpoint import CheckpointMeta, newest_checkpoint, resume_command
from echo_planes.loop.inputs import check_inputs, digest_of_model, digest_of_prompts, keep_inputs
from echo_planes.loop.loading import describe, dump_resolved, load_config, recorded_config
from echo_planes.loop.resume import Change, changes_of, check_changes, check_unfinished
from echo_planes.loop.runner import Outcome
from echo_planes.reporting.metrics import GAUGES, read_summary
from echo_planes.reporting.terminal import View

HEAR_S = 0.01  # for the event loop to process a Ctrl-C that came during blocking code

USAGE = """usage: python -m echo_planes.run [--print] [--help] [group=name] [section.key=value] ...

  python -m echo_planes.run                                     addition on two CPU workers
  python -m echo_planes.run task.dataset=gsm8k task.data=PATH model.path=FOLDER
  python -m echo_planes.run task=package.module:Class           your own TaskAdapter
  python -m echo_planes.run run.resume=runs/FOLDER              continue a run

  --print   show the resolved configuration and exit
  --help    show this, with every key
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and return the exit status. A person's mistake is one line on stderr, never a traceback."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if "--help" in words or "-h" in words:
            settings = [word for word in words if not word.startswith("-")]
            return _show(f"{USAGE}\n{describe(settings)}\n")
        config = load_config([word for word in words if word != "--print"])
        if "--print" in words:
            return _show(dump_resolved(config))
        return run(config)
    except (UserError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("error: interrupted before the run began", file=sys.stderr)
        return StoppedError.exit_status
    except EchoPlanesError as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _show(text: str) -> int:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, as in `--help | head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def run(config: Config) -> int:
    """Run with a resolved configuration, and return the exit status.

    Raises:
        EchoPlanesError: the run could not start, was interrupted, failed or collapsed. A run that began has
            written its summary and report.
    """
    model = config.model.model_copy(update={"path": pinned(config.model.path)})
    config = config.model_copy(update={"model": model})
    folder = run_folder(config)
    checkpoint: Path | None = None
    meta = CheckpointMeta(step=0, lineage_number=0, next_epoch=0)
    changes: list[Change] = []
    if config.run.resume:
        changes = changes_of(recorded_config(folder), config, lambda task: adapter_options(task)[1])
        check_changes(changes, config.run.resume)
        checkpoint, meta = newest_checkpoint(folder)
        summary = read_summary(folder)
        is_stored = meta.step not in (summary.get("versions_unstored") or ())
        check_unfinished(config, meta.step, str(summary.get("status", "")), is_stored=is_stored)
    config = dated(config, dt.date.today())
    preflight.check(config, folder)
    clock = MonotonicClock()
    view = View(sys.stdout, config.run.steps, sys.stdout.isatty(), clock)
    view.event(f"run folder {folder}")
    try:
        with view.ticking():
            return asyncio.run(_run(config, folder, checkpoint, meta, list(map(str, changes)), view, clock))
    except (KeyboardInterrupt, asyncio.CancelledError):
        way_on = resume_command(folder)
        advice = f"go on with: {way_on}" if way_on else "there is no checkpoint to go on from: start anew"
        raise StoppedError(f"interrupted; {advice}") from None


def dated(config: Config, today: dt.date) -> Config:
    """Return the settings with the run's date, which config.yaml keeps: a resume tells templates the same."""
    run = config.run.model_copy(update={"date": config.run.date or today})
    return config.model_copy(update={"run": run})


def run_folder(config: Config) -> Path:
    """Return the run's folder as an absolute path: processes of the run have other working directories."""
    if config.run.resume:
        return user_path(config.run.resume).resolve()
    if config.run.dir:
        return user_path(config.run.dir).resolve()
    return (Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{config.task.name}").resolve()


async def _run(
    config: Config,
    folder: Path,
    checkpoint: Path | None,
    meta: CheckpointMeta,
    changes: Sequence[str],
    view: View,
    clock: Clock,
) -> int:
    start_s = clock.now_s()
    # The event loop handles SIGINT, since some imports swallow a KeyboardInterrupt.
    task = asyncio.current_task()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, lambda: task and task.cancel())
    quieten_ray()
    if not cluster_address(config):
        keep_ray_private()
    with view.phase("imports"):
        # Imported only now, so that the checks of the settings report a mistake before these seconds.
        from echo_planes.cluster import session as cluster
        from echo_planes.loop import launch
        from echo_planes.loop.job import open_folder, run_job
        from echo_planes.loop.task_probe import probe_task

    await asyncio.sleep(HEAR_S)
    with view.phase("task"):
        told, prompts = probe_task(config)
        inputs = {
            "model": digest_of_model(config.model.folder),
            "prompts": digest_of_prompts(prompts),
        }
        if checkpoint:
            check_inputs(folder, inputs, config.model.path)
    if told:
        view.event(told)
    with ExitStack() as stack:
        with view.phase("Ray"):
            config = stack.enter_context(cluster.ray_session(config, folder / "ray_logs"))
            machines = cluster.machines()
            preflight.check_cards(config.fleet, machines)
            memory.check_memory(config, machines, psutil.virtual_memory().total)
        await asyncio.sleep(HEAR_S)
        # The run folder is made only now, so that a mistake leaves none behind.
        meta = open_folder(config, folder, checkpoint, meta)
        keep_inputs(folder, inputs)
        outcome = await run_job(
            config,
            folder,
            view,
            clock,
            start_s=start_s,
            checkpoint=checkpoint,
            meta=meta,
            changes=changes,
            make_planes=launch.RayPlanes,
            make_actuator=launch.make_actuator,
            worker_configs=config.first_workers(),
            export=cluster.prometheus((one.key, one.name, one.description) for one in GAUGES),
        )
        return exit_status(outcome)  # within the session, which keeps Ray's logs of a run that failed


def exit_status(outcome: Outcome) -> int:
    """Return the exit status of an outcome; 0 also for a spent budget, which is a planned end.

    Raises:
        RunError: the run failed, or collapsed.
    """
    if outcome.status == "collapsed":
        raise CollapsedError(outcome.error)
    if outcome.status == "failed":
        raise RunError(outcome.error)
    return StoppedError.exit_status if outcome.status == "stopped" else 0


if __name__ == "__main__":
    sys.exit(main())
