"""Part of `bench.sparse` on real text: a pretrained model, and solved problems of GSM8K before a question."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from bench.sparse_schedule import TARGET, TOKENS, answers, figures
from echo_planes.config.fleet import EngineConfig
from echo_planes.config.kv_schedule import Schedule
from echo_planes.config.schema import SamplingConfig
from echo_planes.rollout.sparsity.acceptance import TAIL
from echo_planes.rollout.sparsity.calibration import Surface
from echo_planes.rollout.vllm.sparse_engine import SparseEngine

CONTEXTS = (2048, 4096, 8192)
BIN_TOKENS = 2048
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


def prompts(model: Path, data: Path, tokens: int, count: int) -> list[tuple[int, ...]]:
    """So many prompts, of at most so many tokens with an answer."""
    found, tokenizer = problems(data), AutoTokenizer.from_pretrained(model)
    return [prompt(found, tokenizer, tokens, number) for number in range(count)]


def write_endless(model: Path, folder: Path) -> None:
    """Write the model as one that ends no answer by itself."""
    policy = AutoModelForCausalLM.from_pretrained(model)
    # Without a tokenizer vLLM ends answers at token 0, whose logit is hardly ever the largest now.
    with torch.no_grad():
        policy.get_input_embeddings().weight[0] = 0.0
    for config in (policy.config, policy.generation_config):
        config.eos_token_id = None
    policy.save_pretrained(folder)


async def text(page: int, count: int, model: Path, data: Path, contexts: Sequence[int]) -> dict[str, Any]:
    """Acceptance by length and budget, `count` answers of 64 tokens in each cell, and a schedule of it.

    The schedule is tried on as many other questions.
    """
    found, tokenizer = problems(data), AutoTokenizer.from_pretrained(model)
    engine = SparseEngine(
        EngineConfig(kv_cache_gib=1.5, max_num_seqs=32),
        SamplingConfig(top_logprobs=20),
        model,
        max(contexts),
        0,
        page_tokens=page,
    )
    await engine.start()

    def asked(context: int, first: int) -> list[tuple[int, ...]]:
        return [prompt(found, tokenizer, context, number) for number in range(first, first + count)]

    def plan(*pages: int) -> Schedule:
        return Schedule(pages=pages, page_tokens=page, bin_tokens=BIN_TOKENS, dense_layers=DENSE_LAYERS)

    told: dict[str, Any] = {"answers": count}
    surface = Surface(BIN_TOKENS, TARGET, TAIL)
    for context in contexts:
        rows = told[str(context)] = {}
        for budget in (size for size in BUDGET_TOKENS if size < context):
            drawn = await answers(engine, plan(budget // page), asked(context, 0))
            for _, tokens, alphas in drawn:
                surface.add(budget // page, tokens, alphas)
            rows[str(budget)] = figures([alphas for _, _, alphas in drawn])
            print(
                f"[sparse] real text of {context} tokens, {budget} read: {_line(rows[str(budget)])}",
                flush=True,
            )
    told["schedule"] = surface.schedule(max(contexts))
    for context in contexts:
        drawn = await answers(engine, plan(*told["schedule"]), asked(context, count))
        row = told[str(context)]["schedule"] = figures([alphas for _, _, alphas in drawn])
        print(
            f"[sparse] real text of {context} tokens, by {told['schedule']} pages: {_line(row)}", flush=True
        )
    await engine.close()
    return told


def _line(row: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in row.items())
