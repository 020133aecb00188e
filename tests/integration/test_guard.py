"""A run that must collapse, on the real parts: the guard climbs its ladder, and nothing says `done`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.harness import SMALL, events, metrics, program, staleness, summary, trained
from tests.thorough import takes_minutes

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

STEPS = 600  # two ladders, also where calm steps take a rung back in between
# Warmed up so slowly that the first checkpoints are good, to a rate that no policy survives.
DOOMED = (
    *SMALL,
    "fleet=single",
    f"run.steps={STEPS}",
    "learner.lr=2e-2",
    "learner.warmup_steps=100",
    "learner.drift_target=0",
    "objective.anchor=proximal",
    "checkpoint.every=2",
    "guard.good_after=2",
    "guard.max_rollbacks=1",
    "eval.every=0",
)


@takes_minutes
def test_a_doomed_run_goes_back_once_and_ends_as_collapsed(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with program(tmp_path / "work", run_dir, *DOOMED) as doomed:
        assert doomed.wait() == 1, doomed.tail()
        assert doomed.left_behind() == []
    told = summary(run_dir)
    assert told["status"] == "collapsed"
    (line,) = [line for line in doomed.stderr.splitlines() if line.startswith("error: ")]
    assert line == f"error: {told['error']}"
    for part in ("guard.", "after 1 rollbacks", "lower learner.lr"):
        assert part in line
    texts = [event["text"] for event in events(run_dir, "guard")]
    actions = told["guard"]["actions"]
    assert (actions["rollback"], actions["stop"]) == (1, 1)
    # Two ladders; a rung that was taken back meanwhile is climbed again.
    assert all(2 <= actions[rung] <= 2 + actions.get("relax", 0) for rung in ("mask", "limit", "slow"))
    assert all(text in doomed.stdout for text in texts)

    rows = metrics(run_dir)
    (back,) = [text for text in texts if "back to the checkpoint of step" in text]
    good = int(back.split("of step ")[1].split(",")[0])
    assert good % 2 == 0
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert [row["guard_rollbacks"] for row in rows] == [0] * good + [1] * (len(rows) - good)
    assert len(rows) < STEPS
    assert all(row["staleness_max"] <= row["guard_max_staleness"] for row in rows)
    assert {row["guard_max_staleness"] for row in rows if row["guard_rollbacks"]} <= {1, 0}
    assert told["max_staleness"] == 3
    assert told["lost_trajectories"] == told["duplicate_trajectories"] == 0
    assert all(staleness(row) <= 3 for row in trained(run_dir))

    page = (run_dir / "report.html").read_text()
    assert page[page.index("<main>") + len("<main>") :].startswith('<header><p class="error">')
    newest = sorted((run_dir / "checkpoints").glob("step-*"))[0]
    assert json.loads((newest / "meta.json").read_text())["guard"]["rollbacks"] == 1
