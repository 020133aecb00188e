"""The learner with real DeepSpeed processes, against a plain PyTorch loop written here from the formulas."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.nn.utils import parametrize
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from echo_planes.config.kv_schedule import Schedule
from echo_planes.config.schema import Config
from echo_planes.errors import ConfigError, DataError, DivergedError, ModelError
from echo_planes.learning import learner as learner_module
from echo_planes.learning.adapters import first_a
from echo_planes.learning.learner import Learner
from echo_planes.learning.meeting import alone
from echo_planes.learning.objectives import Loss, Tokens
from echo_planes.learning.policy_model import load_policy, nucleus
from echo_planes.types import Adjustment, TrainBatch
from tests.integration.learner_ranks import LIMIT_S, VOCABULARY, make_batch, master_weights
from tests.thorough import THOROUGH, takes_minutes

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).with_name("learner_ranks.py")
STEPS = 5
LR, WARMUP, BETAS, EPS, CLIP = 1e-3, 3, (0.9, 0.98), 1e-6, 0.05
Arrays = dict[str, npt.NDArray[Any]]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Sharing out such small matrices takes longer than multiplying them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def write_model(folder: Path) -> Path:
    """A random two-layer model with a tied lm_head, saved as bf16."""
    torch.manual_seed(5)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def settings(folder: Path, zero_stage: int, dtype: str, **changes: Any) -> dict[str, Any]:
    learner = {
        "num_ranks": 2,
        "zero_stage": zero_stage,
        "dtype": dtype,
        "lr": LR,
        "warmup_steps": WARMUP,
        "beta1": BETAS[0],
        "beta2": BETAS[1],
        "eps": EPS,
        "grad_clip": CLIP,
        # Small, so that every rank sees several micro-batches, and the two unlike ones.
        "micro_batch_tokens": 40,
        "drift_target": 0.0,
    }
    return {
        "model": {"path": str(folder), "max_model_len": 20},
        "learner": learner | changes.pop("learner", {}),
        "sampling": {"temperature": 0.8},
        **changes,
        "objective": {"anchor": "proximal", "clip_delta": 0.0} | changes.get("objective", {}),
    }


@dataclass(frozen=True)
class Run:
    """A learner that makes `STEPS` steps.

    `twice`: of two updates each, with a reference model; `sampler`: its ratio is against the sampler;
    `sharing`: two ranks share each sequence;
    `saving`: of memory, with chunks of three tokens at lm_head and layers that are run again in the backward
    pass; `lora`: of adapters; `offload`: its optimizer is in host memory, under ZeRO-3 its weights too.
    """

    world_size: int
    zero_stage: int
    dtype: str
    twice: bool = False
    sampler: bool = False
    saving: bool = False
    lora: bool = False
    offload: bool = False
    sharing: bool = False

    @property
    def name(self) -> str:
        more = "-twice" * self.twice + "-sampler" * self.sampler + "-saving" * self.saving
        more += "-lora" * self.lora + "-offload" * self.offload + "-sharing" * self.sharing
        return f"{self.world_size}-{self.zero_stage}-{self.dtype}{more}"

    def settings(self, model_folder: Path) -> dict[str, Any]:
        changes: dict[str, Any] = {}
        if self.twice:
            changes = {"learner": {"updates_per_step": 2}, "objective": {"kl_beta": 0.3}}
        if self.saving:
            changes = {"learner": {"activation_checkpointing": True}}
        if self.lora:
            changes["learner"] = {**changes.get("learner", {}), "lora_rank": RANK, "lora_alpha": ALPHA}
        if self.offload:
            offloaded = {"offload_optimizer": True, "offload_weights": self.zero_stage == 3}
            changes["learner"] = {**changes.get("learner", {}), **offloaded}
        if self.sharing:
            ranks = {"num_ranks": self.world_size, "sequence_ranks": 2}
            changes["learner"] = {**changes.get("learner", {}), **ranks}
        if self.sampler:
            changes = {"objective": {"anchor": "sampler", "clip_delta": 4.0}}
        return settings(model_folder, self.zero_stage, self.dtype, **changes)


SAVING_SHARED = Run(2, 3, "fp32", saving=True, sharing=True)
OFFLOADED = Run(2, 3, "fp32", offload=True)
FP32 = [Run(2, 1, "fp32"), SAVING_SHARED, OFFLOADED]
LORA_DIVIDED = Run(2, 3, "fp32", lora=True)
LORA = [LORA_DIVIDED]
if THOROUGH:
    FP32 += [Run(2, zero_stage, "fp32") for zero_stage in (0, 2, 3)]
    FP32 += [Run(2, zero_stage, "fp32", saving=True) for zero_stage in (1, 3)]
    FP32 += [Run(2, 0, "fp32", sharing=True), Run(2, 1, "fp32", offload=True)]
    LORA += [Run(2, zero_stage, "fp32", lora=True) for zero_stage in (0, 1)]
RANK, ALPHA = 2, 8.0
LORA_TWICE = Run(1, 1, "fp32", twice=True, lora=True)
BF16 = [Run(2, zero_stage, "bf16") for zero_stage in ((0, 1) if THOROUGH else (1,))]
TWICE = Run(1, 1, "fp32", twice=True)
TWICE_DIVIDED = Run(2, 3, "fp32", twice=True)  # so is its reference
TWICE_SHARED = Run(2, 1, "fp32", twice=True, sharing=True)
TWICE_OFFLOADED = Run(2, 3, "fp32", twice=True, offload=True)  # and its reference
WITH_REFERENCE = [TWICE, TWICE_SHARED, *([TWICE_DIVIDED, TWICE_OFFLOADED] if THOROUGH else [])]
SAMPLER = Run(1, 0, "fp32", sampler=True)
# Each leaves a checkpoint on the way, from which new processes go on.
SAVED = [Run(1, 0, "fp32"), Run(2, 1, "fp32"), Run(1, 2, "fp32"), OFFLOADED, Run(2, 3, "bf16")]
SAVED += [Run(1, 0, "fp32", lora=True), LORA_DIVIDED]
if THOROUGH:
    SAVED += [Run(1, 1, "bf16")]
SAVED_AT = 3


def run_ranks(folder: Path, specs: dict[Run, dict[str, Any]]) -> dict[Run, Arrays]:
    """Start the script once per rank, wait for all, and read what rank 0 found. All of one world size."""
    (world_size,) = {run.world_size for run in specs}
    whole = [{**spec, "world_size": world_size, "out": str(folder / run.name)} for run, spec in specs.items()]
    path = folder / f"{world_size}.json"
    path.write_text(json.dumps(whole))
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(path), str(rank)],
            env=environment,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [process.communicate(timeout=LIMIT_S)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    for process, output in zip(ranks, outputs, strict=True):
        assert process.returncode == 0, output[-4000:]
    found = {}
    for run in specs:
        with np.load(folder / f"{run.name}-0.npz") as arrays:
            found[run] = dict(arrays)
    return found


def run_together(folder: Path, specs: dict[Run, dict[str, Any]]) -> dict[Run, Arrays]:
    """Those of one world size one after the other in the same processes: starting these takes longest."""
    found: dict[Run, Arrays] = {}
    for world_size in (1, 2):
        found |= run_ranks(folder, {run: spec for run, spec in specs.items() if run.world_size == world_size})
    return found


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def unbroken(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, checkpoints: Path
) -> dict[Run, Arrays]:
    """Every run from its first step to its last."""
    specs: dict[Run, dict[str, Any]] = {}
    for run in dict.fromkeys([*FP32, *BF16, *SAVED, *LORA, LORA_TWICE, *WITH_REFERENCE, SAMPLER]):
        saves = {"save_at": SAVED_AT, "save_to": str(checkpoints / run.name)} if run in SAVED else {}
        chunks = {"chunk_logits": 3 * VOCABULARY} if run.saving else {}
        specs[run] = {
            "config": run.settings(model_folder),
            "first_step": 0,
            "num_steps": STEPS,
            "shown": True,
            **saves,
            **chunks,
        }
    return run_together(tmp_path_factory.mktemp("unbroken"), specs)


@pytest.fixture(scope="module")
def resumed(
    tmp_path_factory: pytest.TempPathFactory,
    model_folder: Path,
    checkpoints: Path,
    unbroken: dict[Run, Arrays],
) -> dict[Run, Arrays]:
    """The saved runs' last steps, from their checkpoints."""
    rest = {"first_step": SAVED_AT, "num_steps": STEPS - SAVED_AT}
    specs = {
        run: {"config": run.settings(model_folder), "load_from": str(checkpoints / run.name), **rest}
        for run in SAVED
    }
    return run_together(tmp_path_factory.mktemp("resumed"), specs)


