"""Each prompt once: `python -m bench.prompts [learner|engine|arithmetic ...] [--model PATH] [--json FILE]`.

Groups of 8 with prompts of 55, 512 and 2,048 tokens and answers of 64, random tokens.

    learner     forward and backward passes: rows that share their prompts, and a row for each trajectory
    engine      vLLM with and without its prefix cache; pages of 32 and of 128 tokens
    arithmetic  what it saves with 8 billion weights; nothing is run

With --gsm8k FOLDER (train.jsonl.gz) and a model that has a chat template, its problems as they are come too.

Ours, the baseline and the limit, which is the ratio of tokens to be computed, come from one run, in turn;
figures are medians of --rounds. With the built-in model they show mechanics, with SmolLM2-135M-Instruct
(docs/running.md, "Models") what a user gets.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import numpy as np
import torch
from transformers import AutoTokenizer

from bench.sparse_text import problems
from echo_planes.cluster.processor import bf16_is_faster
from echo_planes.config.fleet import EngineConfig
from echo_planes.config.schema import BUILTIN_MODELS, SamplingConfig
from echo_planes.learning.packing import build, find_inputs, make_units, plan
from echo_planes.learning.policy_model import PolicyModel, load_policy
from echo_planes.rollout.vllm.engine import VllmEngine
from echo_planes.types import TrainBatch

GROUP, ANSWER = 8, 64
PROMPTS = (55, 512, 2048)
BUDGET = 8192  # tokens of a micro-batch
GROUPS = {55: (4, 8), 512: (2, 4), 2048: (1, 2)}  # by length of the prompt: in a batch, asked at once
PARTS = ("learner", "engine", "arithmetic")


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts of one kind, new ones on every call, and how many of them are learned from or asked at once."""

    draw: Callable[[int, int], list[list[int]]]  # (count, seed)
    learned: int
    asked: int


def kinds_of(model: Path, gsm8k: Path | None) -> dict[str, Prompts]:
    """Random prompts by their length, and real ones."""
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]

    def random(tokens: int) -> Callable[[int, int], list[list[int]]]:
        def draw(count: int, seed: int) -> list[list[int]]:
            drawn = np.random.default_rng((tokens, seed)).integers(5, vocabulary - 5, (count, tokens))
            return [[int(token) for token in row] for row in drawn]

        return draw

    found = {str(tokens): Prompts(random(tokens), *GROUPS[tokens]) for tokens in PROMPTS}
    if gsm8k is not None:
        tokenizer = AutoTokenizer.from_pretrained(model)
        said = [[{"role": "user", "content": one["question"]}] for one in problems(gsm8k)]

        def real(count: int, seed: int) -> list[list[int]]:
            chosen = np.random.default_rng(seed).choice(len(said), count, replace=False)
            asked = [said[i] for i in chosen]
            ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)
            return [list(one) for one in ids["input_ids"]]

        found["GSM8K"] = Prompts(real, *GROUPS[55])
    return found


def batch_of(prompts: list[list[int]]) -> TrainBatch:
    """Groups of answers of random tokens; an answer is trained whole."""
    draw = np.random.default_rng(0)
    rows = [
        np.concatenate([prompt, draw.integers(0, max(prompt), ANSWER)])
        for prompt in prompts
        for _ in range(GROUP)
    ]
    count, groups = len(rows), len(prompts)
    token_ids = np.concatenate(rows)
    return TrainBatch(
        step=0,
        trajectory_ids=tuple(map(str, range(count))),
        token_ids=token_ids,
        offsets=np.cumsum([0, *map(len, rows)]),
        loss_mask=np.concatenate([np.arange(len(row)) >= len(row) - ANSWER for row in rows]),
        sampler_logprobs=np.zeros(len(token_ids), np.float32),
        rewards=np.zeros(count, np.float32),
        advantage_groups=np.repeat(np.arange(groups), GROUP),
        advantages=np.zeros(count, np.float32),
        versions=np.zeros(count, np.int64),
        correct=np.zeros(count, np.bool_),
        token_versions=np.zeros(len(token_ids), np.int64),
        cut_off=np.zeros(count, np.bool_),
    )


