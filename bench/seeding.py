"""Seeding on real engines and pinned cores: tokens/s of a synchronous run, `python -m bench.seeding`.

One core has the learner and its seeder, the other one a remote worker. Three kinds of runs alternate:

- colocated: the seeder samples every step, which is then trained;
- remote only: the remote worker samples, the learner trains parts of the step as they come;
- seeded: the seeder samples first, the remote worker goes on while the learner trains. At its end the remote
  worker is killed for good in mid-step, and the seeder does the next steps alone.

Answers are long, and the model is tiny: sampling is most of a step. Every engine has room for a sixth of a
step's prompts, as engines of real models have: an engine with room for all of them takes as long for a half.
Trained tokens per second of steps, start-up and the first steps left out; the median of the runs. About
twenty minutes; run it on an otherwise idle machine of two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.integration.harness import Program, events, metrics, program, summary, trained
from tests.integration.test_preemption import model_of_long_answers

WARM_UP_STEPS = 4  # in which the window settles, and which are not measured
STEPS = 6  # measured in each run
STEPS_ALONE = 5  # after the one in which the remote worker was killed
LEAST = {"colocated": 1.4, "remote only": 1.1}  # of which the seeded run makes so many times the tokens/s
LEAST_ALONE = 0.9  # of the colocated run's tokens/s, without the remote worker
PROMPTS = 24  # of a step
MAX_GROUPS = 4  # prompts in flight at an engine
PARTS = "learner.micro_batch_groups=4"
REMOTE = ("fleet=single", f"fleet.workers.0.max_groups={MAX_GROUPS}", PARTS)
SEEDER = f"seeding.max_groups={MAX_GROUPS}"
KINDS: dict[str, tuple[str, ...]] = {
    "colocated": ("fleet=colocated", SEEDER),
    "remote only": REMOTE,
    "seeded": (*REMOTE, SEEDER, "seeding.engines=1", "seeding.first_s=2.0", "fleet.restarts=0"),
}


def words(kind: str, model: Path) -> Sequence[str]:
    """Settings of one kind of run."""
    return (
        *KINDS[kind],
        f"model.path={model}",
        "task=tests.integration.long_answers:LongAnswers",
        "staleness.max_staleness=0",
        f"sampling.prompts_per_step={PROMPTS}",
        "sampling.samples_per_prompt=4",
        "sampling.max_new_tokens=200",
        "sampling.stream_s=0.5",
        "eval.every=0",
        "eval.num_prompts=1",
        "eval.samples_per_prompt=1",
        "checkpoint.every=0",
        "guard.mode='off'",
        "run.steps=100000",
    )


def processes_of(running: Program) -> tuple[list[psutil.Process], list[psutil.Process]]:
    """Return the learner's processes and the workers', of which a seeder is the last to be placed."""
    found = running.processes()
    workers = [process for process in found if process.name().startswith("ray::WorkerPro")]
    learner = [process for process in found if process.name().startswith("ray::LearnerPro")]
    return learner, sorted(workers, key=lambda process: process.create_time())


def pin(running: Program, *, has_seeder: bool) -> None:
    """Put the learner and its seeder on the first core, the remote worker on the second."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    learner, workers = processes_of(running)
    num_remote = len(workers) - has_seeder
    for core, owners in ((cores[0], learner + workers[num_remote:]), (cores[1], workers[:num_remote])):
        for owner in owners:
            for process in (owner, *owner.children(recursive=True)):
                for thread in process.threads():
                    os.sched_setaffinity(thread.id, {core})


def measured(kind: str, model: Path, folder: Path) -> dict[str, Any]:
    """Measure one run: tokens/s and windows, and of a seeded one what the seeder does alone."""
    folder.mkdir()
    alone: list[dict[str, Any]] = []
    with program(folder / "work", folder / "run", *words(kind, model)) as running:
        running.wait_for_step(2)
        pin(running, has_seeder=kind != "remote only")
        first = metrics(running.run_dir)[-1]["step"] + WARM_UP_STEPS
        rows = _steps(running, first, STEPS)
        if kind == "seeded":
            (remote, _) = processes_of(running)[1]
            remote.kill()
            # The steps until the loss is known are left out: the last of them was begun with both.
            running.wait_until(lambda: events(running.run_dir, "worker lost"), "the loss is known")
            alone = _steps(running, metrics(running.run_dir)[-1]["step"] + 1, STEPS_ALONE)
        running.interrupt()
        running.wait()
    told = summary(folder / "run")
    ids = [row["trajectory_id"] for row in trained(folder / "run")]
    return {
        "tokens_per_s": _tokens_per_s(rows),
        "step_s": statistics.mean(row["t_step_s"] for row in rows),
        "t_train_s": statistics.mean(row["t_train_s"] for row in rows),
        "t_seed_s": [round(row.get("t_seed_s", 0.0), 2) for row in rows],
        "alone_tokens_per_s": _tokens_per_s(alone) if alone else None,
        "twice": len(ids) - len(set(ids)) + told["duplicate_trajectories"],
        "lost": told["lost_trajectories"],
    }


def _steps(running: Program, first: int, number: int) -> list[dict[str, Any]]:
    """Wait for so many steps after step `first`, and return their metrics."""
    running.wait_for_step(first + number)
    return [row for row in metrics(running.run_dir) if row["step"] > first][:number]


def _tokens_per_s(rows: Sequence[dict[str, Any]]) -> float:
    return float(sum(row["tokens"] for row in rows) / sum(row["t_step_s"] for row in rows))


def main() -> int:
    """Measure, print, and write what was asked for. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.seeding", description="Seeding on real engines")
    parser.add_argument("--json", type=Path, help="write figures and verdicts here")
    parser.add_argument("--runs", type=int, default=3, help="of each kind, in turn")
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        model = model_of_long_answers(Path(folder) / "model")
        for number in range(arguments.runs):
            for kind, figures in found.items():
                figures.append(measured(kind, model, Path(folder) / f"{kind.replace(' ', '-')}-{number}"))
                print(f"run {number + 1}, {kind}: {figures[-1]}", flush=True)
    speeds = {
        kind: statistics.median(one["tokens_per_s"] for one in figures) for kind, figures in found.items()
    }
    verdicts = {}
    for kind, tokens_per_s in speeds.items():
        ratio = speeds["seeded"] / tokens_per_s
        print(f"{kind:12s} {tokens_per_s:8,.0f} tokens/s   seeded: {ratio:.2f} times")
        if kind in LEAST:
            verdicts[f"seeded at least {LEAST[kind]} times {kind}"] = ratio >= LEAST[kind]
    alone = statistics.median(one["alone_tokens_per_s"] for one in found["seeded"])
    print(f"{'alone':12s} {alone:8,.0f} tokens/s   colocated: {alone / speeds['colocated']:.2f} times")
    verdicts[f"without its remote worker at least {LEAST_ALONE} times colocated"] = (
        alone >= LEAST_ALONE * speeds["colocated"]
    )
    runs = [one for figures in found.values() for one in figures]
    verdicts["no answer is lost or trained twice"] = not any(one["twice"] or one["lost"] for one in runs)
    for claim, holds in verdicts.items():
        print(f"{'holds' if holds else 'FAILS'}  {claim}")
    if arguments.json:
        written = {"figures": {"tokens_per_s": speeds, "runs": found}, "verdicts": verdicts}
        arguments.json.write_text(json.dumps(written, indent=1))
    return 0 if all(verdicts.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