def reference_logprobs(model: Any, batch: TrainBatch, i: int) -> torch.Tensor:
    """Logprobs at temperature 0.8 of trajectory i's tokens 1, 2, ..."""
    ids = torch.from_numpy(batch.token_ids[batch.offsets[i] : batch.offsets[i + 1]])
    logits = model(input_ids=ids[None]).logits[0, :-1].float() / 0.8
    return torch.log_softmax(logits, -1).gather(-1, ids[1:, None]).squeeze(-1)


def reference_loss(
    model: Any,
    batch: TrainBatch,
    members: list[int],
    old: list[torch.Tensor],
    frozen: list[torch.Tensor] | None = None,
    *,
    against_sampler: bool = False,
) -> torch.Tensor:
    """GRPO, one sequence at a time: 1/N sum_i 1/|o_i| sum_t w (0.3 KL - min(r A, clip(r) A)).

    Against the sampler: no w, r clipped at 1.28 above, and never worse than 4 A.
    """
    total = torch.zeros(())
    for i in members:
        group = batch.rewards[batch.advantage_groups == batch.advantage_groups[i]].astype(np.float64)
        advantage = float((batch.rewards[i] - group.mean()) / (group.std() + 1e-6))
        start, stop = batch.offsets[i], batch.offsets[i + 1]
        logprobs = reference_logprobs(model, batch, i)
        trained = torch.from_numpy(batch.loss_mask[start + 1 : stop])
        sampler = torch.from_numpy(batch.sampler_logprobs[start + 1 : stop])
        weight = torch.exp(old[i] - sampler).clamp(max=2.0)
        ratio = torch.exp(logprobs - old[i])
        terms = -weight * torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        if against_sampler:
            ratio = torch.exp(logprobs - sampler)
            gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
            terms = -(gain.clamp(min=4 * advantage) if advantage < 0 else gain)
        if frozen is not None:
            kl = torch.exp(frozen[i] - logprobs) - (frozen[i] - logprobs) - 1
            terms = terms + 0.3 * weight * kl
        total = total + terms[trained].mean()
    return total / len(members)


class Product(torch.nn.Module):
    """A weight as W + s B A, computed whole. Its gradient passes straight through what is `shown` of it."""

    def __init__(self, name: str, weight: torch.Tensor) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(first_a(0, name, RANK, weight.shape[1]))
        self.b = torch.nn.Parameter(torch.zeros(weight.shape[0], RANK))
        self.shown = weight.detach()

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        whole = weight + ALPHA / RANK * (self.b @ self.a)
        check_rounding(self.shown, whole)
        return whole + (self.shown - whole).detach()


def check_rounding(shown: torch.Tensor, master: torch.Tensor) -> None:
    """`shown` must be the bf16 value nearest to a weight; of two that are as near, by float error, either."""
    master = master.detach()
    assert torch.equal(shown.bfloat16().float(), shown)
    nearest = master.bfloat16().float()
    further = (shown - master).abs() - (nearest - master).abs()
    assert further.max() < 1e-6
    assert (shown != nearest).float().mean() < 1e-3


def with_products(model: Any) -> dict[str, Product]:
    """Freeze a model but for products at all linear layers of its layers; return them by our names."""
    model.requires_grad_(False)
    found = {}
    for name, module in list(model.model.layers.named_modules()):
        if isinstance(module, torch.nn.Linear):
            product = Product(name, module.weight)
            parametrize.register_parametrization(module, "weight", product)
            found[f"model.layers.{name}"] = product
    return found


