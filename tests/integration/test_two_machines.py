"""Two machines, each with its own network address: of a learner's ranks, or of a worker without the model."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.chaos.machines import USUAL, Machines, shut_off, up
from echo_planes.config.schema import BUILTIN_MODELS
from tests.integration.harness import ROOT, program, summary
from tests.integration.netns import missing
from tests.thorough import takes_minutes

pytestmark = [
    pytest.mark.integration,
    takes_minutes,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(missing()), reason=f"not shown: {missing()}"),
]

STEPS = 3
PRIVATE = "private"  # a folder of machine 0
TOLD = ("status", "steps", "digest_mismatches", "reward_first", "mismatch_same_version_mean")
WORDS = [
    f"run.steps={STEPS}",
    "eval.every=0",
    "eval.num_prompts=8",
    "eval.samples_per_prompt=1",
    "sampling.prompts_per_step=8",
    "fleet=single",
]
RANKS_APART = [
    "fleet.workers.0.resources={CPU: 0.25}",
    "learner.num_ranks=2",
    "learner.resources={CPU: 1.5}",  # of two on each machine
]
WORKER_APART = [
    "fleet.workers.0.resources={CPU: 0.25, machine1: 0.5}",
    "learner.resources={CPU: 1, machine0: 0.5}",
    "model.path=@model",  # a folder that machine 1 does not have
]


def apart(folder: Path, *words: str, run: str = "run") -> subprocess.CompletedProcess[str]:
    here = [sys.executable, "-m", "tests.integration.test_two_machines"]
    command = shut_off([*here, str(folder), run, *words])
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)


def run_apart(folder: Path, *words: str) -> dict[str, Any]:
    done = apart(folder, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert (said["status"], said["steps"], said["digest_mismatches"]) == ("done", STEPS, 0)
    return said


def test_the_ranks_of_two_machines_meet(tmp_path: Path) -> None:
    said = run_apart(tmp_path, *RANKS_APART)
    assert said["learner"] == [1, 1]


def test_a_worker_needs_no_model_folder(tmp_path: Path) -> None:
    """Its settings and tokenizer come from the run, its weights over the chain."""
    said = run_apart(tmp_path, *WORKER_APART)
    assert (said["learner"], said["worker"]) == ([1, 0], [0, 1])
    assert said["reward_first"] > 0.3  # with other weights it would be 0
    assert said["mismatch_same_version_mean"] < 0.05


def test_ranks_of_machines_without_a_common_disk_are_refused(tmp_path: Path) -> None:
    """Each would write its part of a checkpoint where a resume does not find it."""
    done = apart(tmp_path, *RANKS_APART, run=f"{PRIVATE}/run")
    said = done.stdout + done.stderr
    assert done.returncode != 0
    # Ray may put either rank on either machine.
    assert re.search(r"learner rank [01] is on a machine without that folder", said), said


def stacks(machines: Machines) -> str:
    """Stack of each rank, as py-spy sees it."""
    return "\n".join(
        subprocess.run(
            [str(Path(sys.executable).parent / "py-spy"), "dump", "--pid", str(process.pid)],
            capture_output=True,
            text=True,
            check=False,
        ).stdout
        for machine in (0, 1)
        for name, process in machines.processes(machine)
        if name.startswith("ray::LearnerP")
    )


def main(folder: Path, run: str, *words: str) -> None:
    """Run the job on two machines; print how many ranks and workers each held, and what came of it."""
    environment = {"PYTHONPATH": str(ROOT)}
    model = folder / PRIVATE / "model"
    shutil.copytree(BUILTIN_MODELS["builtin:tiny-math"], model)
    with up(2, environment, rtt_s=0.01, loss=0.0, hidden=[folder / PRIVATE]) as machines:
        joined = {**environment, **USUAL, "RAY_ADDRESS": machines.address}
        settings = [word.replace("@model", str(model)) for word in (*WORDS, *words)]
        starting = program(folder / "work", folder / run, *settings, environment=joined)
        with machines.net.inside(0), starting as running:
            try:
                running.wait_for_step(1)
            except AssertionError as missed:
                raise AssertionError(f"{missed}\n{stacks(machines)}") from missed
            held = {
                part: [
                    sum(name.startswith(prefix) for name, _ in machines.processes(machine))
                    for machine in (0, 1)
                ]
                for part, prefix in (("learner", "ray::LearnerP"), ("worker", "ray::WorkerPr"))
            }
            if running.wait():
                raise RuntimeError(running.tail())
    books = summary(folder / run)
    print(json.dumps({**held, **{key: value for key, value in books.items() if key in TOLD}}))


if __name__ == "__main__":
    os.environ.pop("RAY_ADDRESS", None)
    main(Path(sys.argv[1]), *sys.argv[2:])