def losses(policy: PolicyModel, batch: TrainBatch) -> Iterator[Any]:
    """A loss of each micro-batch, in the layout that the policy takes."""
    inputs = find_inputs(batch, np.ones(batch.num_trajectories, np.bool_))
    units = make_units(batch, inputs, BUDGET if policy.packs else 0)
    lengths = np.array([unit.length for unit in units])
    for layout in plan(lengths, BUDGET, 1, several=policy.packs)[0]:
        micro = build(layout, units, batch, inputs)
        ids, positions = torch.from_numpy(micro.token_ids), torch.from_numpy(micro.position_ids)
        predictors, targets = torch.from_numpy(micro.predictors), torch.from_numpy(micro.targets)
        yield policy(ids, positions, micro.segments, predictors, targets)[0].sum()


def train(policy: PolicyModel, batch: TrainBatch) -> float:
    """Seconds of the forward and backward passes of a batch."""
    begun_s = time.perf_counter()
    for loss in losses(policy, batch):
        loss.backward()
    return time.perf_counter() - begun_s


def kept_bytes(policy: PolicyModel, batch: TrainBatch) -> int:
    """Memory that forward passes of a batch keep for the backward pass, all micro-batches together.

    That is what the layout needs in one micro-batch with room for all of it. Weights do not count.
    """
    weights = {one.untyped_storage().data_ptr() for one in policy.parameters()}
    total, sizes = 0, dict[int, int]()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for loss in losses(policy, batch):
            total += sum(sizes.values())
            sizes.clear()
            del loss  # before the next one is made: each keeps its own tensors
    return total


