"""Learning with sparse rollouts: real runs of the task of `bench.recall`, three seeds of each kind.

- dense: attention reads everything.
- schedule: budgets that keep the target for all but 1 % of the tokens, as calibrated (18 pages do for 5 %).
- distilled: the same budgets, with an adapter of sparse attention's own (DistillSparse).
- two pages: the newest page and one more, without either guard: the learner's would stop the run.
- guarded: two pages to begin with, and the guard, which audits a quarter of the answers.

All runs have the same seeds, prompts and steps. Evaluations are dense, on the same held-out prompts.
The runs' own figures are read from their folders. The last version of each is exported and answers more
prompts, since a run's own evaluation leaves an error larger than the difference that is asked for.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from bench.recall import MODEL, Recall, RecallOptions
from echo_planes.config.fleet import EngineConfig
from echo_planes.config.schema import SamplingConfig
from echo_planes.data.tasks.adapter import EpisodeBuilder
from echo_planes.reporting.weights.cli import main as weights
from echo_planes.rollout.vllm.engine import VllmEngine

SEEDS, STEPS = 3, 160
MOST_TOKENS = 512  # of a prompt and its answer
ANSWER_TOKENS = 48
LAST_PROMPTS, LAST_SAMPLES = 512, 4  # of the last version's evaluation
WITHIN, COLLAPSED = 0.02, 0.1
COMMON = [
    "task=bench.recall:Recall",
    f"model={MODEL}",
    f"model.max_model_len={MOST_TOKENS}",
    f"run.steps={STEPS}",
    "sampling.prompts_per_step=16",
    "sampling.samples_per_prompt=4",
    f"sampling.max_new_tokens={ANSWER_TOKENS}",
    "sampling.top_logprobs=20",
    "learner.lr=4e-4",
    "staleness.max_staleness=1",
    f"eval.every={STEPS}",
    "eval.num_prompts=96",
    "eval.samples_per_prompt=2",
    "checkpoint.every=0",
]
SPARSE = ["sparse.dense_layers=1", "sparse.bin_tokens=512"]
SCHEDULE = [*SPARSE, "sparse.schedule=[22]", "sparse.tail_share=0.01", "sparse.audit_share=0.1"]
KINDS: dict[str, list[str]] = {
    "dense": [],
    "schedule": SCHEDULE,
    "distilled": [*SCHEDULE, "sparse.distill_rank=16"],
    "two pages": [
        *SPARSE,
        "sparse.schedule=[2]",
        "sparse.first_pages=0",
        "sparse.last_pages=1",
        "sparse.guard=off",
        "guard.mode=warn",
        "sparse.audit_share=0.1",
    ],
    "guarded": [
        *SPARSE,
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


async def accuracy(folder: Path) -> float:
    """Mean reward of the last version of a run on so many held-out prompts, decoded densely."""
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        if weights(["export", str(folder), str(model)]):
            raise RuntimeError(f"{folder}: its last version could not be exported")
        tokenizer = AutoTokenizer.from_pretrained(model)
        task = Recall(RecallOptions(), tokenizer, 0)
        settings = EngineConfig(kv_cache_gib=0.5, max_num_seqs=64)
        engine = VllmEngine(settings, SamplingConfig(), model, MOST_TOKENS, 0)
        await engine.start()

        async def mean(index: int) -> float:
            prompt = task.eval_prompt(index)
            samples = await engine.generate(
                prompt.token_ids,
                num_samples=LAST_SAMPLES,
                max_new_tokens=ANSWER_TOKENS,
                on_tokens=lambda *_: None,
            )
            rewards = []
            for sample in samples:
                builder = EpisodeBuilder()
                builder.add_sample(sample)
                rewards.append(task.reward(prompt, builder.build(tokenizer)).value)
            return statistics.mean(rewards)

        found = await asyncio.gather(*map(mean, range(LAST_PROMPTS)))
        await engine.close()
    return statistics.mean(found)


def learning(page: int) -> dict[str, Any]:
    told: dict[str, Any] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as name:
        for seed in range(SEEDS):
            for kind in KINDS:
                folder = Path(name) / f"{kind.replace(' ', '-')}-{seed}"
                one = run(kind, seed, folder)
                one["last"] = asyncio.run(accuracy(folder))
                told[kind].append(one)
                print(f"[sparse] {kind}, seed {seed}: {one['held out']}, last {one['last']}", flush=True)
    return told


def last(told: dict[str, Any], kind: str) -> list[float]:
    """Accuracy of the last version of each seed."""
    return [one["last"] for one in told[kind]]


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
