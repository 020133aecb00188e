"""mu of a worker before a run: measured, given, or estimated from the bandwidth of its memory.

A decoding step reads all weights once and the KV cache of every sequence in the batch. At the lengths of
reasoning answers the batch is usually so small that reading takes longer than the arithmetic. Then
tokens/s = batch / (bytes read / bandwidth): a roofline, of which real engines reach a part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from echo_planes.config.files import MODEL_JSON_BYTES, read_json
from echo_planes.errors import ModelError
from echo_planes.fleet.sku_facts import SkuFacts
from echo_planes.weights.tensor_files import load_tensors

Source = Literal["measured", "given", "estimated"]

BYTES_PER_WEIGHT = 2  # bf16, of weights and KV cache
ENGINE_EFFICIENCY = 0.6  # share of the roofline: scheduling, prefill, sampling, kernels below their peak
MEMORY_SHARE = 0.85  # share of GPU memory that an engine takes (EngineConfig.gpu_memory_utilization)
LEARNER_EFFICIENCY = 0.35  # share of the peak arithmetic: usual with optimizer and data movement
FLOPS_PER_WEIGHT_TOKEN = 8  # forward and backward 6, the forward pass for log-probabilities 2
_KV_BYTES_8B = 131_072  # per token: 32 layers, 8 KV heads of 128, keys and values in bf16
_GIB = 2**30
_MOST = 10**7  # bound on layers, heads and dimensions of a head in a config.json


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Size of a model: the weights and the KV cache that decoding reads."""

    num_params: float
    kv_bytes_per_token: float
    kv_source: Source

    @property
    def weight_bytes(self) -> float:
        return self.num_params * BYTES_PER_WEIGHT


@dataclass(frozen=True, slots=True)
class Answers:
    """Mean lengths of prompts and answers, in tokens, and the largest batch."""

    prompt_tokens: int
    answer_tokens: int
    max_num_seqs: int  # most sequences that an engine decodes together
    read_tokens: float | None = None  # whose KV a sampled token reads, mean; None: all before it

    def read_bytes(self, size: ModelSize) -> float:
        """Return the KV cache that a sampled token reads, on average."""
        if self.read_tokens is None:
            return self.kv_bytes(size)
        return size.kv_bytes_per_token * self.read_tokens

    def kv_bytes(self, size: ModelSize) -> float:
        """Return the KV cache of a sequence, which is on average half way through its answer."""
        return size.kv_bytes_per_token * (self.prompt_tokens + self.answer_tokens / 2)


@dataclass(frozen=True, slots=True)
class Throughput:
    """mu of one worker with its source."""

    mu: float  # trajectories/s
    source: Source


def size_of_params(num_params: float, kv_bytes_per_token: float | None) -> ModelSize:
    """Return the size of a dense decoder with `num_params` weights.

    Without `kv_bytes_per_token`, the estimate is 128 KiB at 8 B weights and grows with the square root of the
    size. It is right within a factor of three for the usual decoders with grouped keys and values.
    """
    if kv_bytes_per_token is not None:
        return ModelSize(num_params, kv_bytes_per_token, "given")
    return ModelSize(num_params, _KV_BYTES_8B * math.sqrt(num_params / 8e9), "estimated")


def size_of_folder(folder: Path) -> ModelSize:
    """Read a model's size: the weights from its safetensors files, the KV cache from its config.json.

    Of layers of several kinds, those with full attention count: the others' cache does not grow with the
    answer. Where all look back a limited number of tokens, or compress the cache, it is an upper estimate.

    Raises:
        ModelError: no config.json, or one without the numbers of layers and heads.
        DataError: no safetensors files, or damaged ones.
    """
    path = folder / "config.json"
    advice = "give a model folder, or params_b=N"
    fields: Any = read_json(path, MODEL_JSON_BYTES, error=ModelError, advice=advice)
    if isinstance(fields, dict) and isinstance(fields.get("text_config"), dict):
        fields = fields["text_config"]  # a model of several modalities
    try:
        layers, heads = int(fields["num_hidden_layers"]), int(fields["num_attention_heads"])
        kinds = fields.get("layer_types")
        full = kinds.count("full_attention") if isinstance(kinds, list) else 0
        is_limited = bool(fields.get("sliding_window")) and fields.get("use_sliding_window") is not False
        layers, is_less = full or layers, bool(fields.get("kv_lora_rank")) or (is_limited and not full)
        kv_heads = int(fields.get("num_key_value_heads") or heads)
        head_dim = int(fields.get("head_dim") or int(fields["hidden_size"]) // heads)
        if not 0 < min(layers, heads, kv_heads, head_dim) <= max(layers, heads, kv_heads, head_dim) < _MOST:
            raise ValueError("one is none, or too large")
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, ZeroDivisionError) as error:
        raise ModelError(
            f"{path} does not say its layers and heads ({error}); give params_b=N and kv_kib_per_token=N"
        ) from error
    kv_bytes = 2.0 * layers * kv_heads * head_dim * BYTES_PER_WEIGHT
    num_params = float(sum(tensor.bits.size for tensor in load_tensors(folder).values()))
    return ModelSize(num_params, kv_bytes, "estimated" if is_less else "given")


def estimated_tokens_per_s(
    size: ModelSize, answers: Answers, facts: SkuFacts, memory_gib: float, num_gpus: int
) -> float | None:
    """Estimate the tokens/s of a saturated engine on `num_gpus` GPUs; None if not even one sequence fits.

    The batch is as large as the memory holds, at most `max_num_seqs`. The arithmetic of a large batch is a
    second limit.
    """
    context_bytes = answers.kv_bytes(size)
    room_bytes = MEMORY_SHARE * memory_gib * _GIB * num_gpus - size.weight_bytes
    batch = min(answers.max_num_seqs, math.floor(room_bytes / context_bytes))
    if batch < 1:
        return None
    read_bytes = size.weight_bytes + batch * answers.read_bytes(size)
    reading_s = read_bytes / (facts.bandwidth_gb_s * 1e9 * num_gpus)
    computing_s = 2 * size.num_params * batch / (facts.bf16_tflops * 1e12 * num_gpus)
    return ENGINE_EFFICIENCY * batch / max(reading_s, computing_s)


def mu_of_sku(
    sku: str,
    measured: Mapping[str, float],
    given_tokens_per_s: Mapping[str, float],
    estimated: float | None,
    answer_tokens: int,
) -> Throughput | None:
    """Return the best known mu of a worker: measured, else from given tokens/s, else estimated.

    Args:
        sku: its GPU.
        measured: SKU -> trajectories/s of one worker.
        given_tokens_per_s: SKU -> tokens/s of one saturated worker.
        estimated: tokens/s of one saturated worker (`estimated_tokens_per_s`).
        answer_tokens: mean length of an answer.
    """
    if sku in measured:
        return Throughput(measured[sku], "measured")
    if sku in given_tokens_per_s:
        return Throughput(given_tokens_per_s[sku] / answer_tokens, "given")
    return None if estimated is None else Throughput(estimated / answer_tokens, "estimated")


def estimated_t_train_s(num_params: float, tokens_per_step: float, facts: SkuFacts, num_gpus: int) -> float:
    """Estimate T_train, seconds: 8 operations per weight and token at `LEARNER_EFFICIENCY` of the peak."""
    operations = FLOPS_PER_WEIGHT_TOKEN * num_params * tokens_per_step
    return operations / (LEARNER_EFFICIENCY * facts.bf16_tflops * 1e12 * num_gpus)
