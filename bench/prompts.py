"""Each prompt once: `python -m bench.prompts [learner|engine|arithmetic ...] [--model PATH] [--json FILE]`.

Groups of 8 with prompts of 55, 512 and 2,048 tokens and answers of 64, random tokens.

    learner     forward and backward passes: rows that share their prompts, and a row for each trajectory
    engine      vLLM with and without its prefix cache; pages of 32 and of 128 tokens
    arithmetic  what it saves with 8 billion weights; nothing is run

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import numpy as np
import torch

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
LEARNER_GROUPS = {55: 4, 512: 2, 2048: 1}  # of a batch
ENGINE_GROUPS = {55: 8, 512: 4, 2048: 2}  # at once
PARTS = ("learner", "engine", "arithmetic")


def batch_of(prompt_tokens: int, groups: int, vocabulary: int) -> TrainBatch:
    """Groups of random tokens; an answer is trained whole."""
    draw = np.random.default_rng(prompt_tokens)
    rows = []
    for _ in range(groups):
        prompt = draw.integers(0, vocabulary, prompt_tokens)
        rows += [np.concatenate([prompt, draw.integers(0, vocabulary, ANSWER)]) for _ in range(GROUP)]
    count, length = len(rows), prompt_tokens + ANSWER
    token_ids = np.concatenate(rows)
    return TrainBatch(
        step=0,
        trajectory_ids=tuple(map(str, range(count))),
        token_ids=token_ids,
        offsets=np.arange(count + 1) * length,
        loss_mask=np.tile(np.arange(length) >= prompt_tokens, count),
        sampler_logprobs=np.zeros(len(token_ids), np.float32),
        rewards=np.zeros(count, np.float32),
        advantage_groups=np.repeat(np.arange(groups), GROUP),
        advantages=np.zeros(count, np.float32),
        versions=np.zeros(count, np.int64),
        correct=np.zeros(count, np.bool_),
        token_versions=np.zeros(len(token_ids), np.int64),
        cut_off=np.zeros(count, np.bool_),
    )


def train(policy: PolicyModel, batch: TrainBatch) -> float:
    """Seconds of the forward and backward passes of a batch, in the layout that the policy takes."""
    begun_s = time.perf_counter()
    inputs = find_inputs(batch, np.ones(batch.num_trajectories, np.bool_))
    units = make_units(batch, inputs, BUDGET if policy.packs else 0)
    lengths = np.array([unit.length for unit in units])
    for layout in plan(lengths, BUDGET, 1, several=policy.packs)[0]:
        micro = build(layout, units, batch, inputs)
        ids, positions = torch.from_numpy(micro.token_ids), torch.from_numpy(micro.position_ids)
        predictors, targets = torch.from_numpy(micro.predictors), torch.from_numpy(micro.targets)
        policy(ids, positions, micro.segments, predictors, targets)[0].sum().backward()
    return time.perf_counter() - begun_s


def in_turn(ways: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Median seconds of each way, after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            took_s = way()
            if number:
                seconds[name].append(took_s)
    return {name: statistics.median(values) for name, values in seconds.items()}


def learner(model: Path, rounds: int) -> dict[str, Any]:
    """Seconds of training, shared and alone."""
    dtype = torch.bfloat16 if bf16_is_faster() else torch.float32
    policy = load_policy(model, dtype, 1.0, 1.0, longest=max(PROMPTS) + ANSWER)
    vocabulary = policy.model.config.vocab_size
    found: dict[str, Any] = {}
    for prompt_tokens in PROMPTS:
        batch = batch_of(prompt_tokens, LEARNER_GROUPS[prompt_tokens], vocabulary)

        def alone(batch: TrainBatch = batch) -> float:
            with policy.rows_of_one():
                return train(policy, batch)

        def shared(batch: TrainBatch = batch) -> float:
            return train(policy, batch)

        seconds = in_turn({"shared": shared, "alone": alone}, rounds)
        limit = GROUP * (prompt_tokens + ANSWER - 1) / (prompt_tokens + GROUP * (ANSWER - 1))
        times = seconds["alone"] / seconds["shared"]
        found[str(prompt_tokens)] = seconds | {"times": times, "limit": limit}
        print(
            f"learner, {str(dtype)[6:]}, prompts of {prompt_tokens:>5}: shared {seconds['shared']:.2f} s, "
            f"alone {seconds['alone']:.2f} s: {times:.2f} times as fast (tokens: {limit:.2f})",
            flush=True,
        )
    return found


async def answers(engine: VllmEngine, prompt_tokens: int, groups: int, vocabulary: int, seed: int) -> float:
    """Seconds until an engine has answered `groups` new prompts, asked at once."""
    draw = np.random.default_rng(seed)
    prompts = [draw.integers(5, vocabulary - 5, prompt_tokens).tolist() for _ in range(groups)]
    begun_s = time.perf_counter()
    await asyncio.gather(
        *(
            engine.generate(prompt, num_samples=GROUP, max_new_tokens=ANSWER, on_tokens=lambda *_: None)
            for prompt in prompts
        )
    )
    return time.perf_counter() - begun_s


def engine(model: Path, rounds: int) -> dict[str, Any]:
    """Tokens per second of engines with and without a prefix cache. One after another: memory."""
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    kinds = {
        "ours": EngineConfig(kv_cache_gib=2.0),
        "no cache": EngineConfig(kv_cache_gib=2.0, enable_prefix_caching=False),
        "no cache, pages of 128": EngineConfig(
            kv_cache_gib=2.0, enable_prefix_caching=False, extra={"block_size": 128}
        ),
    }
    seconds: dict[str, dict[int, float]] = {}
    tokens: dict[str, dict[int, int]] = {}
    for name, config in kinds.items():
        made = VllmEngine(config, SamplingConfig(), model, max(PROMPTS) + 2 * ANSWER, seed=0)

        async def measure(made: VllmEngine = made, name: str = name) -> None:
            await made.start()
            counter = made._counter
            if counter is None:
                raise RuntimeError("the engine counts nothing")
            seconds[name], tokens[name] = {}, {}
            try:
                for size in PROMPTS:
                    took = []
                    for number in range(rounds + 1):
                        before = counter.tokens
                        groups, seed = ENGINE_GROUPS[size], 100 * size + number
                        took.append(await answers(made, size, groups, vocabulary, seed))
                        tokens[name][size] = counter.tokens - before
                    seconds[name][size] = statistics.median(took[1:])
            finally:
                await made.close()

        asyncio.run(measure())
    found: dict[str, Any] = {}
    for size in PROMPTS:
        sampled = ENGINE_GROUPS[size] * GROUP * ANSWER
        rates = {name: sampled / seconds[name][size] for name in kinds}
        limit = tokens["no cache"][size] / tokens["ours"][size]
        found[str(size)] = {
            "tokens_per_s": rates,
            "computed_tokens": {name: tokens[name][size] for name in kinds},
            "times": rates["ours"] / rates["no cache"],
            "limit": limit,
        }
        told = ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
        print(
            f"engine, prompts of {size:>5}: sampled tokens/s: {told}: {found[str(size)]['times']:.2f} times "
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
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if wrong := sorted(set(options.parts) - set(PARTS)):
        parser.error(f"{wrong[0]!r} is no part; there are {', '.join(PARTS)}")
    options.parts = options.parts or list(PARTS)
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    if "learner" in options.parts:
        found["learner"] = learner(options.model, options.rounds)
    if "engine" in options.parts:
        found["engine"] = engine(options.model, options.rounds)
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
