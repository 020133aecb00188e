"""Adapter of the linear layers of a vLLM model on CPUs, for some tokens of a batch.

vLLM's own adapters are of whole requests, here bins of lengths have one or not. And on CPUs (0.32) they copy
the matrices for every token, and tokens of requests without an adapter get that of the last place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from vllm.distributed.communication_op import tensor_model_parallel_all_reduce
from vllm.model_executor.layers.linear import LinearBase

from echo_planes.errors import WeightsError
from echo_planes.rollout.vllm.shards import hugging_face_pieces, whole


@dataclass(frozen=True, slots=True)
class _Part:
    """Layer of the checkpoint, or this rank's shard of it, in a linear layer of vLLM."""

    shape: tuple[int, ...]  # (outputs, inputs) of the whole
    dim: int  # that the ranks share
    start: int  # of the shard there
    first: int  # of its outputs in those of vLLM's layer
    rows: int
    columns: int


@dataclass(slots=True)
class _Layer:
    """Linear layer of vLLM."""

    parts: dict[str, _Part] = field(default_factory=dict)  # by name in the checkpoint
    # (A, B, first output) of the adapter; A is (rank, inputs)
    pairs: list[tuple[Tensor, Tensor, int]] = field(default_factory=list)

    @property
    def shares_inputs(self) -> bool:
        """Whether ranks hold shares of the inputs, so that their products with A must be summed."""
        return any(one.columns < one.shape[1] for one in self.parts.values())


class LiveAdapter:
    """Adapter of an engine's rank; none until `load`.

    Args:
        model: that serves.
        rows: returns the places, (r,) int64, of a batch's tokens that it is for; None: there are none.
    """

    def __init__(self, model: torch.nn.Module, rows: Callable[[], Tensor | None]) -> None:
        self._rows = rows
        self._layers: dict[torch.nn.Module, _Layer] = {}
        self.version = -1
        for piece in hugging_face_pieces(model):
            if isinstance(piece.module, LinearBase) and piece.leaf == "weight":
                parts = self._layers.setdefault(piece.module, _Layer()).parts
                shape, dim, start = whole(piece)
                first = sum(one.rows for one in parts.values())
                parts[piece.name.removesuffix(".weight")] = _Part(shape, dim, start, first, *piece.view.shape)
        for module, layer in self._layers.items():
            module.register_forward_hook(partial(self._add, layer))

    def load(self, version: int, pairs: dict[str, tuple[Tensor, Tensor]]) -> None:
        """Compute with an adapter from now on, by the layers' names in the checkpoint.

        Raises:
            WeightsError: a layer's shapes are not those of the model.
        """
        loaded: dict[torch.nn.Module, list[tuple[Tensor, Tensor, int]]] = {}
        for module, layer in self._layers.items():
            weight: Any = module.weight
            for name, part in layer.parts.items():
                if name not in pairs:
                    continue
                a, b = pairs[name]
                if (b.shape[0], a.shape[1]) != part.shape:
                    raise WeightsError(
                        f"a sparse adapter of shapes {tuple(a.shape)}, {tuple(b.shape)} for {name}, which "
                        f"has {part.shape}"
                    )
                if part.dim == 0:
                    b = b[part.start : part.start + part.rows]
                else:
                    a = a[:, part.start : part.start + part.columns]
                loaded.setdefault(module, []).append(
                    (a.to(weight.dtype).contiguous(), b.to(weight.dtype).contiguous(), part.first)
                )
        if not loaded:
            raise WeightsError("a sparse adapter of none of the model's layers")
        for module, layer in self._layers.items():
            layer.pairs = loaded.get(module, [])
        self.version = version

    def _add(self, layer: _Layer, module: torch.nn.Module, inputs: tuple[Tensor], output: Any) -> None:
        rows = self._rows() if layer.pairs else None
        if rows is None:
            return
        made = output[0] if isinstance(output, tuple) else output
        x = inputs[0][rows]
        for a, b, first in layer.pairs:
            low = linear(x, a)
            if layer.shares_inputs:
                low = tensor_model_parallel_all_reduce(low)
            made[rows, first : first + len(b)] += linear(low, b)
