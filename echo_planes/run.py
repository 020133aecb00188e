"""`python -m echo_planes.run task=math key=value ...`: one run, from the command line to the report."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from echo_planes.cluster.clock import Clock, MonotonicClock
from echo_planes.cluster.placement import cluster_address
from echo_planes.cluster.process import keep_ray_private
from echo_planes.config.files import user_path
from echo_planes.config.schema import Config
from echo_planes.data.tasks.registry import adapter_options
from echo_planes.errors import CollapsedError, EchoPlanesError, RunError, StoppedError, UserError
from echo_planes.loop import preflight
from echo_planes.loop.checkpoint import CheckpointMeta, newest_checkpoint
from echo_planes.loop.inputs import check_inputs, digest_of_model, digest_of_prompts, keep_inputs
from echo_planes.loop.loading import describe, dump_resolved, load_config, recorded_config
from echo_planes.loop.resume import Change, changes_of, check_changes, check_unfinished
from echo_planes.loop.runner import Outcome
from echo_planes.reporting.metrics import GAUGES, read_summary
from echo_planes.reporting.terminal import View

HEAR_S = 0.01  # for the loop to hear of a Ctrl-C that came while something else ran

USAGE = """usage: python -m echo_planes.run [--print] [--help] [group=name] [section.key=value] ...

  python -m echo_planes.run                                     addition on two CPU workers
  python -m echo_planes.run task.dataset=gsm8k task.data=PATH model.path=FOLDER
  python -m echo_planes.run task=package.module:Class           your own TaskAdapter
  python -m echo_planes.run run.resume=runs/FOLDER              continue a run

  --print   show the resolved configuration and exit
  --help    show this, with every key
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; returns the exit status. A person's mistake is one line on stderr, never a traceback."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if "--help" in words or "-h" in words:
            return _show(f"{USAGE}\n{describe(words)}\n")
        config = load_config([word for word in words if word != "--print"])
        if "--print" in words:
            return _show(dump_resolved(config))
        return run(config)
    except (UserError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    except (KeyboardInterrupt, asyncio.CancelledError):
        print(
            "error: interrupted; continue from the newest checkpoint with run.resume=FOLDER, if there is one",
            file=sys.stderr,
        )
        return StoppedError.exit_status
    except EchoPlanesError as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _show(text: str) -> int:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # `--help | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def run(config: Config) -> int:
    """One run with a resolved configuration; returns the exit status.

    Raises:
        EchoPlanesError: what ended it, after the summary and the report were written.
    """
    folder = run_folder(config)
    checkpoint: Path | None = None
    meta = CheckpointMeta(step=0, lineage_number=0, next_epoch=0)
    changes: list[Change] = []
    if config.run.resume:
        changes = changes_of(recorded_config(folder), config, lambda task: adapter_options(task)[1])
        check_changes(changes, config.run.resume)
        checkpoint, meta = newest_checkpoint(folder)
        check_unfinished(config, meta.step, str(read_summary(folder).get("status", "")))
    preflight.check(config, folder)
    clock = MonotonicClock()
    view = View(sys.stdout, config.run.steps, sys.stdout.isatty(), clock)
    view.event(f"run folder {folder}")
    return asyncio.run(_run(config, folder, checkpoint, meta, list(map(str, changes)), view, clock))


def run_folder(config: Config) -> Path:
    """The run's folder, absolute: processes of the run have other working directories."""
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
    # Heard by the loop, not by whatever code runs just then: some imports swallow an interruption.
    task = asyncio.current_task()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, lambda: task and task.cancel())
    if not cluster_address(config):
        keep_ray_private()
    with view.phase("imports"):
        # Only now: a mistake in the settings is told before these take their seconds.
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
            stack.enter_context(cluster.ray_session(config, folder / "ray_logs"))
        await asyncio.sleep(HEAR_S)
        # Only now is anything written: a mistake leaves no run folder behind.
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
            kinds=config.fleet.fixed(),
            export=cluster.prometheus((one.key, one.name, one.description) for one in GAUGES),
        )
    return exit_status(outcome)


def exit_status(outcome: Outcome) -> int:
    """0 also where the budget is spent: that is an end as planned, and a job that ends so has not failed.

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
