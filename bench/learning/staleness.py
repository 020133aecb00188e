"""Staleness against methods and learning rates, with an exact lag: what breaks, and what does not.

Every cell is a number of seeds; equal seeds see equal prompts. A run collapsed where its last 20 steps have
less than half of the best reward it had (mean of 10 steps).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from bench.learning import variants
from bench.learning.harness import Setup, in_processes, train
from bench.learning.intervals import Interval, interval
from echo_planes.types import TrainBatch

LAGS = (0, 1, 3, 6, 11, 16, 32)
FAR_LAGS, FAR_RATES = (64, 128, 256), (1, 4)  # beyond those of the map
NOISE = 0.03  # nats: mean |difference of log-probabilities| of a bf16 engine and an fp32 learner
IDLE = 0.5  # share of the steps without an update
RATES = (1, 2, 4, 8)  # times `ONE`
ONE = 2.5e-4  # the default rate of the embedded models, and the best of S = 0
SEEDS = (0, 1, 2, 3, 4)  # fixed before the first run
NO_DRIFT = {"learner": {"drift_target": 0.0}}
METHODS: dict[str, dict[str, Any]] = {
    "uncorrected": {
        "objective": {"anchor": "proximal", "tis_level": "none", "uncorrected": True},
        **NO_DRIFT,
    },
    "proximal": {"objective": {"anchor": "proximal"}, **NO_DRIFT},
    "sampler": {"objective": {"anchor": "sampler"}, **NO_DRIFT},
    "sequence": {"objective": {"name": "gspo", "anchor": "sampler"}, **NO_DRIFT},
    "masked": {"objective": {"anchor": "proximal", "token_mask": [0.5, 2.0]}, **NO_DRIFT},
    "m2po": NO_DRIFT,
    "sat": NO_DRIFT,
    "gac": {"learner": {**NO_DRIFT["learner"], "zero_stage": 0, "dtype": "fp32"}},
    "rate/(1+lag)": NO_DRIFT,
    "kl-adaptive": NO_DRIFT,
    "default": {},
    "idle": {},  # half of the steps make no update, since all rewards are equal
    "noisy": {},  # so, and the engine differs from the learner by `NOISE`
}
DISTURBED = {"idle": 0.0, "noisy": NOISE}


@dataclass(frozen=True, slots=True)
class Result:
    """One run."""

    method: str
    lag: int
    times: int  # of the rate `ONE`
    updates: int  # per step
    seed: int
    area: float
    final: float
    lowest_late: float
    best: float  # mean of ten steps
    tokens_to_reach: int | None
    drift: float  # mean over the steps that measured one, nats
    smallest_factor: float
    rewards: list[float]  # mean of each step
    watched: list[dict[str, Any]]  # of each step, the fields of `GuardFigures`
    seconds: float

    @property
    def mean_factor(self) -> float:
        return fmean(step["rate_factor"] or 0.0 for step in self.watched)

    @property
    def collapsed(self) -> bool:
        return self.final < 0.5 * self.best


@dataclass(frozen=True, slots=True)
class Job:
    """One run to be made."""

    method: str
    lag: int
    times: int
    updates: int
    seed: int
    steps: int
    model: str
    task: str  # options, JSON


def run_one(job: Job) -> Result:
    """Make it."""
    settings: dict[str, dict[str, Any]] = {k: dict(v) for k, v in METHODS[job.method].items()}
    settings.setdefault("learner", {})["updates_per_step"] = job.updates
    variant = job.method if job.method in variants.NAMES else ""
    setup = Setup(
        job.lag,
        ONE * job.times,
        job.seed,
        settings,
        variant,
        steps=job.steps,
        task=json.loads(job.task),
        model=job.model,
    )
    noise = DISTURBED.get(job.method)
    trace = train(setup, variants.change, None if noise is None else partial(disturbed, noise=noise))
    drift = [one for one in trace.drift if one is not None and math.isfinite(one)]
    means = [fmean(trace.rewards[i - 10 : i]) for i in range(10, len(trace.rewards) + 1)]
    return Result(
        job.method,
        job.lag,
        job.times,
        job.updates,
        job.seed,
        trace.area,
        trace.final,
        trace.lowest_late,
        max(means),
        trace.tokens_to_reach,
        fmean(drift) if drift else 0.0,
        min(trace.factor),
        trace.rewards,
        [asdict(figures) for figures in trace.watched],
        trace.seconds,
    )


def disturbed(batch: TrainBatch, rng: np.random.Generator, noise: float) -> TrainBatch:
    """Return a batch as of an engine that computes otherwise; in half of the steps all rewards are equal."""
    shift = rng.normal(0.0, noise * math.sqrt(math.pi / 2), len(batch.sampler_logprobs)).astype(np.float32)
    logprobs = np.where(batch.loss_mask, batch.sampler_logprobs + shift, batch.sampler_logprobs)
    rewards = np.zeros_like(batch.rewards) if rng.random() < IDLE else batch.rewards
    return replace(batch, sampler_logprobs=logprobs, rewards=rewards)


def run_all(jobs: Sequence[Job], cache: Path, processes: int) -> list[Result]:
    """Every job's result; those in `cache` (a line of JSON each) are not run again."""
    found = {_key(result): result for result in cached(cache)}
    left = [job for job in jobs if _key(job) not in found]
    with open(cache, "a", encoding="utf-8") as file:
        for result in in_processes(run_one, left, processes):
            found[_key(result)] = result
            file.write(json.dumps(asdict(result)) + "\n")
            file.flush()
            print(
                f"{result.method:13s} lag {result.lag:2d} {result.times}x {result.updates}u "
                f"seed {result.seed} area {result.area:.3f} final {result.final:.3f} "
                f"drift {result.drift:.3f} factor >= {result.smallest_factor:.3f} {result.seconds:.0f} s",
                flush=True,
            )
    return [found[_key(job)] for job in jobs]


