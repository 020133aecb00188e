"""A real run whose rewards hang, raise and lie for some prompts: it goes on, counts them, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.harness import events, metrics, run_to_end, summary, trajectories

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

SAMPLES = 4


def test_rewards_that_hang_raise_or_lie_leave_the_run_going(tmp_path: Path) -> None:
    finished = run_to_end(
        tmp_path / "work",
        tmp_path / "run",
        "fleet=single",
        "task=tests.integration.badly_rewarded:SometimesBadlyRewarded",
        "run.steps=4",
        f"sampling.samples_per_prompt={SAMPLES}",
        "eval.num_prompts=16",
        "eval.samples_per_prompt=1",
    )
    told = summary(finished.run_dir)
    assert told["status"] == "done"
    assert told["steps"] == 4
    # Prompts 3, 5 and 7 were among the first. A group's later answers are not scored after one that hung.
    assert told["reward_timeout"] >= 1
    assert told["reward_error"] >= SAMPLES
    assert told["reward_invalid"] >= SAMPLES
    assert told["lost_trajectories"] == 0
    assert told["accepted"] == told["trained"] + told["dropped_stale"] + told["buffered"]
    assert metrics(finished.run_dir)[-1]["reward_error"] >= SAMPLES
    rows = trajectories(finished.run_dir)
    assert not {3, 5, 7} & {row["prompt_index"] % 40 for row in rows}
    evaluations = [event["text"] for event in events(finished.run_dir, "eval")]
    assert all("3 answers have no reward" in text for text in evaluations)
    for place in (finished.stdout, (finished.run_dir / "report.html").read_text()):
        assert "timed out" in place
        assert "their groups were not trained" in place
