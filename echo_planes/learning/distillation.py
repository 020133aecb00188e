"""Distillation of the policy into its own sparse attention (DistillSparse, Sparrow 4.5, Algorithm 1).

A low-rank adapter of all linear layers computes only where rollouts are sparse: the policy knows nothing of
it. It is trained to the least KL(dense || sparse) over the vocabulary, at the tokens that workers decoded
sparsely, on answers of the newest step and with the weights that this step made. The paper takes the dense
log-probabilities of the policy's own update. Those are of older weights and of the sampled tokens alone, so
another dense pass is made here.

The choice of pages has no gradient: the adapter learns to do with the pages that are read.
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

from echo_planes.config.kv_pages import chosen_pages, landmarks
from echo_planes.config.kv_schedule import Schedule
from echo_planes.config.sparse import SparseConfig
from echo_planes.errors import DivergedError
from echo_planes.learning.adapters import first_a
from echo_planes.learning.packing import find_inputs
from echo_planes.learning.policy_model import PolicyModel, layers_of
from echo_planes.types import BoolArray, TrainBatch
from echo_planes.weights.sparse_adapter import Distilled, SparseAdapter

ATTENTION = "echo_planes_sparse"  # implementation of attention, in transformers' words
STATE = "sparse-adapter.pt"
CLIP_NORM = 1.0
_CHUNK_ROWS = 256  # tokens whose choice of pages, and mask, are held at once


@dataclass(frozen=True, slots=True)
class SparseRows:
    """Tokens of a sequence that attend sparsely, and their budgets. n: these tokens."""

    schedule: Schedule
    adapted: Tensor  # (m,) positions where the adapter computes: of sparse bins, those of the prompt too
    rows: Tensor  # (n,) positions that attend sparsely
    pages: Tensor  # (n,) that their sequences have
    budgets: Tensor  # (n,) that they read

    @classmethod
    def of(cls, schedule: Schedule, decoded: BoolArray, device: torch.device) -> SparseRows:
        """Return those of a sequence whose tokens (t,) were `decoded` or not."""
        lengths = np.arange(1, len(decoded) + 1)
        is_sparse = np.array(schedule.pages)[schedule.bins(lengths)] > 0
        attending = lengths[is_sparse & decoded]
        arrays = (
            np.flatnonzero(is_sparse),
            attending - 1,
            schedule.pages_of(attending),
            schedule.budgets(attending),
        )
        return cls(schedule, *(torch.from_numpy(one).to(device) for one in arrays))

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
            marks = landmarks(key[0].detach(), self.schedule.page_tokens)
            group = query.shape[1] // key.shape[1]
            for part in torch.split(torch.arange(len(self.rows), device=query.device), _CHUNK_ROWS):
                some = query[:, :, self.rows[part]]
                mask = self._mask(some[0].detach(), marks, part, key.shape[2]).repeat_interleave(group, dim=0)
                made = attend(some, key, value, attn_mask=mask[None])
                output = output.index_copy(2, self.rows[part], made)
        return output.transpose(1, 2), None

    def _mask(self, query: Tensor, marks: Tensor, part: Tensor, tokens: int) -> Tensor:
        """Return, (heads of keys, rows, tokens) bool, the tokens that some rows (heads, rows, size) read."""
        mean = query.float().view(len(marks), len(query) // len(marks), *query.shape[1:]).mean(1)
        chosen = chosen_pages(
            mean @ marks.transpose(1, 2),
            self.pages[part],
            self.budgets[part],
            self.schedule.first_pages,
            self.schedule.last_pages,
        )
        read = chosen.repeat_interleave(self.schedule.page_tokens, dim=-1)[..., :tokens]
        return read & (torch.arange(tokens, device=query.device) <= self.rows[part][:, None])


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
            rows = SparseRows.of(schedule, batch.loss_mask[tokens], device)
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
        rates = [group["lr"] for group in self._optimizer.param_groups]
        self._optimizer.load_state_dict(state["moments"])
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate  # as the settings say now
