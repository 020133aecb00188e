"""Low-rank adapters: training of B A beside frozen weights W (LoRA, Hu et al. 2021, section 4.1).

A linear layer computes with M = W + s B A in bf16, with A of shape (rank, inputs), B of shape (outputs, rank)
and s = alpha / rank. B begins at 0, so the first policy is the model's own. M is what is published, under the
name of W: workers, patches and digests know nothing of adapters. Gradients are those of x W^T + s x A^T B^T,
so they pass straight through the rounding, and no gradient of the size of W is made.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from echo_planes.errors import ConfigError
from echo_planes.learning.policy_model import layers_of
from echo_planes.learning.rounding import PUBLISHED

A, B = "lora_a", "lora_b"  # parameters of an adapted linear layer, beside its weight
PEFT_NAMES = {A: "lora_A.weight", B: "lora_B.weight"}


class Adapters:
    """Adapters of a model, whose other parameters get frozen.

    Args:
        model: a causal LM.
        rank: of the adapters.
        alpha: scale s times `rank`.
        targets: last names of the linear layers to adapt ("q_proj"); None: all in transformer layers.
        seed: of the A matrices.
        base: name of the model, for those who load the adapters beside it.

    Raises:
        ConfigError: a target is no linear layer of the model's transformer layers.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rank: int,
        alpha: float,
        targets: Sequence[str] | None,
        seed: int,
        base: str | None = None,
    ) -> None:
        self._scale = alpha / rank
        self._settings = {"r": rank, "lora_alpha": alpha, "base_model_name_or_path": base}
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
            if not self._are_on:
                return nn.functional.linear(inputs, module.weight, module.bias)
            pair = getattr(module, A), getattr(module, B)
            outputs: Tensor = _MergedLinear.apply(  # type: ignore[no-untyped-call]
                inputs, module.weight, *pair, self._scale
            )
            return outputs if module.bias is None else outputs + module.bias

        module.forward = forward  # type: ignore[assignment,method-assign]

    def write(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write adapters in PEFT's format, which PEFT and vLLM load beside the frozen model.

        Args:
            folder: made if it is missing.
            tensors: by the names of the parameters in the model.
        """
        folder.mkdir(exist_ok=True)
        named = {}
        for name, tensor in tensors.items():
            layer, _, kind = name.rpartition(".")
            named[f"base_model.model.{layer}.{PEFT_NAMES[kind]}"] = tensor
        targets = sorted({name.rpartition(".")[0].rpartition(".")[2] for name in tensors})
        about = {**self._settings, "peft_type": "LORA", "task_type": "CAUSAL_LM", "target_modules": targets}
        about |= {"bias": "none", "lora_dropout": 0.0, "fan_in_fan_out": False, "inference_mode": True}
        save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        (folder / "adapter_config.json").write_text(json.dumps(about, indent=2))

    @contextmanager
    def off(self) -> Iterator[None]:
        """Compute with the frozen model alone: the reference of the KL term."""
        self._are_on = False
        try:
            yield
        finally:
            self._are_on = True

    def merged(self, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return M in bf16, shape of `weight`."""
        return _merged(weight.detach(), a.detach(), b.detach(), self._scale)


def _merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    # The only place that computes M, on copies of A and B: a library may add up in another order where memory
    # is aligned otherwise, and forward and publication must get the same bits.
    low, high = (one.to(torch.float32, copy=True) for one in (a, b))
    return torch.addmm(weight.float(), high, low, alpha=scale).to(PUBLISHED)


class _MergedLinear(torch.autograd.Function):
    """x M^T, with the gradients of x (W + s B A)^T for x, A and B. M is made anew where it is needed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x, weight, a, b)
        ctx.scale = scale
        return nn.functional.linear(x, _merged(weight, a, b, scale).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b = ctx.saved_tensors
        (gradient,) = gradients
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = gradient @ _merged(weight, a, b, ctx.scale).to(gradient.dtype)
        flat, outer = x.flatten(0, -2), ctx.scale * gradient.flatten(0, -2)
        of_a, of_b = (outer @ b).T @ flat, outer.T @ (flat @ a.T)
        return of_x, None, of_a, of_b, None


def first_a(seed: int, name: str, rank: int, inputs: int) -> Tensor:
    """Return the first A of the layer `name`, (rank, inputs) fp32: uniform with variance 1 / (3 inputs)."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    bound = 1.0 / math.sqrt(inputs)
    return torch.empty(rank, inputs).uniform_(-bound, bound, generator=generator)
