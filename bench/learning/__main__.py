"""`python -m bench.learning PART ... [--json FILE]`: what the learner is held to, part by part.

    gradient   bias and variance of every objective against the exact gradient          half a minute
    staleness  lags x methods x learning rates, exact lag, one process a core           hours for all of it
    controls   what must not learn, and what refilled batches are worth                 ten minutes
    guard      whether it is early, quiet and of use, on runs that break and runs that do not   half an hour
    parity     gradients and rewards beside TRL's, in an environment of its own         a quarter of an hour
    real       the embedded job on Ray, vLLM and DeepSpeed, five seeds a cell           an hour

Every figure goes into FILE, with `verdicts`: {claim: true or false}. The exit status is 1 where one is false.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: one process a core
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from bench.learning import controls, gradient, guarding, parity, real, staleness

Figures = tuple[dict[str, Any], dict[str, bool]]


def run_gradient(args: argparse.Namespace) -> Figures:
    rows = list(gradient.table())
    for row in rows:
        print(
            f"{row.objective:8s} {row.sampler:10s} {row.correction:19s} bias {row.bias:6.3f} "
            f"spread {row.spread:6.2f} cosine {row.cosine:.4f}"
        )
    return {"rows": [asdict(row) for row in rows]}, gradient.verdicts(rows)


def run_staleness(args: argparse.Namespace) -> Figures:
    seeds = staleness.SEEDS[: args.seeds]
    common = {"steps": args.steps, "model": args.model, "task": args.task}
    jobs = staleness.grid(args.methods, args.lags, args.times, args.updates, seeds, **common)
    if args.far:
        jobs += staleness.grid(["default"], staleness.FAR_LAGS, staleness.FAR_RATES, [1], seeds, **common)
        jobs += staleness.grid(staleness.DISTURBED, [3], [1], [1], seeds, **common)
    staleness.run_all(jobs, args.cache, args.processes)
    table = staleness.Table(staleness.cached(args.cache))  # with what earlier calls ran
    if args.picture:
        args.picture.write_text(staleness.picture(table, args.methods))
    rows = table.rows()
    for row in rows:
        print(
            f"{row['method']:13s} lag {row['lag']:2d} {row['times']}x {row['updates']}u "
            f"area {row['area']:.3f} +- {row['area_95']:.3f} "
            f"final {row['final']:.3f} +- {row['final_95']:.3f} "
            f"collapsed {row['collapsed']} of {row['seeds']}"
        )
    return {"rows": rows}, staleness.verdicts(table)


def run_controls(args: argparse.Namespace) -> Figures:
    seeds = staleness.SEEDS[: args.seeds]
    outcomes = controls.controls(seeds, args.processes)
    refill, told = controls.refill(seeds, args.processes)
    figures = {"controls": [asdict(one) for one in outcomes], "refill": refill}
    return figures, {**controls.control_verdicts(outcomes), **told}


def run_guard(args: argparse.Namespace) -> Figures:
    return guarding.figures(staleness.SEEDS[: args.seeds], args.cache, args.processes)


def run_parity(args: argparse.Namespace) -> Figures:
    found = parity.run(args.trl, seeds=staleness.SEEDS[: args.seeds])
    print("\n".join(parity.lines(found)))
    return {**asdict(found), "tokens": found.tokens, "area": found.area}, parity.verdicts(found)


def run_real(args: argparse.Namespace) -> Figures:
    runs = real.run_all(args.runs, staleness.SEEDS[: args.seeds])
    rows = real.figures(runs)
    for row in rows:
        print(json.dumps(row))
    return {"rows": rows, "runs": [asdict(one) for one in runs]}, real.verdicts(runs)


PARTS: dict[str, Callable[[argparse.Namespace], Figures]] = {
    "gradient": run_gradient,
    "staleness": run_staleness,
    "controls": run_controls,
    "guard": run_guard,
    "parity": run_parity,
    "real": run_real,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.learning", description="What the learner is held to."
    )
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--json", type=Path, help="file for figures and verdicts")
    parser.add_argument(
        "--seeds", type=int, default=len(staleness.SEEDS), help="of the fixed list, the first"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    usual = [name for name in staleness.METHODS if name not in staleness.DISTURBED]
    parser.add_argument("--methods", nargs="*", choices=staleness.METHODS, default=usual)
    parser.add_argument("--far", action="store_true", help="lags 64 to 256 and a noisy engine too")
    parser.add_argument("--lags", nargs="+", type=int, default=staleness.LAGS)
    parser.add_argument("--times", nargs="+", type=int, default=staleness.RATES, help="of the rate 2.5e-4")
    parser.add_argument("--updates", nargs="+", type=int, default=[1, 2], help="a step")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--model", default="builtin:tiny-math")
    parser.add_argument("--task", default="{}", help="task options, JSON")
    parser.add_argument("--cache", type=Path, default=Path("staleness.jsonl"), help="results, a line a run")
    parser.add_argument("--picture", type=Path, help="SVG of the boundary")
    parser.add_argument("--runs", type=Path, default=Path("runs/learning"), help="folder of the real runs")
    parser.add_argument("--trl", type=Path, default=Path(".venv-trl/bin/python"), help="Python with TRL")
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    verdicts: dict[str, bool] = {}
    for part in args.parts:
        figures[part], told = PARTS[part](args)
        verdicts |= {f"{part}: {claim}": holds for claim, holds in told.items()}
    for claim, holds in verdicts.items():
        print(f"{'holds' if holds else 'FAILS'}  {claim}")
    if args.json:
        args.json.write_text(json.dumps({**figures, "verdicts": verdicts}, indent=2) + "\n")
    return 0 if all(verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
