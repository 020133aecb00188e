"""Attention over a row of trajectories that share their histories: each common history once, and no mask.

A row is a forest of segments in preorder. A segment is a run of tokens, and its descendants, which continue
it, come right behind it:

    prompt | answer 1 | answer 2 | answer 3        one group: a segment with three descendants

A token attends to its own segment up to itself, and to all of the segments above. So torch's own kernels are
called for each segment on itself, causally, and for the descendants of each inner segment on that segment. A
token's results of several calls are merged by the logarithms of their sums, as FlashAttention merges blocks
(Dao et al. 2022, section 3.1). The backward kernels get the merged results, and so compute exact gradients:
from the merged sums they find a key's weight among all keys of a token, not only those of their own call.

On CPUs there is a call for each segment on itself (one for all short segments of a length), and one for the
descendants of each inner segment; on GPUs one for all segments, and one more for each level of the forest
(not run on a GPU).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from echo_planes.learning.packing import Segment
from echo_planes.learning.sequence import SequenceGroup

ATTENTION = "echo_planes"  # its name among transformers' implementations of attention
_SHORT_TOKENS = 8  # of a segment: copying longer ones together takes longer than calls of their own


class Forest:
    """Structure of a row of tokens, for the layers of a model.

    Args:
        segments: of the row, in preorder; they cover it.
        device: of the row.
        sequence: ranks that share the row with this one.
    """

    def __init__(
        self, segments: Sequence[Segment], device: torch.device, sequence: SequenceGroup | None = None
    ) -> None:
        self.sequence = sequence
        self.calls = _calls(segments) if device.type == "cpu" else _joined_calls(segments, device)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    forest: Forest | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **named: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return attention as transformers' models call it; without a forest, plain causal attention.

    Args:
        module: the layer.
        query, key, value: (1, heads, tokens, head size); keys and values may have fewer heads.
        attention_mask: None; what a token sees follows from the forest.
        scaling: of the products of queries and keys.

    Returns:
        The outputs (1, tokens, heads, head size), and no weights.

    Raises:
        RuntimeError: something is asked for that attention over a forest does not do.
    """
    if forest is None:
        found: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **named
        )
        return found
    if len(query) != 1 or dropout or attention_mask is not None:
        raise RuntimeError("attention over a forest takes one row, and neither dropout nor a mask")
    width, scale = value.shape[-1], query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.shape[-1] > width:  # the kernels have one size for all heads
        value = nn.functional.pad(value, (0, query.shape[-1] - width))
    sequence = forest.sequence
    if sequence is not None:
        query, key, value = sequence.heads_shared(query, key, value)
    rows = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    output: Tensor = _TreeAttention.apply(*rows, forest.calls, scale)  # type: ignore[no-untyped-call]
    output = output[None] if sequence is None else sequence.positions_shared(output.transpose(0, 1)[None])
    return output[..., :width], None


