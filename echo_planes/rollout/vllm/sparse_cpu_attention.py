"""Block-sparse decoding on CPUs, through vLLM's paged kernel (`sparse_attention`).

In bf16 vLLM's kernel has AMX for pages of 32, not of 16.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm import envs
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from echo_planes.config.kv_schedule import PAGE_TOKENS, Schedule
from echo_planes.rollout.sparsity.pages import add_keys, choose_pages, warm_up
from echo_planes.rollout.vllm.sparse_attention import Division, SparseLayer


@dataclass
class Rows:
    """Rows of a batch that one call of the kernel computes."""

    tokens: Tensor | None  # (t,) their positions in the batch; None: all, in order
    query_start_loc: Tensor
    lengths: Tensor  # (r,) int32
    block_table: Tensor  # (r, pages)
    scheduler_metadata: Tensor


@dataclass
class SparseRows:
    """Rows that sample sparsely. r: rows, h: heads of keys and values."""

    tokens: Tensor | slice  # (r,) positions in the batch
    block_table: Tensor  # (r, pages), int64
    pages: Tensor  # (r,) there are, int64
    budgets: Tensor  # (r,) of them read, int64
    most: int  # largest budget
    heads: Rows  # r x h rows of one head each; their table is made in each layer


@dataclass
class SparseMetadata(CPUAttentionMetadata):  # type: ignore[misc]
    """vLLM's metadata of a batch, and its division."""

    schedule: Schedule | None = None
    sparse: SparseRows | None = None
    others: Rows | None = None  # rows that are not in `sparse`; None: there are none
    adapted: Tensor | None = None  # (t,) positions in the batch that the adapter is for; None: there are none


class SparseBackend(CPUAttentionBackend):  # type: ignore[misc]
    """vLLM's attention backend for CPUs, with small pages and sparse decoding."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        return list(PAGE_TOKENS)  # vLLM rounds a `MultipleOf(16)` up to 128

    @staticmethod
    def get_impl_cls() -> type[SparseAttention]:
        return SparseAttention

    @staticmethod
    def get_builder_cls() -> type[SparseBuilder]:
        return SparseBuilder


class SparseBuilder(CPUAttentionMetadataBuilder):  # type: ignore[misc]
    """Metadata of a batch: vLLM's, and which rows read how much."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> SparseMetadata:
        stock = super().build(common_prefix_len, common_attn_metadata, fast_build)
        common = common_attn_metadata
        told = SparseMetadata(**vars(stock))
        lengths = common.seq_lens[: common.num_reqs].numpy().astype(np.int64)
        division = Division.of(common, lengths)
        if division is None:
            return told
        told.adapted = None if division.adapted is None else torch.from_numpy(division.adapted)
        if not len(division.sparse):
            return told
        told.schedule = division.schedule
        told.sparse = self._sparse(stock, division)
        rest = division.others
        if len(rest):
            told.others = self._rows(
                division.tokens_of_others,
                np.diff(division.starts)[rest],
                stock.seq_lens[rest],
                stock.block_table[rest],
                self.num_heads,
                self.num_kv_heads,
            )
        return told

    def _sparse(self, stock: CPUAttentionMetadata, division: Division) -> SparseRows:
        rows, schedule = division.sparse, division.schedule
        lengths = division.lengths[rows]
        pages, budgets = schedule.pages_of(lengths), schedule.budgets(lengths)
        read = np.repeat(schedule.read_tokens(lengths), self.num_kv_heads)
        heads = self._rows(
            None,
            np.ones(len(read), np.int64),
            torch.from_numpy(read).to(torch.int32),
            stock.block_table[:0],
            self.num_heads // self.num_kv_heads,
            1,
        )
        tokens = division.starts[rows]
        return SparseRows(
            torch.from_numpy(tokens) if len(division.others) else slice(0, len(rows)),
            stock.block_table[rows, : int(pages.max())].long(),
            torch.from_numpy(pages),
            torch.from_numpy(budgets),
            int(budgets.max()),
            heads,
        )

    def _rows(
        self, tokens: Any, sizes: Any, lengths: Tensor, table: Tensor, num_heads: int, num_kv_heads: int
    ) -> Rows:
        starts = torch.zeros(len(sizes) + 1, dtype=torch.int32)
        starts[1:] = torch.from_numpy(np.cumsum(sizes))
        metadata = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(sizes),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=self.head_dim,
            seq_lens=lengths,
            dtype=self.dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=self.isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        )
        return Rows(None if tokens is None else torch.from_numpy(tokens), starts, lengths, table, metadata)


class SparseAttention(SparseLayer, CPUAttentionBackendImpl):  # type: ignore[misc]
    """Attention of one layer.

    Raises:
        ConfigError: the layer computes with what pages cannot be left out of.
    """

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.refuse_what_needs_every_page(
            a_sliding_window=self.sliding_window != -1, an_fp8_KV_cache=self.is_fp8_kv_cache
        )
        self.landmarks: Tensor | None = None  # (blocks, heads, size) float32: sums of keys

    def do_kv_cache_update(
        self, layer: torch.nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        blocks, heads, page, width = kv_cache.shape
        if self.landmarks is None or self.landmarks.shape[0] != blocks:
            self.landmarks = torch.zeros(blocks, heads, width // 2)
        add_keys(
            self.landmarks.numpy(),
            slot_mapping.numpy(),
            key.float().contiguous().numpy(),
            page,
        )

    def _rows_of_heads(self, query: Tensor, sparse: SparseRows, schedule: Schedule) -> Rows:
        """Return the rows with the block table, (r x h, most), of blocks that have one head each."""
        if self.landmarks is None:
            raise RuntimeError("keys are written before they are read")
        heads = self.num_kv_heads
        mean = query.view(len(query), heads, self.num_queries_per_kv, -1).float().mean(2)  # (r, h, size)
        table = torch.zeros(len(query) * heads, sparse.most, dtype=torch.int32)
        choose_pages(
            mean.numpy(),
            self.landmarks.numpy(),
            sparse.block_table.numpy(),
            sparse.pages.numpy(),
            sparse.budgets.numpy(),
            schedule.first_pages,
            schedule.last_pages,
            table.numpy(),
        )
        return replace(sparse.heads, block_table=table)

    def _attend(self, query: Tensor, kv_cache: Tensor, rows: Rows) -> Tensor:
        blocks, heads, page, _ = kv_cache.shape
        keys, values = kv_cache.view(blocks, heads, 2 * page, -1).chunk(2, dim=2)
        output = torch.empty_like(query)
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=keys,
            value_cache=values,
            output=output,
            query_start_loc=rows.query_start_loc,
            seq_lens=rows.lengths,
            scale=self.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=rows.block_table,
            softcap=self.logits_soft_cap,
            scheduler_metadata=rows.scheduler_metadata,
            s_aux=None,
        )
        return output


warm_up()
