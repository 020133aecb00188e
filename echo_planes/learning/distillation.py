"""Distillation of the policy into its own sparse attention (DistillSparse, Sparrow 4.5, Algorithm 1).

A low-rank adapter of all linear layers computes only where rollouts are sparse: the policy knows nothing of
it. It is trained to the least KL(dense || sparse) over the vocabulary, at the tokens that workers decoded
sparsely, on answers of the newest step and with the weights that this step made. The paper takes the dense
log-probabilities of the policy's own update. Those are of older weights and of the sampled tokens alone, so
another dense pass is made here.

A page that is not read has no gradient, so KL alone teaches nothing about the choice of pages. A second term,
which the paper does not have, does: the scores of the pages are to order them as the layer's own attention to
all tokens does. DeepSeek-V3.2 trains its indexer so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers import AttentionInterface

from echo_planes.config.kv_schedule import Schedule
from echo_planes.config.sparse import SparseConfig
from echo_planes.errors import DivergedError
from echo_planes.learning.adapters import first_a
from echo_planes.learning.packing import find_inputs
from echo_planes.learning.page_choice import chosen_pages, page_sums
from echo_planes.learning.policy_model import PolicyModel, layers_of
from echo_planes.types import BoolArray, TrainBatch
from echo_planes.weights.sparse_adapter import Distilled, SparseAdapter

ATTENTION = "echo_planes_sparse"  # implementation of attention, in transformers' words
STATE = "sparse-adapter.pt"
CLIP_NORM = 1.0
_CHUNK_ROWS = 256  # tokens whose choice of pages, and mask, are held at once
SELECTION = 0.5  # weight of the second term
_SHARPNESS = 3.0  # logits of a standard deviation of the scores
_NEVER = -1e30


class _Also(torch.autograd.Function):
    """Loss that is minimised beside the one that `output` leads to. It needs no way out of the layer."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], torch.ones((), dtype=torch.float32, device=gradients[0].device)


