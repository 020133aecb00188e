"""The embedded job on Ray, vLLM and DeepSpeed: staleness must cost its delay, and nothing more.

Tokens are counted when they are trained, but what a step teaches is sampled only `lag` steps later; so a run
of mean lag m reaches a reward m steps later, however well it learns. That delay, m steps of tokens,
is taken off before runs are compared.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.learning.harness import REACHED, WINDOW
from bench.learning.intervals import interval
from bench.learning.staleness import SEEDS
from echo_planes.reporting.metrics import read_metrics, read_summary

ROOT = Path(__file__).resolve().parents[2]
CELLS = ((0, 2.5e-4), (3, 2.5e-4), (6, 2.5e-4), (0, 1e-3), (3, 1e-3), (6, 1e-3), (16, 1e-3))
LIMIT_S = 1200.0


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the embedded job."""

    staleness: int  # S
    rate: float
    seed: int
    status: str
    accuracy: float  # held out, at the end
    area: float  # mean reward of the steps
    final: float  # of the last 20
    tokens_to_reach: int | None  # trained, to a reward of 0.9 (mean of five steps)
    tokens_per_step: float
    lag: float  # mean of its batches
    smallest_factor: float | None

    @property
    def tokens_without_delay(self) -> float | None:
        """To the same reward, less what was trained before the policy that earns it was sampled from."""
        if self.tokens_to_reach is None:
            return None
        return self.tokens_to_reach - self.lag * self.tokens_per_step


def run(staleness: int, rate: float, seed: int, folder: Path, words: Sequence[str] = ()) -> Run:
    """Run it, unless its folder holds a summary already."""
    place = folder / f"S{staleness}-{rate:g}-{seed}"
    if not (place / "summary.json").exists():
        command = [sys.executable, "-m", "echo_planes.run", f"run.dir={place}", f"run.seed={seed}"]
        command += [f"staleness.max_staleness={staleness}", f"learner.lr={rate}", *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        if not (place / "summary.json").exists():
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return read(place, staleness, rate, seed)


def read(place: Path, staleness: int, rate: float, seed: int) -> Run:
    """Read a run's figures from its folder."""
    steps, summary = read_metrics(place), read_summary(place)
    rewards = [row["reward_mean"] for row in steps]
    tokens = [row["tokens"] for row in steps]
    factors = [row["rate_factor"] for row in steps if row.get("rate_factor") is not None]
    return Run(
        staleness=staleness,
        rate=rate,
        seed=seed,
        status=summary["status"],
        accuracy=summary["eval_last"] or 0.0,
        area=fmean(rewards),
        final=fmean(rewards[-20:]),
        tokens_to_reach=next(
            (
                sum(tokens[:step])
                for step in range(WINDOW, len(rewards) + 1)
                if fmean(rewards[step - WINDOW : step]) >= REACHED
            ),
            None,
        ),
        tokens_per_step=fmean(tokens),
        lag=fmean(row["staleness_mean"] for row in steps),
        smallest_factor=min(factors, default=None),
    )


def run_all(
    folder: Path, seeds: Sequence[int] = SEEDS, cells: Sequence[tuple[int, float]] = CELLS
) -> list[Run]:
    """Every cell and seed."""
    found = []
    for seed in seeds:
        for staleness, rate in cells:
            found.append(run(staleness, rate, seed, folder))
            print(json.dumps(asdict(found[-1])), flush=True)
    return found


def figures(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A line per cell."""
    rows = []
    for staleness, rate in dict.fromkeys((one.staleness, one.rate) for one in runs):
        cell = [one for one in runs if (one.staleness, one.rate) == (staleness, rate)]
        reached = [t for one in cell if (t := one.tokens_without_delay) is not None]
        rows.append(
            {
                "S": staleness,
                "rate": rate,
                "seeds": len(cell),
                "status": sorted({one.status for one in cell}),
                "accuracy": interval([one.accuracy for one in cell]),
                "area": interval([one.area for one in cell]),
                "final": interval([one.final for one in cell]),
                "lag": fmean(one.lag for one in cell),
                "tokens_to_reach": [one.tokens_to_reach for one in cell],
                "tokens_without_delay": interval(reached) if reached else None,
            }
        )
    return rows


def verdicts(runs: Sequence[Run]) -> dict[str, bool]:
    """The claims."""
    by_cell: dict[tuple[int, float], dict[int, Run]] = {}
    for one in runs:
        by_cell.setdefault((one.staleness, one.rate), {})[one.seed] = one
    told = {}
    for staleness in (3, 6):
        fresh, stale = by_cell[0, 2.5e-4], by_cell[staleness, 2.5e-4]
        pairs = [(fresh[seed].tokens_without_delay, stale[seed].tokens_without_delay) for seed in fresh]
        whole = [b - a for a, b in pairs if a is not None and b is not None]
        mean, width = interval(whole)
        told[f"S = {staleness}, 2.5e-4: tokens to 0.9 less the delay within the interval of S = 0"] = (
            len(whole) == len(pairs) and mean <= width
        )
        told[f"S = {staleness}, 1e-3: ends at 0.9 or more"] = all(
            one.accuracy >= 0.9 for one in by_cell[staleness, 1e-3].values()
        )
    told["S = 16, 1e-3: learns, or is stopped with its reason"] = all(
        one.accuracy >= 0.8 or one.status == "collapsed" for one in by_cell[16, 1e-3].values()
    )
    told["no run that collapsed says done"] = not any(
        one.status == "done" and one.final < 0.5 * one.area for one in runs
    )
    return told