def reference_run(
    folder: Path,
    found: Arrays,
    updates_per_step: int = 1,
    *,
    kl: bool = False,
    against_sampler: bool = False,
    lora: bool = False,
    exact: bool = True,
) -> Arrays:
    """Losses, gradient norms, weights and probe logprobs of the plain loop, in fp32 over weights in bf16.

    The loop computes with the weights that the learner `found` showed after each update, which must be its
    own masters rounded, if its arithmetic is `exact`. Otherwise float error that decides the rounding of one
    weight would part the two.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    products = with_products(model) if lora else {}
    named = {name: one for name, one in model.named_parameters() if one.requires_grad}
    trained = list(named.values())
    masters = trained if lora else [one.detach().clone() for one in trained]
    optimizer = torch.optim.AdamW(masters, lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0)
    losses, norms, updates = [], [], 0
    frozen_model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) if kl else None
    for step in range(STEPS):
        batch = make_batch(step)
        everyone = range(batch.num_trajectories)
        with torch.no_grad():
            old = [reference_logprobs(model, batch, i) for i in everyone]
            frozen = [reference_logprobs(frozen_model, batch, i) for i in everyone] if kl else None
        for part in np.split(np.arange(batch.num_trajectories), updates_per_step):
            loss = reference_loss(model, batch, part.tolist(), old, frozen, against_sampler=against_sampler)
            optimizer.zero_grad()
            model.zero_grad()
            torch.autograd.backward(loss)
            norms.append(float(torch.nn.utils.clip_grad_norm_(trained, CLIP)))
            updates += 1
            optimizer.param_groups[0]["lr"] = LR * min(1.0, updates / WARMUP)
            for master, one in zip(masters, trained, strict=True):
                master.grad = one.grad
            optimizer.step()
            losses.append(loss.item())
            for name, product in products.items():
                product.shown = shown_after(found, updates - 1, f"{name}.weight")
            for name, master, one in zip(named, masters, trained, strict=True):
                if not lora:
                    one.data = shown_after(found, updates - 1, name)
                    if exact:
                        check_rounding(one.data, master)
    probe_batch = make_batch(999)
    probe = np.zeros(len(probe_batch.token_ids), np.float32)
    with torch.no_grad():
        for i in range(probe_batch.num_trajectories):
            start, stop = probe_batch.offsets[i], probe_batch.offsets[i + 1]
            probe[start + 1 : stop] = reference_logprobs(model, probe_batch, i).numpy()
    assert min(norms) > CLIP  # clipping is part of what is compared
    kept = dict(zip(named, masters, strict=True))
    for name, product in products.items():
        kept |= {f"{name}.lora_a": product.a, f"{name}.lora_b": product.b}
    weights = {f"fp32/{n}": p.detach().numpy().reshape(-1) for n, p in kept.items() if "parametri" not in n}
    weights |= {f"merged/{name}.weight": one.shown.numpy().reshape(-1) for name, one in products.items()}
    return {
        "loss": np.array(losses).reshape(STEPS, -1).mean(1),
        "grad_norm": np.array(norms).reshape(STEPS, -1).mean(1),
        "probe": probe * probe_batch.loss_mask,
        **weights,
    }


def shown_after(found: Arrays, update: int, name: str) -> torch.Tensor:
    """A weight with which the learner computes after an update."""
    bits = torch.from_numpy(found[f"shown/{update}/{name}"].view(np.int16))
    return bits.view(torch.bfloat16).float()


def largest_difference(found: Arrays, reference: Arrays) -> float:
    names = [name for name in reference if name.startswith("fp32/")]
    assert names
    return max(float(np.abs(found[name] - reference[name]).max()) for name in names)


@pytest.mark.parametrize("run", FP32, ids=lambda run: run.name)
def test_two_ranks_equal_the_plain_loop(run: Run, unbroken: dict[Run, Arrays], model_folder: Path) -> None:
    found = unbroken[run]
    reference = reference_run(model_folder, found)
    np.testing.assert_allclose(found["loss"], reference["loss"], atol=1e-5)
    np.testing.assert_allclose(found["grad_norm"], reference["grad_norm"], rtol=1e-4)
    np.testing.assert_allclose(found["probe"], reference["probe"], atol=1e-4)
    assert largest_difference(found, reference) < 1e-6
    # What is published: exactly the fp32 weights rounded to bf16, under the names of the model's folder.
    with safe_open(model_folder / "model.safetensors", framework="np") as saved:
        assert {n.removeprefix("bits/") for n in found if n.startswith("bits/")} == set(saved.keys())
        shapes = {name: tuple(saved.get_slice(name).get_shape()) for name in saved.keys()}  # noqa: SIM118
    for name, shape in shapes.items():
        assert found[f"bits/{name}"].shape == shape
        rounded = torch.from_numpy(found[f"fp32/{name}"]).to(torch.bfloat16).view(torch.int16).numpy()
        assert (found[f"bits/{name}"].reshape(-1).view(np.int16) == rounded).all()


def check_adapters(found: Arrays, expected: Arrays, model_folder: Path) -> None:
    np.testing.assert_allclose(found["loss"], expected["loss"], atol=1e-5)
    np.testing.assert_allclose(found["grad_norm"], expected["grad_norm"], rtol=1e-4)
    np.testing.assert_allclose(found["probe"], expected["probe"], atol=1e-4)
    assert largest_difference(found, expected) < 1e-6
    merged = [name.removeprefix("merged/") for name in expected if name.startswith("merged/")]
    with safe_open(model_folder / "model.safetensors", framework="pt") as saved:
        assert {n.removeprefix("bits/") for n in found if n.startswith("bits/")} == set(saved.keys())
        for name in saved.keys():  # noqa: SIM118
            published = torch.from_numpy(found[f"bits/{name}"].view(np.int16)).view(torch.bfloat16).float()
            first = saved.get_tensor(name)
            if name in merged:
                whole = torch.from_numpy(expected[f"merged/{name}"]).reshape(first.shape)
                assert not torch.equal(whole, first)
                assert torch.equal(published, whole)
            else:  # frozen
                assert torch.equal(published, first.bfloat16().float())


@pytest.mark.parametrize("run", LORA, ids=lambda run: run.name)
def test_adapters_equal_the_plain_loop_with_whole_products(
    run: Run, unbroken: dict[Run, Arrays], model_folder: Path
) -> None:
    found = unbroken[run]
    check_adapters(found, reference_run(model_folder, found, lora=True), model_folder)


def test_the_reference_of_adapters_is_the_model_without_them(
    unbroken: dict[Run, Arrays], model_folder: Path
) -> None:
    found = unbroken[LORA_TWICE]
    check_adapters(found, reference_run(model_folder, found, 2, kl=True, lora=True), model_folder)


def test_a_checkpoint_of_adapters_holds_no_frozen_weights(
    unbroken: dict[Run, Arrays], checkpoints: Path
) -> None:
    folder = checkpoints / Run(1, 0, "fp32", lora=True).name
    (path,) = folder.rglob("*model_states.pt")
    names = torch.load(path, weights_only=False)["module"].keys()  # our own, of a moment ago
    # Of a matrix with two names DeepSpeed leaves out one.
    assert [name for name in names if "lora_" not in name] == ["model.lm_head.weight"]


@pytest.mark.parametrize("run", BF16, ids=lambda run: run.name)
def test_two_ranks_in_bf16_stay_within_its_rounding(
    run: Run, unbroken: dict[Run, Arrays], model_folder: Path
) -> None:
    found = unbroken[run]
    reference = reference_run(model_folder, found, exact=False)
    # bf16 keeps 8 bits: 2^-8 of logits of size ~4, averaged; Adam's step bounds how far weights can part.
    np.testing.assert_allclose(found["loss"], reference["loss"], atol=0.02)
    np.testing.assert_allclose(found["grad_norm"], reference["grad_norm"], rtol=0.05)
    assert largest_difference(found, reference) < 2 * LR * STEPS
    # A gradient whose sign rounding decides moves its weight a whole step the other way: some, not many.
    close = [np.abs(found[n] - reference[n]) < LR for n in reference if n.startswith("fp32/")]
    assert np.concatenate(close).mean() > 0.97
    for name in (n for n in found if n.startswith("bits/")):
        master = torch.from_numpy(found[name.replace("bits/", "fp32/")])
        bits = torch.from_numpy(found[name].reshape(-1).view(np.int16))
        assert (bits == master.bfloat16().view(torch.int16)).all()


@pytest.mark.parametrize("run", SAVED, ids=lambda run: run.name)
def test_resume_is_bit_identical(run: Run, unbroken: dict[Run, Arrays], resumed: dict[Run, Arrays]) -> None:
    whole, rest = unbroken[run], resumed[run]
    assert rest["num_updates"].tolist() == whole["num_updates"][SAVED_AT:].tolist() == [4, 5]
    assert {name for name in whole if not name.startswith("shown/")} == rest.keys()
    for name in rest.keys() - {"loss", "grad_norm", "num_updates"}:
        assert whole[name].tobytes() == rest[name].tobytes(), name
    assert (whole["loss"][SAVED_AT:] == rest["loss"]).all()


def served_logprobs(
    folder: Path, bits: Mapping[str, npt.NDArray[Any]], batch: TrainBatch
) -> npt.NDArray[Any]:
    """Log-probabilities of a batch's trained tokens by an fp32 model that has only what was published."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for name, one in model.named_parameters():
            shown = torch.from_numpy(bits[name].view(np.int16)).view(torch.bfloat16)
            one.copy_(shown.reshape(one.shape))
        answers = [reference_logprobs(model, batch, i).numpy() for i in range(batch.num_trajectories)]
    found: npt.NDArray[Any] = np.concatenate([np.concatenate([[0.0], one]) for one in answers])
    return found * batch.loss_mask


