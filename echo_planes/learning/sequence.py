"""Sequence parallelism: ranks that share every row (DeepSpeed-Ulysses, Jacobs et al. 2023, section 3).

Each rank of a group holds an equal run of every row's positions, so that none holds a whole long answer. Only
attention looks at other positions. Before it, the ranks exchange theirs for all positions of a share of the
heads; after it, they exchange back. At the end each rank gets the logprobs that the others have computed, as
constants: its gradient is that of its own positions, and the sum over ranks that of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from echo_planes.learning.meeting import MEETING_LIMIT


@dataclass(frozen=True, slots=True)
class Share:
    """Share of one rank in a micro-batch. M: predictors in all, m: those at its positions."""

    token_ids: Tensor  # (rows, row_len / size)
    position_ids: Tensor  # like token_ids
    predictors: Tensor  # (m,) flat positions in token_ids
    targets: Tensor  # (m,)
    mine: Tensor  # (M,) bool


class SequenceGroup:
    """Ranks that share the rows with this one.

    Args:
        group: their process group.
        index, size: place of this rank among them, and their number.
    """

    def __init__(self, group: Any, index: int, size: int) -> None:
        self.group = group
        self.index = index
        self.size = size

    @classmethod
    def joined(cls, rank: int, world_size: int, size: int) -> SequenceGroup | None:
        """Make the groups of `size` successive ranks, and return this rank's; None if each is alone.

        Collective over all ranks.
        """
        if size == 1:
            return None
        firsts = range(0, world_size, size)
        groups = [
            torch.distributed.new_group(list(range(first, first + size)), timeout=MEETING_LIMIT)
            for first in firsts
        ]
        return cls(groups[rank // size], rank % size, size)

    def leave(self) -> None:
        """Drop the process group, whose threads live as long as it. No model can use the group afterwards."""
        self.group = None

    def share(self, token_ids: Tensor, position_ids: Tensor, predictors: Tensor, targets: Tensor) -> Share:
        """Return this rank's positions of a micro-batch; its row length is a multiple of `size`."""
        row_len = token_ids.shape[1]
        part = row_len // self.size
        first = self.index * part
        row, column = predictors // row_len, predictors % row_len
        mine = column // part == self.index
        return Share(
            token_ids[:, first : first + part],
            position_ids[:, first : first + part],
            (row * part + column - first)[mine],
            targets[mine],
            mine,
        )

    def gathered(self, values: Tensor, mine: Tensor) -> Tensor:
        """Return the values (M,) of all ranks, from this rank's (m,), through which alone gradients flow."""
        own = torch.zeros(mine.shape, dtype=values.dtype, device=values.device).masked_scatter(mine, values)
        whole = own.detach().clone()
        torch.distributed.all_reduce(whole, group=self.group)
        return torch.where(mine, own, whole)

    def heads_shared(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange positions for heads: whole rows of a share of the heads.

        Args:
            query, key, value: (rows, heads, row_len / size, head size); keys and values may have fewer heads.

        Returns:
            The three as (rows, heads / size, row_len, head size).
        """
        if key.shape[1] % self.size:
            times = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(times, dim=1) for x in (key, value))
        return self._heads_shared(query), self._heads_shared(key), self._heads_shared(value)

    def _heads_shared(self, x: Tensor) -> Tensor:
        """Turn (rows, heads, positions / size, head size) into (rows, heads / size, positions, head size)."""
        rows, heads, part, width = x.shape
        sent = x.reshape(rows, self.size, heads // self.size, part, width).movedim(1, 0)
        got = _Exchange.apply(sent.contiguous(), self.group)  # type: ignore[no-untyped-call]
        # (from rank, rows, heads / size, part, width): ranks hold successive positions
        whole: Tensor = got.movedim(0, 2).reshape(rows, heads // self.size, self.size * part, width)
        return whole

    def positions_shared(self, x: Tensor) -> Tensor:
        """Turn (rows, heads / size, positions, head size) into (rows, positions / size, heads, head size)."""
        rows, heads, positions, width = x.shape
        sent = x.reshape(rows, heads, self.size, positions // self.size, width).movedim(2, 0)
        got = _Exchange.apply(sent.contiguous(), self.group)  # type: ignore[no-untyped-call]
        # (from rank, rows, heads / size, part, width): ranks hold successive heads
        whole: Tensor = got.movedim(0, 1).reshape(rows, self.size * heads, -1, width).transpose(1, 2)
        return whole.contiguous()


class _Exchange(torch.autograd.Function):
    """Exchange among the ranks of a group: entry i along the first axis goes to rank i, and comes from it."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _exchanged(sent, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _exchanged(gradients[0].contiguous(), ctx.group), None


def _exchanged(sent: Tensor, group: Any) -> Tensor:
    got = torch.empty_like(sent)
    torch.distributed.all_to_all_single(got, sent, group=group)
    return got
