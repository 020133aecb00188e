"""The other tasks on the real parts: programs in the sandbox, hands of several turns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echo_planes.data.sandbox.model import Limits, SandboxError
from echo_planes.tasks.code.runner import ProgramRunner
from tests.integration.harness import Program, run_to_end, summary, trained

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

STEPS = 3


def run(tmp_path: Path, *words: str) -> Program:
    small = ("run.steps=3", "sampling.prompts_per_step=4", "eval.num_prompts=4", "eval.samples_per_prompt=1")
    return run_to_end(tmp_path / "work", tmp_path / "run", "fleet=single", *words, *small)


def check(finished: Program) -> None:
    told = summary(finished.run_dir)
    assert told["status"] == "done"
    assert told["steps"] == STEPS
    assert told["digest_mismatches"] == told["lost_trajectories"] == told["reward_error"] == 0
    assert told["accepted"] == told["trained"] + told["dropped_stale"] + told["buffered"]


def test_programs_are_judged_in_the_sandbox(tmp_path: Path) -> None:
    runner = ProgramRunner(1, Limits())
    try:
        protection = runner.protection
    except SandboxError as error:
        pytest.skip(f"not shown: {error}")
    finally:
        runner.close()
    finished = run(tmp_path, "task=code")
    check(finished)
    assert f"sandbox: {protection.partition(';')[0]}" in finished.stdout
    rows = trained(finished.run_dir)
    assert {bool(row["correct"]) for row in rows} == {True, False}
    for row in rows:
        parts = json.loads(row["reward_parts"])
        assert row["correct"] == (parts["passed"] == 1.0)
        assert parts.get("is_ok") or parts.get("is_syntax")


def test_hands_are_played_over_several_turns(tmp_path: Path) -> None:
    finished = run(tmp_path, "task=poker")
    check(finished)
    rows = trained(finished.run_dir)
    assert max(row["num_turns"] for row in rows) > 1
    for group in {row["group_id"] for row in rows}:
        assert len({row["prompt_text"] for row in rows if row["group_id"] == group}) == 1
    for row in rows:
        assert -5 <= row["reward"] <= 5  # stacks of five big blinds, heads-up
        assert not all(row["response_mask"]) or row["num_turns"] == 1
        assert all(p == 0.0 for p, own in zip(row["logprobs"], row["response_mask"], strict=True) if not own)
