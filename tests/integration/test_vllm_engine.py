"""A real vLLM engine: what was published is what computes, and what fails to install changes nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import shutil
import tempfile
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from echo_planes.config.fleet import EngineConfig
from echo_planes.config.schema import BUILTIN_MODELS, SamplingConfig
from echo_planes.errors import ConfigError, RunError, TaskError, WeightsError
from echo_planes.learning.adapters import A, Adapters, B
from echo_planes.rollout.vllm.engine import VllmEngine
from echo_planes.rollout.vllm.plugin import LiveTensors, WorkerExtension
from echo_planes.types import Draw, Publication, Sample, is_whole, joined
from echo_planes.weights.codec.entry import Applied, Change
from echo_planes.weights.digest import BitTensor, bit_tensor
from echo_planes.weights.node.stager import Stager
from tests.thorough import THOROUGH, takes_minutes
from tests.unit.test_receiver import publication as in_memory
from tests.unit.test_stager import Learner

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

MODEL = BUILTIN_MODELS["builtin:tiny-math"]
EOS = 258
PROBE = tuple(b"12+34=")
MAX_MODEL_LEN = 512
BATCHED_TOKENS = 640  # of a step of the engine
# Nats, one token, by the engine's dtype: bf16 keeps 8 bits of a mantissa and the two implementations
# round in different places, on each type of processor in others (0.055 and 0.174 were seen).
LOGPROB_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}
MERGE_TOLERANCE = 0.03  # nats, one token: W + s B A is rounded to bf16 once, W x + s B (A x) is not

State = dict[str, BitTensor]
Dtype = Literal["float32", "bfloat16"]


class CorruptingExtension(WorkerExtension):
    """Lets a test damage live weights, as a stray write would, and compute with copies of them."""

    def flip_live_bit(self, name: str, position: int) -> None:
        view = self.weight_transfer_engine.receiver._target._views[name]  # type: ignore[attr-defined]
        view.view(-1).view(torch.int16)[position] ^= 0x0040

    def break_device(self, after: int) -> None:
        """Only so many more writes succeed; below 0: all again, and half-applied weights count as damaged."""
        receiver = self.weight_transfer_engine.receiver
        live, writes = LiveTensors(self.weight_transfer_engine.model), itertools.count()

        def exchange(change: Change) -> Applied:
            if next(writes) >= after >= 0:
                raise RuntimeError("the device went away")
            return LiveTensors.exchange(live, change)

        receiver._target.exchange = exchange  # type: ignore[method-assign]
        if after < 0:
            receiver._standing = "damaged"

    def copy_weights(self, layer: str, copying: bool) -> None:
        module = self.weight_transfer_engine.model.get_submodule(layer)
        copy = module.weight.data.clone()
        linear = torch.nn.functional.linear
        module.cpu_linear = (lambda x, weight, bias: linear(x, copy, bias)) if copying else linear


class CorruptibleEngine(VllmEngine):
    worker_extension = f"{__name__}.CorruptingExtension"


class Bench:
    """One engine on a loop of its own, the learner whose versions it installs, and the stager between."""

    kind: type[VllmEngine] = CorruptibleEngine

    def __init__(
        self, *, prefix_caching: bool, model: Path = MODEL, dtype: Dtype = "float32", **options: Any
    ) -> None:
        self.loop = asyncio.new_event_loop()
        self.prefix_caching = prefix_caching
        self.model = model
        self.tolerance = LOGPROB_TOLERANCE[dtype]
        config = EngineConfig(
            max_num_seqs=32,
            enable_prefix_caching=prefix_caching,
            dtype=dtype,
            extra={"max_num_batched_tokens": BATCHED_TOKENS},
            **options,
        )
        self.engine = self.kind(config, SamplingConfig(top_logprobs=3), model, MAX_MODEL_LEN, seed=0)
        self.state: State = {
            name: bit_tensor(tensor) for name, tensor in load_file(model / "model.safetensors").items()
        }
        self.learner = Learner(self.state)
        self.folder = Path(tempfile.mkdtemp())
        self.stager = Stager(None, self.folder)

    def close(self) -> None:
        self.run(self.engine.close())
        self.loop.close()
        shutil.rmtree(self.folder)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(coroutine)

    def publish(self, *, full: bool = False) -> Publication:
        """The state as the next version, staged; `full`: in full, for an engine in any state."""
        self.stager.stage(*self.learner.publish("full" if full else "compact", self.state))
        return self.stager.current(fresh=full).publication()

    async def settle(self, publication: Publication) -> None:
        await self.engine.install(publication)
        self.stager.settled(publication.manifest.version, ok=True)

    def step(self, share: float, seed: int) -> None:
        """Change the sign and last bits of a share of the weights, as a large update would."""
        rng = np.random.default_rng(seed)
        for name, tensor in self.state.items():
            bits = tensor.bits.copy()
            chosen = rng.random(bits.size) < share
            bits[chosen] ^= rng.choice(np.array([0x8000, 0x0003], dtype=np.uint16), size=int(chosen.sum()))
            self.state[name] = BitTensor(bits, tensor.dtype, tensor.shape)

    def install(self, *, full: bool = False) -> Publication:
        publication = self.publish(full=full)
        self.run(self.settle(publication))
        return publication

    def sample(self, prompt: tuple[int, ...] = PROBE, n: int = 4, tokens: int = 8) -> list[Sample]:
        samples: list[Sample] = self.run(
            self.engine.generate(prompt, num_samples=n, max_new_tokens=tokens, on_tokens=lambda *_: None)
        )
        return samples

    def live_digest(self) -> str:
        return str(self.run(self.engine.live_digest()))


PLAIN = pytest.param("float32", marks=takes_minutes, id="plain")


@pytest.fixture(scope="module", params=[PLAIN, pytest.param("bfloat16", id="prefix-caching")])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(prefix_caching=request.param == "bfloat16", dtype=request.param)
    bench.run(bench.engine.start())
    yield bench
    bench.close()


def hf_logprobs(
    state: State,
    sample: Sample,
    folder: Path,
    prompt: tuple[int, ...] = PROBE,
    model_folder: Path = MODEL,
) -> list[float]:
    """Logprobs of the sampled tokens by Hugging Face's model in float32, on these very bits."""
    tensors = {
        name: torch.from_numpy(t.bits.copy()).view(torch.bfloat16).reshape(t.shape)
        for name, t in state.items()
    }
    (folder / "config.json").write_bytes((model_folder / "config.json").read_bytes())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return logprobs_of(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), sample, prompt)


