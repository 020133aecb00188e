"""A learner whose ranks are on two machines, each with its own network address: it trains, and publishes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.chaos.machines import USUAL, Machines, shut_off, up
from tests.integration.harness import ROOT, program, summary
from tests.integration.netns import missing

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(missing()), reason=f"not shown: {missing()}"),
]

STEPS = 3
WORDS = (
    f"run.steps={STEPS}",
    "eval.every=0",
    "eval.num_prompts=8",
    "eval.samples_per_prompt=1",
    "sampling.prompts_per_step=8",
    "fleet=single",
    "fleet.workers.0.resources={CPU: 0.25}",
    "learner.num_ranks=2",
    "learner.resources={CPU: 1.5}",  # of two on each machine
)


def test_the_ranks_of_two_machines_meet(tmp_path: Path) -> None:
    words = shut_off([sys.executable, "-m", "tests.integration.test_two_machines", str(tmp_path)])
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["ranks"] == [1, 1]
    assert (said["status"], said["steps"], said["digest_mismatches"]) == ("done", STEPS, 0)


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


def main(folder: Path) -> None:
    """Run the job on two machines; print how many ranks each held, and what came of it."""
    environment = {"PYTHONPATH": str(ROOT)}
    with up(2, environment, rtt_s=0.01, loss=0.0) as machines:
        joined = {**environment, **USUAL, "RAY_ADDRESS": machines.address}
        starting = program(folder / "work", folder / "run", *WORDS, environment=joined)
        with machines.net.inside(0), starting as running:
            try:
                running.wait_for_step(1)
            except AssertionError as missed:
                raise AssertionError(f"{missed}\n{stacks(machines)}") from missed
            ranks = [
                sum(name.startswith("ray::LearnerP") for name, _ in machines.processes(machine))
                for machine in (0, 1)
            ]
            if running.wait():
                raise RuntimeError(running.tail())
    told = {key: summary(folder / "run")[key] for key in ("status", "steps", "digest_mismatches")}
    print(json.dumps({"ranks": ranks, **told}))


if __name__ == "__main__":
    os.environ.pop("RAY_ADDRESS", None)
    main(Path(sys.argv[1]))