AttentionInterface.register(ATTENTION, attend)


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a kernel: what queries attend to what keys, each a run or an index of tokens.

    On CPUs a call holds `count` pairs of one size. On GPUs it holds several pairs of any size; `query_bounds`
    and `key_bounds` (pairs + 1,) int32 part them.
    """

    queries: slice | Tensor
    keys: slice | Tensor
    causal: bool
    count: int = 1
    query_bounds: Tensor | None = None
    key_bounds: Tensor | None = None
    most_queries: int = 0
    most_keys: int = 0


def _calls(segments: Sequence[Segment]) -> tuple[list[_Call], list[_Call]]:
    """Return the calls of segments on themselves, which hold each token once, and on segments above."""
    own = []
    short: dict[int, list[int]] = {}  # starts of the segments of a length
    for one in segments:
        if one.stop - one.start > _SHORT_TOKENS:
            own.append(_Call(run := slice(one.start, one.stop), run, True))
        else:
            short.setdefault(one.stop - one.start, []).append(one.start)
    for size, starts in short.items():
        rows = (torch.tensor(starts)[:, None] + torch.arange(size)).flatten()
        own.append(_Call(rows, rows, True, len(starts)))
    inner = (one for one in segments if one.end > one.stop)
    return own, [_Call(slice(one.stop, one.end), slice(one.start, one.stop), False) for one in inner]


def _joined_calls(segments: Sequence[Segment], device: torch.device) -> tuple[list[_Call], list[_Call]]:
    """Return `_calls` as one call of all segments on themselves, and one for each level of the forest."""
    everything = [(one.start, one.stop) for one in segments]
    inner = [one for one in segments if one.end > one.stop]
    levels = [[one for one in inner if one.depth == depth] for depth in sorted({one.depth for one in inner})]
    return [_joined(everything, everything, True, device)], [
        _joined([(x.stop, x.end) for x in level], [(x.start, x.stop) for x in level], False, device)
        for level in levels
    ]


def _joined(
    queries: list[tuple[int, int]], keys: list[tuple[int, int]], causal: bool, device: torch.device
) -> _Call:
    def index(runs: list[tuple[int, int]]) -> tuple[Tensor, Tensor, int]:
        sizes = torch.tensor([stop - start for start, stop in runs])
        bounds = nn.functional.pad(sizes.cumsum(0), (1, 0)).to(torch.int32)
        places = torch.cat([torch.arange(start, stop) for start, stop in runs])
        return places.to(device), bounds.to(device), int(sizes.max())

    (rows, row_bounds, most), (columns, column_bounds, longest) = index(queries), index(keys)
    return _Call(rows, columns, causal, 1, row_bounds, column_bounds, most, longest)


class _TreeAttention(torch.autograd.Function):
    """Attention of queries (tokens, heads, size) to keys and values (tokens, some heads, size)."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        calls: tuple[list[_Call], list[_Call]],
        scale: float,
    ) -> Tensor:
        own, above = calls
        outputs = torch.empty(query.shape, dtype=torch.float32, device=query.device)
        sums = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)  # their logarithms
        for call in own:
            made, log_sum = _forward(call, query, key, value, scale)
            _put(outputs, call.queries, made.float())
            _put(sums, call.queries, log_sum)
        for call in above:
            more, log_sum = _forward(call, query, key, value, scale)
            before = sums[call.queries]
            share = torch.sigmoid(log_sum - before)  # of the new results in those of both
            outputs[call.queries] = torch.lerp(outputs[call.queries], more.float(), share[..., None])
            sums[call.queries] = torch.logaddexp(before, log_sum)
        outputs = outputs.to(query.dtype)
        ctx.save_for_backward(query, key, value, outputs, sums)
        ctx.calls, ctx.scale = calls, scale
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, outputs, sums = ctx.saved_tensors
        # In bf16 the kernel for CPUs takes up to twenty times as long, and is never faster.
        dtype = torch.float32 if query.device.type == "cpu" else query.dtype
        gradient, q, k, v, out = (x.to(dtype).contiguous() for x in (*gradients, query, key, value, outputs))
        found = [torch.empty_like(x) for x in (q, k, v)]
        own, above = ctx.calls
        for call in own:
            parts = _backward(call, gradient, q, k, v, out, sums, ctx.scale)
            for whole, part in zip(found, parts, strict=True):
                _put(whole, call.keys, part)
        for call in above:
            parts = _backward(call, gradient, q, k, v, out, sums, ctx.scale)
            for whole, rows, part in zip(found, (call.queries, call.keys, call.keys), parts, strict=True):
                if isinstance(rows, slice):
                    whole[rows].add_(part)
                else:
                    whole.index_add_(0, rows, part)
        return (*(x.to(query.dtype) for x in found), None, None)


def _forward(call: _Call, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return outputs (queries, heads, size) and log-sums (queries, heads) of one call."""
    query, key, value = _rows(query, call.queries), _rows(key, call.keys), _rows(value, call.keys)
    if call.query_bounds is None:
        output, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(_heads_first(x, call) for x in (query, key, value)),
            0.0,
            call.causal,
            attn_mask=None,
            scale=scale,
        )
        return _tokens_first(output), _tokens_first(sums)
    bounds = (call.query_bounds, call.key_bounds, call.most_queries, call.most_keys)
    output, sums, *_ = torch.ops.aten._flash_attention_forward(
        query, key, value, *bounds, 0.0, call.causal, False, scale=scale
    )
    return output, sums.transpose(0, 1)


def _backward(
    call: _Call,
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    outputs: Tensor,
    sums: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of one call's queries, keys and values, from all calls' outputs and log-sums."""
    gradient, query, outputs, sums = (_rows(x, call.queries) for x in (gradient, query, outputs, sums))
    key, value = _rows(key, call.keys), _rows(value, call.keys)
    if call.query_bounds is None:
        queries, keys, values = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(_heads_first(x, call) for x in (gradient, query, key, value, outputs)),
            _heads_first(sums, call).contiguous(),
            0.0,
            call.causal,
            attn_mask=None,
            scale=scale,
        )
        return _tokens_first(queries), _tokens_first(keys), _tokens_first(values)
    bounds = (call.query_bounds, call.key_bounds, call.most_queries, call.most_keys)
    # Without dropout the kernel does not read the state of the random numbers.
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    none = torch.zeros((), dtype=torch.uint64, device=query.device)
    found = torch.ops.aten._flash_attention_backward(
        gradient,
        query,
        key,
        value,
        outputs,
        sums.transpose(0, 1).contiguous(),
        *bounds,
        0.0,
        call.causal,
        state,
        none,
        scale=scale,
    )
    return found  # type: ignore[no-any-return]


def _rows(x: Tensor, rows: slice | Tensor) -> Tensor:
    # `x[rows]` with an index copies element by element.
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def _put(x: Tensor, rows: slice | Tensor, values: Tensor) -> None:
    if isinstance(rows, slice):
        x[rows] = values
    else:
        x.index_copy_(0, rows, values)


def _heads_first(x: Tensor, call: _Call) -> Tensor:
    """Turn (tokens, heads, ...) into (pairs, heads, tokens of a pair, ...), without a copy."""
    return x.reshape(call.count, -1, *x.shape[1:]).transpose(1, 2)


def _tokens_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(0, 1)