@dataclass(frozen=True, slots=True)
class SparseRows:
    """Tokens of a sequence that attend sparsely, and their budgets. n: these tokens."""

    schedule: Schedule
    layers: int  # of the model that attend sparsely
    adapted: Tensor  # (m,) positions where the adapter computes: of sparse bins, those of the prompt too
    rows: Tensor  # (n,) positions that attend sparsely
    pages: Tensor  # (n,) that their sequences have
    budgets: Tensor  # (n,) that they read

    @classmethod
    def of(cls, schedule: Schedule, layers: int, decoded: BoolArray, device: torch.device) -> SparseRows:
        """Return those of a sequence whose tokens (t,) were `decoded` or not, in a model of `layers`."""
        lengths = np.arange(1, len(decoded) + 1)
        is_sparse = np.array(schedule.pages)[schedule.bins(lengths)] > 0
        attending = lengths[is_sparse & decoded]
        arrays = (
            np.flatnonzero(is_sparse),
            attending - 1,
            schedule.pages_of(attending),
            schedule.budgets(attending),
        )
        sparse_layers = max(1, layers - schedule.dense_layers)
        return cls(schedule, sparse_layers, *(torch.from_numpy(one).to(device) for one in arrays))

    def attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Return attention of one sequence, as transformers' models call it.

        Args:
            module: layer, with its number.
            query, key, value: (1, heads, tokens, size); keys and values may have fewer heads.
            attention_mask: not used: attention is causal.
            scaling: of the products of queries and keys.

        Returns:
            The outputs (1, tokens, heads, size), and no weights.
        """
        attend = partial(
            scaled_dot_product_attention, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
        output = attend(query, key, value, is_causal=True)
        if module.layer_idx >= self.schedule.dense_layers:
            marks = page_sums(key[0].float(), self.schedule.page_tokens)
            group = query.shape[1] // key.shape[1]
            for part in torch.split(torch.arange(len(self.rows), device=query.device), _CHUNK_ROWS):
                some = query[:, :, self.rows[part]]
                scores = _by_group(some[0].float(), group) @ marks.transpose(1, 2)
                seen = torch.arange(key.shape[2], device=query.device) <= self.rows[part][:, None]
                read = self._read(scores.detach(), part, key.shape[2]) & seen
                made = attend(some, key, value, attn_mask=read.repeat_interleave(group, dim=0)[None])
                if torch.is_grad_enabled():
                    mass = self._mass(some[0].detach() * scaling, key[0].detach(), seen)
                    made = _Also.apply(made, self._misordered(scores, mass, part))  # type: ignore[no-untyped-call]
                output = output.index_copy(2, self.rows[part], made)
        return output.transpose(1, 2), None

    def _read(self, scores: Tensor, part: Tensor, tokens: int) -> Tensor:
        """Return, (heads, rows, tokens) bool, the tokens in the pages that some rows read."""
        first, last = self.schedule.first_pages, self.schedule.last_pages
        chosen = chosen_pages(scores, self.pages[part], self.budgets[part], first, last)
        return chosen.repeat_interleave(self.schedule.page_tokens, dim=-1)[..., :tokens]

    def _mass(self, query: Tensor, key: Tensor, seen: Tensor) -> Tensor:
        """Return, (heads, rows, pages), the share of attention to all tokens that falls on each page."""
        group, size = len(query) // len(key), self.schedule.page_tokens
        logits = query.float() @ key.float().repeat_interleave(group, dim=0).transpose(1, 2)
        weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
        return page_sums(_by_group(weights, group)[..., None], size)[..., 0]

    def _misordered(self, scores: Tensor, mass: Tensor, part: Tensor) -> Tensor:
        """Return the cross-entropy of the scores, of pages that need not be read, to the attention on them.

        Scores are counted in their standard deviations: the order is what is chosen by.
        """
        place, pages = torch.arange(scores.shape[-1], device=scores.device), self.pages[part][:, None]
        free = (place >= self.schedule.first_pages) & (place < pages - self.schedule.last_pages)
        count = free.sum(-1, keepdim=True).clamp(min=1)
        centred = scores - (scores * free).sum(-1, keepdim=True) / count
        deviation = ((centred**2 * free).sum(-1, keepdim=True) / count).sqrt().clamp(min=1e-6)
        order = (_SHARPNESS * centred / deviation).masked_fill(~free, _NEVER).log_softmax(-1)
        return -SELECTION / self.layers * (mass * free * order).sum() / len(scores)


def _by_group(values: Tensor, group: int) -> Tensor:
    """Return the mean of (heads, n, m) over each group of heads that share keys: (heads / group, n, m)."""
    return values.view(len(values) // group, group, *values.shape[1:]).mean(1)


class Distiller:
    """Adapter of one rank, and its training. All ranks call `distil` and `load` alike.

    Args:
        policy: of this rank, whole and on its device.
        settings: section `sparse`.
        seed: of the run.
        rank, world_size: place among the ranks, and their number.
    """

    def __init__(
        self, policy: PolicyModel, settings: SparseConfig, seed: int, rank: int, world_size: int
    ) -> None:
        self.policy = policy
        self._share = settings.distill_share
        self._seed = seed
        self._rank = rank
        self._world_size = world_size
        self._rows: SparseRows | None = None  # None: the adapter is off
        self.pairs: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
        layers = layers_of(policy.model)
        self._layers = len(layers)
        prefix = next(name for name, one in policy.model.named_modules() if one is layers)
        for name, module in layers.named_modules():
            if isinstance(module, nn.Linear):
                device = module.weight.device
                a = nn.Parameter(
                    first_a(seed, f"sparse/{name}", settings.distill_rank, module.in_features).to(device)
                )
                b = nn.Parameter(torch.zeros(module.out_features, settings.distill_rank, device=device))
                self.pairs[f"{prefix}.{name}"] = (a, b)
                module.register_forward_hook(partial(self._add, a, b))
        self._parameters = [one for pair in self.pairs.values() for one in pair]
        self._optimizer = torch.optim.AdamW(self._parameters, lr=settings.distill_lr, weight_decay=0.0)

    def _add(self, a: Tensor, b: Tensor, module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        if self._rows is None:
            return output
        x = inputs[0][:, self._rows.adapted]
        added = linear(linear(x, a.to(x.dtype)), b.to(x.dtype))
        return output.index_add(1, self._rows.adapted, added)

    @contextmanager
    def sparse(self, rows: SparseRows) -> Iterator[None]:
        """Let the policy attend sparsely, with the adapter, at these tokens of the one sequence it gets."""
        settings = self.policy.model.config.get_text_config()
        dense = settings._attn_implementation
        AttentionInterface.register(ATTENTION, rows.attend)
        self._rows, settings._attn_implementation = rows, ATTENTION
        try:
            yield
        finally:
            self._rows, settings._attn_implementation = None, dense

    def hidden(self, token_ids: Tensor, rows: Tensor) -> Tensor:
        """Return the last hidden states (n, size) at `rows` (n,) of a sequence (tokens,)."""
        self.policy.model.eval()
        output = self.policy.model.base_model(input_ids=token_ids[None], use_cache=False)
        states: Tensor = output.last_hidden_state[0, rows]
        return states

    def distil(
        self, batch: TrainBatch | None, schedule: Schedule, version: int, doing: Callable[[str], None]
    ) -> Distilled:
        """Make one update by a share of a batch's answers, and return the adapter.

        Args:
            batch: of the newest step; None: there was none since the start, and no update is made.
            schedule: by which workers decode.
            version: of the policy's weights.
            doing: told of each answer.

        Raises:
            DivergedError: the gradient is not finite.
        """
        begun_s = time.perf_counter()
        if batch is None:
            return Distilled(SparseAdapter.of(version, self.pairs), 0.0, 0, 0.0)
        device = self._parameters[0].device
        sums = torch.zeros(2, dtype=torch.float64, device=device)  # divergence, tokens
        gradients = [torch.zeros_like(one) for one in self._parameters]
        drawn = np.random.default_rng((self._seed, batch.step)).random(batch.num_trajectories) < self._share
        inputs = find_inputs(batch, drawn)
        mine = np.flatnonzero(inputs.lengths)[self._rank :: self._world_size]
        for number, i in enumerate(mine.tolist(), start=1):
            doing(f"distilling answer {number} of {len(mine)}")
            tokens = slice(inputs.starts[i], inputs.starts[i] + inputs.lengths[i])
            rows = SparseRows.of(schedule, self._layers, batch.loss_mask[tokens], device)
            if not len(rows.rows):
                continue
            token_ids = torch.from_numpy(batch.token_ids[tokens]).to(device)
            with torch.no_grad():
                dense = self.hidden(token_ids, rows.rows)
            with self.sparse(rows):  # layers that run again in the backward pass do so sparsely, too
                apart = self.policy.head.divergence(self.hidden(token_ids, rows.rows), dense).sum()
                found = torch.autograd.grad(apart, self._parameters)
            for total, one in zip(gradients, found, strict=True):
                total += one
            sums += torch.stack([apart.detach(), torch.ones_like(apart) * len(rows.rows)])
        self._update(gradients, sums)
        divergence, count = sums.tolist()
        adapter = SparseAdapter.of(version, self.pairs)
        return Distilled(adapter, divergence / max(count, 1), int(count), time.perf_counter() - begun_s)

    def _update(self, gradients: list[Tensor], sums: Tensor) -> None:
        if self._world_size > 1:
            for one in (sums, *gradients):
                torch.distributed.all_reduce(one)
        if not sums[1]:
            return  # every answer was dense
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient / sums[1].to(gradient.dtype)
        norm = nn.utils.clip_grad_norm_(self._parameters, CLIP_NORM)
        if not torch.isfinite(norm):
            raise DivergedError(
                f"the gradient of the sparse adapter is {norm.item()}; set a smaller sparse.distill_lr, or "
                "sparse.distill_rank=0"
            )
        self._optimizer.step()

    def save(self, folder: Path) -> None:
        """Write the adapter and its moments."""
        weights = [one.detach() for one in self._parameters]
        torch.save({"adapter": weights, "moments": self._optimizer.state_dict()}, folder / STATE)

    def load(self, folder: Path) -> None:
        """Continue from `save`; from the beginning, if that run did not distil or with another rank."""
        if not (folder / STATE).is_file():
            return
        state = torch.load(folder / STATE, weights_only=True, map_location=self._parameters[0].device)
        if [one.shape for one in state["adapter"]] != [one.shape for one in self._parameters]:
            return
        with torch.no_grad():
            for parameter, saved in zip(self._parameters, state["adapter"], strict=True):
                parameter.copy_(saved)
        self._optimizer.load_state_dict(state["moments"])