@pytest.mark.parametrize("run", [run for run in SAVED if run.dtype == "fp32"], ids=lambda run: run.name)
@pytest.mark.parametrize("again", [False, True], ids=["unbroken", "resumed"])
def test_the_policy_that_is_trained_is_the_one_that_is_published(
    run: Run, again: bool, unbroken: dict[Run, Arrays], resumed: dict[Run, Arrays], model_folder: Path
) -> None:
    found = (resumed if again else unbroken)[run]
    bits = {name.removeprefix("bits/"): one for name, one in found.items() if name.startswith("bits/")}
    served = served_logprobs(model_folder, bits, make_batch(999))
    np.testing.assert_allclose(found["probe"], served, atol=1e-5)


@pytest.mark.parametrize("rank", [0, RANK], ids=["weights", "adapters"])
@pytest.mark.parametrize("rate", [1e-6, 1e-5, 2.5e-4])
def test_no_rate_parts_the_trained_policy_from_the_published_one(
    tmp_path: Path, model_folder: Path, rate: float, rank: int
) -> None:
    """Most updates at the rates of real models are below a bf16 step: the learner must not see them."""
    changes = {"lr": rate, "warmup_steps": 0, "lora_rank": rank, "grad_clip": 1.0}
    probe, moved = make_batch(999), []
    with learner_here(tmp_path, model_folder, learner=changes) as learner:
        first = learner.logprobs(probe)
        for step in range(STEPS):
            learner.train_step(make_batch(step))
            bits = {name: one for name, (one, _) in learner.state_bits().items()}
            served = served_logprobs(model_folder, bits, probe)
            now = learner.logprobs(probe)
            np.testing.assert_allclose(now, served, atol=1e-5)
            moved.append(np.abs(now - first).max())
        masters = master_weights(learner)
    begun = load_file(model_folder / "model.safetensors")
    if not rank:  # the masters moved all the same
        name = "model.embed_tokens.weight"
        assert np.abs(masters[name] - begun[name].float().numpy().reshape(-1)).max() > 0.5 * rate
    if rate == 2.5e-4:
        assert max(moved) > 1e-3


@pytest.mark.parametrize("run", WITH_REFERENCE, ids=lambda run: run.name)
def test_two_updates_per_step_with_a_reference_equal_the_plain_loop(
    run: Run, unbroken: dict[Run, Arrays], model_folder: Path
) -> None:
    found = unbroken[run]
    expected = reference_run(model_folder, found, 2, kl=True)
    assert found["num_updates"].tolist() == [2, 4, 6, 8, 10]
    np.testing.assert_allclose(found["loss"], expected["loss"], atol=1e-5)
    np.testing.assert_allclose(found["grad_norm"], expected["grad_norm"], rtol=1e-4)
    assert largest_difference(found, expected) < 1e-6


