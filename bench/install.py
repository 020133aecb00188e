"""Pause of generation for an update: `python -m bench.install [--json FILE] [--no-engine]`.

What the engine must do while it stands still is bounded from below by one digest of all live tensors (the
proof that they are what was published). Every pause is shown beside that digest, taken in the same round.

- arrays: tensors in the shapes of a Qwen2.5-0.5B cut to about 200 MB, as plain numpy targets. 1 % of the
  elements change by one unit in the last place. `staged` is what the worker's node does meanwhile, in another
  process than the engine's: decode, apply to its shadow, digest, write the engine's file;
- engine: a real vLLM engine for each of --dtypes, idle and with requests in flight. The parts of a pause are
  measured inside the engine's process. Seconds a GB are of published weights, two bytes each.

Figures are medians over the rounds; the ratio is the median of the ratios within each round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from safetensors.torch import load_file

from echo_planes.config.fleet import EngineConfig
from echo_planes.config.schema import BUILTIN_MODELS, SamplingConfig
from echo_planes.rollout.vllm.engine import VllmEngine
from echo_planes.rollout.vllm.plugin import WorkerExtension
from echo_planes.types import ByteArray, Codec, Manifest, Publication, TensorSpec
from echo_planes.weights.codec.changes import exchange
from echo_planes.weights.codec.entry import Applied, Change, encode
from echo_planes.weights.digest import BitTensor, bit_tensor, run_of, state_digest
from echo_planes.weights.node.stager import Stager
from echo_planes.weights.receiver import Receiver

State = dict[str, BitTensor]
Dtype = Literal["bfloat16", "float32"]

HIDDEN, INTERMEDIATE, KEYS, VOCABULARY, NUM_LAYERS = 896, 4864, 128, 50_000, 4
CHANGED_SHARE = 0.01
PROMPT = tuple(b"12+34=")
MODEL = BUILTIN_MODELS["builtin:tiny-math"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)


class Arrays:
    """Tensors in memory, as `weights.receiver.Target`."""

    def __init__(self, state: Mapping[str, BitTensor]) -> None:
        self.state = {name: BitTensor(np.zeros_like(t.bits), t.dtype, t.shape) for name, t in state.items()}
        self._specs = {name: tensor.spec(name) for name, tensor in state.items()}

    def specs(self) -> Mapping[str, TensorSpec]:
        return self._specs

    def read(self, name: str, start: int = 0, stop: int | None = None) -> BitTensor:
        return run_of(self.state[name], start, stop)

    def exchange(self, change: Change) -> Applied:
        return exchange(change, self.state[change.name].bits)


class Learner:
    """Publishes states that differ by single units in the last place."""

    def __init__(self, state: State, seed: int = 0) -> None:
        self.state = state
        self.version = -1
        self._base: State | None = None
        self._rng = np.random.default_rng(seed)

    def step(self, share: float) -> None:
        """Move a share of the elements by one unit in the last place."""
        self._base, self.state = self.state, {}
        for name, old in self._base.items():
            bits = old.bits.copy()
            hit = self._rng.random(bits.size, dtype=np.float32) < share
            bits[hit] += np.uint16(1)
            self.state[name] = BitTensor(bits, old.dtype, old.shape)

    def publish(self, codec: Codec) -> tuple[Manifest, list[tuple[int, ByteArray]]]:
        """The next version, as manifest and segments."""
        base = None if codec == "full" else self._base
        segments: list[tuple[int, ByteArray]] = []
        size = 0
        for segment in encode(codec, base, self.state):
            segments.append((size, segment.payload))
            size += segment.payload.size
        self.version += 1
        manifest = Manifest(
            lineage="bench",
            version=self.version,
            num_updates=self.version,
            codec=codec,
            base_version=self.version - 1 if base else -1,
            base_digest=state_digest(base) if base else "",
            digest=state_digest(self.state),
            payload_digest="",
            payload_bytes=size,
            dense_bytes=sum(tensor.nbytes for tensor in self.state.values()),
            changed_elements=0,
            total_elements=sum(tensor.bits.size for tensor in self.state.values()),
            num_segments=len(segments),
        )
        return manifest, segments


def random_state(seed: int = 0) -> State:
    """About 200 MB of bfloat16 weights, normal with deviation 0.015."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(NUM_LAYERS):
        parts: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (KEYS, HIDDEN),
            "self_attn.v_proj": (KEYS, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
            "mlp.up_proj": (INTERMEDIATE, HIDDEN),
            "mlp.down_proj": (HIDDEN, INTERMEDIATE),
        }
        for part, shape in parts.items():
            shapes[f"model.layers.{layer}.{part}.weight"] = shape
    rng = np.random.default_rng(seed)
    state: State = {}
    for name, shape in shapes.items():
        values = rng.standard_normal(math.prod(shape), dtype=np.float32) * np.float32(0.015)
        state[name] = BitTensor((values.view(np.uint32) >> 16).astype(np.uint16), "bfloat16", shape)
    return state


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and what came of it."""
    begun_s = time.perf_counter()
    result = work()
    return time.perf_counter() - begun_s, result


def rows(measured: Mapping[str, list[float]], digests_s: list[float]) -> dict[str, dict[str, float]]:
    """Median seconds of each kind, and as multiples of the digest of the same round."""
    return {
        name: {
            "seconds": statistics.median(times_s),
            "of_digest": statistics.median(t / d for t, d in zip(times_s, digests_s, strict=True)),
        }
        for name, times_s in measured.items()
    }


def bench_arrays(rounds: int) -> dict[str, Any]:
    """Stage and install patches on plain arrays."""
    learner = Learner(random_state())
    digests_s: list[float] = []
    measured: dict[str, list[float]] = {"staged": [], "pause, patch": [], "pause, full": []}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        stager, receiver = Stager(None, Path(folder)), Receiver(Arrays(learner.state))
        receiver.install(stager.stage(*learner.publish("full")).publication())
        stager.settled(0, ok=True)
        for number in range(rounds + 1):
            learner.step(CHANGED_SHARE)
            manifest, segments = learner.publish("compact")
            staged_s, staged = timed(partial(stager.stage, manifest, segments))
            publication = staged.publication()
            full = stager.snapshot()
            patch_s, _ = timed(partial(receiver.install, publication))
            digest_s, _ = timed(receiver.live_digest)
            full_s, _ = timed(partial(receiver.install, full))
            stager.settled(manifest.version, ok=True)
            if number:  # the first round warms up
                digests_s.append(digest_s)
                for name, seconds in zip(measured, (staged_s, patch_s, full_s), strict=True):
                    measured[name].append(seconds)
    return {
        "dense_bytes": manifest.dense_bytes,
        "digest_gb_s": manifest.dense_bytes / statistics.median(digests_s) / 1e9,
        "rows": rows({"digest": digests_s, **measured}, digests_s),
    }


class TimedExtension(WorkerExtension):
    """Measures the parts of a pause where they happen."""

    def time_parts(self) -> tuple[float, float]:
        """Seconds of one digest of the live tensors and of one probe."""
        engine = self.weight_transfer_engine
        return timed(engine.receiver.live_digest)[0], timed(engine.probe)[0]


class TimedEngine(VllmEngine):
    """`VllmEngine` with the extension above."""

    worker_extension = f"{__spec__.name}.TimedExtension"


async def bench_engine(rounds: int, model: Path, dtype: Dtype) -> dict[str, Any]:
    """Install patches into a real engine, idle and while it answers."""
    state = {name: bit_tensor(tensor) for name, tensor in load_file(model / "model.safetensors").items()}
    norm = state["model.norm.weight"]  # all logits equal: answers are long, so requests stay in flight
    state["model.norm.weight"] = BitTensor(np.zeros_like(norm.bits), norm.dtype, norm.shape)
    learner = Learner(state)
    config = EngineConfig(max_num_seqs=32, dtype=dtype, kv_cache_gib=0.5)
    engine = TimedEngine(config, SamplingConfig(), model, 2048, seed=0)
    await engine.start()
    digests_s: list[float] = []
    measured: dict[str, list[float]] = {"probe": [], "pause, idle": [], "pause, 32 requests in flight": []}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        stager = Stager(None, Path(folder))

        async def install(codec: Codec) -> float:
            publication: Publication = stager.stage(*learner.publish(codec)).publication()
            await engine.install(publication)
            stager.settled(learner.version, ok=True)
            return engine.last_pause_s

        await install("full")
        for number in range(rounds + 1):
            learner.step(CHANGED_SHARE)
            idle_s = await install("compact")
            answering = asyncio.Event()

            def begun(*_: object, event: asyncio.Event = answering) -> None:
                event.set()

            answers = asyncio.ensure_future(
                engine.generate(PROMPT, num_samples=32, max_new_tokens=64, on_tokens=begun)
            )
            await answering.wait()
            learner.step(CHANGED_SHARE)
            busy_s = await install("compact")
            await answers
            digest_s, probe_s = (await engine.vllm.collective_rpc("time_parts"))[0]
            if number:
                digests_s.append(digest_s)
                for name, seconds in zip(measured, (probe_s, idle_s, busy_s), strict=True):
                    measured[name].append(seconds)
    await engine.close()
    dense_bytes = sum(tensor.nbytes for tensor in state.values())
    return {"dense_bytes": dense_bytes, "rows": rows({"digest": digests_s, **measured}, digests_s)}


def show(title: str, result: Mapping[str, Any]) -> None:
    print(f"{title}: {result['dense_bytes'] / 1e6:.1f} MB")
    for name, row in result["rows"].items():
        per_gb_s = row["seconds"] / result["dense_bytes"] * 1e9
        print(
            f"  {name:30} {1000 * row['seconds']:9.2f} ms {row['of_digest']:8.2f} x digest "
            f"{per_gb_s:6.2f} s a GB"
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.install", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures as one JSON object")
    parser.add_argument("--rounds", type=int, default=11, help="measured rounds of each kind")
    parser.add_argument("--no-engine", action="store_true", help="only the arrays")
    parser.add_argument("--model", type=Path, default=MODEL, help="of the engines, a folder with one file")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES, help="of the engines")
    arguments = parser.parse_args()
    result = {"arrays": bench_arrays(arguments.rounds)}
    show("arrays", result["arrays"])
    for dtype in [] if arguments.no_engine else arguments.dtypes:
        result[dtype] = asyncio.run(bench_engine(arguments.rounds, arguments.model, dtype))
        show(f"engine, {dtype}", result[dtype])
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
