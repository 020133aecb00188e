"""Adapter that sparse attention alone computes with (DistillSparse, Sparrow 4.5), as workers get it.

A linear layer computes x W^T + (x A^T) B^T where a request is sparse: at tokens, also of the prompt, whose
bin of lengths has a budget. At all others it computes x W^T.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from echo_planes.errors import WeightsError

if TYPE_CHECKING:
    from torch import Tensor

MOST_BYTES = 1 << 30
_A, _B = ".lora_a", ".lora_b"


@dataclass(frozen=True, slots=True)
class SparseAdapter:
    """Adapter, made for the weights of one version."""

    version: int
    tensors: bytes  # safetensors, bf16

    @classmethod
    def of(cls, version: int, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> SparseAdapter:
        """Pack A (rank, inputs) and B (outputs, rank) of each layer, by the layer's name in the model."""
        import torch
        from safetensors.torch import save

        named = {}
        for layer, (a, b) in pairs.items():
            for kind, tensor in ((_A, a), (_B, b)):
                named[layer + kind] = tensor.detach().to("cpu", torch.bfloat16).contiguous()
        return cls(version, save(named))

    def pairs(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return A and B of each layer, by its name.

        Raises:
            WeightsError: the bytes hold no adapter.
        """
        import torch
        from safetensors import SafetensorError
        from safetensors.torch import load

        if len(self.tensors) > MOST_BYTES:
            raise WeightsError(f"a sparse adapter of {len(self.tensors)} bytes: at most {MOST_BYTES} may be")
        try:
            named = load(self.tensors)
        except SafetensorError as error:
            raise WeightsError(f"a sparse adapter that is no safetensors file: {error}") from error
        layers = {name.removesuffix(_A) for name in named if name.endswith(_A)}
        if named.keys() != {layer + kind for layer in layers for kind in (_A, _B)}:
            raise WeightsError("a sparse adapter whose tensors are not pairs of A and B")
        found = {layer: (named[layer + _A], named[layer + _B]) for layer in sorted(layers)}
        for layer, (a, b) in found.items():
            if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1]:
                raise WeightsError(
                    f"a sparse adapter of shapes {tuple(a.shape)}, {tuple(b.shape)} for {layer}: A must be "
                    "(rank, inputs), B (outputs, rank)"
                )
            if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
                raise WeightsError(f"a sparse adapter with values for {layer} that are not finite")
        return found


@dataclass(frozen=True, slots=True)
class Distilled:
    """Adapter after an update, and the figures of that."""

    adapter: SparseAdapter
    divergence: float  # KL(dense || sparse) before the update, nats a token; 0.0: no token was sparse
    tokens: int  # that it was trained on
    seconds: float
