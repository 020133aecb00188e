"""Parts of `bench.sparse` about acceptance: schedules on held-out prompts, page choice, the learner's view.

All with the model of `bench.recall`, whose answers depend on bytes anywhere before them.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.recall import MODEL, Recall, RecallOptions
from echo_planes.config.fleet import EngineConfig
from echo_planes.config.schema import SamplingConfig
from echo_planes.data.tasks.registry import load_tokenizer
from echo_planes.rollout.sparsity.acceptance import TAIL, share_bounds
from echo_planes.rollout.sparsity.calibration import DEVIATIONS, Surface
from echo_planes.rollout.sparsity.schedule import Schedule
from echo_planes.rollout.vllm.sparse_engine import SparseEngine

TARGET = 0.86
BIN, BINS = 2000, 4
TOKENS = 64  # of an answer
ANSWERS = 40  # in each bin
BUDGETS = (64, 88, 112, 144, 184, 232, 296, 376)
SEEDS = 3
DENSE_LAYERS = 1  # of three

Answer = tuple[int, int, list[float]]  # its bin, tokens before it, acceptance of its tokens


def prompts(seed: int, count: int, bins: Sequence[int] = range(BINS)) -> list[tuple[int, ...]]:
    """So many prompts for each bin, whose answers stay in it."""
    found = []
    for place in bins:
        options = RecallOptions(
            shortest=place * BIN + 200,
            longest=(place + 1) * BIN - TOKENS - 1,
            shortest_period=100,
            longest_period=800,
        )
        task = Recall(options, load_tokenizer(MODEL), seed)
        found += [task.prompt(1000 * place + i).token_ids for i in range(count)]
    return found


async def open_engine(page: int, max_num_seqs: int = 32) -> SparseEngine:
    engine = SparseEngine(
        EngineConfig(kv_cache_gib=0.6, max_num_seqs=max_num_seqs),
        SamplingConfig(top_logprobs=20),
        MODEL,
        BIN * BINS + 64,
        0,
        page_tokens=page,
    )
    await engine.start()
    return engine


async def answers(engine: SparseEngine, schedule: Schedule, asked: Sequence[tuple[int, ...]]) -> list[Answer]:
    """Answers by this schedule, compared with dense attention."""
    await engine.set_schedule(schedule)
    drawn = await asyncio.gather(
        *(
            engine.generate(one, num_samples=1, max_new_tokens=TOKENS, on_tokens=lambda *_: None)
            for one in asked
        )
    )
    found = []
    for one, (sample,) in zip(asked, drawn, strict=True):
        alphas = [token.likely for token in await engine.audit(one, sample)]
        found.append((len(one) // BIN, len(one), alphas))
    return found


def by_bin(found: Sequence[Answer]) -> list[dict[str, float]]:
    """Mean, 5th percentile, and bounds (95 %) of the share below the target, of each bin."""
    rows = []
    for place in range(BINS):
        mine = [alphas for where, _, alphas in found if where == place]
        below = [(len(one), sum(alpha < TARGET for alpha in one)) for one in mine]
        whole = np.concatenate(mine)
        low, high = share_bounds(below, DEVIATIONS)
        rows.append(
            {
                "mean": float(whole.mean()),
                "5th percentile": float(np.quantile(whole, TAIL)),
                "share below target, least": low,
                "share below target, most": high,
            }
        )
    return rows


async def schedule(page: int) -> dict[str, Any]:
    """A schedule calibrated on some prompts, and a fixed budget of its mean, on others of three seeds."""
    scale = page // 16
    engine = await open_engine(page)
    surface = Surface(BIN, TARGET)
    fixed_rows: dict[int, list[dict[str, float]]] = {}
    for tokens in BUDGETS:
        pages = tokens // scale
        plan = Schedule(pages=(pages,), page_tokens=page, dense_layers=DENSE_LAYERS)
        found = await answers(engine, plan, prompts(100, ANSWERS))
        fixed_rows[pages] = by_bin(found)
        for _, context, alphas in found:
            surface.add(pages, context, alphas)
        print(f"[sparse] {pages} pages: {_tails(fixed_rows[pages])}", flush=True)
    chosen = surface.schedule(BIN * BINS)
    mean = round(statistics.mean(one or BIN * (place + 1) // page for place, one in enumerate(chosen)))
    plans = {
        "schedule": Schedule(pages=tuple(chosen), page_tokens=page, dense_layers=DENSE_LAYERS),
        "fixed": Schedule(pages=(mean,), page_tokens=page, dense_layers=DENSE_LAYERS),
    }
    told: dict[str, Any] = {"chosen": chosen, "mean": mean, "surface": fixed_rows}
    for name, plan in plans.items():
        told[name] = []
        for seed in range(SEEDS):
            told[name].append(by_bin(await answers(engine, plan, prompts(seed, 2 * ANSWERS))))
            print(f"[sparse] {name}, seed {seed}: {_tails(told[name][-1])}", flush=True)
    await engine.close()
    # Sparrow 3.1: over all fixed budgets, how the bin goes with the mean and with the tail.
    told["range over bins, mean"] = statistics.mean(_range(rows, "mean") for rows in fixed_rows.values())
    told["range over bins, 5th percentile"] = statistics.mean(
        _range(rows, "5th percentile") for rows in fixed_rows.values()
    )
    return told


def _tails(rows: Sequence[dict[str, float]]) -> str:
    return ", ".join(f"{row['5th percentile']:.3f} (mean {row['mean']:.3f})" for row in rows)


def _range(rows: Sequence[dict[str, float]], what: str) -> float:
    return max(row[what] for row in rows) - min(row[what] for row in rows)


def schedule_verdicts(told: dict[str, Any]) -> dict[str, bool]:
    """Claims about schedules, and whether each holds."""
    kept = [[row["share below target, most"] <= TAIL for row in rows] for rows in told["schedule"]]
    failed = [[row["share below target, least"] > TAIL for row in rows] for rows in told["fixed"]]
    return {
        f"a calibrated schedule keeps {TARGET} in every bin, with 95 %, on held-out prompts of 3 seeds": all(
            map(all, kept)
        ),
        "a fixed budget of its mean fails in some bin, with 95 %, for every seed": all(map(any, failed)),
        "the tail tells the length, the mean does not: ranges over bins, at least 3 times": told[
            "range over bins, 5th percentile"
        ]
        >= 3 * told["range over bins, mean"],
    }
