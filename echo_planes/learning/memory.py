"""Memory that a forward pass keeps for the backward pass, counted from a model's settings alone.

The model is made on torch's meta device, where tensors have shapes and no storage, and what autograd saves in
one forward pass is added up. That needs neither weights nor memory, and holds for every kind of layer that
runs there.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from echo_planes.config.schema import LearnerConfig
from echo_planes.learning.policy_model import layers_of, recompute_layers

TOKENS = 512  # of the forward pass that is counted
FUSED = "counted_fused_attention"
MAX_KEPT_BYTES = 4 * 2**30  # of a micro-batch, beyond which layers are run again by default


class _FusedAttention(torch.autograd.Function):
    """Attention as fused kernels save it: queries, keys, values and outputs, but no scores."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        outputs = torch.empty_like(queries).transpose(1, 2).contiguous()
        ctx.save_for_backward(queries, keys, values, outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise NotImplementedError("shapes only")


def _fused(
    module: nn.Module, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, **_: Any
) -> tuple[Tensor, None]:
    return _FusedAttention.apply(queries, keys, values), None  # type: ignore[no-untyped-call]


AttentionInterface.register(FUSED, _fused)


def kept_bytes_per_token(config: PretrainedConfig, dtype: torch.dtype, *, recompute: bool = False) -> float:
    """Return the bytes that the layers keep of a token for the backward pass, weights and lm_head left out.

    Args:
        config: settings of a causal LM.
        dtype: of weights and activations.
        recompute: layers keep their inputs alone.
    """
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=dtype, attn_implementation=FUSED
        )
        ids = torch.zeros(1, TOKENS, dtype=torch.int64)
        mask = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool)
    if recompute:
        recompute_layers(model)
    not_counted = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), mask)}
    kept: dict[int, Tensor] = {}  # by storage: views of one tensor count once

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        # Held until the sum is made: a storage that is freed may give its address to the next.
        output = model.eval().base_model(
            input_ids=ids, position_ids=ids, attention_mask=mask, use_cache=False
        )
    total = sum(one.untyped_storage().nbytes() for key, one in kept.items() if key not in not_counted)
    del output
    return total / TOKENS


def recomputes(config: LearnerConfig, model: PreTrainedModel) -> bool:
    """Return whether a learner's layers keep only their inputs for the backward pass."""
    if config.activation_checkpointing is not None:
        return config.activation_checkpointing
    may = len(layers_of(model)) > 0
    tokens = config.micro_batch_tokens // config.sequence_ranks
    return may and needs_recompute(model.config, model.dtype, tokens)


def needs_recompute(config: PretrainedConfig, dtype: torch.dtype, tokens: int) -> bool:
    """Return whether so many tokens would keep more than MAX_KEPT_BYTES, or may do so.

    Layers whose shapes depend on values, such as experts chosen by a router, cannot be counted.
    """
    try:
        kept_bytes = kept_bytes_per_token(config, dtype) * tokens
    except Exception:  # noqa: BLE001  the code of any model, in a way that it was not written for
        return True
    return kept_bytes > MAX_KEPT_BYTES
