"""Cost of a rollout worker on top of the engine: `python -m bench.rollout [--json FILE] [--prompts N]`.

One engine, two ways to feed it the same prompts with the same number in flight, in alternating rounds:

- worker: the real `RolloutWorker` with the math task: leases, episodes, rewards, submitted groups. The data
  plane is a list in this process;
- bare: vLLM's `AsyncLLM.generate` with the same sampling parameters, except that it returns whole answers
  only, which is the cheapest way to ask.

By default more prompts are in flight than the engine decodes at once, so that it never waits for one: what is
compared is throughput, not how soon the next prompt follows.

The bar is that the median round of the worker makes at least 0.95 of the tokens per second of the bare one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
from transformers import AutoTokenizer

from echo_planes.config.fleet import WorkerConfig
from echo_planes.config.schema import Config, ModelConfig, SamplingConfig
from echo_planes.loop.builders import build_scorer
from echo_planes.rollout.vllm.engine import VllmEngine
from echo_planes.rollout.work import places
from echo_planes.rollout.worker import RolloutWorker
from echo_planes.tasks.math.adapter import MathTask
from echo_planes.tasks.math.options import MathOptions
from echo_planes.testing.fakes import FakeWeights
from echo_planes.types import Group, Lease, LeaseTokens, Prompt, Receipt, WorkerStats

BAR = 0.95


class ListedWork:
    """A data plane without rules: hands out listed prompts and counts what comes back."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples
        self._prompts: list[Prompt] = []
        self._refilled = asyncio.Event()
        self._missing = 0
        self._drained = asyncio.Event()
        self.tokens = 0

    async def work_off(self, prompts: list[Prompt]) -> int:
        """Returns the tokens sampled for `prompts`, once all of their groups are in."""
        self.tokens, self._missing = 0, len(prompts)
        self._prompts = list(prompts)
        self._drained.clear()
        self._refilled.set()
        await self._drained.wait()
        return self.tokens

    async def pull(self, worker_id: str, epoch: int, room: int, wait_s: float) -> list[Lease]:
        if not self._prompts:
            self._refilled.clear()
            await self._refilled.wait()
        taken, self._prompts = self._prompts[:room], self._prompts[room:]
        return [
            Lease(f"l{p.index}", f"g{p.index}", epoch, worker_id, p, self._num_samples, -1, 1e12)
            for p in taken
        ]

    async def stream(self, worker_id: str, epoch: int, messages: list[LeaseTokens]) -> tuple[str, ...]:
        """Leases here never run out, and are never asked back."""
        return ()

    async def tell(self, epoch: int, stats: WorkerStats) -> None:
        """Nobody routes."""

    async def hand_over(self, worker_id: str, epoch: int, messages: list[LeaseTokens]) -> int:
        """Nobody leaves."""
        return 0

    async def submit(self, worker_id: str, epoch: int, groups: list[tuple[str, Group]]) -> list[Receipt]:
        for _, group in groups:
            if failed := [t.error for t in group.trajectories if t.status != "ok"]:
                raise RuntimeError(failed[0])
            self.tokens += sum(len(t.episode.response_ids) for t in group.trajectories)
        self._missing -= len(groups)
        if self._missing == 0:
            self._drained.set()
        return [Receipt(lease_id, accepted=True) for lease_id, _ in groups]


class BareEngine:
    """The engine under the worker, asked directly."""

    def __init__(self, engine: VllmEngine, sampling: SamplingConfig, max_tokens: int, in_flight: int) -> None:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        self._vllm = engine.vllm
        self._room = asyncio.Semaphore(in_flight)
        self._params = SamplingParams(
            n=sampling.samples_per_prompt,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=max_tokens,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )

    async def work_off(self, prompts: list[Prompt]) -> int:
        return sum(await asyncio.gather(*(self._answer(prompt) for prompt in prompts)))

    async def _answer(self, prompt: Prompt) -> int:
        from vllm.inputs.engine import tokens_input

        tokens = 0
        async with self._room:
            rendered = tokens_input(list(prompt.token_ids))
            async for output in self._vllm.generate(rendered, self._params, f"bare-{prompt.index}"):
                tokens += sum(len(completion.token_ids) for completion in output.outputs)
        return tokens


def cpu_seconds() -> tuple[float, float]:
    """CPU time used so far by this process, and by its children (the engine)."""
    me = psutil.Process()
    spent = [sum(process.cpu_times()[:2]) for process in (me, *me.children(recursive=True))]
    return spent[0], sum(spent[1:])


