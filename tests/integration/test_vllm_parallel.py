"""Real vLLM engines over several ranks: all hold what was published, or the old version serves on."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from echo_planes.config.schema import BUILTIN_MODELS
from echo_planes.errors import RunError, WeightsError
from echo_planes.rollout.vllm.engine import VllmEngine
from echo_planes.rollout.vllm.plugin import WorkerExtension
from echo_planes.rollout.vllm.shards import Piece, check_loaded
from echo_planes.types import Publication, TensorSpec
from echo_planes.weights.digest import BitTensor, bit_tensor, state_digest
from echo_planes.weights.shards import Shard
from tests.integration.test_vllm_engine import (
    PROBE,
    Bench,
    assert_computes,
    hf_logprobs,
    make_answers_long,
    paused,
)
from tests.thorough import takes_minutes

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


class CorruptingExtension(WorkerExtension):
    """Lets a test damage the live weights of one rank, and have it compute with copies of them."""

    rank: int

    def flip_live_bit(self, rank: int, name: str, position: int) -> None:
        if self.rank == rank:
            view = self.weight_transfer_engine.receiver.tensors.local._views[name]  # type: ignore[attr-defined]
            view.view(-1).view(torch.int16)[position] ^= 0x0040

    def copy_weights(self, rank: int, layer: str, copying: bool) -> None:
        if self.rank == rank:
            module = self.weight_transfer_engine.model.get_submodule(layer)
            copy = module.weight.data.clone()
            linear = torch.nn.functional.linear
            module.cpu_linear = (lambda x, weight, bias: linear(x, copy, bias)) if copying else linear

    def die_when_writing(self, rank: int) -> None:
        if self.rank == rank:
            local = self.weight_transfer_engine.receiver.tensors.local  # type: ignore[attr-defined]
            local.exchange = lambda change: os.kill(os.getpid(), signal.SIGKILL)


class CorruptibleEngine(VllmEngine):
    worker_extension = f"{__name__}.CorruptingExtension"


class ParallelBench(Bench):
    """In bf16: several ranks hold weights as they are published."""

    kind = CorruptibleEngine
    began_with = ""

    def __init__(self, **options: Any) -> None:
        super().__init__(prefix_caching=False, dtype="bfloat16", **options)

    @property
    def pipeline_stages(self) -> int:
        return self.engine.vllm.vllm_config.parallel_config.pipeline_parallel_size

    def call(self, method: str, *arguments: object) -> None:
        self.run(self.engine.vllm.collective_rpc(method, args=arguments))


def shared_heads(folder: Path) -> Path:
    """The tiny model with one head of keys and values for all ranks, biases, and a head of its own."""
    source = BUILTIN_MODELS["builtin:tiny-math"]
    shutil.copytree(source, folder)
    config = json.loads((source / "config.json").read_text())
    config |= {"num_key_value_heads": 1, "tie_word_embeddings": False, "attention_bias": True}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(source / "model.safetensors")
    head_dim, generator = config["head_dim"], torch.Generator().manual_seed(0)
    for name in list(tensors):
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            tensors[name] = tensors[name][:head_dim].contiguous()
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):  # vLLM has no other biases
            bias = 0.1 * torch.randn(tensors[name].shape[0], generator=generator)
            tensors[name.removesuffix("weight") + "bias"] = bias.to(torch.bfloat16)
    tensors["lm_head.weight"] = 1.25 * tensors["model.embed_tokens.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(
    scope="module", params=[pytest.param(how, marks=takes_minutes) for how in ("tensor", "pipeline")]
)
def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ParallelBench]:
    """Tensor parallelism with copies of keys and values; pipeline parallelism with a table on both ends."""
    if request.param == "tensor":
        model = shared_heads(tmp_path_factory.mktemp("model") / "shared_heads")
        bench = ParallelBench(model=model, tensor_parallel_size=2)
    else:
        bench = ParallelBench(pipeline_parallel_size=2)
    try:
        bench.run(bench.engine.start())
        bench.began_with = bench.engine.digest
        bench.install(full=True)  # then what comes is a patch
        yield bench
    finally:
        bench.close()


@pytest.mark.parametrize("start", [0, 1, 2, 3])
def test_a_shard_that_lies_elsewhere_than_thought_is_refused(tmp_path: Path, start: int) -> None:
    """Installs would write to the wrong place, and the digest, read from there too, would not tell."""
    whole = torch.arange(16.0, dtype=torch.bfloat16).reshape(4, 4)
    save_file({"w": whole}, tmp_path / "model.safetensors")
    view = whole[:, 1:2].contiguous()  # what the rank holds
    pieces = [Piece("w", view, torch.nn.Module(), "weight", 0)]
    where = {"w": (TensorSpec("w", "bfloat16", (4, 4)), Shard.along((4, 4), 1, start, start + 1))}
    if start == 1:
        check_loaded(tmp_path, pieces, where)
        return
    with pytest.raises(WeightsError, match="tensor 'w' was not loaded where"):
        check_loaded(tmp_path, pieces, where)


def test_a_shard_of_a_tensor_that_the_folder_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"tensor 'w' is in no \*.safetensors file"):
        check_loaded(tmp_path, [Piece("w", torch.zeros(2), torch.nn.Module(), "bias", 0)], {})


def ranks() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if "Worker" in p.name()]


def test_an_engine_begins_with_the_folders_weights_and_keeps_to_loopback(bench: ParallelBench) -> None:
    folder = load_file(bench.model / "model.safetensors")
    assert bench.began_with == state_digest({name: bit_tensor(tensor) for name, tensor in folder.items()})
    assert len(ranks()) == 2
    listening = {
        connection.laddr.ip
        for process in psutil.Process().children(recursive=True)
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}


def test_full_then_patch_and_the_new_weights_compute(bench: ParallelBench, tmp_path: Path) -> None:
    for full, share in ((True, 0.3), (False, 0.05)):
        bench.step(share, seed=int(full))
        publication = bench.install(full=full)
        assert publication.manifest.codec == ("full" if full else "overwrite")
        assert bench.live_digest() == publication.manifest.digest == state_digest(bench.state)
        assert_computes(bench, tmp_path)
    assert bench.engine.digest_mismatches == 0


def test_what_is_refused_leaves_the_old_version_serving(bench: ParallelBench, tmp_path: Path) -> None:
    state, version, digest = dict(bench.state), bench.engine.version, bench.engine.digest
    bench.step(0.05, seed=3)
    patch = bench.publish()
    wrong = dataclasses.replace(patch.manifest, digest=digest)
    with pytest.raises(WeightsError, match="must have digest"):
        bench.run(bench.engine.install(Publication(wrong, patch.payload)))
    damaged = np.array(patch.payload)
    damaged[-1] ^= 1
    with pytest.raises(WeightsError, match="damaged on its way"):
        bench.run(bench.engine.install(Publication(patch.manifest, damaged)))
    assert (bench.engine.version, bench.live_digest()) == (version, digest)
    (sample,) = bench.sample(n=1)
    assert sample.spans[0].version == version
    expected = hf_logprobs(state, sample, tmp_path, PROBE, bench.model)
    assert sample.logprobs == pytest.approx(expected, abs=bench.tolerance)
    bench.run(bench.settle(patch))
    assert bench.live_digest() == patch.manifest.digest


def test_weights_that_cannot_serve_never_do(bench: ParallelBench) -> None:
    before, state = bench.live_digest(), dict(bench.state)
    name = "model.layers.2.mlp.up_proj.weight"
    bits = state[name].bits.copy()
    bits[-1] = 0x7FC0  # not a number, in the last rank's shard
    bench.state[name] = BitTensor(bits, "bfloat16", state[name].shape)
    with pytest.raises(WeightsError, match="not finite"):
        bench.install()
    assert not paused(bench)
    assert bench.live_digest() == before == bench.engine.digest
    bench.state = state
    bench.stager.settled(bench.learner.version, ok=False)
    bench.install()


@pytest.mark.parametrize("name", ["model.layers.3.mlp.down_proj.weight", "model.embed_tokens.weight"])
def test_a_bit_flipped_on_the_last_rank_is_found_and_mended(bench: ParallelBench, name: str) -> None:
    before, counted = bench.live_digest(), bench.engine.digest_mismatches
    bench.call("flip_live_bit", 1, name, 5)
    assert bench.live_digest() != before
    bench.step(0.01, seed=4)
    with pytest.raises(WeightsError, match="damaged since their last install"):
        bench.install()
    assert paused(bench)
    bench.stager.settled(bench.learner.version, ok=False)
    mended = bench.stager.current().publication()
    bench.run(bench.settle(mended))
    assert not paused(bench)
    assert bench.live_digest() == mended.manifest.digest
    assert bench.engine.digest_mismatches == counted + 2


@pytest.mark.parametrize("layer", ["model.layers.3.self_attn.qkv_proj", "model.layers.3.mlp.down_proj"])
def test_a_layer_of_one_rank_that_computes_with_a_copy_is_noticed(bench: ParallelBench, layer: str) -> None:
    bench.run(bench.engine._check_live())
    bench.call("copy_weights", 1, layer, True)
    with pytest.raises(RunError, match=f"layer {layer} computes with a copy"):
        bench.run(bench.engine._check_live())
    bench.call("copy_weights", 1, layer, False)
    bench.run(bench.engine._check_live())
    assert bench.live_digest() == bench.engine.digest


def test_requests_in_flight_survive_an_install_and_a_lost_rank_ends_them(bench: ParallelBench) -> None:
    """The last test: it ends the engine. A rank dies while it generates, or in the middle of an install."""
    in_an_install = bench.pipeline_stages > 1
    make_answers_long(bench)
    old = bench.engine.version
    bench.step(0.05, seed=5)
    update = bench.publish()
    started = asyncio.Event()

    async def survive() -> None:
        answering = asyncio.ensure_future(
            bench.engine.generate(
                PROBE, num_samples=4, max_new_tokens=100, on_tokens=lambda *_: started.set()
            )
        )
        await started.wait()
        await bench.settle(update)
        samples = await answering
        seen = {tuple(span.version for span in sample.spans) for sample in samples}
        assert (old, old + 1) in seen, seen

    async def lose() -> None:
        started.clear()
        answering = asyncio.ensure_future(
            bench.engine.generate(
                PROBE, num_samples=4, max_new_tokens=500, on_tokens=lambda *_: started.set()
            )
        )
        await started.wait()
        bench.step(0.05, seed=6)  # an engine writes nothing of a version whose bits it has
        if in_an_install:
            await bench.engine.vllm.collective_rpc("die_when_writing", args=(1,))
        else:
            ranks()[-1].kill()
            with pytest.raises(RunError):
                await asyncio.wait_for(answering, 100)
        with pytest.raises(RunError):
            await asyncio.wait_for(bench.engine.install(bench.publish(full=True)), 100)
        with pytest.raises(RunError):
            await asyncio.wait_for(answering, 100)

    bench.run(survive())
    bench.run(lose())
    _, alive = psutil.wait_procs(ranks(), timeout=60)
    assert not alive
