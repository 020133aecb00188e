"""Sparse decoding and stock attention on CPUs: `python -m bench.sparse [PART ...] [--json FILE]`.

- parity: with a budget of all pages, greedy answers of a random model equal those of stock attention with
  the same pages, in float32 and bfloat16. The sparse path computes them, a head at a time. The control has
  four pages.
- pages: those read, beside a choice by brute force and the newest ones.
- audit: dense answers of the embedded model, audited: the dense pass must accept what dense decoding sampled.
- schedule: with the model of `bench.recall`, a schedule calibrated from fixed budgets, and a fixed budget of
  its mean, on held-out prompts of three seeds (an hour; `--answers` in each bin).
- text: acceptance by length and budget on real text: a pretrained `--model`, problems of `--gsm8k FOLDER`.
- guard: a budget cut to a quarter, until the guard raises it.
- learner: the learner's acceptance beside the audit's, with the same weights and three updates ahead.
- learning: runs with dense and sparse rollouts, of three seeds (an hour).
- distil: acceptance of budgets before and after distillation, three seeds (a quarter of an hour).
- speed: two engines hold the same long answers, stock vLLM (its own pages) and sparse with a budget of 1,024
  tokens, and run in turn for a number of tokens each. Only decoding counts, not prefill. The weights are few,
  so that attention is what costs; each head has keys of its own. `--page 16` has the pages of the paper; by
  default they are of 32 tokens, for which vLLM's kernel has AMX.

Every context is measured in five alternating pairs. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from bench import sparse_distil, sparse_learning, sparse_schedule, sparse_text
from bench.recall import MODEL
from echo_planes.config.fleet import EngineConfig
from echo_planes.config.kv_schedule import PAGE_TOKENS, Schedule
from echo_planes.config.schema import BUILTIN_MODELS, SamplingConfig
from echo_planes.rollout.sparsity.acceptance import Histogram
from echo_planes.rollout.vllm.engine import VllmEngine
from echo_planes.rollout.vllm.sparse_engine import SparseEngine
from echo_planes.types import Draw, Sample

VOCABULARY = 259
BATCH = 8
BUDGET_TOKENS = 1024
PAIRS = 5
CONTEXTS = (1024, 2048, 4096, 8192, 16_384)
TOKENS = {1024: 96, 2048: 64, 4096: 48, 8192: 32, 16_384: 32}  # decoded by each request in one turn
SPEEDUP, NO_LOSS, SAME_NATS, LEAST_TOKENS = 1.5, 0.95, 1e-5, 10_000
AUDITED, DENSE_TAIL = 128, 0.995


def write_model(folder: Path, layers: int, hidden: int, heads: int, kv_heads: int, size: int) -> None:
    """A random model that ends no answer by itself."""
    torch.manual_seed(5)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=size,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    # Without a tokenizer vLLM ends answers at token 0, whose logit is never the largest now.
    with torch.no_grad():
        model.model.embed_tokens.weight[0] = 0.0
    model.save_pretrained(folder)


async def parity(page: int) -> dict[str, Any]:
    return {dtype: await _parity(page, dtype) for dtype in ("float32", "bfloat16")}


async def _parity(page: int, dtype: Literal["float32", "bfloat16"]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, 3, 64, 4, 2, 32)
        settings = EngineConfig(dtype=dtype, kv_cache_gib=0.1, max_num_seqs=16)
        engine = SparseEngine(settings, SamplingConfig(), folder, 2048, 0, page_tokens=page)
        await engine.start()
        rng = random.Random(1)
        prompts = [[rng.randrange(VOCABULARY - 1) for _ in range(rng.randrange(3, 900))] for _ in range(16)]
        dense, full, few = [
            await _answers(engine, prompts, schedule)
            for schedule in (
                None,
                Schedule(pages=(10_000,), page_tokens=page, dense_layers=0),
                Schedule(pages=(4,), page_tokens=page, dense_layers=0),
            )
        ]
        await engine.close()
    equal = [(one, two) for one, two in zip(dense, full, strict=True) if one.token_ids == two.token_ids]
    apart = [abs(p - q) for one, two in equal for p, q in zip(one.logprobs, two.logprobs, strict=True)]
    return {
        "tokens": sum(len(one.token_ids) for one in dense),
        "answers": len(dense),
        "equal answers": len(equal),
        "largest difference, nats": max(apart, default=0.0),
        "equal answers with 4 pages": sum(
            one.token_ids == two.token_ids for one, two in zip(dense, few, strict=True)
        ),
    }


async def audit(page: int) -> dict[str, Any]:
    folder = BUILTIN_MODELS["builtin:tiny-math"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    engine = SparseEngine(
        EngineConfig(kv_cache_gib=0.1), SamplingConfig(top_logprobs=20), folder, 64, 0, page_tokens=page
    )
    await engine.start()
    rng, histogram = random.Random(2), Histogram()
    widest = 0.0
    for _ in range(AUDITED):
        prompt = tokenizer.encode(
            f"{rng.randrange(10, 90)}+{rng.randrange(10, 90)}=", add_special_tokens=False
        )
        (sample,) = await engine.generate(prompt, num_samples=1, max_new_tokens=8, on_tokens=lambda *_: None)
        bounds = await engine.audit(prompt, sample)
        histogram.add([0] * len(bounds), [one.likely for one in bounds])
        widest = max(widest, *(one.upper - one.lower for one in bounds))
    await engine.close()
    return {
        "answers": AUDITED,
        "mean": histogram.mean(0),
        "5th percentile": histogram.tail(0),
        "widest bounds": widest,
    }


async def _answers(engine: SparseEngine, prompts: list[list[int]], schedule: Schedule | None) -> list[Sample]:
    """Answer the prompts, all queued before the first step.

    Where vLLM cuts a prompt's prefill decides how bfloat16 rounds (0.016 nats), and requests that come one by
    one are cut by chance.
    """
    await engine.set_schedule(schedule)
    await engine.vllm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
    work = [asyncio.ensure_future(_answer(engine, prompt, 1000)) for prompt in prompts]
    while engine.vllm.output_processor.get_num_unfinished_requests() < len(prompts):
        await asyncio.sleep(0.001)
    await engine.vllm.resume_generation()
    return [samples[0] for samples in await asyncio.gather(*work)]


def _answer(engine: VllmEngine, prompt: list[int], tokens: int) -> Awaitable[list[Sample]]:
    return engine.generate(
        prompt, num_samples=1, max_new_tokens=tokens, on_tokens=lambda *_: None, draw=Draw(0.0, 1.0)
    )


class Turns:
    """An engine with long answers that runs only in its turns."""

    def __init__(self, engine: VllmEngine, context: int, prompts: Sequence[Sequence[int]]) -> None:
        self.engine = engine
        self.counts = [0] * len(prompts)
        room = (PAIRS + 2) * 2 * TOKENS[context] + 200
        self.work = [asyncio.ensure_future(self._hold(place, one, room)) for place, one in enumerate(prompts)]

    async def _hold(self, place: int, prompt: Sequence[int], room: int) -> None:
        def count(index: int, piece: Sample) -> None:
            self.counts[place] += len(piece.token_ids)

        await self.engine.generate(
            prompt, num_samples=1, max_new_tokens=room, on_tokens=count, draw=Draw(0.0, 1.0)
        )

    async def run(self, tokens: int) -> float:
        """Let every request decode so many tokens; seconds of one token of all."""
        before = min(self.counts)
        await self.engine.vllm.resume_generation()
        start_s, first = time.perf_counter(), sum(self.counts)
        while min(self.counts) < before + tokens:
            if any(one.done() for one in self.work):
                raise RuntimeError(f"an answer ended before its time, after {self.counts} tokens")
            await asyncio.sleep(0.001)
        await self.engine.vllm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        return (time.perf_counter() - start_s) / (sum(self.counts) - first) * len(self.counts)

    async def end(self) -> None:
        await self.engine.vllm.resume_generation()
        for one in self.work:
            one.cancel()
        await asyncio.gather(*self.work, return_exceptions=True)


async def speed(
    page: int, contexts: Sequence[int], model: Path | None = None, data: Path | None = None
) -> dict[str, Any]:
    """Decoding beside stock attention; of a pretrained model on GSM8K in `data`, or of a random one."""
    told: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if model and data:
            sparse_text.write_endless(model, folder)
        else:
            write_model(folder, 8, 256, 4, 4, 64)
        settings = EngineConfig(kv_cache_gib=3.5 if model else 1.4, max_num_seqs=BATCH)
        longest = max(contexts) + 2048
        stock = VllmEngine(settings, SamplingConfig(), folder, longest, 0)
        sparse = SparseEngine(settings, SamplingConfig(), folder, longest, 0, page_tokens=page)
        engines = (stock, sparse)
        for engine in engines:
            await engine.start()
        for context in contexts:
            budget = min(context // 2, 2 * BUDGET_TOKENS) if model else BUDGET_TOKENS
            await sparse.set_schedule(Schedule(pages=(budget // page,), page_tokens=page))
            prompts: Sequence[Sequence[int]]
            if model and data:
                prompts = sparse_text.prompts(model, data, context, BATCH)
            else:
                rng = random.Random(context)
                prompts = [[rng.randrange(VOCABULARY - 1) for _ in range(context)] for _ in range(BATCH)]
            turns = []
            for engine in engines:
                turns.append(Turns(engine, context, prompts))
                while min(turns[-1].counts) < 2:  # prefilled
                    await asyncio.sleep(0.05)
                await turns[-1].run(2)  # ends in a pause
            pairs = [[await one.run(TOKENS[context]) for one in turns] for _ in range(PAIRS)]
            told[str(context)] = {
                "tokens read, at most": budget,
                "stock, ms a token of all": [1000 * first for first, _ in pairs],
                "sparse, ms a token of all": [1000 * second for _, second in pairs],
                "stock / sparse": statistics.median(first / second for first, second in pairs),
            }
            print(
                f"[sparse] {context} tokens: stock / sparse {told[str(context)]['stock / sparse']:.2f}",
                flush=True,
            )
            for one in turns:
                await one.end()
        for engine in engines:
            await engine.close()
    return told


def verdicts(told: dict[str, Any]) -> dict[str, bool]:
    """Claims, and whether each holds."""
    found = {}
    for dtype, one in told.get("parity", {}).items():
        found[f"a full budget is stock attention in {dtype}: 10,000 tokens; four pages are not"] = (
            one["tokens"] >= LEAST_TOKENS
            and one["equal answers"] == one["answers"]
            and one["largest difference, nats"] <= SAME_NATS
            and one["equal answers with 4 pages"] < one["answers"]
        )
    if "audit" in told:
        tail = told["audit"]["5th percentile"]
        found[f"a dense pass accepts dense answers: 5th percentile at least {DENSE_TAIL}"] = (
            tail >= DENSE_TAIL
        )
    if "pages" in told:
        found |= sparse_schedule.pages_verdicts(told["pages"])
    if "schedule" in told:
        found |= sparse_schedule.schedule_verdicts(told["schedule"])
    if "guard" in told:
        found |= sparse_schedule.guard_verdicts(told["guard"])
    if "learner" in told:
        found |= sparse_schedule.learner_verdicts(told["learner"])
    if "learning" in told:
        found |= sparse_learning.learning_verdicts(told["learning"])
    if "distil" in told:
        found |= sparse_distil.distil_verdicts(told["distil"])
    if "speed" in told:
        ratios = {int(context): one["stock / sparse"] for context, one in told["speed"].items()}
        if 16_384 in ratios:
            found[f"at 16k at least {SPEEDUP} times as fast"] = ratios[16_384] >= SPEEDUP
        if 1024 in ratios:
            found[f"at 1k at least {NO_LOSS} times as fast"] = ratios[1024] >= NO_LOSS
    return found


WORK = {
    "parity": parity,
    "pages": sparse_schedule.pages,
    "audit": audit,
    "guard": sparse_schedule.guard,
    "learner": sparse_schedule.learner,
    "distil": sparse_distil.distil,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = (
        "parity",
        "pages",
        "audit",
        "schedule",
        "text",
        "guard",
        "learner",
        "learning",
        "distil",
        "speed",
    )
    parser.add_argument("parts", nargs="*", metavar="|".join(names), help="default: all")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--page", type=int, choices=PAGE_TOKENS, default=32, help="tokens of a page")
    parser.add_argument(
        "--model", type=Path, help="of schedule (by `bench.recall`, its default), text, and speed on --gsm8k"
    )
    parser.add_argument("--gsm8k", type=Path, help="of text and speed: folder with train.jsonl.gz")
    parser.add_argument("--answers", type=int, default=sparse_schedule.HELD_OUT, help="of both, in a bin")
    parser.add_argument("--contexts", type=int, nargs="+", choices=CONTEXTS, help="of text and speed")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(names):
        parser.error(f"{', '.join(unknown)}: there are {', '.join(names)}")
    told: dict[str, Any] = {"page": args.page}
    for part in args.parts or [name for name in names if name != "text" or args.gsm8k]:
        if part == "learning":
            told[part] = sparse_learning.learning(args.page)
            continue
        if part == "text":
            if args.gsm8k is None or args.model is None:
                parser.error("text: say where a model and GSM8K are with --model FOLDER and --gsm8k FOLDER")
            contexts = args.contexts or sparse_text.CONTEXTS
            told[part] = asyncio.run(
                sparse_text.text(args.page, args.answers, args.model, args.gsm8k, contexts)
            )
            continue
        if part == "schedule":
            told[part] = asyncio.run(sparse_schedule.schedule(args.page, args.answers, args.model or MODEL))
            continue
        work = WORK.get(part)
        contexts = args.contexts or CONTEXTS
        told[part] = asyncio.run(
            work(args.page) if work else speed(args.page, contexts, args.model, args.gsm8k)
        )
    told["verdicts"] = verdicts(told)
    print(json.dumps(told, indent=2))
    if args.json:
        args.json.write_text(json.dumps(told, indent=2) + "\n")
    if not told["verdicts"]:
        print("[sparse] no claim is about these contexts")
    raise SystemExit(0 if all(told["verdicts"].values()) else 1)


if __name__ == "__main__":
    main()
