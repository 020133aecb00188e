"""Low-rank adapters: training of B A beside frozen weights W (LoRA, Hu et al. 2021, section 4.1).

A linear layer computes x W^T + s x A^T B^T, with A of shape (rank, inputs), B of shape (outputs, rank) and
s = alpha / rank. B begins at 0, so the first policy is the model's own. Published is W + s B A in bf16, under
the name of W: workers, patches and digests know nothing of adapters.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from echo_planes.errors import ConfigError
from echo_planes.learning.policy_model import layers_of

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
            outputs = nn.functional.linear(inputs, module.weight, module.bias)
            if not self._are_on:
                return outputs
            low = nn.functional.linear(inputs, getattr(module, A))
            return outputs + self._scale * nn.functional.linear(low, getattr(module, B))

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

    def merged(self, weight: Tensor, a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        """Return W + s B A in fp32, shape of `weight`; in `out`, if that is given."""
        return torch.addmm(weight.float(), b.float(), a.float(), alpha=self._scale, out=out)


def first_a(seed: int, name: str, rank: int, inputs: int) -> Tensor:
    """Return the first A of the layer `name`, (rank, inputs) fp32: uniform with variance 1 / (3 inputs)."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    bound = 1.0 / math.sqrt(inputs)
    return torch.empty(rank, inputs).uniform_(-bound, bound, generator=generator)
