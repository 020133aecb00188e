"""Part of `bench.sparse` about DistillSparse: acceptance of a budget that is too small, before and after it.

The policy is the embedded model and stays as it is. Prompts are random bytes, over which its attention is
spread wide. (The answers of `bench.recall` depend on single pages: what is in one that is not read cannot be
known.) Answers are drawn sparsely by the engine with the adapter as it is, the adapter makes one update by
them, and so on. Before and after, held-out prompts are answered and audited.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from echo_planes.config.fleet import EngineConfig
from echo_planes.config.kv_schedule import Schedule
from echo_planes.config.schema import BUILTIN_MODELS, SamplingConfig
from echo_planes.config.sparse import SparseConfig
from echo_planes.learning.distillation import Distiller
from echo_planes.learning.policy_model import load_policy
from echo_planes.rollout.sparsity.acceptance import TAIL
from echo_planes.rollout.vllm.sparse_engine import SparseEngine
from echo_planes.types import Sample, TrainBatch
from echo_planes.weights.sparse_adapter import Distilled, SparseAdapter

FOLDER = BUILTIN_MODELS["builtin:tiny-math"]
BIN, BINS = 128, 4
TOKENS = 48  # of an answer
PAGES = 2  # the first and the last
UPDATES, ANSWERS = 160, 48  # of each update
HELD_OUT = (2400, 160, 160, 160)  # answers in each bin: in the first one the rise is small
RANK, LEARNING_RATE = 16, 3e-4
SEEDS = 3
RESAMPLES = 2000

Answered = tuple[tuple[int, ...], Sample]


def prompts(seed: int, counts: Sequence[int]) -> list[tuple[int, ...]]:
    """So many prompts of random bytes for each bin, whose answers stay in it."""
    rng = random.Random(seed)
    found = []
    for place, count in enumerate(counts):
        for _ in range(count):
            length = rng.randint(max(72, place * BIN), (place + 1) * BIN - TOKENS - 1)
            found.append(tuple(rng.randrange(256) for _ in range(length)))
    return found


def batch(step: int, answered: Sequence[Answered]) -> TrainBatch:
    """These answers as the learner gets them."""
    lengths = [(len(one), len(sample.token_ids)) for one, sample in answered]
    mask = np.concatenate([[False] * prompt + [True] * answer for prompt, answer in lengths])
    ids = np.concatenate([[*one, *sample.token_ids] for one, sample in answered]).astype(np.int64)
    count = len(answered)
    zeros = np.zeros(count, np.float32)
    return TrainBatch(
        step=step,
        trajectory_ids=tuple(map(str, range(count))),
        token_ids=ids,
        offsets=np.cumsum([0, *map(sum, lengths)]),
        loss_mask=mask.astype(np.bool_),
        sampler_logprobs=np.zeros(len(ids), np.float32),
        rewards=zeros,
        advantage_groups=np.arange(count),
        advantages=zeros,
        versions=np.zeros(count, np.int64),
        correct=zeros > 0,
        token_versions=np.where(mask, 0, -1),
        cut_off=zeros > 0,
    )


async def drawn(engine: SparseEngine, asked: Sequence[tuple[int, ...]]) -> list[Answered]:
    samples = await asyncio.gather(
        *(
            engine.generate(one, num_samples=1, max_new_tokens=TOKENS, on_tokens=lambda *_: None)
            for one in asked
        )
    )
    return [(one, sample) for one, (sample,) in zip(asked, samples, strict=True)]


async def acceptances(engine: SparseEngine, asked: Sequence[tuple[int, ...]]) -> list[list[Any]]:
    """Of each bin, of each answer, the acceptance of its tokens after the first, which is dense."""
    bins: list[list[Any]] = [[] for _ in range(BINS)]
    answered = await drawn(engine, asked)
    audits = await asyncio.gather(*(engine.audit(*one) for one in answered))
    for (one, _), audit in zip(answered, audits, strict=True):
        bins[len(one) // BIN].append(np.array([token.likely for token in audit[1:]]))
    return bins


def rise(before: Sequence[Any], after: Sequence[Any]) -> tuple[float, float]:
    """Interval, 95 %, of the rise of the 5th percentile, by resampling answers."""
    rng = np.random.default_rng(0)

    def tail(answers: Sequence[Any]) -> float:
        some = rng.integers(0, len(answers), len(answers))
        return float(np.quantile(np.concatenate([answers[i] for i in some]), TAIL))

    rises = [tail(after) - tail(before) for _ in range(RESAMPLES)]
    return float(np.quantile(rises, 0.025)), float(np.quantile(rises, 0.975))


async def distil(page: int) -> dict[str, Any]:
    """A budget that is too small, before and after distillation, of three seeds."""
    plan = Schedule(pages=(PAGES,), page_tokens=page, bin_tokens=BIN, last_pages=1, dense_layers=1)
    # Rounding to bfloat16 is no part of the question, and CPUs without AVX-512 emulate it.
    settings = EngineConfig(dtype="float32", kv_cache_gib=0.3, max_num_seqs=32)
    engine = SparseEngine(settings, SamplingConfig(top_logprobs=20), FOLDER, BIN * BINS, 0, page_tokens=page)
    await engine.start()
    await engine.set_schedule(plan)
    versions = itertools.count()  # of two adapters the newer one counts
    seeds = [await _one(engine, plan, seed, versions) for seed in range(SEEDS)]
    await engine.close()
    return {"seeds": seeds, "updates": UPDATES, "pages": PAGES}


async def _one(engine: SparseEngine, plan: Schedule, seed: int, versions: Iterator[int]) -> dict[str, Any]:
    policy = load_policy(FOLDER, torch.float32, 1.0, 1.0)
    settings = SparseConfig(distill_rank=RANK, distill_lr=LEARNING_RATE, distill_share=1.0)
    distiller = Distiller(policy, settings, seed, 0, 1)
    held_out = prompts(900 + seed, HELD_OUT)
    await engine.set_adapter(SparseAdapter.of(next(versions), distiller.pairs))
    before = await acceptances(engine, held_out)
    made: list[Distilled] = []
    for update in range(UPDATES):
        answered = await drawn(engine, prompts(1000 * seed + update, [ANSWERS // BINS] * BINS))
        made.append(distiller.distil(batch(update, answered), plan, next(versions), lambda _: None))
        await engine.set_adapter(made[-1].adapter)
        if update % 20 == 19:
            print(f"[sparse] distil, seed {seed}: {update + 1}, {made[-1].divergence:.4f} nats", flush=True)
    after = await acceptances(engine, held_out)
    rows = []
    for one, two in zip(before, after, strict=True):
        old, new = np.concatenate(one), np.concatenate(two)
        rows.append(
            {
                "5th percentile": [float(np.quantile(alphas, TAIL)) for alphas in (old, new)],
                "mean": [float(alphas.mean()) for alphas in (old, new)],
                "rise": rise(one, two),
            }
        )
        print(f"[sparse] distil, seed {seed}: {rows[-1]}", flush=True)
    return {
        "bins": rows,
        "divergence": [one.divergence for one in made],
        "seconds": sum(one.seconds for one in made),
        "tokens": sum(one.tokens for one in made),
        "adapter bytes": len(made[-1].adapter.tensors),
    }


def distil_verdicts(told: dict[str, Any]) -> dict[str, bool]:
    """Claims about distillation, and whether each holds."""
    rises = [[row["rise"] for row in one["bins"]] for one in told["seeds"]]
    return {
        "the 5th percentile of a budget rises in every bin, 95 %, for every seed": all(
            low > 0 for one in rises for low, _ in one
        ),
        "the mean of its rises over the seeds is above 0 in every bin, 95 % over answers": all(
            of_mean(found)[0] > 0 for found in zip(*rises, strict=True)
        ),
    }


def of_mean(intervals: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Interval of the mean of independent figures, given theirs."""
    mean = statistics.mean((low + high) / 2 for low, high in intervals)
    half = math.sqrt(sum((high - low) ** 2 for low, high in intervals)) / 2 / len(intervals)
    return mean - half, mean + half
