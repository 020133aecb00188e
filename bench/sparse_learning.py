"""Learning with sparse rollouts: real runs of the task of `bench.recall`, three seeds of each kind.

- dense: attention reads everything.
- schedule: budgets that keep the target, as calibrated.
- distilled: the same budgets, with an adapter of sparse attention's own (DistillSparse).
- two pages: the newest page and one more, without either guard: the learner's would stop the run.
- guarded: two pages to begin with, and the guard, which audits a quarter of the answers.

All runs have the same seeds, prompts and steps. Evaluations are dense, on the same held-out prompts.
The runs' own figures are read from their folders.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.recall import MODEL

SEEDS, STEPS = 3, 160
WITHIN, COLLAPSED = 0.02, 0.1
COMMON = [
    "task=bench.recall:Recall",
    f"model={MODEL}",
    "model.max_model_len=512",
    f"run.steps={STEPS}",
    "sampling.prompts_per_step=16",
    "sampling.samples_per_prompt=4",
    "sampling.max_new_tokens=48",
    "sampling.top_logprobs=20",
    "learner.lr=4e-4",
    "staleness.max_staleness=1",
    "eval.every=40",
    "eval.num_prompts=96",
    "eval.samples_per_prompt=8",
    "checkpoint.every=0",
    "sparse.dense_layers=1",
    "sparse.bin_tokens=512",
]
KINDS: dict[str, list[str]] = {
    "dense": [],
    "schedule": ["sparse.schedule=[18]", "sparse.audit_share=0.1"],
    "distilled": ["sparse.schedule=[18]", "sparse.audit_share=0.1", "sparse.distill_rank=16"],
    "two pages": [
        "sparse.schedule=[2]",
        "sparse.first_pages=0",
        "sparse.last_pages=1",
        "sparse.guard=off",
        "guard.mode=warn",
        "sparse.audit_share=0.1",
    ],
    "guarded": [
        "sparse.schedule=[2]",
        "sparse.first_pages=0",
        "sparse.last_pages=1",
        "sparse.audit_share=0.25",
    ],
}


def run(kind: str, seed: int, folder: Path) -> dict[str, Any]:
    """One run, as a user starts it."""
    words = [*COMMON, *KINDS[kind], f"run.seed={seed}", f"run.dir={folder}"]
    command = [sys.executable, "-m", "echo_planes.run", *words]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if not (folder / "summary.json").exists():
        raise RuntimeError(f"{kind}, seed {seed}: {ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    summary = json.loads((folder / "summary.json").read_text())
    steps, events = (
        [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("metrics", "events")
    )
    return {
        "status": summary["status"],
        "steps": summary["steps"],
        "tokens": summary["tokens_trained"],
        "held out": [one["reward_mean"] for one in summary["evals"]],
        "reward": [row["reward_mean"] for row in steps],
        "same-version mismatch": summary["mismatch_same_version_mean"],
        "rate factor": summary["rate_factor_min"],
        "events": [one["text"] for one in events if one["kind"].startswith(("sparse", "guard", "collapse"))],
    }


def learning(page: int) -> dict[str, Any]:
    told: dict[str, Any] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as name:
        for seed in range(SEEDS):
            for kind in KINDS:
                one = run(kind, seed, Path(name) / f"{kind.replace(' ', '-')}-{seed}")
                told[kind].append(one)
                print(f"[sparse] {kind}, seed {seed}: held out {one['held out']}", flush=True)
    return told


def last(told: dict[str, Any], kind: str) -> list[float]:
    return [one["held out"][-1] for one in told[kind]]


def learning_verdicts(told: dict[str, Any]) -> dict[str, bool]:
    """Claims about learning, and whether each holds."""
    dense = statistics.mean(last(told, "dense"))
    return {
        f"a calibrated schedule ends within {WITHIN} of dense, mean of {SEEDS} seeds": abs(
            statistics.mean(last(told, "schedule")) - dense
        )
        <= WITHIN,
        f"with distillation it ends within {WITHIN} of dense, mean of {SEEDS} seeds": abs(
            statistics.mean(last(told, "distilled")) - dense
        )
        <= WITHIN,
        f"two pages without a guard end at least {COLLAPSED} below dense, every seed": all(
            one <= dense - COLLAPSED for one in last(told, "two pages")
        ),
        f"with the guard they end within {WITHIN} of dense": abs(
            statistics.mean(last(told, "guarded")) - dense
        )
        <= WITHIN,
    }