def logprobs_of(model: Any, sample: Sample, prompt: tuple[int, ...] = PROBE) -> list[float]:
    """Logprobs of the sampled tokens by a model."""
    ids = torch.tensor([[*prompt, *sample.token_ids]])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits[0].float(), dim=-1)
    start = len(prompt) - 1
    return [float(logprobs[start + i, token]) for i, token in enumerate(sample.token_ids)]


def assert_computes(bench: Bench, folder: Path) -> None:
    """The engine's log-probabilities are those of a fresh model on the published weights."""
    for sample in bench.sample(n=3):
        exact = hf_logprobs(bench.state, sample, folder, model_folder=bench.model)
        assert sample.logprobs == pytest.approx(exact, abs=bench.tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_live_tensors_are_exchanged_in_place(dtype: torch.dtype) -> None:
    """An engine that computes in float32 holds published bfloat16 weights all the same."""
    layer = torch.nn.Linear(8, 4, bias=False)
    layer.weight.data = (torch.arange(32.0) / 4).to(torch.bfloat16).reshape(4, 8).to(dtype)
    live = LiveTensors(torch.nn.ModuleDict({"a": layer}))
    assert live.specs()["a.weight"].dtype == "bfloat16"
    before = live.read("a.weight").bits.copy()
    new = torch.tensor([-1.0, 5.5, -0.0]).to(torch.bfloat16).view(torch.uint16).numpy()
    for change in (
        Change("a.weight", 0, np.array([0, 7, 31], np.int32), new),
        Change("a.weight", 4, None, new),
    ):
        where = [0, 7, 31] if change.indices is not None else [4, 5, 6]
        applied = live.exchange(change)
        assert applied.old.tolist() == before[where].tolist()
        assert layer.weight.data.reshape(-1)[where].tolist() == [-1.0, 5.5, -0.0]
        assert live.read("a.weight").bits[where].tolist() == new.tolist()
        live.exchange(Change("a.weight", change.start, change.indices, applied.old))
        assert np.array_equal(live.read("a.weight").bits, before)


def test_before_the_first_install_the_folders_weights_serve(bench: Bench) -> None:
    assert bench.engine.version == -1
    publication = bench.publish(full=True)
    assert bench.engine.digest == publication.manifest.digest
    for sample in bench.sample():
        assert [(s.start, s.version) for s in sample.spans] == [(0, -1)]
    assert bench.engine.last_pause_s == 0.0
    bench.run(bench.settle(publication))
    assert bench.engine.last_pause_s > 0.0
    assert (bench.engine.version, bench.engine.digest) == (0, publication.manifest.digest)


def test_vllm_gets_the_options_that_it_knows(bench: Bench) -> None:
    assert bench.engine.vllm.vllm_config.scheduler_config.max_num_batched_tokens == BATCHED_TOKENS
    wrong = EngineConfig(extra={"max_num_batched_tokens": "many"})
    engine = VllmEngine(wrong, SamplingConfig(), MODEL, MAX_MODEL_LEN, seed=0)
    with pytest.raises(ConfigError, match=r"engine\.extra=.*'many'.*: vLLM refuses it"):
        bench.run(engine.start())
    bench.run(engine.close())


def test_full_then_patch_and_the_new_weights_compute(bench: Bench, tmp_path: Path) -> None:
    bench.step(0.3, seed=1)
    full = bench.install(full=True)
    assert full.manifest.codec == "full"
    assert bench.live_digest() == full.manifest.digest
    assert_computes(bench, tmp_path)

    bench.step(0.05, seed=2)
    patch = bench.install()
    assert patch.manifest.codec == "overwrite"
    assert bench.live_digest() == patch.manifest.digest
    assert_computes(bench, tmp_path)


@takes_minutes
def test_base_and_adapter_are_served_as_published_in_fp32(tmp_path: Path) -> None:
    """An engine in fp32, in which no rounding of sums hides a difference, beside transformers in fp32."""
    bench = Bench(prefix_caching=False)
    bench.run(bench.engine.start())
    try:
        model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
        adapters = Adapters(model, 4, 8.0, None, seed=0)
        torch.manual_seed(0)
        with torch.no_grad():
            for name, module in model.named_modules():
                if hasattr(module, B):
                    getattr(module, B).normal_(std=0.2)
                    merged = adapters.merged(module.weight, getattr(module, A), getattr(module, B))
                    bench.state[f"{name}.weight"] = bit_tensor(merged.to(torch.bfloat16))
        base = {name: bit_tensor(one) for name, one in load_file(MODEL / "model.safetensors").items()}
        assert bench.install(full=True).manifest.digest == bench.live_digest()
        for sample in bench.sample(n=3):
            exact = hf_logprobs(bench.state, sample, tmp_path)
            assert sample.logprobs == pytest.approx(exact, abs=1e-4)
            assert sample.logprobs == pytest.approx(logprobs_of(model, sample), abs=MERGE_TOLERANCE)
            without = hf_logprobs(base, sample, tmp_path)
            assert max(abs(a - b) for a, b in zip(exact, without, strict=True)) > 10 * MERGE_TOLERANCE
    finally:
        bench.close()


def test_samples_are_complete(bench: Bench) -> None:
    pieces: list[list[Sample]] = [[] for _ in range(5)]
    samples = bench.run(
        bench.engine.generate(
            PROBE, num_samples=5, max_new_tokens=40, on_tokens=lambda i, piece: pieces[i].append(piece)
        )
    )
    assert [joined(sample) for sample in pieces] == samples
    for sample in samples:
        assert len(sample.logprobs) == len(sample.top_logprobs) == len(sample.token_ids) <= 40
        assert (sample.token_ids[-1] == EOS) == (sample.finish_reason == "stop")
        assert (sample.spans[0].start, sample.spans[-1].stop) == (0, len(sample.token_ids))
        for token, logprob, top in zip(sample.token_ids, sample.logprobs, sample.top_logprobs, strict=True):
            assert [len(pair) for pair in top] == [2, 2, 2]
            assert [lp for _, lp in top] == sorted((lp for _, lp in top), reverse=True)
            assert dict(top).get(token, logprob) == logprob <= top[0][1]


def test_tokens_are_drawn_as_the_request_says(bench: Bench) -> None:
    def tokens_and_likeliest(draw: Draw | None, n: int) -> list[tuple[int, int]]:
        asked = bench.engine.generate(
            PROBE, num_samples=n, max_new_tokens=12, on_tokens=lambda *_: None, draw=draw
        )
        samples: list[Sample] = bench.run(asked)
        return [(t, top[0][0]) for s in samples for t, top in zip(s.token_ids, s.top_logprobs, strict=True)]

    greedy = tokens_and_likeliest(Draw(0.0, 1.0), 1)
    assert all(token == likeliest for token, likeliest in greedy)
    hot = tokens_and_likeliest(Draw(2.0, 1.0), 16)
    assert any(token != likeliest for token, likeliest in hot)
    narrow = tokens_and_likeliest(Draw(2.0, 1e-6), 16)  # a nucleus of one token
    assert all(token == likeliest for token, likeliest in narrow)


def test_a_failing_install_leaves_the_old_version_serving(bench: Bench, tmp_path: Path) -> None:
    before, digest, version = bench.live_digest(), bench.engine.digest, bench.engine.version
    state = dict(bench.state)
    bench.step(0.05, seed=3)
    patch = bench.publish()
    wrong = dataclasses.replace(patch.manifest, digest=digest)
    with pytest.raises(WeightsError, match="must have digest"):
        bench.run(bench.engine.install(Publication(wrong, patch.payload)))
    assert bench.live_digest() == before == bench.engine.digest
    assert bench.engine.version == version
    (sample,) = bench.sample(n=1)
    assert sample.spans[0].version == version
    assert sample.logprobs == pytest.approx(hf_logprobs(state, sample, tmp_path), abs=bench.tolerance)

    bench.run(bench.settle(patch))
    assert bench.live_digest() == patch.manifest.digest


def test_a_flipped_live_bit_is_found_and_repaired(bench: Bench) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"  # lies in the middle of a fused tensor
    before = bench.live_digest()
    bench.run(bench.engine.vllm.collective_rpc("flip_live_bit", args=(name, 5)))
    assert bench.live_digest() != before
    counted = bench.engine.digest_mismatches
    bench.step(0.05, seed=4)
    with pytest.raises(WeightsError, match="damaged since their last install"):
        bench.install()
    assert bench.engine.digest_mismatches == counted + 1
    assert paused(bench)  # damaged weights do not serve
    found_s = bench.engine.last_pause_s
    bench.stager.settled(bench.learner.version, ok=False)
    repaired = bench.stager.current().publication()
    assert repaired.manifest.codec == "full"

    async def ask_and_mend() -> list[Sample]:
        asked = bench.engine.generate(PROBE, num_samples=1, max_new_tokens=8, on_tokens=lambda *_: None)
        answering = asyncio.ensure_future(asked)
        await bench.settle(repaired)  # finds the damage too, and mends it
        return await answering

    (sample,) = bench.run(ask_and_mend())
    assert [span.version for span in sample.spans] == [repaired.manifest.version]
    assert not paused(bench)
    assert bench.engine.last_pause_s > found_s  # all the time since
    assert bench.live_digest() == repaired.manifest.digest
    assert bench.engine.digest_mismatches == counted + 2


def paused(bench: Bench) -> bool:
    return bool(bench.run(bench.engine.vllm.is_paused()))


def flip(bench: Bench) -> None:
    bench.run(bench.engine.vllm.collective_rpc("flip_live_bit", args=("model.norm.weight", 5)))


def mend(bench: Bench, state: State) -> None:
    """Back to the weights from before the test."""
    bench.state = state
    bench.install(full=True)
    assert not paused(bench)
    assert bench.live_digest() == bench.engine.digest


@pytest.mark.parametrize("how", ["patch", "payload", "digest"])
def test_damage_that_the_next_install_does_not_mend_ends_the_engine(bench: Bench, how: str) -> None:
    state = dict(bench.state)
    flip(bench)
    bench.step(0.01, seed=8)
    patch = bench.publish()
    with pytest.raises(WeightsError, match="damaged"):
        bench.run(bench.engine.install(patch))
    full = bench.stager.current(fresh=True).publication()
    if how == "payload":
        full = Publication(full.manifest, full.payload[:-1])
    if how == "digest":
        full = Publication(dataclasses.replace(full.manifest, digest=f"xxh3:{'0' * 32}"), full.payload)
    with pytest.raises(RunError, match="not mended"):
        bench.run(bench.engine.install(patch if how == "patch" else full))
    assert paused(bench)
    mend(bench, state)


def test_half_applied_weights_never_serve(bench: Bench) -> None:
    """The device fails in the middle of an install, and while the old bits are put back."""
    state = dict(bench.state)
    bench.step(0.05, seed=9)
    patch = bench.publish()
    bench.run(bench.engine.vllm.collective_rpc("break_device", args=(3,)))
    for _ in range(2):  # and nothing is tried again
        with pytest.raises(RunError, match=r"broken.*restart this engine"):
            bench.run(bench.engine.install(patch))
        assert paused(bench)
    bench.run(bench.engine.vllm.collective_rpc("break_device", args=(-1,)))
    mend(bench, state)


def test_new_weights_never_serve_under_the_old_name(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = bench.engine.vllm
    finish = vllm.finish_weight_update
    version = bench.engine.version

    async def fail(label: str | None = None) -> None:
        await finish()
        raise RuntimeError("no label today")

    monkeypatch.setattr(vllm, "finish_weight_update", fail)
    state = dict(bench.state)
    bench.step(0.05, seed=10)
    with pytest.raises(RunError, match="no label today"):
        bench.install()
    assert (bench.engine.version, paused(bench)) == (version, True)
    monkeypatch.undo()
    mend(bench, state)


def test_a_staged_file_is_used_as_it_lies_and_other_payloads_become_files(bench: Bench) -> None:
    bench.step(0.01, seed=7)
    publication = bench.publish()
    path = Path(publication.payload.filename)  # type: ignore[attr-defined]
    bench.run(bench.engine.install(publication))
    assert path.exists()  # it is the stager's
    bench.stager.settled(bench.learner.version, ok=True)
    bench.run(bench.engine.install(in_memory(bench.learner.version, bench.state)))
    assert bench.engine._staging is not None
    assert not list(bench.engine._staging.glob("*.safetensors"))


@pytest.mark.parametrize("full", [True, False])
def test_weights_that_cannot_serve_never_do(bench: Bench, tmp_path: Path, full: bool) -> None:
    """Not-a-number weights arrive as published: right digest, useless."""
    before, version, state = bench.live_digest(), bench.engine.version, dict(bench.state)
    name = "model.layers.2.mlp.up_proj.weight"
    bits = bench.state[name].bits.copy()
    bits[100] = 0x7FC0
    bench.state[name] = BitTensor(bits, "bfloat16", bench.state[name].shape)
    mismatches = bench.engine.digest_mismatches
    with pytest.raises(WeightsError, match="not finite"):
        bench.install(full=full)
    assert bench.engine.last_pause_s > 0.0
    assert bench.live_digest() == before == bench.engine.digest
    assert (bench.engine.version, bench.engine.digest_mismatches) == (version, mismatches)
    bench.state = state
    assert_computes(bench, tmp_path)
    bench.stager.settled(bench.learner.version, ok=False)
    bench.install()


@pytest.mark.parametrize("layer", ["model.layers.1.self_attn.qkv_proj", "lm_head"])
def test_a_layer_that_computes_with_a_copy_is_noticed(bench: Bench, layer: str) -> None:
    """The head shares its parameter with the embedding, which does not tell what it computes with."""
    before = bench.live_digest()
    bench.run(bench.engine._check_live())
    bench.run(bench.engine.vllm.collective_rpc("copy_weights", args=(layer, True)))
    with pytest.raises(RunError, match=f"layer {layer} computes with a copy"):
        bench.run(bench.engine._check_live())
    bench.run(bench.engine.vllm.collective_rpc("copy_weights", args=(layer, False)))
    bench.run(bench.engine._check_live())
    assert bench.live_digest() == before  # the check leaves every bit as it was


def test_a_new_request_never_sees_keys_and_values_of_old_weights(bench: Bench, tmp_path: Path) -> None:
    """A prompt of several cache blocks is asked again after an install."""
    prompt = PROBE * 50
    before = bench.sample(prompt, n=1, tokens=1)[0]
    bench.step(0.3, seed=6)
    bench.install()
    after = bench.sample(prompt, n=1, tokens=1)[0]
    assert after.spans[0].version == before.spans[0].version + 1
    expected = hf_logprobs(bench.state, after, tmp_path, prompt)
    assert after.logprobs == pytest.approx(expected, abs=bench.tolerance)


def make_answers_long(bench: Bench) -> None:
    """All logits equal: an answer ends at each token with probability 1/259 only."""
    norm = bench.state["model.norm.weight"]
    bench.state["model.norm.weight"] = BitTensor(np.zeros_like(norm.bits), norm.dtype, norm.shape)
    bench.install(full=True)


def test_requests_in_flight_survive_an_install(bench: Bench) -> None:
    """Long answers are under way when a version arrives: they go on, and each token knows its version."""
    started = asyncio.Event()
    make_answers_long(bench)
    old = bench.engine.version
    bench.step(0.05, seed=5)
    update = bench.publish()

    pieces: list[list[Sample]] = [[] for _ in range(8)]

    def arrived(index: int, piece: Sample) -> None:
        assert is_whole(piece)
        pieces[index].append(piece)
        started.set()

    async def scenario() -> list[Sample]:
        answering = asyncio.ensure_future(
            bench.engine.generate(PROBE, num_samples=8, max_new_tokens=400, on_tokens=arrived)
        )
        await started.wait()
        await bench.settle(update)
        return await answering

    samples = bench.run(scenario())
    assert all(len(parts) > 2 for parts in pieces)  # it was streamed, and each piece knew its versions
    assert [joined(parts) for parts in pieces] == samples
    both = [s for s in samples if len(s.spans) == 2]
    assert both, [len(s.token_ids) for s in samples]
    for sample in both:
        first, second = sample.spans
        assert (first.version, second.version) == (old, old + 1)
        assert (first.start, first.stop, second.stop) == (0, second.start, len(sample.token_ids))
        assert second.digest == bench.engine.digest != first.digest


def test_an_install_recomputes_nothing(bench: Bench) -> None:
    """Each prompt is computed, its whole pages once where they are cached, and each token."""
    make_answers_long(bench)
    prompt, counter = tuple(i % 200 for i in range(100)), bench.engine._counter
    assert counter is not None
    started, before = asyncio.Event(), counter.tokens
    bench.step(0.05, seed=6)
    update = bench.publish()

    async def scenario() -> list[Sample]:
        answering = asyncio.ensure_future(
            bench.engine.generate(
                prompt, num_samples=8, max_new_tokens=100, on_tokens=lambda *_: started.set()
            )
        )
        await started.wait()
        await bench.settle(update)
        return await answering

    samples = bench.run(scenario())
    assert any(len(sample.spans) == 2 for sample in samples)
    shared = 7 * 96 if bench.prefix_caching else 0
    sampled = sum(len(sample.token_ids) for sample in samples)
    # The last token of an answer is not computed; some are, before vLLM sees that the answer has ended.
    assert 0 <= counter.tokens - before - (8 * len(prompt) - shared + sampled - 8) <= 8


@pytest.mark.timeout(1800)
def test_installs_one_after_another_recompute_nothing_and_serve_no_old_block(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer runs during each; then a prompt comes again, twice. In every third round one is given up."""
    monkeypatch.setattr(bench.learner, "segment_bytes", 1 << 20)  # the tests' tiny segments take long
    norm = bench.state["model.norm.weight"]
    quarter = np.full_like(norm.bits, 0x3E80)  # long answers, but not all tokens alike
    bench.state["model.norm.weight"] = BitTensor(quarter, norm.dtype, norm.shape)
    bench.install(full=True)
    counter, rng = bench.engine._counter, np.random.default_rng(8)
    assert counter is not None
    again = tuple(rng.integers(1, 200, 70).tolist())
    whole_pages = 64 if bench.prefix_caching else 0

    async def ask(prompt: tuple[int, ...], tokens: int, started: asyncio.Event) -> Sample:
        (sample,) = await bench.engine.generate(
            prompt, num_samples=1, max_new_tokens=tokens, on_tokens=lambda *_: started.set()
        )
        return sample

    async def one_round(number: int, update: Publication) -> list[Sample]:
        started = asyncio.Event()
        running = asyncio.ensure_future(ask(tuple(rng.integers(1, 200, 40).tolist()), 60, started))
        await started.wait()
        given_up = asyncio.ensure_future(ask(again, 60, asyncio.Event())) if number % 3 == 0 else None
        await bench.settle(update)
        if given_up is not None:
            given_up.cancel()
            await asyncio.wait([given_up])
        return [await ask(again, 4, started), await ask(again, 4, started), await running]

    rounds, over_an_install = 200 if THOROUGH else 20, 0
    for number in range(rounds):
        bench.step(0.05, seed=100 + number)
        update, before = bench.publish(), counter.tokens
        first, second, running = bench.run(one_round(number, update))
        computed = counter.tokens - before
        for sample in (first, second):
            assert [span.version for span in sample.spans] == [update.manifest.version]
        if number % 3:
            sampled = sum(len(sample.token_ids) - 1 for sample in (first, second, running))
            assert 0 <= computed - (40 + 2 * len(again) - whole_pages + sampled) <= 3
        if number % 10 == 0:
            exact = hf_logprobs(bench.state, second, tmp_path, again, bench.model)
            assert second.logprobs == pytest.approx(exact, abs=bench.tolerance)
        over_an_install += len(running.spans) == 2
    assert over_an_install > rounds / 2


def test_a_prompt_without_room_is_the_tasks_fault(bench: Bench) -> None:
    with pytest.raises(TaskError, match="max_model_len"):
        bench.sample(prompt=(1,) * MAX_MODEL_LEN)


def test_whoever_waits_for_an_engine_that_ends_is_told(bench: Bench) -> None:
    """The last test: it ends the engine, once by killing its process and once by closing it."""
    make_answers_long(bench)
    started = asyncio.Event()

    async def scenario() -> None:
        answering = asyncio.ensure_future(
            bench.engine.generate(
                PROBE, num_samples=8, max_new_tokens=500, on_tokens=lambda *_: started.set()
            )
        )
        await started.wait()
        if not bench.prefix_caching:
            await bench.engine.close()
        else:
            (process,) = [p for p in psutil.Process().children() if "EngineCore" in p.name()]
            process.suspend()  # so that an install is under way when the process ends
            installing = asyncio.ensure_future(bench.engine.install(bench.publish(full=True)))
            assert not (await asyncio.wait([installing], timeout=1))[0]
            process.kill()
            with pytest.raises(RunError, match="died"):
                await asyncio.wait_for(installing, 30)
        with pytest.raises(RunError):
            await asyncio.wait_for(answering, 30)
        with pytest.raises(RunError):
            await bench.engine.install(bench.publish(full=True))

    bench.run(scenario())
