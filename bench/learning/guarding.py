"""The guard on runs that break and on runs that do not: is it early, is it quiet, does what it does help.

Broken runs: objectives without drift control, at lags and rates that the table of `staleness` breaks.
Healthy ones: the defaults. Both are runs of that table, whose figures the guard is shown. What it does is
tried on the plain objective, with checkpoints every `SAVE_EVERY` steps; a rollback goes back to one of them.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.learning.harness import LAST, Loop, Setup, in_processes
from bench.learning.intervals import interval
from bench.learning.staleness import METHODS, ONE, Result, grid, run_all
from echo_planes.config.schema import GuardConfig
from echo_planes.errors import DivergedError
from echo_planes.learning.fall import collapse_of
from echo_planes.learning.guard import Guard, GuardFigures, figures_of
from echo_planes.types import Adjustment

SAVE_EVERY = 10
BROKEN_METHODS, BROKEN_LAGS, BROKEN_TIMES = ("uncorrected", "proximal", "sampler"), (3, 6, 11, 16), (4,)
HEALTHY_LAGS, HEALTHY_TIMES = (0, 1, 3, 6, 11, 16), (1, 2, 4, 8)
LOST = 0.05  # of the best reward (mean of ten steps): by then a collapse must have been named


@dataclass(frozen=True, slots=True)
class Warned:
    """A run without a guard, shown to one."""

    method: str
    lag: int
    times: int  # of the rate `ONE`
    seed: int
    collapsed: bool
    steps: int
    alarms: tuple[int, ...]  # steps
    first: str  # alarm, in words
    lost_at: int | None  # step at which the reward had lost `LOST` of its best for good


@dataclass(frozen=True, slots=True)
class Guarded:
    """A run that the guard acted on."""

    lag: int
    times: int
    seed: int
    status: str  # done, collapsed, or stopped by the guard
    alarms: tuple[int, ...]  # steps
    final: float  # mean reward of the last 20 steps
    steps: int
    actions: dict[str, int]


def warn(run: Result) -> Warned:
    """Show a run's figures to the guard.

    That drift control holds the rate far below its schedule is told too, and is true, but no alarm.
    """
    guard = Guard(GuardConfig(mode="warn"), run.lag)
    alarms: list[tuple[int, str]] = []
    for step, figures in enumerate(run.watched):
        verdict = guard.observe(GuardFigures(**figures))
        if verdict is not None and sum(number for _, number in guard.report.alarms) > len(alarms):
            alarms.append((step, verdict.text))
    return Warned(
        run.method,
        run.lag,
        run.times,
        run.seed,
        run.collapsed,
        len(run.watched),
        tuple(step for step, _ in alarms),
        alarms[0][1] if alarms else "",
        _lost_at(run.rewards),
    )


def act(job: tuple[int, int, int], steps: int = 120) -> Guarded:
    """Train the plain objective at a lag, a multiple of the rate and a seed, as the guard wants it."""
    given, times, seed = job
    lag, halved, stopped = given, 1.0, False
    guard = Guard(GuardConfig(), lag)
    rewards: list[float] = []
    spreads: list[float] = []
    alarms: list[int] = []
    actions: dict[str, int] = {}
    records: dict[int, dict[str, Any]] = {}  # of the guard, by step of a checkpoint
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        loop = Loop(Setup(lag, ONE * times, seed, METHODS["proximal"], steps=steps), folder)
        step = 0
        try:
            while step < steps and not stopped:
                if step % SAVE_EVERY == 0 and not (folder / str(step)).exists():
                    (folder / str(step)).mkdir()
                    loop.learner.save(folder / str(step))
                    records[step] = guard.record()
                    guard.saved(step)
                batch, step_rewards, _ = loop.sample(step)
                rewards.append(fmean(step_rewards))
                spreads.append(float(batch.rewards.std()))
                stats = loop.learner.train_step(batch)
                step += 1
                verdict = guard.observe(figures_of(batch, stats))
                if verdict and verdict.rung:
                    alarms.append(len(rewards))
                    actions[verdict.rung] = actions.get(verdict.rung, 0) + 1
                    stopped = verdict.rung == "stop"
                if verdict and verdict.rung == "rollback":
                    step = guard.report.good_step
                    for later in (
                        one for one in folder.iterdir() if one.name.isdigit() and int(one.name) > step
                    ):
                        shutil.rmtree(later)
                    loop.learner.load(folder / str(step))
                    loop.forget()
                    halved *= 0.5
                    lag //= 2
                    guard = Guard(GuardConfig(), lag, guard.record_after_rollback(records[step]))
                    records[step] = guard.record()
                loop.lag = guard.max_staleness
                wanted = guard.adjustment
                loop.learner.adjust(Adjustment(wanted.rate_scale * halved, wanted.mask_outliers))
        except DivergedError:
            stopped = True
        finally:
            loop.close()
    status = "stopped" if stopped else "collapsed" if collapse_of(rewards, spreads) else "done"
    return Guarded(given, times, seed, status, tuple(alarms), fmean(rewards[-LAST:]), len(rewards), actions)


def _lost_at(rewards: Sequence[float]) -> int | None:
    """The step after which the mean of ten never comes back to within `LOST` of its best so far."""
    best = 0.0
    lost: int | None = None
    for step in range(9, len(rewards)):
        mean = fmean(rewards[step - 9 : step + 1])
        best = max(best, mean)
        if mean >= (1 - LOST) * best:
            lost = None
        elif lost is None:
            lost = step
    return lost


def figures(seeds: Sequence[int], cache: Path, processes: int) -> tuple[dict[str, Any], dict[str, bool]]:
    """Every run, and what is claimed of them."""
    table = partial(grid, updates=(1,), seeds=seeds, steps=120, model="builtin:tiny-math", task="{}")
    doomed = table(BROKEN_METHODS, BROKEN_LAGS, BROKEN_TIMES)
    sound = table(("default",), HEALTHY_LAGS, HEALTHY_TIMES)
    warned = [warn(run) for run in run_all([*doomed, *sound], cache, processes)]
    acted = []
    for one in in_processes(
        act,
        [(lag, times, seed) for lag in BROKEN_LAGS for times in BROKEN_TIMES for seed in seeds],
        processes,
    ):
        acted.append(one)
        print(one, flush=True)
    broken = [one for one in warned[: len(doomed)] if one.collapsed]
    healthy = [one for one in warned[len(doomed) :] if not one.collapsed]
    quiet, false_alarms = sum(one.steps for one in healthy), sum(len(one.alarms) for one in healthy)
    late = [one for one in broken if not one.alarms or one.lost_at is None or one.alarms[0] > one.lost_at]
    ahead = [one.lost_at - one.alarms[0] for one in broken if one not in late and one.lost_at is not None]
    fresh = fmean(run.final for run in run_all(table(("default",), (0,), (1,)), cache, processes))
    final = interval([one.final for one in acted])
    for alarmed in [*late, *(one for one in healthy if one.alarms)]:
        print(alarmed)
    told_ahead = f"{min(ahead, default=0)} to {max(ahead, default=0)} steps ahead"
    print(f"{len(broken)} broken runs, {len(late)} named late, the others {told_ahead}")
    print(f"{false_alarms} alarms in {quiet} healthy steps; acted on: {final}, S = 0: {fresh:.3f}")
    told = {
        "runs broke": len(broken) >= len(doomed) / 2,
        "19 of 20 collapses are named before the reward has lost 5 %": 20 * len(late) <= len(broken),
        "fewer than 1 false alarm in 10,000 healthy steps": quiet >= 10_000 and false_alarms * 10_000 < quiet,
        "after its actions a run ends within 5 % of S = 0": final.mean >= 0.95 * fresh,
        "no run that collapsed says done": all(one.status != "done" or one.final > 0.5 for one in acted),
    }
    rows = {
        "broken": [asdict(one) for one in broken],
        "healthy": [asdict(one) for one in healthy],
        "acted": [asdict(one) for one in acted],
        "healthy_steps": quiet,
        "false_alarms": false_alarms,
        "acted_final": final,
        "fresh_final": fresh,
    }
    return rows, told