def cached(cache: Path) -> list[Result]:
    """Runs made earlier, each once."""
    lines = cache.read_text().splitlines() if cache.exists() else []
    return list({_key(run): run for run in (Result(**json.loads(line)) for line in lines)}.values())


def _key(one: Job | Result) -> tuple[Any, ...]:
    return one.method, one.lag, one.times, one.updates, one.seed


def grid(
    methods: Iterable[str],
    lags: Iterable[int],
    times: Iterable[int],
    updates: Iterable[int],
    seeds: Iterable[int],
    *,
    steps: int,
    model: str,
    task: str,
) -> list[Job]:
    """All combinations; a run has three times as many steps as its lag, at least."""
    updates, times, lags, seeds = list(updates), list(times), list(lags), list(seeds)
    return [
        Job(method, lag, rate, update, seed, max(steps, 3 * lag), model, task)
        for method in methods
        for lag in lags
        for rate in times
        for update in updates
        for seed in seeds
    ]


class Table:
    """Results by cell, with one update a step unless said."""

    def __init__(self, results: Sequence[Result]) -> None:
        self._cells: dict[tuple[str, int, int, int], list[Result]] = {}
        for one in sorted(results, key=lambda result: result.seed):
            self._cells.setdefault((one.method, one.lag, one.times, one.updates), []).append(one)

    def cell(self, method: str, lag: int, times: int, updates: int = 1) -> list[Result]:
        return self._cells.get((method, lag, times, updates), [])

    def collapses(self, method: str) -> list[Result]:
        return [one for key, cell in self._cells.items() if key[0] == method for one in cell if one.collapsed]

    def rows(self) -> list[dict[str, Any]]:
        """A line of figures per cell."""
        rows = []
        for (method, lag, times, updates), cell in sorted(self._cells.items()):
            area, area_width = interval([one.area for one in cell])
            final, final_width = interval([one.final for one in cell])
            reached = [one.tokens_to_reach for one in cell]
            rows.append(
                {
                    "method": method,
                    "lag": lag,
                    "times": times,
                    "updates": updates,
                    "seeds": len(cell),
                    "area": area,
                    "area_95": area_width,
                    "final": final,
                    "final_95": final_width,
                    "collapsed": sum(one.collapsed for one in cell),
                    "tokens_to_reach": reached,
                    "drift": fmean(one.drift for one in cell),
                    "smallest_factor": min(one.smallest_factor for one in cell),
                }
            )
        return rows

    def area_lost(self, method: str, lag: int, times: int) -> Interval:
        """Relative loss of area against lag 0 at the rate `ONE`, paired by seed."""
        base = {one.seed: one.area for one in self.cell("default", 0, 1)}
        cell = self.cell(method, lag, times)
        return interval([1 - one.area / base[one.seed] for one in cell if one.seed in base])


