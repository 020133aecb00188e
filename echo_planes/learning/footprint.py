"""Memory that a learner rank holds at least, by arithmetic from a model folder's headers and config.json.

Not counted: values that layers keep of a micro-batch beyond their inputs (`memory.py` counts them, and has
layers run again where they are many), the layer that ZeRO-3 has gathered, buffers of collectives, and
fragmentation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from echo_planes.config.files import MODEL_JSON_BYTES, read_json
from echo_planes.config.schema import BUILTIN_MODELS, Config
from echo_planes.weights.tensor_files import load_tensors

CHUNK_LOGITS = 2**27  # logits that are held at once: 0.5 GiB in fp32
LOGIT_COPIES = 2  # a chunk and its exponentials, or their gradient
PROGRAM_BYTES = 0.43e9  # measured: torch 2.13 for CPUs with DeepSpeed, anonymous memory
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of a model."""

    weights: int
    layers: int
    hidden: int
    vocabulary: int
    heads: int = 0  # of attention; 0: not known
    linear: Mapping[str, int] = field(default_factory=dict)  # inputs + outputs of all layers, by last name


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one rank by part."""

    weights: float
    gradients: float
    masters: float  # fp32 copies beside the weights of the forward; in fp32 ranks that share have one more
    moments: float  # of AdamW, two
    reference: float  # the frozen model of the KL term
    inputs: float  # of the layers, of one micro-batch
    logits: float
    embedding: float  # gradient of its matrix, before it is added to the update's
    program: float  # Python with torch, where it is in the same memory
    published: float  # bf16 weights of the newest publication, where they stay in the same memory
    offloaded: float = 0.0  # masters, moments and weights in host memory, beside all of these

    @property
    def total(self) -> float:
        """Most that is held at once: in the middle of a step, or beside another copy to be published."""
        step = self.gradients + self.inputs + self.logits + self.embedding
        lasting = self.weights + self.masters + self.moments + self.reference + self.program + self.published
        return lasting + max(step, self.published)

    def __str__(self) -> str:
        parts = [(one.name, getattr(self, one.name)) for one in fields(self) if one.name != "offloaded"]
        return ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts if size >= 0.05 * GIB)


def compute_dtype(
    config: Config, *, on_gpu: bool, bf16_is_faster: Callable[[], bool] = lambda: True
) -> Literal["bf16", "fp32"]:
    """Return `learner.dtype`; for auto the faster one.

    That is bf16 on GPUs, and on CPUs with matrix units (AMX), where a step of a model of 135 million weights
    takes 0.4 of the time, but for the built-in models, which are too small, and for several ranks, whose CPUs
    may be of different kinds.

    Args:
        bf16_is_faster: measures a CPU; by default the type that takes less memory is assumed to be faster.
    """
    if config.learner.dtype != "auto":
        return config.learner.dtype
    may = config.model.path not in BUILTIN_MODELS and config.learner.num_ranks == 1
    return "bf16" if on_gpu or (may and bf16_is_faster()) else "fp32"


def free_threads(config: Config, cores: int) -> int:
    """Return the threads of a rank on a machine with so many cores.

    All of them where learner and engines take turns (S = 0), else those that engines on CPUs leave: a kernel
    waits for its slowest thread, and with one of two beside an engine a step took 1.3 times as long as with
    one thread. The built-in models are too small for more than one.
    """
    if config.model.path in BUILTIN_MODELS:
        return 1
    engines = sum(one.count for one in config.fleet.workers if not one.resources.get("GPU"))
    free = cores - (engines if config.staleness.max_staleness > 0 else 0)
    return max(free // config.learner.num_ranks, 1)


def shape_of(folder: Path) -> Shape:
    """Return the size of the model in a Hugging Face folder. Weights are counted, not loaded.

    Raises:
        UserError: config.json or a weight file cannot be read.
        KeyError: config.json does not name its sizes in the usual words.
    """
    said: dict[str, Any] = read_json(folder / "config.json", MODEL_JSON_BYTES)
    text: dict[str, Any] = said.get("text_config", said)
    tied = said.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    weights, linear = 0, Counter[str]()
    for name, tensor in load_tensors(folder).items():
        if not (tied and name == "lm_head.weight"):
            weights += tensor.bits.size
        *path, kind = name.split(".")
        if kind == "weight" and len(tensor.shape) == 2 and any(part.isdecimal() for part in path[:-1]):
            linear[path[-1]] += sum(tensor.shape)
    return Shape(
        weights,
        text["num_hidden_layers"],
        text["hidden_size"],
        text["vocab_size"],
        text.get("num_attention_heads", 0),
        linear,
    )


def footprint(config: Config, shape: Shape, *, on_gpu: bool) -> Footprint:
    """Return what one rank holds (DeepSpeed's ZeRO, Rajbhandari et al. 2020, 3)."""
    learner, ranks = config.learner, config.learner.num_ranks
    is_bf16 = compute_dtype(config, on_gpu=on_gpu) == "bf16"
    width = 2 if is_bf16 else 4
    adapted = [name for name in shape.linear if learner.lora_targets is None or name in learner.lora_targets]
    adapters = learner.lora_rank * sum(shape.linear[name] for name in adapted)
    trained = adapters if learner.lora_rank else shape.weights
    is_offloaded = learner.offload_optimizer and on_gpu
    are_weights_offloaded = learner.offload_weights and on_gpu
    has_reference = config.objective.kl_beta > 0 and not learner.lora_rank

    def shared(count: int, stage: int) -> float:
        return count / (ranks if learner.zero_stage >= stage else 1)

    tokens = learner.micro_batch_tokens / learner.sequence_ranks
    copies = (is_bf16 or learner.zero_stage > 0) + (not is_bf16 and not learner.lora_rank)
    masters = 4 * copies * shared(trained, 1)
    moments = 8 * shared(trained, 1)
    weights = width * shared(shape.weights + adapters, 3)
    reference = width * shared(shape.weights, 3) if has_reference else 0.0
    host = [masters, moments] * is_offloaded + [weights, reference] * are_weights_offloaded
    chunk = min(tokens * shape.vocabulary, CHUNK_LOGITS)
    return Footprint(
        weights=0.0 if are_weights_offloaded else weights,
        gradients=(width if learner.zero_stage == 0 else 4) * shared(trained, 2),
        masters=0.0 if is_offloaded else masters,
        moments=0.0 if is_offloaded else moments,
        reference=0.0 if are_weights_offloaded else reference,
        inputs=width * tokens * shape.layers * shape.hidden,
        logits=4.0 * LOGIT_COPIES * chunk,
        embedding=0.0 if learner.lora_rank else width * shape.vocabulary * shape.hidden,
        program=0.0 if on_gpu else PROGRAM_BYTES,
        published=0.0 if on_gpu else 2.0 * shape.weights,
        offloaded=sum(host),
    )
