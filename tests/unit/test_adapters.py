"""Adapters beside frozen weights: what they compute, what of them is published, and their memory."""

from __future__ import annotations

from functools import partial

import pytest

torch = pytest.importorskip("torch")

from transformers import AutoModelForCausalLM  # noqa: E402

from echo_planes.config.schema import BUILTIN_MODELS, Config  # noqa: E402
from echo_planes.errors import ConfigError  # noqa: E402
from echo_planes.learning.adapters import Adapters  # noqa: E402
from echo_planes.learning.footprint import Shape, compute_dtype, footprint, free_threads, shape_of  # noqa: E402
from echo_planes.loop.loading import load_config  # noqa: E402
from echo_planes.testing.simulation import replace_section  # noqa: E402

FOLDER = BUILTIN_MODELS["builtin:tiny-math"]
IDS = torch.arange(5, 25)[None]


def tiny() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits  # type: ignore[no-any-return]


def stirred(model: torch.nn.Module) -> None:
    """As after some updates: B is 0 no more."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_b"):
            parameter.data.normal_(std=0.05)


def test_the_first_policy_is_the_models_own_and_only_adapters_are_trained() -> None:
    model, plain = tiny(), logits(tiny())
    Adapters(model, 4, 32.0, None, seed=0)
    assert torch.equal(logits(model), plain)
    trained = [name for name, one in model.named_parameters() if one.requires_grad]
    assert {name.rpartition(".")[2] for name in trained} == {"lora_a", "lora_b"}
    assert len(trained) == 2 * 7 * 4  # seven linear layers in each of four


def test_targets_choose_layers() -> None:
    model = tiny()
    Adapters(model, 4, 32.0, ["q_proj", "down_proj"], seed=0)
    adapted = {name.split(".")[-2] for name, one in model.named_parameters() if one.requires_grad}
    assert adapted == {"q_proj", "down_proj"}


def test_a_target_that_does_not_exist_is_named_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match=r"learner\.lora_targets: wq .* choose of down_proj, gate_proj"):
        Adapters(tiny(), 4, 32.0, ["wq"], seed=0)


def test_merged_weights_compute_what_adapters_compute() -> None:
    model = tiny()
    adapters = Adapters(model, 4, 8.0, None, seed=0)
    stirred(model)
    plain, whole = logits(tiny()), tiny()
    parameters = dict(model.named_parameters())
    for name, weight in whole.named_parameters():
        layer = name.removesuffix("weight")
        if f"{layer}lora_a" in parameters:
            pair = (parameters[f"{layer}lora_a"].data, parameters[f"{layer}lora_b"].data)
            weight.data = adapters.merged(weight.data, *pair).float()
    assert not torch.allclose(logits(model), plain, atol=1e-2)
    assert torch.equal(logits(whole), logits(model))
    with adapters.off():
        assert torch.equal(logits(model), plain)
    assert not torch.equal(logits(model), plain)


def test_gradients_of_adapters_pass_straight_through_the_rounding() -> None:
    """Those of a weight W + s B A whose rounding is left out of the derivative."""
    torch.manual_seed(0)
    model = tiny()
    adapters = Adapters(model, 4, 8.0, ["q_proj"], seed=0)
    stirred(model)
    layer = model.model.layers[1].self_attn.q_proj  # type: ignore[union-attr, index]
    x = torch.randn(2, 5, layer.in_features, requires_grad=True)
    found = torch.autograd.grad((layer(x) ** 2).sum(), [x, layer.lora_a, layer.lora_b])
    whole = layer.weight + 2.0 * layer.lora_b @ layer.lora_a
    shown = whole + (adapters.merged(layer.weight, layer.lora_a, layer.lora_b).float() - whole).detach()
    expected = torch.autograd.grad(((x @ shown.T) ** 2).sum(), [x, layer.lora_a, layer.lora_b])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_another_seed_gives_other_matrices_and_the_same_one_the_same() -> None:
    first = []
    for seed in (0, 0, 1):
        model = tiny()
        Adapters(model, 4, 32.0, ["q_proj"], seed)
        first.append(next(one for name, one in model.named_parameters() if name.endswith("lora_a")))
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first[0], first[2])


def test_auto_is_bf16_where_it_is_fast_but_for_the_built_in_models() -> None:
    own, builtin = load_config([f"model.path={FOLDER}"]), load_config([])
    asked = load_config([f"model.path={FOLDER}", "learner.dtype=fp32"])
    ranks = load_config([f"model.path={FOLDER}", "learner.num_ranks=2"])
    for is_faster in (False, True):
        of = partial(compute_dtype, bf16_is_faster=lambda is_faster=is_faster: is_faster)
        assert of(own, on_gpu=False) == ("bf16" if is_faster else "fp32")
        assert of(builtin, on_gpu=False) == of(asked, on_gpu=False) == "fp32"
        assert of(ranks, on_gpu=False) == "fp32"  # their CPUs may differ
        assert of(own, on_gpu=True) == of(builtin, on_gpu=True) == "bf16"


def test_threads_are_those_that_engines_on_cpus_leave() -> None:
    path = f"model.path={FOLDER}"
    assert free_threads(load_config([]), 8) == 1  # a built-in model
    assert free_threads(load_config([path, "staleness.max_staleness=0"]), 8) == 8
    assert free_threads(load_config([path, "staleness.max_staleness=3", "fleet=single"]), 8) == 7
    assert free_threads(load_config([path, "staleness.max_staleness=3", "fleet=single"]), 1) == 1
    assert free_threads(load_config([path, "learner.num_ranks=2", "staleness.max_staleness=0"]), 8) == 4


def test_the_arithmetic_counts_adapters_as_they_are() -> None:
    model = tiny()
    frozen = sum(one.numel() for one in model.parameters())
    Adapters(model, 4, 32.0, ["q_proj", "up_proj"], seed=0)
    trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    base = Config()
    lora = {"lora_rank": 4, "lora_targets": ["q_proj", "up_proj"], "dtype": "fp32", "zero_stage": 0}
    config = replace_section(
        base,
        learner={**base.learner.model_dump(), **lora},
        objective={**base.objective.model_dump(), "kl_beta": 0.1},
    )
    shape = shape_of(FOLDER)
    needs = footprint(config, shape, on_gpu=False)
    assert needs.weights == 4 * (frozen + trained)
    assert (needs.gradients, needs.moments) == (4 * trained, 8 * trained)
    assert needs.masters == needs.reference == needs.embedding == 0.0
    divided = {"num_ranks": 4, "zero_stage": 3, "resources": {"CPU": 0.25}}
    kl = replace_section(
        base,
        learner={**base.learner.model_dump(), **divided},
        objective={**base.objective.model_dump(), "kl_beta": 0.1},
    )
    assert footprint(kl, Shape(8, 1, 1, 1), on_gpu=False).reference == 4 * 8 / 4  # under ZeRO-3
    offloaded = replace_section(kl, learner={**kl.learner.model_dump(), "offload_optimizer": True})
    shape = Shape(800, 1, 1, 1)
    on_card, apart = (footprint(one, shape, on_gpu=True) for one in (kl, offloaded))
    assert (apart.masters, apart.moments, on_card.offloaded) == (0.0, 0.0, 0.0)
    assert apart.offloaded == on_card.masters + on_card.moments == 12 * 800 / 4
    assert on_card.total - apart.total == apart.offloaded
    assert footprint(offloaded, shape, on_gpu=False) == footprint(kl, shape, on_gpu=False)
    both = {**kl.learner.model_dump(), "offload_optimizer": True, "offload_weights": True}
    bare = footprint(replace_section(kl, learner=both), shape, on_gpu=True)
    assert (bare.weights, bare.reference) == (0.0, 0.0)
    assert bare.offloaded - apart.offloaded == on_card.weights + on_card.reference == 2 * 2 * 800 / 4
    assert apart.total - bare.total == on_card.weights + on_card.reference
    assert (
        footprint(base, Shape(1, 1, 1, 1), on_gpu=False).moments == 8.0
    )  # all of the weights without adapters
