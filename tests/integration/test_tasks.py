"""task=code on the real parts: programs in the sandbox. (task=poker is run in test_job.py.)"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echo_planes.sandbox.model import Limits, SandboxError
from echo_planes.tasks.code.runner import ProgramRunner
from tests.integration.harness import run_to_end, summary, trained
from tests.thorough import takes_minutes

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


@takes_minutes
def test_programs_are_judged_in_the_sandbox(tmp_path: Path) -> None:
    runner = ProgramRunner(1, Limits())
    try:
        protection = runner.protection
    except SandboxError as error:
        pytest.skip(f"not shown: {error}")
    finally:
        runner.close()
    finished = run_to_end(
        tmp_path / "work",
        tmp_path / "run",
        "task=code",
        "fleet=single",
        "run.steps=3",
        "sampling.prompts_per_step=4",
        "eval.num_prompts=4",
        "eval.samples_per_prompt=1",
    )
    told = summary(finished.run_dir)
    assert (told["status"], told["steps"]) == ("done", 3)
    assert told["digest_mismatches"] == told["lost_trajectories"] == told["reward_error"] == 0
    assert told["accepted"] == told["trained"] + told["dropped_stale"] + told["buffered"]
    assert f"sandbox: {protection.partition(';')[0]}" in finished.stdout
    rows = trained(finished.run_dir)
    assert {bool(row["correct"]) for row in rows} == {True, False}
    for row in rows:
        parts = json.loads(row["reward_parts"])
        assert row["correct"] == (parts["passed"] == 1.0)
        assert parts.get("is_ok") or parts.get("is_syntax")
