"""The guard on runs that break and on runs that do not: is it early, is it quiet, does what it does help.

Broken runs: the plain objective without drift control, at lags and rates that the table breaks. Healthy
ones: the defaults. Checkpoints are written every `SAVE_EVERY` steps; a rollback goes back to one of them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.learning.harness import LAST, Loop, Setup
from bench.learning.staleness import NO_DRIFT, ONE, interval
from echo_planes.config import GuardConfig
from echo_planes.errors import DivergedError
from echo_planes.learning.fall import collapse_of
from echo_planes.learning.guard import Guard, figures_of
from echo_planes.types import Adjustment

SAVE_EVERY = 10
BROKEN = ((3, 4), (6, 4), (11, 4), (16, 4))  # lag, times the rate `ONE`
HEALTHY = ((0, 1), (3, 1), (6, 1), (3, 4), (11, 4))
LOST = 0.05  # of the best reward (mean of ten steps): by then a collapse must have been named


@dataclass(frozen=True, slots=True)
class Watched:
    """A run under the guard."""

    lag: int
    times: int
    seed: int
    mode: str
    status: str  # done, collapsed, or stopped by the guard
    alarms: tuple[int, ...]  # steps
    lost_at: int | None  # step at which the reward had lost `LOST` of its best
    final: float  # mean reward of the last 20 steps
    steps: int
    actions: dict[str, int]


def watch(lag: int, times: int, seed: int, mode: str, settings: dict[str, Any], steps: int = 120) -> Watched:
    """One run. `mode`: act or warn."""
    given = lag
    guard = Guard(GuardConfig.model_validate({"mode": mode}), lag)
    rewards: list[float] = []
    spreads: list[float] = []
    alarms: list[int] = []
    actions: dict[str, int] = {}
    stopped, halved = False, 1.0
    with tempfile.TemporaryDirectory() as folder:
        loop = Loop(Setup(lag, ONE * times, seed, settings, steps=steps), Path(folder))
        step = 0
        try:
            while step < steps and not stopped:
                batch, step_rewards, _ = loop.sample(step)
                rewards.append(fmean(step_rewards))
                spreads.append(float(batch.rewards.std()))
                stats = loop.learner.train_step(batch)
                step += 1
                verdict = guard.observe(figures_of(batch, stats))
                if verdict and (verdict.rung or mode == "warn"):
                    alarms.append(len(rewards))
                    actions[verdict.rung or "warn"] = actions.get(verdict.rung or "warn", 0) + 1
                if verdict and verdict.rung == "rollback":
                    step = guard.report.good_step
                    loop.learner.load(Path(folder) / str(step))
                    loop.forget()
                    halved *= 0.5
                    lag //= 2
                    guard = Guard(
                        GuardConfig.model_validate({"mode": mode}), lag, guard.record_after_rollback()
                    )
                stopped = verdict is not None and verdict.rung == "stop"
                if mode == "act":
                    loop.lag = guard.max_staleness
                    wanted = guard.adjustment
                    loop.learner.adjust(Adjustment(wanted.rate_scale * halved, wanted.mask_outliers))
                if step % SAVE_EVERY == 0 and not (Path(folder) / str(step)).exists():
                    (Path(folder) / str(step)).mkdir()
                    loop.learner.save(Path(folder) / str(step))
                    guard.saved(step)
        except DivergedError:
            stopped = True
        finally:
            loop.close()
    status = "stopped" if stopped else "collapsed" if collapse_of(rewards, spreads) else "done"
    return Watched(
        given,
        times,
        seed,
        mode,
        status,
        tuple(alarms),
        _lost_at(rewards),
        fmean(rewards[-LAST:]),
        len(rewards),
        actions,
    )


def _lost_at(rewards: Sequence[float]) -> int | None:
    """The step after which the mean of ten never comes back to within `LOST` of its best so far."""
    means = [fmean(rewards[max(0, i - 9) : i + 1]) for i in range(len(rewards))]
    best = 0.0
    lost: int | None = None
    for step, mean in enumerate(means):
        best = max(best, mean)
        if mean >= (1 - LOST) * best:
            lost = None
        elif lost is None:
            lost = step
    return lost


def figures(seeds: Sequence[int]) -> tuple[dict[str, Any], dict[str, bool]]:
    """Every run, and what is claimed of them."""
    plain = {"objective": {"anchor": "proximal"}, **NO_DRIFT}
    warned = [watch(lag, times, seed, "warn", plain) for lag, times in BROKEN for seed in seeds]
    acted = [watch(lag, times, seed, "act", plain) for lag, times in BROKEN for seed in seeds]
    healthy = [watch(lag, times, seed, "warn", {}) for lag, times in HEALTHY for seed in seeds]
    fresh = [one.final for one in healthy if (one.lag, one.times) == (0, 1)]
    for one in (*warned, *acted, *healthy):
        print(one, flush=True)
    broken = [one for one in warned if one.status != "done"]
    quiet = sum(one.steps for one in healthy if one.status == "done")
    false_alarms = sum(len(one.alarms) for one in healthy if one.status == "done")
    final, width = interval([one.final for one in acted])
    told = {
        "runs broke": bool(broken),
        "collapses are named before the reward has lost 5 %": all(
            one.alarms and one.lost_at is not None and one.alarms[0] <= one.lost_at for one in broken
        ),
        "fewer than 1 false alarm in 10,000 healthy steps": false_alarms * 10_000 < max(quiet, 1),
        "after its actions a run ends within 5 % of S = 0": final >= 0.95 * fmean(fresh),
        "no run that collapsed says done": all(one.status != "done" or one.final > 0.5 for one in acted),
    }
    rows = {
        "warned": [asdict(one) for one in warned],
        "acted": [asdict(one) for one in acted],
        "healthy": [asdict(one) for one in healthy],
        "healthy_steps": quiet,
        "false_alarms": false_alarms,
        "acted_final": (final, width),
        "fresh_final": fmean(fresh),
    }
    return rows, told