async def measure(
    work_off: Callable[[list[Prompt]], Awaitable[int]], prompts: list[Prompt]
) -> tuple[float, float, float]:
    """Tokens/s of one round, and CPU seconds per prompt of this process and of the engine's."""
    cpu_before, begun_s = cpu_seconds(), time.perf_counter()
    tokens = await work_off(prompts)
    elapsed_s, cpu_after = time.perf_counter() - begun_s, cpu_seconds()
    mine, engine = (after - before for before, after in zip(cpu_before, cpu_after, strict=True))
    return tokens / elapsed_s, mine / len(prompts), engine / len(prompts)


async def run(arguments: argparse.Namespace) -> dict[str, float]:
    """Alternating rounds on one engine; medians over rounds."""
    model, sampling = ModelConfig(), SamplingConfig()
    kind = WorkerConfig(max_groups=arguments.max_groups)
    task = MathTask(MathOptions(), AutoTokenizer.from_pretrained(model.folder), seed=0)
    engine = VllmEngine(kind.engine, sampling, model.folder, model.max_model_len, seed=0)
    scorer = build_scorer(Config(), task.reward_limit_s)
    await scorer.start()
    source = ListedWork(sampling.samples_per_prompt)
    worker = RolloutWorker(
        "w0",
        0,
        "bench",
        engine=engine,
        task=task,
        scorer=scorer,
        source=source,
        weights=FakeWeights(),
        kind=kind,
        sampling=sampling,
    )
    begun_s = time.perf_counter()
    await worker.start()
    start_s = time.perf_counter() - begun_s
    pulling = asyncio.create_task(worker.run())
    max_tokens = task.max_new_tokens or sampling.max_new_tokens
    bare = BareEngine(engine, sampling, max_tokens, places(kind, sampling)[0])
    rounds: dict[str, list[tuple[float, float, float]]] = {"worker": [], "bare": []}
    for number in range(arguments.rounds + 1):
        first = number * arguments.prompts
        prompts = [task.prompt(first + i) for i in range(arguments.prompts)]
        for name, work_off in (("worker", source.work_off), ("bare", bare.work_off)):
            measured = await measure(work_off, prompts)
            if number > 0:  # the first round warms both up
                rounds[name].append(measured)
    pulling.cancel()
    await asyncio.wait({pulling})
    await worker.stop()
    return summarize(rounds, sampling.samples_per_prompt) | {
        "prompts_per_round": arguments.prompts,
        "rounds": arguments.rounds,
        "engine_start_s": start_s,
    }


def summarize(rounds: dict[str, list[tuple[float, float, float]]], num_samples: int) -> dict[str, float]:
    """Medians, as plain numbers with units in their names."""
    result: dict[str, float] = {}
    for name, measured in rounds.items():
        speed, mine, engine = (statistics.median(column) for column in zip(*measured, strict=True))
        result[f"{name}_tokens_per_s"] = speed
        result[f"{name}_cpu_s_per_1000_samples"] = 1000 * mine / num_samples
        result[f"{name}_engine_cpu_s_per_1000_samples"] = 1000 * engine / num_samples
    result["ratio"] = result["worker_tokens_per_s"] / result["bare_tokens_per_s"]
    pairs = zip(rounds["worker"], rounds["bare"], strict=True)
    result["ratio_median_of_pairs"] = statistics.median(worker[0] / bare[0] for worker, bare in pairs)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.rollout", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures as one JSON object")
    parser.add_argument("--prompts", type=int, default=256, help="prompts per round, 8 samples each")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds of each kind")
    parser.add_argument("--max-groups", type=int, default=48, help="prompts in flight, in both")
    arguments = parser.parse_args()
    result = asyncio.run(run(arguments))
    print(f"{'':8} {'tokens/s':>10} {'CPU s / 1,000 samples':>24} {'of it the engine':>18}")
    for name in ("worker", "bare"):
        engine = result[f"{name}_engine_cpu_s_per_1000_samples"]
        total = engine + result[f"{name}_cpu_s_per_1000_samples"]
        print(f"{name:8} {result[f'{name}_tokens_per_s']:10,.0f} {total:24.2f} {engine:18.2f}")
    verdict = "at" if result["ratio"] >= BAR else "BELOW"
    print(f"ratio {result['ratio']:.3f}, {verdict} the bar of {BAR}")
    print(f"engine up in {result['engine_start_s']:.0f} s")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
