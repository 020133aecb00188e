"""A real run that decodes sparsely: what its rows, its evaluations, its guard and a resume make of that."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.recall import MODEL
from echo_planes.config.plain_yaml import read_yaml
from echo_planes.learning.distillation import STATE
from echo_planes.loop.sparsity import FILE
from tests.integration.harness import ROOT, events, metrics, run_to_end, summary, trained, trajectories

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

# Two of about twenty pages: far from dense. The guard has its sixteen answers within a few steps.
WORDS = (
    "task=bench.recall:Recall",
    f"model={MODEL}",
    "fleet=single",
    "model.max_model_len=512",
    "sampling.prompts_per_step=8",
    "sampling.samples_per_prompt=4",
    "sampling.max_new_tokens=24",
    "sampling.top_logprobs=20",
    "eval.num_prompts=8",
    "eval.samples_per_prompt=2",
    "sparse.schedule=[2]",
    "sparse.first_pages=0",
    "sparse.last_pages=1",
    "sparse.dense_layers=1",
    "sparse.audit_share=0.5",
)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sparse")
    run_to_end(folder / "work", folder / "run", *WORDS, "run.steps=6", "guard.mode=warn")
    return folder / "run"


def test_the_guard_makes_a_run_dense_that_is_far_from_it(run_dir: Path) -> None:
    told = [event["text"] for event in events(run_dir, "sparse guard")]
    assert told
    assert "reads all pages, not 2" in told[0]
    schedules = json.loads((run_dir / FILE).read_text())["schedules"]
    assert [one["pages"] for one in schedules] == [[2], [0]]
    assert "5th percentile 0." in events(run_dir, "sparse audit")[0]["text"]


def test_every_row_names_the_schedule_that_its_tokens_were_decoded_by(run_dir: Path) -> None:
    rows = trajectories(run_dir)
    numbers = {number for row in rows for number in row["span_schedules"]}
    assert numbers == {0, 1}
    assert {0} == {number for row in trained(run_dir) if row["step"] == 0 for number in row["span_schedules"]}


def test_evaluations_are_dense(run_dir: Path) -> None:
    """The first batch differs from the learner by more than a nat a token; the evaluations hardly do."""
    assert metrics(run_dir)[0]["mismatch_mean"] > 0.3
    assert summary(run_dir)["mismatch_same_version_mean"] < 0.05


def test_a_resume_goes_on_with_the_last_schedule(run_dir: Path, tmp_path: Path) -> None:
    run_to_end(tmp_path / "work", run_dir, f"run.resume={run_dir}", "run.steps=8")
    schedules = json.loads((run_dir / FILE).read_text())["schedules"]
    assert [one["number"] for one in schedules] == [0, 1]
    late = [row for row in trained(run_dir) if row["step"] == 7]
    assert {1} == {number for row in late for number in row["span_schedules"]}


def test_a_calibration_writes_what_a_run_takes(tmp_path: Path) -> None:
    out = tmp_path / "mine.yaml"
    words = [word for word in WORDS if not word.startswith("sparse.")]
    command = [sys.executable, "-m", "echo_planes.sparsity", "calibrate", f"out={out}", "budgets=8,24"]
    own = ["prompts=40", "sparse.dense_layers=1", "sparse.bin_tokens=512"]
    run = subprocess.run(
        [*command, *own, *words], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "24 pages" in run.stdout
    written = read_yaml(out)
    assert written["schedule"] == [24]
    assert written["model"] == "qwen3, 3 layers of 128, 4/2 heads"
    assert "Schedule of KV budgets" in out.with_suffix(".html").read_text()


def test_a_run_distils_and_a_resume_goes_on_with_its_adapter(tmp_path: Path) -> None:
    """Two ranks that share gradients and moments. The adapter is no weight: nothing of it is published."""
    words = [word for word in WORDS if not word.startswith("sparse.schedule")]
    own = ["sparse.schedule=[8]", "sparse.distill_rank=4", "sparse.distill_share=0.5", "sparse.guard=warn"]
    ranks = ["learner.num_ranks=2", "learner.resources.CPU=0.5", "learner.zero_stage=2"]
    run = tmp_path / "run"
    run_to_end(
        tmp_path / "work", run, *words, *own, *ranks, "run.steps=4", "guard.mode=warn", "checkpoint.every=2"
    )
    (told,) = events(run, "sparse distillation")
    assert told["version"] >= 1
    assert "KL(dense || sparse) was " in told["text"]
    (newest,) = (run / "checkpoints" / "step-000004").rglob(STATE)
    weights = torch.load(newest, weights_only=True)["adapter"]
    assert len(weights) == 2 * 7 * 3  # A and B of seven linear layers in each of three
    assert all(one.any() for one in weights)
    assert not events(run, "worker lost")
    run_to_end(tmp_path / "later", run, f"run.resume={run}", "run.steps=6")
    assert summary(run)["steps"] == 6
    assert len(events(run, "sparse distillation")) == 2  # one a sitting
