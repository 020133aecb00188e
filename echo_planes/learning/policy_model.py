"""The learner's policy model: from packed tokens to the logprobs of the trained tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from echo_planes.errors import ModelError
from echo_planes.learning.footprint import CHUNK_LOGITS
from echo_planes.learning.layer_kinds import may_pack, turns_alike
from echo_planes.learning.model_files import Place, load_by_module
from echo_planes.learning.packing import Segment
from echo_planes.learning.rounding import as_published
from echo_planes.learning.sequence import SequenceGroup
from echo_planes.learning.tree_attention import ATTENTION, Forest

# Settings by which a model changes its logits after lm_head, or its attention logits (which sdpa leaves out).
# `PolicyModel` ignores them and would score such a model wrongly.
LOGIT_SETTINGS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "attn_logit_softcapping")
CACHED_LOGITS = 2**21  # that a CPU scores at once: 8 MiB in float32
# Settings of dropout among attention weights, which kernels without a mask do not offer.
ATTENTION_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


class PolicyModel(nn.Module):
    """Causal language model whose logprobs are those of the distribution that workers sample from.

    Args:
        model: Hugging Face causal LM.
        temperature: divides the logits.
        top_p: 1.0, or the mass of the nucleus that is kept and renormalised. The sampled token always
            counts as kept, even where this policy's nucleus would leave it out.
        dropout: whether a forward that keeps gradients applies the dropout of the model's settings. Other
            forwards never do. Old logprobs of an update's own forward share its noise: the ratio is exactly
            1, and importance weights and mismatch carry the noise. Old logprobs of a separate first pass do
            not share it, so the first ratio is not 1.
        recompute: whether layers keep only their inputs for the backward pass, which runs them again
            (activation checkpointing).
        longest: most tokens of a trajectory, which decides if rows may hold several; None: they do not.
        sequence: ranks that share every row with this one. All of them call `forward` with the same rows, and
            get the same logprobs; gradients flow through those of this rank's positions.

    Attributes:
        apart: why rows hold one trajectory each; "": they hold several, as a forest of segments.

    Raises:
        ModelError: a layer's kind is not known to be causal, or ranks cannot share the model's rows.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        temperature: float,
        top_p: float,
        *,
        dropout: bool = False,
        recompute: bool = False,
        longest: int | None = None,
        sequence: SequenceGroup | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        settings = model.config.get_text_config()
        self.apart = "not asked for" if longest is None else _hindrance(model, longest, dropout)
        if sequence is not None and (why := self.apart or _hindrance_of_ranks(settings)):
            raise ModelError(
                f"learner.sequence_ranks={sequence.size}: rows of a {settings.model_type} cannot be shared "
                f"among ranks ({why}); set it to 1"
            )
        if self.packs:
            settings._attn_implementation = ATTENTION
        if recompute:
            recompute_layers(model)
        self.head = Head(model, temperature, top_p)
        self.dropout = dropout
        self.sequence = sequence

    @property
    def packs(self) -> bool:
        """Whether a row holds several trajectories."""
        return not self.apart

    def keep_apart(self, why: str) -> None:
        """Take rows of one trajectory each from now on."""
        if self.packs:
            self.model.config.get_text_config()._attn_implementation = "sdpa"
        self.apart = why

    @contextmanager
    def rows_of_one(self) -> Iterator[None]:
        """Take rows of one trajectory within the context, and compute them alone, as transformers does."""
        settings = self.model.config.get_text_config()
        before = self.apart, self.sequence, settings._attn_implementation
        self.keep_apart(self.apart or "for now")
        self.sequence = None
        try:
            yield
        finally:
            self.apart, self.sequence, settings._attn_implementation = before

    def forward(
        self,
        token_ids: Tensor,
        position_ids: Tensor | None,
        segments: Sequence[Segment] | None,
        predictors: Tensor,
        targets: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return logprob and entropy (both (M,) float32, nats; entropy detached) at M positions.

        Args:
            token_ids: (rows, row_len) int64.
            position_ids: (rows, row_len) int64; not used of rows of one trajectory, which count their own.
            segments: of the row, where rows hold several trajectories; else not used.
            predictors: (M,) flat positions in the rows, each before the token it predicts.
            targets: (M,) the tokens predicted.
        """
        # Set here, whatever mode the caller chose: a model may apply dropout outside Dropout modules, and its
        # training mode may do more than dropout.
        training = self.dropout and torch.is_grad_enabled()
        if self.model.training != training:
            self.model.train(training)
        layout: dict[str, Any] = {}
        if self.packs:
            covered = sum(one.stop - one.start for one in segments or ())
            if segments is None or position_ids is None or covered != token_ids.numel():
                raise RuntimeError("the segments of a row do not cover it")
            layout["forest"] = Forest(segments, token_ids.device, self.sequence)
        share = None
        if self.sequence is not None and position_ids is not None:
            share = self.sequence.share(token_ids, position_ids, predictors, targets)
            token_ids, position_ids = share.token_ids, share.position_ids
            predictors, targets = share.predictors, share.targets
        if self.packs:
            layout["position_ids"] = position_ids
        output = self.model.base_model(input_ids=token_ids, use_cache=False, **layout)
        logprobs, entropies = self.head(
            output.last_hidden_state.flatten(0, 1).index_select(0, predictors), targets
        )
        if self.sequence is None or share is None:
            return logprobs, entropies
        return self.sequence.gathered(logprobs, share.mine), self.sequence.gathered(entropies, share.mine)


def _hindrance(model: PreTrainedModel, longest: int, dropout: bool) -> str:
    """Return why attention over a forest of segments is not right for a model; "": it is.

    Raises:
        ModelError: a layer's kind is not known to be causal.
    """
    settings = model.config.get_text_config()
    if not may_pack(settings, longest):
        return "sliding windows or a state along the row"
    # Older models pass nothing on to their attention, or add to its logits what ours does not know of.
    if not model._supports_attention_backend or settings._attn_implementation != "sdpa":
        return "attention of its own kind"
    if dropout and any(getattr(settings, name, 0.0) for name in ATTENTION_DROPOUT):
        return "dropout among attention weights"
    if torch.cuda.is_available():
        heads = settings.num_attention_heads
        size = getattr(settings, "head_dim", None) or settings.hidden_size // heads
        if (
            model.dtype == torch.float32
            or size > 256
            or size % 8
            or torch.cuda.get_device_capability() < (8, 0)
        ):
            return f"no kernel for heads of {size} in {model.dtype} on this GPU"
    return ""


def _hindrance_of_ranks(settings: object) -> str:
    return "" if turns_alike(settings) else "rotary positions that depend on the length of a call"


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    """Return the transformer layers of a model; none where no module list has as many entries."""
    count = int(model.config.get_text_config().num_hidden_layers)
    lists = (module for module in model.base_model.modules() if isinstance(module, nn.ModuleList))
    return next((layers for layers in lists if len(layers) == count), nn.ModuleList())


def recompute_layers(model: PreTrainedModel) -> None:
    """Let the layers of a model keep only their inputs for the backward pass, which runs them again.

    transformers' own switch works only in training mode, which would turn dropout on.

    Raises:
        ModelError: the model's layers are not found.
    """
    layers = layers_of(model)
    if not layers:
        raise ModelError(
            f"the layers of a {model.config.model_type} are not in one list, so they cannot run again in the "
            "backward pass; set learner.activation_checkpointing=false"
        )
    for layer in layers:
        layer.forward = _recomputed(layer.forward)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:

    @wraps(forward)
    def run(*arguments: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments, **named)
        return checkpoint(forward, *arguments, use_reentrant=False, **named)

    return run


class Head(nn.Module):
    """Logprobs and entropies from hidden states, by the model's lm_head, a chunk of the positions at a time.

    ZeRO-3 gathers the weights of a module, a collective operation, when the module is called. Ranks differ in
    their number of chunks, so a call of lm_head for each would leave one rank waiting for the others without
    end. This module is called once and uses the weights of lm_head itself.

    Args:
        model: has a linear lm_head.
        temperature, top_p: as of `PolicyModel`.
    """

    def __init__(self, model: PreTrainedModel, temperature: float, top_p: float) -> None:
        super().__init__()
        # Held in a tuple: as a submodule, lm_head would give its weights a second name.
        self._lm_head = (model.get_output_embeddings(),)
        self.temperature = temperature
        self.top_p = top_p

    @property
    def borrowed(self) -> list[nn.Parameter]:
        """Parameters that `forward` uses and another module owns."""
        return list(self._lm_head[0].parameters())

    def forward(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return logprob and entropy, both (M,) float32, of `targets` (M,) after `hidden` (M, size)."""
        size = max(CHUNK_LOGITS // self._lm_head[0].out_features, 1)
        if len(targets) <= size:
            return self._score(hidden, targets)
        # The backward pass recomputes the logits of long batches, which would take too much memory.
        parts = [
            checkpoint(self._score, h, t, use_reentrant=False)
            for h, t in zip(torch.split(hidden, size), torch.split(targets, size), strict=True)
        ]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])

    def divergence(self, hidden: Tensor, reference: Tensor) -> Tensor:
        """Return KL(reference || hidden) over the vocabulary, (M,) float32 nats, of states (M, size) each.

        Before top-p. The weights of lm_head must be whole on this rank.
        """
        size = max(CHUNK_LOGITS // self._lm_head[0].out_features, 1)
        pairs = zip(torch.split(hidden, size), torch.split(reference, size), strict=True)
        return torch.cat([checkpoint(self._apart, *pair, use_reentrant=False) for pair in pairs])

    def _apart(self, hidden: Tensor, reference: Tensor) -> Tensor:
        ours, theirs = self._logits(hidden).log_softmax(-1), self._logits(reference).log_softmax(-1)
        return (theirs.exp() * (theirs - ours)).sum(-1)

    def _logits(self, hidden: Tensor) -> Tensor:
        lm_head = self._lm_head[0]
        logits = nn.functional.linear(hidden, lm_head.weight, lm_head.bias).float()
        return logits if self.temperature == 1.0 else logits / self.temperature

    def _score(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        lm_head = self._lm_head[0]
        logits = nn.functional.linear(hidden, lm_head.weight, lm_head.bias)
        if self.top_p < 1.0:
            kept = nucleus(logits.detach().float() / self.temperature, targets, self.top_p)
            logits = logits.masked_fill(~kept, -torch.inf)
        scored: tuple[Tensor, Tensor] = _Scores.apply(logits, targets, self.temperature)  # type: ignore[no-untyped-call]
        return scored


class _Scores(torch.autograd.Function):
    """Logprobs of `targets` (M,) and entropies, both (M,) float32, of logits (M, V) over a temperature.

    For the backward pass only the logits are kept, as they came. On CPUs the float32 copies are of few rows
    at a time, which stay in the cache, and in memory that the allocator does not give back to the system.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        size = _rows_at_once(logits)
        parts = [
            _scores(_float_copy(some, temperature), chosen)
            for some, chosen in zip(torch.split(logits, size), torch.split(targets, size), strict=True)
        ]
        logprobs, entropies, normalisers = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(logits, targets, normalisers)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, normalisers = ctx.saved_tensors
        found = torch.empty_like(logits)
        size = _rows_at_once(logits)
        columns = (logits, targets, normalisers, gradients[0] / ctx.temperature, found)
        for some, chosen, normaliser, pull, made in zip(
            *(torch.split(x, size) for x in columns), strict=True
        ):
            part = _float_copy(some, ctx.temperature)
            part.sub_(normaliser[:, None]).exp_().mul_(-pull[:, None])
            part.scatter_add_(-1, chosen[:, None], pull[:, None])
            made.copy_(part)
        return found, None, None


def _float_copy(logits: Tensor, temperature: float) -> Tensor:
    copy = logits.to(torch.float32, copy=True)
    return copy if temperature == 1.0 else copy.div_(temperature)


def _rows_at_once(logits: Tensor) -> int:
    rows, vocabulary = logits.shape
    return max(CACHED_LOGITS // vocabulary if logits.device.type == "cpu" else rows, 1)


def _scores(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return logprobs, entropies and log-sums, all (M,), of logits (M, V); -inf: left out."""
    most = logits.amax(-1, keepdim=True)
    weights = (logits - most).exp_()
    total = weights.sum(-1)
    normaliser = most[:, 0] + total.log()
    logprobs = logits.gather(-1, targets[:, None])[:, 0] - normaliser
    # A weight of 0 times a logit of -inf would be no number.
    mean = torch.linalg.vecdot(weights, logits.clamp_(min=torch.finfo(logits.dtype).min)) / total
    return logprobs, normaliser - mean, normaliser


def nucleus(logits: Tensor, targets: Tensor, top_p: float) -> Tensor:
    """Return True (M, V) on the fewest most likely tokens that reach `top_p`, and on `targets` (M,)."""
    ordered, index = logits.softmax(-1).sort(stable=True, dim=-1, descending=True)
    kept = ordered.cumsum(-1) - ordered < top_p
    return torch.zeros_like(kept).scatter(-1, index, kept).scatter(-1, targets[:, None], True)


def load_policy(
    folder: Path,
    dtype: torch.dtype,
    temperature: float,
    top_p: float,
    *,
    dropout: bool = False,
    recompute: Callable[[PreTrainedModel], bool] = lambda model: False,
    place: Place | None = None,
    longest: int | None = None,
    sequence: SequenceGroup | None = None,
) -> PolicyModel:
    """Load the model in a Hugging Face folder, its weights rounded to published values.

    Args:
        folder: with config.json and safetensors files.
        dtype: of the parameters.
        temperature, top_p: of the sampling whose log-probabilities are computed.
        dropout: whether the model's own dropout is on.
        recompute: decides for the loaded model whether layers run again in the backward pass.
        place: takes each module as it is read (`model_files`); None: the whole model is loaded.
        longest: most tokens of a trajectory; None: rows hold one each.
        sequence: ranks that share every row with this one.

    Raises:
        ModelError: the folder holds no model, or one that cannot be loaded or is not supported.
    """
    if not (folder / "config.json").is_file():
        raise ModelError(f"no model in {folder}: config.json is missing")
    disable_progress_bar()  # a bar in a log file is noise
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        attention = "sdpa" if MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._supports_sdpa else "eager"
        model = load_by_module(folder, config, dtype, attention, place) if place else None
        if model is None:
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, attn_implementation=attention, local_files_only=True
            )
            for name, parameter in model.named_parameters():
                parameter.data.copy_(as_published(name, parameter.data))
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ModelError(f"the model in {folder} cannot be loaded: {error}") from error
    settings = model.config.get_text_config()
    changed = [name for name in LOGIT_SETTINGS if getattr(settings, name, None) not in (None, 1.0)]
    if changed or not isinstance(model.get_output_embeddings(), nn.Linear):
        why = ", ".join(changed) or "no linear lm_head"
        raise ModelError(f"the model in {folder} is not supported: {why}")
    if model.is_gradient_checkpointing:
        raise ModelError(
            f"the model in {folder} is not supported: config.json has gradient_checkpointing=true, which "
            "would do nothing here; remove it"
        )
    return PolicyModel(
        model,
        temperature,
        top_p,
        dropout=dropout,
        recompute=recompute(model),
        longest=longest,
        sequence=sequence,
    )