@takes_minutes
def test_ranks_share_sequences_in_every_setting(
    tmp_path: Path, checkpoints: Path, unbroken: dict[Run, Arrays], model_folder: Path
) -> None:
    """Two groups of two ranks, a divided reference, adapters and a reference, a run that did not share."""
    four, divided = Run(4, 1, "fp32", sharing=True), Run(2, 3, "fp32", twice=True, sharing=True)
    adapters, began_alone = replace(LORA_TWICE, world_size=2, sharing=True), Run(2, 1, "fp32", sharing=True)
    whole = {"first_step": 0, "num_steps": STEPS, "shown": True}
    rest = {"first_step": SAVED_AT, "num_steps": STEPS - SAVED_AT, "shown": True}
    before = str(checkpoints / Run(2, 1, "fp32").name)
    specs = {
        divided: {"config": divided.settings(model_folder), **whole},
        adapters: {"config": adapters.settings(model_folder), **whole},
        began_alone: {"config": began_alone.settings(model_folder), "load_from": before, **rest},
    }
    found = run_ranks(tmp_path, specs)
    found |= run_ranks(tmp_path, {four: {"config": four.settings(model_folder), **whole}})
    joined = {**unbroken[Run(2, 1, "fp32")], **found[began_alone]}
    assert largest_difference(found[four], reference_run(model_folder, found[four])) < 1e-6
    assert largest_difference(found[began_alone], reference_run(model_folder, joined)) < 1e-6
    expected = reference_run(model_folder, found[divided], 2, kl=True)
    assert largest_difference(found[divided], expected) < 1e-6
    expected = reference_run(model_folder, found[adapters], 2, kl=True, lora=True)
    check_adapters(found[adapters], expected, model_folder)


def test_a_ratio_against_the_sampler_equals_the_plain_loop(
    unbroken: dict[Run, Arrays], model_folder: Path
) -> None:
    found = unbroken[SAMPLER]
    expected = reference_run(model_folder, found, against_sampler=True)
    np.testing.assert_allclose(found["loss"], expected["loss"], atol=1e-5)
    np.testing.assert_allclose(found["grad_norm"], expected["grad_norm"], rtol=1e-4)
    assert largest_difference(found, expected) < 1e-6


@contextmanager
def learner_here(tmp_path: Path, folder: Path, **changes: Any) -> Iterator[Learner]:
    """A one-rank learner in this process."""
    config = Config.model_validate(settings(folder, 1, "fp32", **changes))
    learner = Learner(config, 0, 1, alone(), tmp_path / "failures")
    learner.start()
    try:
        yield learner
    finally:
        learner.close()


def all_bits(learner: Learner) -> bytes:
    return b"".join(array.tobytes() for array, _ in learner.state_bits().values())


def test_a_checkpoint_has_the_adapter_in_the_usual_format(tmp_path: Path, model_folder: Path) -> None:
    from vllm.lora.peft_helper import PEFTHelper

    with learner_here(tmp_path, model_folder, learner={"lora_rank": RANK, "lora_alpha": ALPHA}) as learner:
        for step in range(2):
            learner.train_step(make_batch(step))
        learner.save(tmp_path / "checkpoint")
        published = {name: array.copy() for name, (array, _) in learner.state_bits().items()}
    folder = tmp_path / "checkpoint" / "adapter"
    told = PEFTHelper.from_local_dir(str(folder), None)  # as vLLM reads it
    assert (told.r, told.lora_alpha, told.bias) == (RANK, ALPHA, "none")
    adapter = load_file(folder / "adapter_model.safetensors")
    base = load_file(model_folder / "model.safetensors")
    merged = dict(base)
    for name in [name for name in adapter if name.endswith("lora_A.weight")]:
        layer = name.removesuffix(".lora_A.weight")
        assert layer.rpartition(".")[2] in told.target_modules
        a, b = adapter[name], adapter[f"{layer}.lora_B.weight"]
        assert b.any()
        weight = f"{layer.removeprefix('base_model.model.')}.weight"
        merged[weight] = torch.addmm(base[weight].float(), b, a, alpha=ALPHA / RANK)
    assert len(adapter) > 0
    assert merged.keys() == published.keys()
    for name, array in published.items():  # what workers got is the base with this adapter, bit for bit
        assert array.tobytes() == merged[name].to(torch.bfloat16).view(torch.int16).numpy().tobytes(), name


def test_ranks_that_divide_an_adapter_write_it_whole(checkpoints: Path, unbroken: dict[Run, Arrays]) -> None:
    assert unbroken  # which leaves the checkpoints
    alone_, divided = (
        load_file(checkpoints / run.name / "adapter" / "adapter_model.safetensors")
        for run in (Run(1, 0, "fp32", lora=True), LORA_DIVIDED)
    )
    assert alone_.keys() == divided.keys()
    for name, tensor in alone_.items():
        torch.testing.assert_close(divided[name], tensor, atol=1e-5, rtol=0.0)


@pytest.mark.parametrize("offload", [(False, False), (True, False), (True, True)], ids=str)
def test_what_is_to_be_offloaded_is(tmp_path: Path, model_folder: Path, offload: tuple[bool, bool]) -> None:
    optimizer, weights = offload
    changes = {"zero_stage": 3, "offload_optimizer": optimizer, "offload_weights": weights}
    with learner_here(tmp_path, model_folder, learner=changes) as learner:
        learner.train_step(make_batch(0))
        deepspeed = learner._engine._engine  # by its own word: on CPUs the memory is the same
        assert (deepspeed.zero_cpu_offload(), deepspeed.zero_offload_param() is not None) == offload


@pytest.mark.parametrize("column", ["rewards", "sampler_logprobs"])
def test_a_column_that_is_not_finite_is_saved_and_named(
    tmp_path: Path, model_folder: Path, column: str
) -> None:
    batch = make_batch(7)
    values = getattr(batch, column).copy()
    values[np.flatnonzero(batch.loss_mask)[0] if column == "sampler_logprobs" else 0] = np.nan
    with learner_here(tmp_path, model_folder) as learner:
        with pytest.raises(DivergedError, match=f"step 8 .*{column}.*diverged-step-8"):
            learner.train_step(replace(batch, **{column: values}))
        with pytest.raises(DivergedError):
            learner.save(tmp_path)
    with np.load(tmp_path / "failures" / "diverged-step-8.npz", allow_pickle=False) as saved:
        np.testing.assert_array_equal(saved[column], values)
        np.testing.assert_array_equal(saved["token_ids"], batch.token_ids)


def test_updates_that_are_not_finite_are_left_out_then_end_the_run(
    tmp_path: Path, model_folder: Path
) -> None:
    with learner_here(tmp_path, model_folder, learner={"lr": 1e30, "max_skipped_updates": 2}) as learner:
        learner.train_step(make_batch(0))  # finite, and spoils the weights
        told = [learner.train_step(make_batch(step)) for step in (1, 2)]
        # Of three steps the first alone moved the policy.
        assert [learner.drift.is_still(lag) for lag in (1, 2, 3)] == [True, True, False]
        with pytest.raises(DivergedError, match=r"step 4 .*loss.*diverged-step-4"):
            learner.train_step(make_batch(3))
    assert [(stats.updates_skipped, stats.num_updates, stats.loss) for stats in told] == [(1, 1, None)] * 2
    assert (tmp_path / "failures" / "diverged-step-4.npz").is_file()


