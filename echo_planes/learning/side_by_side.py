"""Parts of a row of tokens that a CPU computes at the same time, each on a thread of its own.

A kernel that several threads share waits for the slowest of them, thousands of times a step, and busily.
Where an engine needs one of the cores now and then, that takes more than the second thread brings. Parts of
a row wait for each other once in each direction, so that they and an engine share the cores as the system
divides them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from echo_planes.learning.packing import Segment

Scores = tuple[Tensor, Tensor]  # logprobs and entropies, both (M,)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Row:
    """Arguments of `PolicyModel.forward` for one row, or for a part of it."""

    token_ids: Tensor  # (1, tokens)
    position_ids: Tensor  # (1, tokens)
    segments: tuple[Segment, ...]
    predictors: Tensor  # (M,)
    targets: Tensor  # (M,)


class SideBySide:
    """Runs a model on the parts of a row, at most `num_parts` at a time.

    Args:
        num_parts: 2 or more.
        threads_each: of kernels, for each part. The caller's own thread has set it for itself.
    """

    def __init__(self, num_parts: int, threads_each: int) -> None:
        self._num_parts = num_parts
        self._pool = ThreadPoolExecutor(num_parts - 1, "part", torch.set_num_threads, (threads_each,))

    def __call__(self, score: Callable[[Row], Scores], row: Row, parameters: Sequence[Tensor]) -> Scores:
        """Return the scores of a row, as `score` makes them of it.

        Gradients of the parts are added up in their order, so equal rows give equal gradients.

        Args:
            score: may be called by several threads at once; applies no dropout.
            parameters: that get gradients.
        """
        parts = parts_of(row.segments, self._num_parts)
        if len(parts) < 2:
            return score(row)
        rows, places = zip(*(_part(row, start, stop) for start, stop in parts), strict=True)
        if torch.is_grad_enabled():
            scores: Scores = _Parts.apply(self, score, rows, *parameters)  # type: ignore[no-untyped-call]
        else:
            scores = _joined(self._each(torch.no_grad()(score), rows))
        order = torch.cat(places).argsort()
        return scores[0][order], scores[1][order]

    def _each(self, work: Callable[[Any], _T], given: Sequence[Any]) -> list[_T]:
        others = [self._pool.submit(work, one) for one in given[1:]]
        try:
            first = work(given[0])
        finally:
            wait(others)  # computations as long as the first
        return [first, *(one.result() for one in others)]


def parts_of(segments: Sequence[Segment], num_parts: int) -> list[tuple[int, int]]:
    """Cut a forest into at most so many runs [start, stop) of whole trees, about equally long."""
    ends = torch.tensor([one.end for one in segments if one.depth == 0])
    total = int(ends[-1])
    cuts = {int(ends[(ends - total * k / num_parts).abs().argmin()]) for k in range(1, num_parts)}
    bounds = sorted({0, *cuts, total})
    return list(itertools.pairwise(bounds))


def _part(row: Row, start: int, stop: int) -> tuple[Row, Tensor]:
    """Return the tokens [start, stop) as a row of its own, and which of the row's scores are its."""
    (places,) = torch.where((row.predictors >= start) & (row.predictors < stop))
    segments = tuple(
        replace(one, start=one.start - start, stop=one.stop - start, end=one.end - start)
        for one in row.segments
        if start <= one.start < stop
    )
    part = Row(
        row.token_ids[:, start:stop],
        row.position_ids[:, start:stop],
        segments,
        row.predictors[places] - start,
        row.targets[places],
    )
    return part, places


def _joined(scores: Sequence[Scores]) -> Scores:
    return torch.cat([one for one, _ in scores]), torch.cat([one for _, one in scores])


class _Parts(torch.autograd.Function):
    """Scores of parts, each with a graph of its own, which its thread goes back through."""

    @staticmethod
    def forward(
        ctx: Any,
        side_by_side: SideBySide,
        score: Callable[[Row], Scores],
        rows: Sequence[Row],
        *parameters: Tensor,
    ) -> Scores:
        scores = side_by_side._each(torch.enable_grad()(score), rows)
        ctx.side_by_side, ctx.parameters = side_by_side, parameters
        ctx.logprobs = [logprobs for logprobs, _ in scores]
        logprobs, entropies = _joined([(one.detach(), entropy) for one, entropy in scores])
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        sizes = [len(one) for one in ctx.logprobs]

        def go_back(pair: tuple[Tensor, Tensor]) -> tuple[Tensor | None, ...]:
            logprobs, gradient = pair
            made: tuple[Tensor | None, ...] = torch.autograd.grad(
                logprobs, ctx.parameters, gradient, allow_unused=True
            )
            return made

        pairs = list(zip(ctx.logprobs, torch.split(gradients[0], sizes), strict=True))
        found = ctx.side_by_side._each(go_back, pairs)
        ctx.logprobs = None
        total: list[Tensor | None] = []
        for parts in zip(*found, strict=True):
            known = [one for one in parts if one is not None]
            for more in known[1:]:
                known[0].add_(more)
            total.append(known[0] if known else None)
        return None, None, None, *total
