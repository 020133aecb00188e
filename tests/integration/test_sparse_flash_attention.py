"""Sparse attention for GPUs on tensors of the CPU, with a stand-in for FlashAttention: no GPU took part."""

from __future__ import annotations

import math
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata

from echo_planes.config.kv_schedule import Schedule
from echo_planes.rollout.sparsity import pages as numba_pages
from echo_planes.rollout.vllm import sparse_flash_attention
from echo_planes.rollout.vllm.answers import DENSE
from echo_planes.rollout.vllm.sparse_attention import EngineState
from echo_planes.rollout.vllm.sparse_flash_attention import SparseFlashAttention, add_keys, divided

pytestmark = pytest.mark.integration

HEADS, KV_HEADS, SIZE, PAGE, BLOCKS = 4, 2, 8, 16, 64
SCHEDULE = Schedule((4, 0, 6), number=3, bin_tokens=100, first_pages=1, last_pages=1, dense_layers=1)
# Rows: lengths with this step's tokens, tokens of this step, and whether the request asks to be dense.
ROWS = [
    (97, 1, False),  # sparse: 4 of 7 pages
    (40, 12, False),  # a piece of a prompt
    (90, 1, True),
    (150, 1, False),  # in a dense bin
    (208, 1, False),  # sparse: 6 of 13 pages, the last one full
    (30, 1, False),  # has fewer pages than its budget
]


def stand_in(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    seqused_k: Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    block_table: Tensor,
    **named: Any,
) -> None:
    """FlashAttention's paged call as it is documented, for causal attention."""
    assert named["causal"] is True
    assert named["window_size"] == [-1, -1]
    assert {cu_seqlens_q.dtype, seqused_k.dtype, block_table.dtype} == {torch.int32}
    assert k.stride(-1) == v.stride(-1) == 1
    for row in range(len(seqused_k)):
        start, stop = cu_seqlens_q[row].item(), cu_seqlens_q[row + 1].item()
        length = seqused_k[row].item()
        assert stop - start <= max_seqlen_q
        assert length <= max_seqlen_k
        blocks = block_table[row, : math.ceil(length / PAGE)].long()
        keys, values = (one[blocks].flatten(0, 1)[:length] for one in (k, v))
        group = q.shape[1] // keys.shape[1]
        scores = torch.einsum("qhd,khd->hqk", q[start:stop], keys.repeat_interleave(group, 1)) * softmax_scale
        places = torch.arange(length) - (length - (stop - start))
        scores.masked_fill_(places[None] > torch.arange(stop - start)[:, None], -torch.inf)
        out[start:stop] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values.repeat_interleave(group, 1))


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> SparseFlashAttention:
    monkeypatch.setattr(sparse_flash_attention, "flash_attn_varlen_func", stand_in, raising=False)
    monkeypatch.setattr(EngineState, "schedule", SCHEDULE)
    return SparseFlashAttention(HEADS, SIZE, SIZE**-0.5, KV_HEADS, None, None, "auto")


@pytest.fixture
def common(monkeypatch: pytest.MonkeyPatch) -> CommonAttentionMetadata:
    lengths, sizes, dense = (np.array(column) for column in zip(*ROWS, strict=True))
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randperm(BLOCKS, generator=generator).int()
    table = torch.zeros(len(ROWS), 16, dtype=torch.int32)
    at = 0
    for row, length in enumerate(lengths):
        count = math.ceil(length / PAGE)
        table[row, :count] = blocks[at : at + count]
        at += count
    starts = torch.tensor(np.concatenate([[0], np.cumsum(sizes)]), dtype=torch.int32)
    ids = [f"r{row}" for row in range(len(ROWS))]
    requests = {
        one: SimpleNamespace(sampling_params=SimpleNamespace(extra_args={DENSE: True} if asks else None))
        for one, asks in zip(ids, dense, strict=True)
    }
    runner = SimpleNamespace(input_batch=SimpleNamespace(req_ids=ids), requests=requests)
    monkeypatch.setattr(EngineState, "runner", runner)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.tensor(lengths, dtype=torch.int32),
        is_prefilling=torch.tensor(sizes > 1),
        num_reqs=len(ROWS),
        num_actual_tokens=int(sizes.sum()),
        max_query_len=int(sizes.max()),
        max_seq_len=int(lengths.max()),
        block_table_tensor=table,
        slot_mapping=torch.zeros(int(sizes.sum()), dtype=torch.int64),
    )


