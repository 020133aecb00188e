"""Progress within a micro-batch: each layer that is computed, forward and backward, is counted."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from echo_planes.learning.layer_count import LayerCount  # noqa: E402
from echo_planes.learning.policy_model import layers_of, recompute_layers  # noqa: E402

LAYERS = 3


def tiny() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=16, head_dim=16, num_hidden_layers=LAYERS, **sizes))


def gradients(model: Any) -> list[Any]:
    model(torch.arange(8)[None]).logits.float().logsumexp(-1).sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("recompute", [False, True])
def test_each_layer_counts_in_both_passes_and_changes_no_gradient(recompute: bool) -> None:
    plain, watched, layers = tiny(), tiny(), LayerCount()
    if recompute:
        recompute_layers(plain)
        recompute_layers(watched)
    layers.watch(watched)
    found: list[int] = []
    for layer in layers_of(watched):
        layer.mlp.register_forward_pre_hook(lambda *_: found.append(layers.passes))
        layer.mlp.down_proj.weight.register_hook(lambda _: found.append(layers.passes))
    for one, other in zip(gradients(plain), gradients(watched), strict=True):
        assert torch.equal(one, other)
    assert layers.passes == 2 * LAYERS
    assert len(set(found)) == 2 * LAYERS  # another number within each layer of each pass


def test_a_forward_pass_alone_counts_each_layer_once() -> None:
    model, layers = tiny(), LayerCount()
    layers.watch(model)
    with torch.no_grad():
        model(torch.arange(8)[None])
    assert layers.passes == LAYERS
