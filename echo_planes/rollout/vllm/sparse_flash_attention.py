"""Block-sparse decoding on NVIDIA GPUs, through FlashAttention's paged call (`sparse_attention`).

Not run on a GPU: on CPUs tests hold its tensors against brute force, with a stand-in for FlashAttention.
Shapes follow from what the host knows, so that no step waits for the device. Rows change from step to step,
so attention stays outside of CUDA graphs, which are piecewise then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import PIN_MEMORY, canonicalize_singleton_dim_strides
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.fa_utils import is_flash_attn_varlen_func_available
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from echo_planes.config.kv_pages import chosen_pages
from echo_planes.config.kv_schedule import PAGE_TOKENS, IntArray, Schedule
from echo_planes.rollout.vllm.sparse_attention import Division, SparseLayer

if is_flash_attn_varlen_func_available():
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func


def add_keys(landmarks: Tensor, slots: Tensor, keys: Tensor, page_tokens: int) -> None:
    """Add keys to the landmarks of their pages. A page's first key begins it anew, whoever had its block.

    Args:
        landmarks: (blocks + 1, heads, size) float32; the last is for keys without a place.
        slots: (n,) int64 places of the keys: block times `page_tokens` plus the place there; negative: none.
        keys: (at least n, heads, size).
        page_tokens: of a page.
    """
    nowhere = len(landmarks) - 1
    block = torch.where(slots < 0, nowhere, slots.div(page_tokens, rounding_mode="floor"))
    begun = torch.where((slots >= 0) & (slots % page_tokens == 0), block, nowhere)
    landmarks.index_fill_(0, begun, 0.0)
    landmarks.index_add_(0, block, keys[: len(slots)].float())


@dataclass
class Rows:
    """Rows of a batch that one call of FlashAttention computes."""

    tokens: Tensor | None  # (t,) their positions in the batch; None: all, in order
    query_start_loc: Tensor  # (r + 1,) int32
    longest_query: int
    lengths: Tensor  # (r,) int32
    longest: int
    block_table: Tensor  # (r, pages) int32


@dataclass
class SparseRows:
    """Rows that sample sparsely. r: rows, h: heads of keys and values."""

    tokens: Tensor | slice  # (r,) positions in the batch
    block_table: Tensor  # (r, n) int64; n: pages of the longest row
    pages: Tensor  # (r,) there are, int64
    budgets: Tensor  # (r,) of them read, int64
    most: int  # largest budget of the schedule
    query_start_loc: Tensor  # (r x h + 1,) int32
    lengths: Tensor  # (r x h,) int32: tokens read


@dataclass
class SparseFlashMetadata(FlashAttentionMetadata):  # type: ignore[misc]
    """vLLM's metadata of a batch, and its division."""

    schedule: Schedule | None = None
    sparse: SparseRows | None = None
    others: Rows | None = None  # rows that are not in `sparse`; None: there are none
    adapted: Tensor | None = None  # (t,) positions in the batch that the adapter is for; None: there are none


class SparseFlashBackend(FlashAttentionBackend):  # type: ignore[misc]
    """vLLM's FlashAttention, with small pages, head by head in memory, and sparse decoding."""

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list[int]:
        return list(PAGE_TOKENS)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)  # blocks x heads pages must lie at equal distances

    @staticmethod
    def get_impl_cls() -> type[SparseFlashAttention]:
        return SparseFlashAttention

    @staticmethod
    def get_builder_cls() -> type[SparseFlashBuilder]:
        return SparseFlashBuilder


class SparseFlashBuilder(FlashAttentionMetadataBuilder):  # type: ignore[misc]
    """Metadata of a batch: vLLM's, and which rows read how much."""

    _cudagraph_support = AttentionCGSupport.NEVER
    supports_update_block_table = False  # `sparse` holds a part of it

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> SparseFlashMetadata:
        stock = super().build(common_prefix_len, common_attn_metadata, fast_build)
        return divided(stock, common_attn_metadata, self.num_heads_kv, self.device)


