"""Low-rank adapters: training of B A beside frozen weights W (LoRA, Hu et al. 2021, section 4.1).

A linear layer computes x W^T + s x A^T B^T, with A of shape (rank, inputs), B of shape (outputs, rank) and
s = alpha / rank. B begins at 0, so the first policy is the model's own. Published is W + s B A in bf16, under
the name of W: workers, patches and digests know nothing of adapters.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from echo_planes.errors import ConfigError
from echo_planes.learning.policy_model import layers_of

A, B = "lora_a", "lora_b"  # parameters of an adapted linear layer, beside its weight


class Adapters:
    """Adapters of a model, whose other parameters get frozen.

    Args:
        model: a causal LM.
        rank: of the adapters.
        alpha: scale s times `rank`.
        targets: last names of the linear layers to adapt ("q_proj"); None: all in transformer layers.
        seed: of the A matrices.

    Raises:
        ConfigError: a target is no linear layer of the model's transformer layers.
    """

    def __init__(
        self, model: PreTrainedModel, rank: int, alpha: float, targets: Sequence[str] | None, seed: int
    ) -> None:
        self._scale = alpha / rank
        self._are_on = True
        model.requires_grad_(False)
        # Else no gradient would leave the first layer, by which ZeRO-3 sees the end of its backward pass.
        model.enable_input_require_grads()
        layers = layers_of(model)
        linear = {name: one for name, one in layers.named_modules() if type(one) is nn.Linear}
        known = sorted({name.rpartition(".")[2] for name in linear})
        for target in targets if targets is not None else known:
            if target not in known:
                raise ConfigError(
                    f"learner.lora_targets: {target} is no linear layer of this model's transformer layers; "
                    f"choose of {', '.join(known) or 'none'}"
                )
        for name, module in linear.items():
            if targets is None or name.rpartition(".")[2] in targets:
                first = first_a(seed, name, rank, module.in_features)
                module.register_parameter(A, nn.Parameter(first.to(module.weight)))
                module.register_parameter(B, nn.Parameter(module.weight.new_zeros(module.out_features, rank)))
                self._adapt(module)
        if not linear:
            raise ConfigError("learner.lora_rank: this model has no linear layers in a list of layers; set 0")

    def _adapt(self, module: nn.Linear) -> None:
        def forward(inputs: Tensor) -> Tensor:
            outputs = nn.functional.linear(inputs, module.weight, module.bias)
            if not self._are_on:
                return outputs
            low = nn.functional.linear(inputs, getattr(module, A))
            return outputs + self._scale * nn.functional.linear(low, getattr(module, B))

        module.forward = forward  # type: ignore[assignment,method-assign]

    @contextmanager
    def off(self) -> Iterator[None]:
        """Compute with the frozen model alone: the reference of the KL term."""
        self._are_on = False
        try:
            yield
        finally:
            self._are_on = True

    def merged(self, weight: Tensor, a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        """Return W + s B A in fp32, shape of `weight`; in `out`, if that is given."""
        return torch.addmm(weight.float(), b.float(), a.float(), alpha=self._scale, out=out)


def first_a(seed: int, name: str, rank: int, inputs: int) -> Tensor:
    """Return the first A of the layer `name`, (rank, inputs) fp32: uniform with variance 1 / (3 inputs)."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    bound = 1.0 / math.sqrt(inputs)
    return torch.empty(rank, inputs).uniform_(-bound, bound, generator=generator)
