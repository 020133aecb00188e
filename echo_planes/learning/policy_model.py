"""The policy as the learner sees it: packed tokens in, logprobs of the trained tokens out."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from echo_planes.errors import ModelError

CHUNK_LOGITS = 2**27  # logits held at once: 0.5 GiB in fp32
# Models that change their logits after lm_head, by a setting of this name, would be scored wrongly here.
LOGIT_SETTINGS = ("final_logit_softcapping", "logit_scale", "logits_scaling")


class PolicyModel(nn.Module):
    """A causal language model whose logprobs are those of the distribution that is sampled from.

    Args:
        model: Hugging Face causal LM.
        temperature: divides the logits.
        top_p: 1.0, or the mass of the nucleus that is kept and renormalised. The token that was sampled
            always counts as kept, even where this policy's nucleus would leave it out.
    """

    def __init__(self, model: PreTrainedModel, temperature: float, top_p: float) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.top_p = top_p

    def forward(
        self,
        token_ids: Tensor,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        predictors: Tensor,
        targets: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Logprob and entropy (both (M,) float32, nats; entropy detached) at M positions.

        Args:
            token_ids: (rows, row_len) int64.
            position_ids: (rows, row_len) int64; None: 0, 1, 2, ... in every row.
            attention_mask: (rows, 1, row_len, row_len) bool, True: may look; None: causal.
            predictors: (M,) flat positions in the rectangle, each before the token it predicts.
            targets: (M,) the tokens predicted.
        """
        output = self.model.base_model(
            input_ids=token_ids, position_ids=position_ids, attention_mask=attention_mask, use_cache=False
        )
        hidden = output.last_hidden_state.flatten(0, 1).index_select(0, predictors)
        size = max(CHUNK_LOGITS // int(self.model.config.get_text_config().vocab_size), 1)
        if len(targets) <= size:
            return self._score(hidden, targets)
        # Logits of long batches are made again in the backward pass instead of being kept.
        parts = [
            checkpoint(self._score, h, t, use_reentrant=False)
            for h, t in zip(torch.split(hidden, size), torch.split(targets, size), strict=True)
        ]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])

    def _score(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model.get_output_embeddings()(hidden).float()
        if self.temperature != 1.0:
            logits = logits / self.temperature
        if self.top_p < 1.0:
            logits = logits.masked_fill(~nucleus(logits.detach(), targets, self.top_p), -torch.inf)
        normaliser = logits.logsumexp(-1)
        logprobs = logits.gather(-1, targets[:, None]).squeeze(-1) - normaliser
        with torch.no_grad():
            probs = (logits - normaliser[:, None]).exp()
            entropy = normaliser - (probs * logits.masked_fill(probs == 0, 0.0)).sum(-1)
        return logprobs, entropy


def nucleus(logits: Tensor, targets: Tensor, top_p: float) -> Tensor:
    """True (M, V) on the fewest most likely tokens that reach `top_p` together, and on `targets` (M,)."""
    ordered, index = logits.softmax(-1).sort(stable=True, dim=-1, descending=True)
    kept = ordered.cumsum(-1) - ordered < top_p
    return torch.zeros_like(kept).scatter(-1, index, kept).scatter(-1, targets[:, None], True)


def load_policy(folder: Path, dtype: torch.dtype, temperature: float, top_p: float) -> PolicyModel:
    """Read a Hugging Face folder from disk. Raises ModelError."""
    if not (folder / "config.json").is_file():
        raise ModelError(f"no model in {folder}: config.json is missing")
    disable_progress_bar()  # a bar in a log file is noise
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa", local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"the model in {folder} cannot be loaded: {error}") from error
    settings = model.config.get_text_config()
    changed = [name for name in LOGIT_SETTINGS if getattr(settings, name, None) not in (None, 1.0)]
    if changed or model.get_output_embeddings() is None:
        raise ModelError(f"the model in {folder} is not supported: {', '.join(changed) or 'no lm_head'}")
    return PolicyModel(model, temperature, top_p)
