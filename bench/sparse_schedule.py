"""Parts of `bench.sparse` about acceptance: schedules on held-out prompts, page choice, the learner's view.

All with the model of `bench.recall`, whose answers depend on bytes anywhere before them.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from bench.recall import MODEL, Recall, RecallOptions
from bench.sparse_reference import Reference
from echo_planes.config.fleet import EngineConfig
from echo_planes.config.kv_schedule import Schedule
from echo_planes.config.schema import SamplingConfig
from echo_planes.data.tasks.registry import load_tokenizer
from echo_planes.learning.policy_model import load_policy
from echo_planes.rollout.sparsity.acceptance import TAIL, Audit, acceptance, share_bounds
from echo_planes.rollout.sparsity.calibration import DEVIATIONS, Surface
from echo_planes.rollout.sparsity.guard import WINDOW, Guard, Raise
from echo_planes.rollout.vllm.sparse_engine import SparseEngine
from echo_planes.types import Sample

TARGET = 0.86
BIN = 2000
PLACES = (0, 1, 3, 7)  # bins that are measured: sequences to 2,000, 4,000, 8,000 and 16,000 tokens
LONGEST = BIN * (PLACES[-1] + 1)
TOKENS = 64  # of an answer
ANSWERS, HELD_OUT = 32, 40  # in each bin, of each budget and of each seed
BUDGETS = (52, 104, 208, 416, 832)
SEEDS = 3
DENSE_LAYERS = 1  # of three
CUT_FROM = 96  # pages of 16, which keep the target in the first bin
LEARNER_LR = 3e-4  # of the three updates
SHORT_BIN = 512  # of the comparison with brute force

Answer = tuple[int, int, list[float]]  # its bin, tokens before it, acceptance of its tokens


def prompts(seed: int, count: int, bins: Sequence[int] = PLACES) -> list[tuple[int, ...]]:
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


async def open_engine(
    page: int, dtype: Literal["float32", "bfloat16"] = "bfloat16", model: Path = MODEL
) -> SparseEngine:
    engine = SparseEngine(
        EngineConfig(kv_cache_gib=1.2, max_num_seqs=32, dtype=dtype),
        SamplingConfig(top_logprobs=20),
        model,
        LONGEST + 64,
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
        alphas = [token.likely for token in (await engine.audit(one, sample))[1:]]  # the first one is dense
        found.append((len(one) // BIN, len(one), alphas))
    return found


def by_bin(found: Sequence[Answer]) -> list[dict[str, float]]:
    """Figures of each bin."""
    return [figures([alphas for where, _, alphas in found if where == place]) for place in PLACES]


def figures(alphas: Sequence[Sequence[float]]) -> dict[str, float]:
    """Mean, 5th percentile, and bounds (95 %) of the share below the target, of these answers' tokens."""
    whole = np.concatenate(alphas)
    low, high = share_bounds([(len(one), sum(alpha < TARGET for alpha in one)) for one in alphas], DEVIATIONS)
    return {
        "mean": float(whole.mean()),
        "5th percentile": float(np.quantile(whole, TAIL)),
        "share below target, least": max(low, 0.0),
        "share below target, most": high,
    }


