"""Count of the layers that a learner computes, by which a micro-batch of a minute shows that it moves."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from echo_planes.learning.policy_model import layers_of


class LayerCount:
    """Passes through the layers of models so far, forward and backward. Other threads may read it.

    A layer that runs again in the backward pass counts as one pass.
    """

    def __init__(self) -> None:
        self.passes = 0

    def watch(self, model: PreTrainedModel) -> None:
        """Count the passes through a model's layers from now on."""
        for layer in layers_of(model):
            layer.register_forward_hook(self._on_forward)

    def _on_forward(self, layer: nn.Module, arguments: Any, output: Any) -> None:
        self.passes += 1
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            # Not a hook of the module for the backward pass: that puts a node of its own into the graph.
            hidden.register_hook(self._on_backward)

    def _on_backward(self, gradient: Tensor) -> None:
        self.passes += 1