@pytest.mark.parametrize(
    ("zero_stage", "dtype"), [(0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (0, "bf16"), (1, "bf16")]
)
def test_an_update_that_is_left_out_leaves_no_trace(
    tmp_path: Path, model_folder: Path, zero_stage: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"learner": {"zero_stage": zero_stage, "dtype": dtype}}
    found = []
    for spoilt in (False, True):
        with learner_here(tmp_path, model_folder, **changes) as learner:
            learner.train_step(make_batch(0))
            before = all_bits(learner)
            if spoilt:
                own = learner.loss
                learner.loss = lambda tokens, own=own: replace(one := own(tokens), loss=one.loss * np.nan)
                assert learner.train_step(make_batch(1)).updates_skipped == 1
                learner.loss = own
                assert all_bits(learner) == before
            stats = learner.train_step(make_batch(2))
            assert stats.updates_skipped == 0
            found.append((stats.loss, stats.grad_norm, all_bits(learner)))
    assert found[0] == found[1]


def test_means_are_over_the_updates_made(tmp_path: Path, model_folder: Path) -> None:
    plain = {"anchor": "proximal", "tis_level": "none", "uncorrected": True}  # every weight is 1
    changes = {"learner": {"updates_per_step": 2}, "objective": plain}
    with learner_here(tmp_path, model_folder, **changes) as learner:
        own, calls = learner.loss, []

        def once_spoilt(tokens: Tokens) -> Loss:
            calls.append(tokens)
            one = own(tokens)
            return replace(one, loss=one.loss * (np.nan if len(calls) == 1 else 1.0))

        learner.loss = once_spoilt
        stats = learner.train_step(make_batch(0))
    assert (stats.updates_skipped, stats.num_updates) == (1, 1)
    assert stats.tis_mean == pytest.approx(1.0)


def test_what_a_step_measured(tmp_path: Path, model_folder: Path) -> None:
    batch = replace(make_batch(5), versions=np.full(18, 3))
    rng = np.random.default_rng(0)
    lags = rng.integers(0, 3, len(batch.token_ids))
    batch = replace(batch, token_versions=np.where(batch.loss_mask, 5 - lags, -1))
    objective = {"skip_zero_advantage": False, "anchor": "proximal", "token_mask": [0.5, 2.0]}
    with learner_here(tmp_path, model_folder, objective=objective) as learner:
        now = learner.logprobs(batch)
        stats = learner.train_step(batch)
    trained = batch.loss_mask
    log_weight = (now - batch.sampler_logprobs)[trained]
    assert stats.tokens_scored == trained.sum()
    assert stats.mismatch_mean == pytest.approx(np.abs(log_weight).mean(), abs=1e-5)
    assert stats.k3 == pytest.approx((np.exp(log_weight) - 1 - log_weight).mean(), rel=1e-3)
    weight = np.exp(log_weight)
    assert stats.effective_samples == pytest.approx(
        weight.sum() ** 2 / (len(weight) * (weight**2).sum()), rel=1e-3
    )
    outside = (weight < 0.5) | (weight > 2.0)
    assert stats.masked_fraction == pytest.approx(outside.mean(), abs=1e-6)
    assert stats.truncated_fraction == pytest.approx((weight > 2.0).mean(), abs=1e-6)
    assert [one.lag for one in stats.lags] == [0, 1, 2]
    for one in stats.lags:
        mine = lags[trained] == one.lag
        assert one.tokens == mine.sum()
        assert one.drift == pytest.approx(np.abs(log_weight[mine]).mean(), abs=1e-5)
        assert one.masked == pytest.approx(outside[mine].mean(), abs=1e-6)


def numbers(measured: Any) -> list[float]:
    """All figures of a step as `asdict` gives it; -1: there is none."""
    if isinstance(measured, dict):
        measured = list(measured.values())
    if isinstance(measured, list | tuple):
        return [x for one in measured for x in numbers(one)]
    return [-1.0 if measured is None else float(measured)]


@pytest.mark.parametrize(
    "changes",
    [
        {"objective": {"token_mask": [0.5, 2.0], "anchor": "sampler"}, "learner": {"drift_target": 0.02}},
        {"objective": {"kl_beta": 0.3}, "learner": {"updates_per_step": 2}},
        {"objective": {"kl_beta": 0.3}, "learner": {"lora_rank": 2, "lora_alpha": 8.0}},
    ],
    ids=["sampler", "reference", "adapters"],
)
def test_shared_rows_measure_and_train_what_rows_alone_do(
    tmp_path: Path, model_folder: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples of a group differ in version, and tokens of a sample too."""
    rng, found = np.random.default_rng(1), []
    batches = []
    for step in (4, 5):
        batch = make_batch(step)
        versions = np.where(batch.loss_mask, step - rng.integers(0, 4, len(batch.token_ids)), -1)
        batches.append(replace(batch, token_versions=versions))
    settle = learner_module.settle_layout
    for apart in (False, True):

        def settled(models: list[Any], *more: Any, apart: bool = apart, **named: Any) -> None:
            settle(models, *more, **named)
            for model in models if apart else ():
                model.keep_apart("for comparison")

        monkeypatch.setattr(learner_module, "settle_layout", settled)
        with learner_here(tmp_path, model_folder, **changes) as learner:
            before = learner.logprobs(batches[0])
            stats = [learner.train_step(batch) for batch in batches]
            found.append((before, stats, learner.logprobs(batches[0])))
    (before, shared, after), (before_alone, by_row, after_alone) = found
    np.testing.assert_allclose(before, before_alone, atol=2e-6)
    np.testing.assert_allclose(after, after_alone, atol=1e-5)  # updates lie between
    for one, other in zip(shared, by_row, strict=True):
        assert one.tokens_forward < other.tokens_forward
        assert len(one.lags) == 4
        found_here, expected = (
            numbers(asdict(replace(x, t_train_s=0.0, tokens_forward=0))) for x in (one, other)
        )
        assert found_here == pytest.approx(expected, abs=1e-5, rel=1e-4)


def test_skipped_groups_are_scored_where_asked(tmp_path: Path, model_folder: Path) -> None:
    batch = make_batch(0)
    found = []
    for score in (False, True):
        with learner_here(tmp_path, model_folder, objective={"score_skipped": score}) as learner:
            now = learner.logprobs(batch)
            stats = learner.train_step(batch)
            found.append((stats, all_bits(learner)))
    (mixed, a), (every, b) = found
    assert a == b
    assert mixed.tokens_scored < every.tokens_scored == batch.loss_mask.sum()
    everything = np.abs(now - batch.sampler_logprobs)[batch.loss_mask].mean()
    assert every.mismatch_mean == pytest.approx(everything, abs=1e-5)


def test_drift_slows_the_rate_and_a_checkpoint_keeps_it(tmp_path: Path, model_folder: Path) -> None:
    changes = {"learner": {"drift_target": 0.01, "warmup_steps": 0}}
    stale = [
        replace(batch := make_batch(t), token_versions=np.where(batch.loss_mask, t - 1, -1))
        for t in (0, 1, 2, 3)
    ]
    with learner_here(tmp_path, model_folder, **changes) as learner:
        rates = [learner.train_step(batch).learning_rate for batch in stale[:3]]
        folder = tmp_path / "checkpoint"
        folder.mkdir()
        learner.save(folder)
        last = learner.train_step(stale[3])
    # Nothing had moved at the first step; its tokens' sampler is 0.3 nats away, so the rate falls after it.
    assert rates[0] == pytest.approx(LR)
    assert rates[1] is not None
    assert rates[1] < 0.1 * LR
    with learner_here(tmp_path, model_folder, **changes) as learner:
        learner.load(folder)
        again = learner.train_step(stale[3])
    assert (again.learning_rate, again.rate_factor) == (last.learning_rate, last.rate_factor)


def test_the_guards_rungs_hold_from_the_next_step_on_until_they_are_taken_back(
    tmp_path: Path, model_folder: Path
) -> None:
    """*mask* trains what `objective.token_mask` does, and *slow* moves the weights half as far."""
    batch = make_batch(0)
    far = 2.0 * (np.arange(len(batch.token_ids)) % 3 == 0)  # ratios of 7, beyond the guard's limit of 2
    batch = replace(batch, sampler_logprobs=(batch.sampler_logprobs - far).astype(np.float32))
    changes: dict[str, Any] = {"learner": {"warmup_steps": 0}}
    with learner_here(tmp_path, model_folder, objective={"token_mask": [0.5, 2.0]}, **changes) as learner:
        expected = learner.train_step(batch)
    with learner_here(tmp_path, model_folder, **changes) as learner:
        learner.adjust(Adjustment(rate_scale=0.5, mask_outliers=True))
        adjusted = learner.train_step(batch)
        masters = master_weights(learner)
        learner.adjust(Adjustment())
        after = learner.train_step(replace(batch, step=1))
        assert learner.drift.history == [0.5, 1.0]
    assert expected.masked_fraction is not None
    assert expected.masked_fraction > 0.2
    for figure in ("masked_fraction", "loss", "grad_norm"):
        assert getattr(adjusted, figure) == getattr(expected, figure)
    assert [one.learning_rate for one in (expected, adjusted, after)] == pytest.approx([LR, LR / 2, LR])
    begun = load_file(model_folder / "model.safetensors")
    moved = max(np.abs(masters[name] - one.float().numpy().reshape(-1)).max() for name, one in begun.items())
    assert moved == pytest.approx(LR / 2, rel=0.02)  # Adam's first step has the length of the rate
    assert after.masked_fraction == 0.0


def test_without_stale_tokens_a_step_is_held_by_how_far_it_moved_the_policy(
    tmp_path: Path, model_folder: Path
) -> None:
    changes = {"learner": {"warmup_steps": 0}, "objective": {"skip_zero_advantage": False}}
    moved = []
    for target in (0.0, 0.02):
        changes["learner"]["drift_target"] = target
        with learner_here(tmp_path, model_folder, **changes) as learner:
            fresh = make_batch(0)
            before = learner.logprobs(fresh)
            first = learner.train_step(fresh)
            moved.append(np.abs(learner.logprobs(fresh) - before)[fresh.loss_mask].mean())
            second = learner.train_step(make_batch(1))
    assert first.learning_rate == pytest.approx(LR)  # nothing was known before it
    # An eighth of the answers was scored again: that part's drift is near the whole's.
    assert 0.3 < second.rate_factor / (0.02 / moved[1]) < 3
    assert second.learning_rate == pytest.approx(LR * second.rate_factor)


def test_sparse_rollouts_are_held_by_how_far_the_policy_moved(tmp_path: Path, model_folder: Path) -> None:
    """Their tokens are far from the learner's, also stale ones, and no rate would bring them nearer."""
    changes = {
        "learner": {"warmup_steps": 0, "drift_target": 0.02},
        "objective": {"skip_zero_advantage": False},
    }
    factors = {}
    for lag, schedule in ((1, []), (1, [4]), (3, [4])):
        changes["sparse"] = {"schedule": schedule}
        with learner_here(tmp_path, model_folder, **changes) as learner:
            for step in (3, 4, 5):
                batch = make_batch(step)
                versions = np.where(batch.loss_mask, step - lag, -1)
                stats = learner.train_step(replace(batch, token_versions=versions))
            factors[lag, bool(schedule)] = stats.rate_factor
            assert stats.mismatch_mean > 0.1  # by which dense rollouts are held
    assert factors[1, False] < 0.7 * factors[1, True]
    assert factors[3, True] < 0.7 * factors[1, True] < 0.7


def test_the_answers_of_a_step_train_the_sparse_adapter_once(tmp_path: Path, model_folder: Path) -> None:
    """Weights are published again where no batch comes: without a new step there is nothing to learn from."""
    sparse = {"schedule": [4], "dense_layers": 1, "distill_rank": 2, "distill_share": 1.0}
    with learner_here(tmp_path, model_folder, sparse=sparse) as learner:
        learner.train_step(make_batch(0))
        first, again = (learner.distil(Schedule(pages=(4,), dense_layers=1), 1) for _ in range(2))
        assert first is not None
        assert again is not None
        assert (first.tokens > 0, again.tokens) == (True, 0)
        assert again.adapter == first.adapter


def test_a_run_that_is_extended_learns_on_at_the_full_rate_and_says_so(
    tmp_path: Path, model_folder: Path
) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    with learner_here(tmp_path, model_folder, run={"steps": 4}, learner={"decay": 0.5}) as learner:
        rates = [learner.train_step(make_batch(step)).learning_rate for step in range(4)]
        learner.save(folder)
    again = tmp_path / "again"
    again.mkdir()
    with learner_here(tmp_path, model_folder, run={"steps": 8}, learner={"decay": 0.5}) as learner:
        learner.load(folder)
        assert learner.about.endswith(f"; goes on at a learning rate of {LR:.3g} (peak {LR:.3g})")
        rates += [learner.train_step(make_batch(step)).learning_rate for step in range(4, 7)]
        learner.save(again)
    with learner_here(tmp_path, model_folder, run={"steps": 8}, learner={"decay": 0.5}) as learner:
        learner.load(again)
        assert f"; goes on at a learning rate of {LR / 2:.3g} (peak" in learner.about
        rates.append(learner.train_step(make_batch(7)).learning_rate)
    first, extended = [LR / 3, 2 * LR / 3, LR, LR / 2], [LR, LR, LR, LR / 2]
    assert rates == pytest.approx([*first, *extended])


def test_skipping_zero_groups_changes_nothing_but_the_work(tmp_path: Path, model_folder: Path) -> None:
    found = []
    for skip in (True, False):
        with learner_here(tmp_path, model_folder, objective={"skip_zero_advantage": skip}) as learner:
            stats = [learner.train_step(make_batch(step)) for step in range(3)]
            found.append((stats, learner.logprobs(make_batch(999))))
    (skipped, a), (whole, b) = found
    assert [s.groups_skipped for s in skipped] == [s.groups_skipped for s in whole]
    assert skipped[0].groups_skipped >= 2
    assert all(s.tokens_forward < w.tokens_forward for s, w in zip(skipped, whole, strict=True))
    assert [s.loss for s in skipped] == pytest.approx([w.loss for w in whole], abs=1e-6)
    np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_batch_without_advantages_is_a_step_without_update(tmp_path: Path, model_folder: Path) -> None:
    batch = make_batch(0)
    with learner_here(tmp_path, model_folder) as learner:
        learner.train_step(batch)
        before = all_bits(learner)
        stats = learner.train_step(replace(batch, step=1, rewards=np.ones_like(batch.rewards)))
        assert all_bits(learner) == before
        assert [learner.drift.is_still(lag) for lag in (1, 2)] == [True, False]
    assert (stats.num_updates, stats.tokens_forward, stats.tokens_scored) == (1, 0, 0)
    # Nothing was measured, which is not the same as 0.
    assert {stats.loss, stats.grad_norm, stats.learning_rate, stats.entropy, stats.tis_mean} == {None}
    assert {stats.mismatch_mean, stats.mismatch_p99, stats.clip_fraction, stats.kl_reference} == {None}
    assert stats.groups_skipped == 6


def test_a_checkpoint_of_another_layout_is_refused(tmp_path: Path, model_folder: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    with learner_here(tmp_path, model_folder) as learner:
        learner.save(folder)
    with learner_here(tmp_path, model_folder, learner={"zero_stage": 2}) as learner:
        with pytest.raises(ConfigError, match="zero_stage=2"):
            learner.load(folder)
        with pytest.raises(DataError):
            learner.load(tmp_path)


def test_a_model_with_a_sliding_window_and_dropout_scores_as_it_does_alone(tmp_path: Path) -> None:
    torch.manual_seed(5)
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
        initializer_range=0.2,
        attention_dropout=0.5,
    )
    Gemma3ForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    batch = make_batch(999)
    with learner_here(tmp_path, tmp_path / "model", learner={"dropout": True}) as learner:
        found = learner.logprobs(batch)
        before = all_bits(learner)
        assert np.isfinite(learner.train_step(make_batch(0)).loss)
        assert all_bits(learner) != before
    for i in range(batch.num_trajectories):
        start, stop = batch.offsets[i], batch.offsets[i + 1]
        with torch.no_grad():
            expected = reference_logprobs(model, batch, i).numpy() * batch.loss_mask[start + 1 : stop]
        np.testing.assert_allclose(found[start + 1 : stop], expected, atol=1e-5)


def test_nucleus_keeps_the_fewest_tokens_and_the_sampled_one() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.05, 0.15, 0.3, 0.5]]).log()
    kept = nucleus(logits, torch.tensor([0, 0]), 0.7)
    assert kept.tolist() == [[True, True, False, False], [True, False, True, True]]