def stock(common: CommonAttentionMetadata) -> FlashAttentionMetadata:
    """Metadata of a batch by vLLM's builder."""
    return FlashAttentionMetadata(
        num_actual_tokens=common.num_actual_tokens,
        max_query_len=common.max_query_len,
        query_start_loc=common.query_start_loc,
        max_seq_len=common.max_seq_len,
        seq_lens=common.seq_lens,
        block_table=common.block_table_tensor,
        slot_mapping=common.slot_mapping,
    )


def filled(common: CommonAttentionMetadata, layer: SparseFlashAttention) -> tuple[Tensor, list[Tensor]]:
    """A cache with random keys and values of all rows, and the keys of each row; landmarks come with them."""
    generator = torch.Generator().manual_seed(1)
    cache = torch.zeros(BLOCKS, KV_HEADS, PAGE, 2 * SIZE)
    layer.landmarks = torch.full((BLOCKS + 1, KV_HEADS, SIZE), 7.0)  # of those who had the blocks before
    rows = []
    for row, length in enumerate(common.seq_lens.tolist()):
        both = torch.randn(length, KV_HEADS, 2 * SIZE, generator=generator)
        place = torch.arange(length)
        block = common.block_table_tensor[row, place // PAGE].long()
        cache[block, :, place % PAGE] = both
        slots = block * PAGE + place % PAGE
        for some in (slice(0, 5), slice(5, 90), slice(90, None)):  # as pieces of a prompt come
            add_keys(layer.landmarks, slots[some], both[some, :, :SIZE], PAGE)
        rows.append(both)
    return cache, rows


def expected(query: Tensor, both: Tensor, *, sparse: bool) -> Tensor:
    """One token's attention, (heads, size), by brute force."""
    length = len(both)
    out = torch.zeros(HEADS, SIZE)
    for head in range(KV_HEADS):
        mine = query.view(KV_HEADS, -1, SIZE)[head]
        keys, values = both[:, head].split(SIZE, dim=-1)
        pages = [torch.arange(length)[start : start + PAGE] for start in range(0, length, PAGE)]
        budget = SCHEDULE.pages[min((length - 1) // SCHEDULE.bin_tokens, 2)]
        read = set(range(len(pages)))
        if sparse and budget < len(pages):
            scores = [float(mine.mean(0) @ keys[page].sum(0)) for page in pages]
            middle = sorted(range(1, len(pages) - 1), key=lambda page: -scores[page])
            read = {0, len(pages) - 1, *middle[: budget - 2]}
        seen = torch.cat([pages[page] for page in sorted(read)])
        weights = (mine @ keys[seen].T * SIZE**-0.5).softmax(-1)
        out[head * 2 : head * 2 + 2] = weights @ values[seen]
    return out


def test_each_row_reads_what_it_may(layer: SparseFlashAttention, common: CommonAttentionMetadata) -> None:
    cache, rows = filled(common, layer)
    told = divided(stock(common), common, KV_HEADS, torch.device("cpu"))
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(common.num_actual_tokens + 3, HEADS, SIZE, generator=generator)  # vLLM pads batches
    output = torch.zeros(len(query), HEADS, SIZE)
    name = SimpleNamespace(layer_name="model.layers.1.self_attn.attn")
    layer.forward(name, query, query, query, cache, told, output)
    sparse = [
        row for row, (length, size, dense) in enumerate(ROWS) if size == 1 and not dense and length != 150
    ]
    at = 0
    for row, (length, size, _) in enumerate(ROWS):
        for back in range(size)[::-1]:
            found = expected(query[at], rows[row][: length - back], sparse=row in sparse)
            torch.testing.assert_close(output[at], found, atol=1e-5, rtol=1e-4)
            at += 1
    assert not output[at:].any()
    # The check can tell: dense attention is something else where pages were left out.
    far = expected(query[0], rows[0], sparse=False)
    assert not torch.allclose(output[0], far, atol=1e-2)


def test_the_first_layers_and_an_engine_without_a_schedule_are_left_to_vllm(
    layer: SparseFlashAttention, common: CommonAttentionMetadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(
        sparse_flash_attention.FlashAttentionImpl, "forward", lambda *args: calls.append(args[6])
    )
    told = divided(stock(common), common, KV_HEADS, torch.device("cpu"))
    cache = torch.zeros(BLOCKS, KV_HEADS, PAGE, 2 * SIZE)
    query = torch.zeros(common.num_actual_tokens, HEADS, SIZE)
    first = SimpleNamespace(layer_name="model.layers.0.self_attn.attn")
    layer.forward(first, query, query, query, cache, told, query)
    monkeypatch.setattr(EngineState, "schedule", None)
    plain = divided(stock(common), common, KV_HEADS, torch.device("cpu"))
    assert plain.sparse is None
    second = SimpleNamespace(layer_name="model.layers.1.self_attn.attn")
    layer.forward(second, query, query, query, cache, plain, query)
    assert calls == [told, plain]
    assert all(
        getattr(plain, one.name) is getattr(told, one.name)
        for one in fields(FlashAttentionMetadata)
        if one.name in ("block_table", "seq_lens", "slot_mapping")
    )


def test_a_step_never_waits_for_the_device(
    layer: SparseFlashAttention, common: CommonAttentionMetadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors without values: whatever looked at one would raise."""
    shapes = []

    def flash(q: Tensor, k: Tensor, block_table: Tensor, **named: Any) -> None:
        shapes.append((tuple(q.shape), tuple(k.shape), tuple(block_table.shape)))

    monkeypatch.setattr(sparse_flash_attention, "flash_attn_varlen_func", flash, raising=False)
    common.block_table_tensor = common.block_table_tensor.to("meta")
    common.seq_lens = common.seq_lens.to("meta")
    told = divided(stock(common), common, KV_HEADS, torch.device("meta"))
    tokens = common.num_actual_tokens
    query, output = (torch.zeros(tokens, HEADS, SIZE, device="meta") for _ in range(2))
    key = torch.zeros(tokens, KV_HEADS, SIZE, device="meta")
    cache = torch.zeros(BLOCKS, KV_HEADS, PAGE, 2 * SIZE, device="meta")
    layer.landmarks = torch.zeros(BLOCKS + 1, KV_HEADS, SIZE, device="meta")
    add_keys(layer.landmarks, torch.zeros(tokens, dtype=torch.int64, device="meta"), key, PAGE)
    layer.forward(SimpleNamespace(layer_name="layers.5.attn"), query, key, key, cache, told, output)
    with pytest.raises((RuntimeError, NotImplementedError)):
        output.sum().item()  # the check can tell
    others, sparse = shapes
    assert others == ((14, HEADS, SIZE), (BLOCKS, PAGE, KV_HEADS, SIZE), (3, 16))
    # Three rows of two heads, each with the heads of queries that share its keys; six pages at most.
    assert sparse == ((6, 2, SIZE), (BLOCKS * KV_HEADS, PAGE, 1, SIZE), (6, 6))


def test_landmarks_are_those_of_the_engine_on_cpus() -> None:
    random = np.random.default_rng(0)
    ours = torch.zeros(BLOCKS + 1, KV_HEADS, SIZE)
    theirs = np.zeros((BLOCKS, KV_HEADS, SIZE), np.float32)
    begun: dict[int, int] = {}
    for _ in range(200):
        slots = []
        for block in random.choice(BLOCKS, 5, replace=False).tolist():
            at = begun.get(block, 0) % PAGE if random.random() < 0.8 else 0
            stop = min(PAGE, at + int(random.integers(1, 9)))
            slots += [block * PAGE + place for place in range(at, stop)]
            begun[block] = stop
        slots += [-1] * int(random.integers(0, 3))
        keys = random.standard_normal((len(slots) + 2, KV_HEADS, SIZE)).astype(np.float32)
        add_keys(ours, torch.tensor(slots), torch.from_numpy(keys), PAGE)
        numba_pages.add_keys(theirs, np.array(slots), keys, PAGE)
        np.testing.assert_allclose(ours[:-1].numpy(), theirs, atol=1e-5)


def test_unknown_lengths_and_layers_that_need_every_page_are_refused(
    layer: SparseFlashAttention, common: CommonAttentionMetadata
) -> None:
    common.seq_lens_cpu_upper_bound = None
    with pytest.raises(RuntimeError, match="does not tell the lengths"):
        divided(stock(common), common, KV_HEADS, torch.device("cpu"))
    with pytest.raises(Exception, match="the model has a sliding window"):
        SparseFlashAttention(HEADS, SIZE, 1.0, KV_HEADS, None, 64, "auto")
    with pytest.raises(Exception, match="the model has ALiBi slopes"):
        SparseFlashAttention(HEADS, SIZE, 1.0, KV_HEADS, [0.5] * HEADS, None, "auto")