def verdicts(table: Table) -> dict[str, bool]:
    """The claims."""
    broken = {
        method: [one for one in table.collapses(method) if one.lag >= 11]
        for method in ("uncorrected", "proximal")
    }
    reach = [one.tokens_to_reach for one in table.cell("default", 11, 4)]
    cost, width = table.area_lost("default", 3, 1)
    free, free_width = table.area_lost("proximal", 3, 1)
    far = [one for lag in FAR_LAGS for times in FAR_RATES for one in table.cell("default", lag, times)]
    noisy = table.cell("noisy", 3, 1)
    return {
        "default: lag up to 6 within 5 % of lag 0 by area": all(
            table.area_lost("default", lag, 1)[0] <= 0.05 for lag in (1, 3, 6)
        ),
        "lag >= 11 breaks the uncorrected objective at some rate": bool(broken["uncorrected"]),
        "lag >= 11 breaks the plain (proximal) objective at some rate": bool(broken["proximal"]),
        "default: no collapse at any lag up to 32 and rate up to 8x": not [
            one for one in table.collapses("default") if one.lag <= max(LAGS)
        ],
        "default: no collapse at lag 64, 128 and 256 with 1x and 4x": bool(far)
        and not any(one.collapsed for one in far),
        "noisy engine, idle steps: a mean factor of 0.9 or more at lag 3": bool(noisy)
        and min(one.mean_factor for one in noisy) >= 0.9,
        "default: reaches 0.9 at lag 11 with 4x": bool(reach) and all(one is not None for one in reach),
        "default: drift control costs nothing at lag 3 with 1x": cost - free <= width + free_width,
    }


SIDE, GAP, MAPS_ACROSS = 44, 50, 3  # pixels of a square, between maps; maps in a row
COLOURS = ((178, 24, 43), (253, 219, 199), (33, 102, 172))  # collapsed, half, learnt


def picture(table: Table, methods: Sequence[str]) -> str:
    """SVG of final rewards with one update a step: a map a method, a square a cell, lags across, rates up."""
    across, down = len(LAGS) * SIDE + GAP, len(RATES) * SIDE + 2 * GAP
    columns = min(len(methods), MAPS_ACROSS)
    width, height = GAP + columns * across, math.ceil(len(methods) / columns) * down
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, method in enumerate(methods):
        left, top = GAP + number % columns * across, number // columns * down + GAP
        parts.append(f'<text x="{left}" y="{top - 12}" font-size="16">{method}</text>')
        for row, times in enumerate(reversed(RATES)):
            parts.append(_text(left - 22, top + row * SIDE, f"{times}x"))
            for column, lag in enumerate(LAGS):
                if cell := table.cell(method, lag, times):
                    value, x, y = fmean(one.final for one in cell), left + column * SIDE, top + row * SIDE
                    parts.append(
                        f'<rect x="{x}" y="{y}" width="{SIDE}" height="{SIDE}" fill="{_colour(value)}"/>'
                    )
                    ink = "black" if 0.25 <= value <= 0.75 else "white"
                    parts.append(_text(x + SIDE // 2, y, f"{value:.2f}", ink))
        bottom = top + len(RATES) * SIDE
        parts += [_text(left + i * SIDE + SIDE // 2, bottom - 10, str(lag)) for i, lag in enumerate(LAGS)]
        parts.append(f'<text x="{left}" y="{bottom + 34}">lag, steps; rate, x {ONE:g}; final reward</text>')
    return "\n".join([*parts, "</svg>\n"])


def _text(x: int, y: int, text: str, ink: str = "black") -> str:
    """In the middle of a square that begins at y."""
    return f'<text x="{x}" y="{y + 27}" fill="{ink}" text-anchor="middle">{text}</text>'


def _colour(value: float) -> str:
    low, high = (COLOURS[0], COLOURS[1]) if value < 0.5 else (COLOURS[1], COLOURS[2])
    share = min(max(2 * value - (value >= 0.5), 0.0), 1.0)
    return "rgb({},{},{})".format(*(round(a + share * (b - a)) for a, b in zip(low, high, strict=True)))