def test_logprobs_are_of_the_distribution_sampled_from(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = load_policy(model_folder, torch.float32, 0.7, 0.6)
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    at, targets = torch.arange(7), ids[0, 1:]
    logprobs, entropy = policy(ids, None, None, at, targets)
    probs = (policy.model(input_ids=ids).logits[0, :-1] / 0.7).softmax(-1).detach()
    for row, target in enumerate(targets.tolist()):
        kept: set[int] = set()
        for token in probs[row].argsort(descending=True).tolist():
            if sum(float(probs[row, k]) for k in kept) >= 0.6:
                break
            kept.add(token)
        inside = probs[row, sorted(kept | {target})]
        mass = float(inside.sum())
        assert logprobs[row].item() == pytest.approx(float(probs[row, target].log()) - np.log(mass), abs=1e-4)
        expected = -(inside / mass * (inside / mass).log()).sum().item()
        assert entropy[row].item() == pytest.approx(expected, abs=1e-4)
    # Scored a few positions at a time, values and gradients are the same.
    weight = policy.model.get_input_embeddings().weight
    (whole,) = torch.autograd.grad(logprobs.sum(), weight)
    monkeypatch.setattr("echo_planes.learning.policy_model.CHUNK_LOGITS", 3 * VOCABULARY)
    again, _ = policy(ids, None, None, at, targets)
    (parts,) = torch.autograd.grad(again.sum(), weight)
    torch.testing.assert_close(again, logprobs)
    torch.testing.assert_close(parts, whole)


def test_a_folder_without_a_model_is_a_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        load_policy(tmp_path, torch.float32, 1.0, 1.0)


def test_a_learner_that_was_never_started_closes(model_folder: Path, tmp_path: Path) -> None:
    """Its owner closes what else it has then, such as the node that sends weights."""
    config = Config.model_validate(settings(model_folder, 0, "fp32"))
    Learner(config, 0, 1, alone(), tmp_path).close()