def in_turn(ways: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Median seconds of each way, after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            took_s = way()
            if number:
                seconds[name].append(took_s)
    return {name: statistics.median(values) for name, values in seconds.items()}


def learner(model: Path, kinds: dict[str, Prompts], rounds: int) -> dict[str, Any]:
    """Seconds of training, shared and alone."""
    dtype = torch.bfloat16 if bf16_is_faster() else torch.float32
    policy = load_policy(model, dtype, 1.0, 1.0, longest=max(PROMPTS) + ANSWER)
    found: dict[str, Any] = {}
    for kind, some in kinds.items():
        prompts = some.draw(some.learned, 0)
        batch = batch_of(prompts)

        def alone(batch: TrainBatch = batch) -> float:
            with policy.rows_of_one():
                return train(policy, batch)

        def shared(batch: TrainBatch = batch) -> float:
            return train(policy, batch)

        seconds = in_turn({"shared": shared, "alone": alone}, rounds)
        kept = {"shared": kept_bytes(policy, batch)}
        with policy.rows_of_one():
            kept["alone"] = kept_bytes(policy, batch)
        size = statistics.fmean(map(len, prompts))
        limit = GROUP * (size + ANSWER - 1) / (size + GROUP * (ANSWER - 1))
        times = seconds["alone"] / seconds["shared"]
        found[kind] = seconds | {"times": times, "limit": limit, "prompt_tokens": size, "kept_bytes": kept}
        print(
            f"learner, {str(dtype)[6:]}, prompts {kind} ({size:.0f} tokens): "
            f"shared {seconds['shared']:.2f} s, alone {seconds['alone']:.2f} s: {times:.2f} times as fast "
            f"(tokens: {limit:.2f}); kept for the backward pass: {kept['shared'] / 1e9:.2f} GB, "
            f"alone {kept['alone'] / 1e9:.2f}",
            flush=True,
        )
    return found


async def answers(engine: VllmEngine, prompts: list[list[int]]) -> float:
    """Sampled tokens per second of answers to prompts that are asked at once."""
    begun_s = time.perf_counter()
    made = await asyncio.gather(
        *(
            engine.generate(prompt, num_samples=GROUP, max_new_tokens=ANSWER, on_tokens=lambda *_: None)
            for prompt in prompts
        )
    )
    sampled = sum(len(sample.token_ids) for samples in made for sample in samples)
    return sampled / (time.perf_counter() - begun_s)


def engine(model: Path, kinds: dict[str, Prompts], rounds: int) -> dict[str, Any]:
    """Tokens per second of engines with and without a prefix cache. One after another: memory."""
    engines = {
        "ours": EngineConfig(kv_cache_gib=2.0),
        "no cache": EngineConfig(kv_cache_gib=2.0, enable_prefix_caching=False),
        "no cache, pages of 128": EngineConfig(
            kv_cache_gib=2.0, enable_prefix_caching=False, extra={"block_size": 128}
        ),
    }
    rates: dict[str, dict[str, float]] = {}
    tokens: dict[str, dict[str, int]] = {}
    for name, config in engines.items():
        made = VllmEngine(config, SamplingConfig(), model, max(PROMPTS) + 2 * ANSWER, seed=0)

        async def measure(made: VllmEngine = made, name: str = name) -> None:
            await made.start()
            counter = made._counter
            if counter is None:
                raise RuntimeError("the engine counts nothing")
            rates[name], tokens[name] = {}, {}
            try:
                for kind, some in kinds.items():
                    found = []
                    for number in range(rounds + 1):
                        before = counter.tokens
                        found.append(await answers(made, some.draw(some.asked, number)))
                        tokens[name][kind] = counter.tokens - before
                    rates[name][kind] = statistics.median(found[1:])
            finally:
                await made.close()

        asyncio.run(measure())
    found: dict[str, Any] = {}
    for kind in kinds:
        limit = tokens["no cache"][kind] / tokens["ours"][kind]
        found[kind] = {
            "tokens_per_s": {name: rates[name][kind] for name in engines},
            "computed_tokens": {name: tokens[name][kind] for name in engines},
            "times": rates["ours"][kind] / rates["no cache"][kind],
            "limit": limit,
        }
        told = ", ".join(f"{name} {rates[name][kind]:.0f}" for name in engines)
        print(
            f"engine, prompts {kind}: sampled tokens/s: {told}: {found[kind]['times']:.2f} times "
            f"(tokens computed: {limit:.2f})",
            flush=True,
        )
    return found


def arithmetic() -> dict[str, Any]:
    """FLOPs of a step of 512 x 8 answers of 2,048 tokens with 8 billion weights; nothing is run.

    6 FLOPs a weight and token of training (Kaplan et al. 2020, 2.1), 2 of sampling, 989 TFLOP/s of an H100 in
    bf16 at 40 % (training) and 50 % (prefill). Decoding, which is bound by memory, is the same either way.
    """
    weights, prompts, answer = 8e9, 512, 2048
    found: dict[str, Any] = {}
    for prompt in (300, 4000):
        alone, shared = prompts * GROUP * (prompt + answer), prompts * (prompt + GROUP * answer)
        train_saved, prefill_saved = 6 * weights * (alone - shared), 2 * weights * (alone - shared)
        found[str(prompt)] = {
            "training_pflops": (6 * weights * alone / 1e15, 6 * weights * shared / 1e15),
            "prefill_pflops": (
                2 * weights * prompts * GROUP * prompt / 1e15,
                2 * weights * prompts * prompt / 1e15,
            ),
            "training_gpu_s_saved": train_saved / (989e12 * 0.4),
            "prefill_gpu_s_saved": prefill_saved / (989e12 * 0.5),
            "training_times": alone / shared,
        }
        one = found[str(prompt)]
        print(
            f"arithmetic, 8 B, 512 x 8 x 2,048, prompts of {prompt}: training "
            f"{one['training_pflops'][0]:.0f} -> {one['training_pflops'][1]:.0f} PFLOP "
            f"({one['training_times']:.2f} times, {one['training_gpu_s_saved']:.0f} H100 seconds), prefill "
            f"{one['prefill_pflops'][0]:.1f} -> {one['prefill_pflops'][1]:.1f} PFLOP "
            f"({one['prefill_gpu_s_saved']:.0f} H100 seconds)"
        )
    return found


def main() -> int:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS) + "; default: all")
    parser.add_argument("--model", type=Path, default=BUILTIN_MODELS["builtin:tiny-math"])
    parser.add_argument("--gsm8k", type=Path, help="folder with train.jsonl.gz")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if wrong := sorted(set(options.parts) - set(PARTS)):
        parser.error(f"{wrong[0]!r} is no part; there are {', '.join(PARTS)}")
    options.parts = options.parts or list(PARTS)
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    kinds = kinds_of(options.model, options.gsm8k)
    if "learner" in options.parts:
        found["learner"] = learner(options.model, kinds, options.rounds)
    if "engine" in options.parts:
        found["engine"] = engine(options.model, kinds, options.rounds)
    if "arithmetic" in options.parts:
        found["arithmetic"] = arithmetic()
    found["verdicts"] = {
        f"{part}: at least {times} times as fast at prompts of 512": found[part]["512"]["times"] >= times
        for part, times in (("learner", 3), ("engine", 4))
        if part in found
    }
    for text, holds in found["verdicts"].items():
        print(f"{'pass' if holds else 'MISSED'}  {text}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 0 if all(found["verdicts"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
