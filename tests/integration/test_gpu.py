"""Runs on a GPU. Nothing here has ever run on one: where there is none, each test is skipped, and says so."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
import torch

from tests.integration.harness import metrics, program, summary
from tests.unit.test_gpu_docs import CASES, section

CARD = CASES[2]
GSM8K = os.environ.get("ECHO_PLANES_GSM8K", "")  # folder of the dataset

pytestmark = [
    pytest.mark.integration,
    pytest.mark.gpu,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use"),
]


def run_documented(tmp_path: Path, *changes: str) -> Path:
    """Three steps of the page's command for one card of 24 GB; its run folder."""
    (code,) = re.findall(r"```bash\n(.*?)```", section(CARD), re.DOTALL)
    keys = {word.partition("=")[0] for word in (*changes, "run.dir=", "task.data=")}
    words = [word for word in shlex.split(code.replace("\\\n", " "))[3:] if word.split("=")[0] not in keys]
    given = (*words, *changes, f"task.data={GSM8K}", "run.steps=3", "eval.num_prompts=16")
    with program(tmp_path / "work", tmp_path / "run", *given) as running:
        status = running.wait(limit_s=3000.0)
        assert status == 0, running.tail()
    return tmp_path / "run"


@pytest.mark.skipif(not GSM8K, reason="needs GSM8K: set ECHO_PLANES_GSM8K to its folder")
@pytest.mark.parametrize("changes", [(), ("learner.lora_rank=16",)], ids=["all weights", "adapters"])
def test_half_a_billion_weights_on_one_card(tmp_path: Path, changes: tuple[str, ...]) -> None:
    run_dir = run_documented(tmp_path, *changes)
    steps = metrics(run_dir)
    assert [step["step"] for step in steps] == [1, 2, 3]
    # bf16 on both sides, by different kernels: the same weights must give nearly the same log-probabilities.
    assert steps[0]["mismatch_mean"] < 0.05
    assert summary(run_dir)["digest_mismatches"] == 0
    assert summary(run_dir)["lost_trajectories"] == 0


def test_a_learner_on_the_card_publishes_what_a_publication_from_the_host_would(tmp_path: Path) -> None:
    """Only changed bits leave the card; their digest is checked by the worker against its live tensors."""
    words = (
        "run.steps=4",
        "eval.every=0",
        "fleet=single",
        "learner.resources={CPU: 1, GPU: 1}",
        "sampling.prompts_per_step=8",
    )
    with program(tmp_path / "work", tmp_path / "run", *words) as running:
        status = running.wait(limit_s=1200.0)
        assert status == 0, running.tail()
    assert summary(tmp_path / "run")["digest_mismatches"] == 0
    assert summary(tmp_path / "run")["steps"] == 4