async def schedule(page: int, count: int, model: Path) -> dict[str, Any]:
    """A schedule calibrated on some prompts, and a fixed budget of its mean, on others of three seeds.

    In float32, which CPUs without AVX-512 need not emulate. `count`: see `HELD_OUT`.
    """
    engine = await open_engine(page, "float32", model)
    surface = await _calibrated(engine, page)
    chosen = surface.schedule(LONGEST)
    # Of the bins that are measured: there are as many answers in each.
    mean = round(statistics.mean(chosen[place] or BIN * (place + 1) // page for place in PLACES))
    plans = {
        "schedule": Schedule(pages=tuple(chosen), page_tokens=page, dense_layers=DENSE_LAYERS),
        "fixed": Schedule(pages=(mean,), page_tokens=page, dense_layers=DENSE_LAYERS),
    }
    told: dict[str, Any] = {"answers": count, "chosen": chosen, "mean": mean}
    for name, plan in plans.items():
        told[name] = []
        for seed in range(SEEDS):
            told[name].append(by_bin(await answers(engine, plan, prompts(seed, count))))
            print(f"[sparse] {name}, seed {seed}: {_tails(told[name][-1])}", flush=True)
    await engine.close()
    # Sparrow 3.1: under a fixed budget, how the bin goes with the mean and with the tail.
    for what in ("mean", "5th percentile"):
        told[f"range over bins, {what}"] = statistics.mean(_range(rows, what) for rows in told["fixed"])
    return told


async def _calibrated(engine: SparseEngine, page: int) -> Surface:
    """Measure what decides: in each bin the budgets from the last bin's on, to the first that is kept."""
    surface, budgets = Surface(BIN, TARGET, TAIL), [tokens * 16 // page for tokens in BUDGETS]
    for place in PLACES:
        while budgets:
            plan = Schedule(pages=(budgets[0],), page_tokens=page, dense_layers=DENSE_LAYERS)
            for _, context, alphas in await answers(engine, plan, prompts(100, ANSWERS, [place])):
                surface.add(budgets[0], context, alphas)
            cell = surface.cell(budgets[0], place)
            print(f"[sparse] to {BIN * (place + 1)} tokens, {budgets[0]} pages: {cell}", flush=True)
            if cell and cell.is_kept:
                break
            del budgets[0]
    return surface


def _tails(rows: Sequence[dict[str, float]]) -> str:
    return ", ".join(f"{row['5th percentile']:.3f} (mean {row['mean']:.3f})" for row in rows)


def _range(rows: Sequence[dict[str, float]], what: str) -> float:
    return max(row[what] for row in rows) - min(row[what] for row in rows)


def schedule_verdicts(told: dict[str, Any]) -> dict[str, bool]:
    """Claims about schedules, and whether each holds."""
    kept = [[row["share below target, most"] <= TAIL for row in rows] for rows in told["schedule"]]
    failed = [[row["share below target, least"] > TAIL for row in rows] for rows in told["fixed"]]
    return {
        f"a calibrated schedule keeps {TARGET} in every bin measured, to {LONGEST:,} tokens, with 95 %, "
        f"on held-out prompts of {SEEDS} seeds": all(map(all, kept)),
        "a fixed budget of its mean fails in some bin, with 95 %, for every seed": all(map(any, failed)),
        "the tail tells the length, the mean does not: ranges over bins, at least 3 times": told[
            "range over bins, 5th percentile"
        ]
        >= 3 * told["range over bins, mean"],
    }


async def guard(page: int) -> dict[str, Any]:
    """A budget that keeps the target, and a quarter of it: answers audited until the guard raises it."""
    engine = await open_engine(page)
    rises = []
    for seed in range(SEEDS):
        whole = Schedule(
            pages=(CUT_FROM * 16 // page,), number=2 * seed, page_tokens=page, dense_layers=DENSE_LAYERS
        )
        keeper = Guard(whole, TARGET, TAIL, BIN)
        asked = prompts(200 + seed, 2 * WINDOW, [0])
        calm = await _heard(engine, keeper, asked[:WINDOW])
        cut = replace(whole, pages=(whole.pages[0] // 4,), number=2 * seed + 1)
        keeper = Guard(cut, TARGET, TAIL, BIN)
        alarm = await _heard(engine, keeper, asked[WINDOW:])
        rises.append(
            {
                "false alarm": calm is not None,
                "answers until the rise": alarm[0] if alarm else 0,
                "rise": str(alarm[1]) if alarm else "",
            }
        )
        print(f"[sparse] guard, seed {seed}: {rises[-1]}", flush=True)
    await engine.close()
    return {"runs": rises}


async def _heard(
    engine: SparseEngine, keeper: Guard, asked: Sequence[tuple[int, ...]]
) -> tuple[int, Raise] | None:
    """Answers audited until the guard asks for a rise, and the rise; None: it does not."""
    for number, (_, context, alphas) in enumerate(await answers(engine, keeper.schedule, asked), 1):
        keeper.add(Audit(keeper.schedule.number, 0, context, tuple(alphas), 0.0))
        if rises := keeper.raises():
            return number, rises[0]
    return None


def guard_verdicts(told: dict[str, Any]) -> dict[str, bool]:
    """Claims about the guard on a real engine, and whether each holds."""
    runs = told["runs"]
    return {
        f"a budget cut to a quarter is raised within {WINDOW} audited answers, for every seed": all(
            0 < one["answers until the rise"] <= WINDOW for one in runs
        ),
        "the whole budget is not": not any(one["false alarm"] for one in runs),
    }


async def learner(page: int) -> dict[str, Any]:
    """The learner's acceptance, with the engine's weights and three updates ahead, beside the audit's."""
    engine = await open_engine(page)
    plan = Schedule(pages=(CUT_FROM * 8 // page,), page_tokens=page, dense_layers=DENSE_LAYERS)
    await engine.set_schedule(plan)
    asked = prompts(300, 24, [0])
    drawn = await asyncio.gather(
        *(
            engine.generate(one, num_samples=1, max_new_tokens=TOKENS, on_tokens=lambda *_: None)
            for one in asked
        )
    )
    answered = [(one, sample) for one, (sample,) in zip(asked, drawn, strict=True)]
    audited = [token.likely for one, sample in answered for token in await engine.audit(one, sample)]
    await engine.close()
    policy = load_policy(MODEL, torch.float32, 1.0, 1.0).model
    told = {"tokens": len(audited), "S = 0": _apart(_of_learner(policy, answered), audited)}
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNER_LR)
    for update in range(3):
        for one, sample in answered[8 * update : 8 * update + 8]:
            ids = torch.tensor([[*one, *sample.token_ids]])
            (policy(input_ids=ids, labels=ids).loss / 8).backward()
        optimizer.step()
        optimizer.zero_grad()
    told["S = 3"] = _apart(_of_learner(policy, answered), audited)
    return told


def _of_learner(policy: Any, answered: Sequence[tuple[tuple[int, ...], Sample]]) -> list[float]:
    """Acceptance of all tokens, the dense distribution being the learner's."""
    alphas = []
    for one, sample in answered:
        with torch.inference_mode():
            logits = policy(input_ids=torch.tensor([[*one, *sample.token_ids]])).logits[0]
        rows = logits[len(one) - 1 : -1].log_softmax(-1)
        for row, token, logprob, top in zip(
            rows, sample.token_ids, sample.logprobs, sample.top_logprobs, strict=True
        ):
            best = row.topk(20)
            dense = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
            alphas.append(acceptance([*dense, (token, float(row[token]))], [*top, (token, logprob)]).likely)
    return alphas


def _apart(learner: Sequence[float], audited: Sequence[float]) -> dict[str, float]:
    apart = np.abs(np.array(learner) - np.array(audited))
    return {
        "median difference": float(np.median(apart)),
        "largest difference": float(apart.max()),
        "5th percentile, learner": float(np.quantile(learner, TAIL)),
        "5th percentile, audit": float(np.quantile(audited, TAIL)),
        "mean, learner": float(np.mean(learner)),
        "mean, audit": float(np.mean(audited)),
    }


def learner_verdicts(told: dict[str, Any]) -> dict[str, bool]:
    """Claims about the learner's acceptance, and whether each holds."""
    return {
        "with the engine's weights the learner's acceptance is the audit's, median within 0.005": (
            told["S = 0"]["median difference"] <= 0.005
        ),
        "three updates ahead it is lower: sparsity and staleness mix there": told["S = 3"]["mean, learner"]
        < told["S = 3"]["mean, audit"],
    }


async def pages(page: int) -> dict[str, Any]:
    """Over 1,000 steps, blocks reused: log-probabilities beside those of a choice of pages by brute force.

    Then the exact acceptance of the same tokens, by bins of 512, with these pages and with the newest ones.
    """
    plan = Schedule(
        pages=(40 * 16 // page,), page_tokens=page, bin_tokens=SHORT_BIN, dense_layers=DENSE_LAYERS
    )
    settings = EngineConfig(dtype="float32", kv_cache_gib=0.0065, max_num_seqs=2)
    engine = SparseEngine(settings, SamplingConfig(top_logprobs=20), MODEL, 2048, 0, page_tokens=page)
    await engine.start()
    await engine.set_schedule(plan)
    options = RecallOptions(shortest=1200, longest=1800, shortest_period=600, longest_period=850)
    task = Recall(options, load_tokenizer(MODEL), 0)
    asked = [task.prompt(i).token_ids for i in range(16)]
    drawn = await asyncio.gather(
        *(engine.generate(one, num_samples=1, max_new_tokens=160, on_tokens=lambda *_: None) for one in asked)
    )
    await engine.close()
    best, recent = Reference(MODEL), Reference(MODEL, recent=True)
    apart: list[float] = []
    alphas: dict[str, dict[int, list[float]]] = {"best": {}, "newest": {}}
    for one, (sample,) in zip(asked, drawn, strict=True):
        rows = {
            "dense": best.logprobs(one, sample.token_ids, None),
            "best": best.logprobs(one, sample.token_ids, plan),
            "newest": recent.logprobs(one, sample.token_ids, plan),
        }
        mine = rows["best"][torch.arange(len(sample.token_ids)), torch.tensor(sample.token_ids)]
        apart += (mine - torch.tensor(sample.logprobs)).abs().tolist()
        for name, bins in alphas.items():
            exact = torch.minimum(rows[name].exp(), rows["dense"].exp()).sum(-1).tolist()
            for i, alpha in enumerate(exact):
                bins.setdefault((len(one) + i) // SHORT_BIN, []).append(alpha)
    tails = {
        name: {place: float(np.quantile(found, TAIL)) for place, found in sorted(bins.items())}
        for name, bins in alphas.items()
    }
    return {
        "steps": len(apart) // 2,  # of two rows each
        "rows with pages left out": best.rows,
        "tokens as by brute force": sum(one < 1e-3 for one in apart) / len(apart),
        "tails": tails,
    }


def pages_verdicts(told: dict[str, Any]) -> dict[str, bool]:
    """Claims about the choice of pages, and whether each holds."""
    tails = told["tails"]
    return {
        "1,000 steps read the pages of a choice by brute force (999 tokens in 1,000)": (
            told["steps"] >= 1000 and told["tokens as by brute force"] >= 0.999
        ),
        "the newest pages are worse by 0.05 of the 5th percentile, beyond the first bin": all(
            tails["newest"][place] <= best - 0.05 for place, best in tails["best"].items() if place > 0
        ),
    }
