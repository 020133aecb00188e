"""Block-sparse decoding in vLLM's engine: each sampled token reads a budget of pages (Sparrow, 3.2).

vLLM imports this module in the engine's process, before it loads a model, as that of the worker extension
`SparseWorkerExtension`. It puts our backends in the place of two of vLLM's: of the one for CPUs
(`sparse_cpu_attention`) and of FlashAttention (`sparse_flash_attention`). Without a schedule they compute
what those compute, with the engine's page size.

A row that samples reads a shortened block table through vLLM's own paged kernel. Heads choose their pages by
themselves: the cache, [blocks, heads, ...], is also a cache of blocks x heads pages with one head each, and
every head of a row becomes a row of its own. Keys hold their rotary positions, so pages can be left out. Rows
that prefill read everything. After a preemption vLLM prefills an answer's tokens too, so they read everything
then, but for a last piece of one token.

A page's landmark is the sum of its keys, kept beside the cache as they are written; vLLM does not count its
memory, a 16th or a 32nd of the cache in bf16.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from echo_planes.config.kv_schedule import IntArray, Schedule
from echo_planes.errors import ConfigError
from echo_planes.rollout.vllm.answers import DENSE
from echo_planes.rollout.vllm.plugin import WorkerExtension
from echo_planes.rollout.vllm.sparse_adapter import LiveAdapter
from echo_planes.types import BoolArray
from echo_planes.weights.sparse_adapter import SparseAdapter


class EngineState:
    """State of this process, which has one engine."""

    schedule: Schedule | None = None  # None: dense
    runner: Any = None  # vLLM's model runner, which knows the requests of a batch
    adapter: LiveAdapter | None = None  # of the tokens in bins that have a budget

    @classmethod
    def dense_rows(cls, count: int) -> BoolArray:
        """Return, (count,), which rows of the batch are of requests that ask for dense attention."""
        ids = cls.runner.input_batch.req_ids[:count]
        extra = [cls.runner.requests[one].sampling_params.extra_args for one in ids]
        dense: BoolArray = np.zeros(count, np.bool_)  # vLLM may pad a batch with rows without tokens
        dense[: len(extra)] = [bool(one and one.get(DENSE)) for one in extra]
        return dense

    @staticmethod
    def adapted_tokens() -> Tensor | None:
        """Return the places, (r,) int64, of the tokens that the adapter is for; None: there are none."""
        told = get_forward_context().attn_metadata
        if not isinstance(told, dict):
            return None  # no batch of the scheduler
        adapted: Tensor | None = next(iter(told.values())).adapted
        return adapted


@dataclass(frozen=True, slots=True)
class Division:
    """Rows of a batch by how they read. All on the host; n: rows."""

    schedule: Schedule
    starts: IntArray  # (n + 1,) of the rows' tokens
    lengths: IntArray  # (n,) tokens of the sequences, with those of this step
    sparse: IntArray  # rows that read a budget
    others: IntArray  # rows that read everything
    adapted: IntArray | None  # (t,) places of the tokens that the adapter is for; None: there are none

    @classmethod
    def of(cls, common: CommonAttentionMetadata, lengths: IntArray) -> Division | None:
        """Divide a batch; None: the engine is dense."""
        schedule = EngineState.schedule
        if schedule is None:
            return None
        count = common.num_reqs
        starts: IntArray = common.query_start_loc_cpu[: count + 1].numpy().astype(np.int64)
        samples = np.diff(starts) == 1
        if common.is_prefilling is not None:
            samples &= ~common.is_prefilling[:count].numpy()
        samples &= np.array(schedule.pages)[schedule.bins(lengths)] > 0
        adapted = None
        if samples.any() or EngineState.adapter is not None:
            asks_dense = EngineState.dense_rows(count)
            samples &= ~asks_dense
            adapted = _adapted(schedule, starts, lengths, asks_dense)
        return cls(schedule, starts, lengths, np.flatnonzero(samples), np.flatnonzero(~samples), adapted)

    @property
    def tokens_of_others(self) -> IntArray:
        """Places of the tokens of the rows that read everything."""
        return np.concatenate([np.arange(self.starts[row], self.starts[row + 1]) for row in self.others])


def _adapted(
    schedule: Schedule, starts: IntArray, lengths: IntArray, asks_dense: BoolArray
) -> IntArray | None:
    """Return the tokens of sparse bins, also of prompts; none of requests that ask to be dense."""
    if EngineState.adapter is None:
        return None
    sizes = np.diff(starts)
    row = np.repeat(np.arange(len(sizes)), sizes)
    length = lengths[row] - starts[1:][row] + np.arange(len(row)) + 1
    is_sparse = np.array(schedule.pages)[schedule.bins(length)] > 0
    places = np.flatnonzero(is_sparse & ~asks_dense[row])
    return places if len(places) else None


class SparseLayer:
    """Mixin for vLLM's attention of one layer.

    A backend's own part: `_attend`, a call of its kernel, and `_rows_of_heads`, the rows of one head each.
    """

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Compute vLLM's attention; where rows read budgets, these head by head and the others apart."""
        sparse = attn_metadata.sparse if attn_metadata is not None else None
        if sparse is None or not is_sparse(layer, attn_metadata.schedule, kv_cache):
            made: Tensor = super().forward(  # type: ignore[misc]
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
            return made
        own: Any = self
        blocks, heads, *page = kv_cache.shape
        if (rows := attn_metadata.others) is not None:
            made = own._attend(query[rows.tokens], kv_cache, rows)
            output[rows.tokens] = made.view(len(made), *output.shape[1:])
        # Where no layer norms the queries, as in Llama, they are a strided part of a larger tensor.
        asked = query[sparse.tokens].contiguous()
        single = asked.view(len(asked) * heads, own.num_queries_per_kv, -1)
        rows = own._rows_of_heads(asked, sparse, attn_metadata.schedule)
        made = own._attend(single, kv_cache.view(blocks * heads, 1, *page), rows)
        output[sparse.tokens] = made.view(len(asked), *output.shape[1:])
        return output

    def refuse_what_needs_every_page(self, **there: bool) -> None:
        """Check what the layer computes with.

        Raises:
            ConfigError: pages cannot be left out of it.
        """
        layer: Any = self
        found = {
            "ALiBi slopes": layer.alibi_slopes is not None,
            "attention sinks": layer.sinks is not None,
            "KV that layers share": layer.kv_sharing_target_layer_name is not None,
            "attention that is not a decoder's": layer.attn_type != AttentionType.DECODER,
            **{name.replace("_", " "): is_there for name, is_there in there.items()},
        }
        for name, is_there in found.items():
            if is_there:
                raise ConfigError(
                    f"sparse.schedule: the model has {name}, which is not supported; leave it out"
                )


_index_of = functools.cache(extract_layer_index)  # which is asked in each layer of each step


def is_sparse(layer: Any, schedule: Schedule, kv_cache: Tensor) -> bool:
    """Return whether a layer reads budgets.

    Raises:
        RuntimeError: the pages of the cache, (blocks, heads, tokens, ...), are not the schedule's.
    """
    if _index_of(layer.layer_name) < schedule.dense_layers:
        return False
    if (page := kv_cache.shape[2]) != schedule.page_tokens:
        raise RuntimeError(f"vLLM's pages have {page} tokens, the schedule's {schedule.page_tokens}")
    return True


class SparseWorkerExtension(WorkerExtension):
    """Mixin for vLLM's worker class, with the schedule of its engine."""

    def echo_planes_set_schedule(self, schedule: dict[str, Any] | None) -> int:
        """Decode by this schedule (the fields of `Schedule`) from the next step on; None: dense.

        Returns:
            The number of the schedule; -1 for none.
        """
        if schedule is None:
            EngineState.schedule = None
            return -1
        layers = self.vllm_config.compilation_config.static_forward_context.values()
        if not any(isinstance(getattr(layer, "impl", None), SparseLayer) for layer in layers):
            raise RuntimeError("no layer of this engine can decode sparsely")
        if not hasattr(self.model_runner, "requests"):
            raise RuntimeError("sparse attention needs vLLM's first model runner: VLLM_USE_V2_MODEL_RUNNER=0")
        EngineState.runner = self.model_runner
        EngineState.schedule = Schedule(**schedule | {"pages": tuple(schedule["pages"])})
        return EngineState.schedule.number

    def echo_planes_set_adapter(self, version: int, tensors: bytes) -> int:
        """Compute with an adapter (`SparseAdapter`) where attention is sparse, from the next step on.

        Returns:
            The version of the one that counts: of two, whatever their order, the newer.
        """
        if EngineState.adapter is None:
            EngineState.adapter = LiveAdapter(self.model_runner.model, EngineState.adapted_tokens)
        if version >= EngineState.adapter.version:
            EngineState.adapter.load(version, SparseAdapter(version, tensors).pairs())
        return EngineState.adapter.version


_HERE = __name__.rpartition(".")[0]
register_backend(AttentionBackendEnum.CPU_ATTN, f"{_HERE}.sparse_cpu_attention.SparseBackend")
register_backend(AttentionBackendEnum.FLASH_ATTN, f"{_HERE}.sparse_flash_attention.SparseFlashBackend")
