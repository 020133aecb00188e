"""Part of `bench.sparse` on real text: a pretrained model, and solved problems of GSM8K before a question."""

from __future__ import annotations

import gzip
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from bench.sparse_schedule import TARGET, TOKENS, answers
from echo_planes.config.fleet import EngineConfig
from echo_planes.config.kv_schedule import Schedule
from echo_planes.config.schema import SamplingConfig
from echo_planes.rollout.sparsity.acceptance import TAIL, share_bounds
from echo_planes.rollout.sparsity.calibration import DEVIATIONS
from echo_planes.rollout.vllm.sparse_engine import SparseEngine

CONTEXTS = (2048, 4096, 8192)
BUDGET_TOKENS = (256, 512, 1024, 2048)
DENSE_LAYERS = 2


def problems(folder: Path) -> list[dict[str, str]]:
    """GSM8K's training problems: `question` and `answer`."""
    with gzip.open(folder / "train.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def prompt(
    found: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, tokens: int, number: int
) -> tuple[int, ...]:
    """A question behind as many solved problems as leave room for an answer in so many tokens."""
    draw = np.random.default_rng(number)
    order = draw.permutation(len(found)).tolist()
    question, text = found[order[0]]["question"], ""
    room = tokens - TOKENS - 1
    made: tuple[int, ...] = ()
    for place in order[1:]:
        text += f"Question: {found[place]['question']}\nAnswer: {found[place]['answer']}\n\n"
        said = [{"role": "user", "content": f"{text}Question: {question}\nAnswer:"}]
        ids = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=True)["input_ids"]
        if len(ids) > room:
            return made
        made = tuple(ids)
    raise ValueError(f"all problems together have fewer than {tokens} tokens")


async def text(page: int, count: int, model: Path, data: Path) -> dict[str, Any]:
    """Acceptance by length and budget, `count` answers of 64 tokens in each cell."""
    found, tokenizer = problems(data), AutoTokenizer.from_pretrained(model)
    engine = SparseEngine(
        EngineConfig(kv_cache_gib=1.5, max_num_seqs=32),
        SamplingConfig(top_logprobs=20),
        model,
        max(CONTEXTS),
        0,
        page_tokens=page,
    )
    await engine.start()
    told: dict[str, Any] = {"answers": count}
    for context in CONTEXTS:
        asked = [prompt(found, tokenizer, context, number) for number in range(count)]
        rows = told[str(context)] = {"prompt tokens": statistics.fmean(map(len, asked))}
        for budget in (size for size in BUDGET_TOKENS if size < context):
            began = time.perf_counter()
            plan = Schedule(pages=(budget // page,), page_tokens=page, dense_layers=DENSE_LAYERS)
            alphas = [some for _, _, some in await answers(engine, plan, asked)]
            whole = np.concatenate(alphas)
            low, high = share_bounds(
                [(len(one), sum(alpha < TARGET for alpha in one)) for one in alphas], DEVIATIONS
            )
            row = {
                "5th percentile": float(np.quantile(whole, TAIL)),
                "mean": float(whole.mean()),
                "share below target, least": low,
                "share below target, most": high,
                "tokens": len(whole),
            }
            rows[str(budget)] = row
            print(
                f"[sparse] real text of {context} tokens, {budget} read: 5th percentile "
                f"{row['5th percentile']:.3f}, mean {row['mean']:.3f}, "
                f"below {TARGET}: {low:.1%} to {high:.1%} "
                f"({len(whole)} tokens, {time.perf_counter() - began:.0f} s)",
                flush=True,
            )
    await engine.close()
    return told
