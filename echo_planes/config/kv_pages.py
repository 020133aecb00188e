"""Choice of the pages that tokens read, on tensors: as `rollout.sparsity.pages` makes it, for any device.

The first pages, the last ones, and of those between the ones with the highest scores (Sparrow, 3.2).
"""

from __future__ import annotations

import torch
from torch import Tensor


def landmarks(keys: Tensor, page_tokens: int) -> Tensor:
    """Return the sums of the keys of each page, (heads, pages, size) float32.

    Args:
        keys: (heads, tokens, size). The last page may be partly filled.
        page_tokens: of a page.
    """
    heads, tokens, size = keys.shape
    padded = torch.nn.functional.pad(keys.float(), (0, 0, 0, -tokens % page_tokens))
    return padded.view(heads, -1, page_tokens, size).sum(2)


def chosen_pages(scores: Tensor, pages: Tensor, budgets: Tensor, first_pages: int, last_pages: int) -> Tensor:
    """Return, (heads, rows, n) bool, the pages that each head of each row reads.

    Of equal scores the earlier page is read.

    Args:
        scores: (heads, rows, n) float32, of each page for the mean query of the heads that share its keys.
        pages: (rows,) int64, pages that each row's sequence has, at most n.
        budgets: (rows,) int64, pages to read: at least `first_pages` + `last_pages`, or all.
        first_pages, last_pages: read whatever their scores.
    """
    place = torch.arange(scores.shape[-1], device=scores.device)
    there = place < pages[:, None]
    always = there & ((place < first_pages) | (place >= pages[:, None] - last_pages))
    free = (budgets - always.sum(-1))[:, None]
    open_ = there & ~always
    # A score that is no number, of a diverged policy, counts as the least.
    least = torch.finfo(scores.dtype).min
    between = scores.nan_to_num(nan=least, neginf=least).masked_fill(~open_, -torch.inf)
    order = between.sort(dim=-1, descending=True, stable=True).indices
    rank = torch.empty_like(order).scatter_(-1, order, place.expand_as(order))
    found: Tensor = always | (open_ & (rank < free))
    return found