def divided(
    stock: FlashAttentionMetadata, common: CommonAttentionMetadata, num_kv_heads: int, device: torch.device
) -> SparseFlashMetadata:
    """Return a batch's metadata with its division.

    Raises:
        RuntimeError: the host does not know the lengths, as it does without speculative decoding.
    """
    told = SparseFlashMetadata(**vars(stock))
    if common.seq_lens_cpu_upper_bound is None:
        raise RuntimeError("sparse attention: vLLM does not tell the lengths of a batch's sequences")
    lengths = common.seq_lens_cpu_upper_bound[: common.num_reqs].numpy().astype(np.int64)
    division = Division.of(common, lengths)
    if division is None:
        return told

    def moved(values: IntArray, dtype: torch.dtype = torch.int64) -> Tensor:
        there = torch.from_numpy(values).to(dtype)
        return (there.pin_memory() if PIN_MEMORY else there).to(device, non_blocking=True)

    told.adapted = None if division.adapted is None else moved(division.adapted)
    rows, schedule = division.sparse, division.schedule
    if not len(rows):
        return told
    told.schedule = schedule
    its = lengths[rows]
    pages = schedule.pages_of(its)
    told.sparse = SparseRows(
        moved(division.starts[rows]) if len(division.others) else slice(0, len(rows)),
        stock.block_table[moved(rows), : int(pages.max())].long(),
        moved(pages),
        moved(schedule.budgets(its)),
        max(schedule.pages),
        moved(np.arange(len(rows) * num_kv_heads + 1), torch.int32),
        moved(np.repeat(schedule.read_tokens(its), num_kv_heads), torch.int32),
    )
    rest = division.others
    if len(rest):
        sizes, places = np.diff(division.starts)[rest], moved(rest)
        told.others = Rows(
            moved(division.tokens_of_others),
            moved(np.concatenate([[0], np.cumsum(sizes)]), torch.int32),
            int(sizes.max()),
            stock.seq_lens[places],
            int(lengths[rest].max()),
            stock.block_table[places],
        )
    return told


class SparseFlashAttention(SparseLayer, FlashAttentionImpl):  # type: ignore[misc]
    """Attention of one layer.

    Raises:
        ConfigError: the layer computes with what pages cannot be left out of.
    """

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.refuse_what_needs_every_page(
            a_sliding_window=self.sliding_window != (-1, -1),
            an_fp8_KV_cache=self.kv_cache_dtype.startswith("fp8"),
            heads_of_256_on_this_GPU=self.fa4_hd256,  # its kernel has pages of its own size
        )
        self.landmarks: Tensor | None = None  # (blocks + 1, heads, size) float32: sums of keys

    def do_kv_cache_update(
        self, layer: torch.nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        blocks, heads, page, _ = kv_cache.shape
        if self.landmarks is None or len(self.landmarks) != blocks + 1:
            self.landmarks = torch.zeros(blocks + 1, heads, self.head_size, device=kv_cache.device)
        add_keys(self.landmarks, slot_mapping, key, page)

    def _rows_of_heads(self, query: Tensor, sparse: SparseRows, schedule: Schedule) -> Rows:
        """Return the rows with the block table, (r x h, most) int32, of blocks that have one head each."""
        if self.landmarks is None:
            raise RuntimeError("keys are written before they are read")
        rows, heads = len(query), self.num_kv_heads
        mean = query.view(rows, heads, self.num_queries_per_kv, -1).float().mean(2)
        scores = torch.einsum("rhd,rnhd->hrn", mean, self.landmarks[sparse.block_table])
        read = chosen_pages(scores, sparse.pages, sparse.budgets, schedule.first_pages, schedule.last_pages)
        count = read.shape[-1]
        place = torch.arange(count, device=query.device)
        # Those that are read, in order: the last page is the last, since it alone may be partly filled.
        order = torch.where(read, place, count).sort(-1).values[..., : sparse.most].clamp_(max=count - 1)
        block = sparse.block_table.expand(heads, -1, -1).gather(2, order)  # (h, r, most)
        table: Tensor = block * heads + torch.arange(heads, device=query.device)[:, None, None]
        table = table.transpose(0, 1).reshape(rows * heads, -1).to(torch.int32)
        longest = table.shape[1] * schedule.page_tokens
        return Rows(None, sparse.query_start_loc, 1, sparse.lengths, longest, table)

    def _attend(self, query: Tensor, kv_cache: Tensor, rows: Rows) -> Tensor:
        """Return FlashAttention's output, (t, heads, size), for `query` (t, heads, size)."""
        keys, values = kv_cache.transpose(1, 2).chunk(2, dim=-1)
        output = torch.empty_like(query)
        flash_attn_varlen_func(
            q=query,
            k=canonicalize_singleton_dim_strides(keys),
            v=canonicalize_singleton_dim_strides(values),
            out=output,
            cu_seqlens_q=rows.query_start_loc,
            max_seqlen_q=rows.longest_query,
            seqused_k=rows.lengths,
            max_seqlen_k=rows.longest,
            softmax_scale=self.scale,
            causal=True,
            window_size=[-1, -1],
            block_table=rows.block_table,
            softcap=self.logits_soft_cap,
            fa_version=self.vllm_flash_attn_version,
        )
        return output
