"""Choice of the pages that sampled tokens read: the first, the last, and the best others (Sparrow, 3.2).

A page's landmark is the sum of its keys. Its score for a group of heads that share keys is the product with
their mean query. Compiled: torch would copy the landmarks of all rows before it multiplies them, 47 ms for 8
rows of 16,384 tokens and 4 heads of 64; this takes less than 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from echo_planes.config.kv_schedule import PAGE_TOKENS


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def add_keys(landmarks: Any, slots: Any, keys: Any, page_tokens: int) -> None:
    """Add keys to the landmarks of their pages. A page's first key begins it anew, whoever had its block.

    Args:
        landmarks: (blocks, heads, size) float32.
        slots: (n,) int64 places of the keys: block times `page_tokens` plus the place there; negative: none.
        keys: (n, heads, size) float32.
        page_tokens: of a page.
    """
    for row in range(min(len(slots), len(keys))):
        if slots[row] < 0:
            continue
        block = slots[row] // page_tokens
        if slots[row] % page_tokens == 0:
            landmarks[block] = keys[row]
        else:
            landmarks[block] += keys[row]


# Without "nnan" and "ninf": a diverged policy has them.
@njit(cache=True, nogil=True, fastmath={"reassoc", "contract", "nsz"})  # type: ignore[untyped-decorator]
def choose_pages(
    queries: Any,
    landmarks: Any,
    block_table: Any,
    pages: Any,
    budgets: Any,
    first_pages: int,
    last_pages: int,
    table: Any,
) -> None:
    """Write the blocks that each head of each row reads, in order; of equal scores the earlier page.

    A row's last page comes last in its budget, since it alone may be partly filled.

    Args:
        queries: (r, heads, size) float32, the mean of each group.
        landmarks: (blocks, heads, size) float32.
        block_table: (r, n) int64, the block of each page.
        pages: (r,) int64, pages of each row, at most n.
        budgets: (r,) int64, pages to read: at least `first_pages` + `last_pages`, or all.
        first_pages, last_pages: read whatever their scores.
        table: (r x heads, most) int32, written: block times heads, plus head. Beyond a budget it stays.
    """
    rows, heads, size = queries.shape
    for row in range(rows):
        count = pages[row]
        begin = min(first_pages, count)
        end = max(begin, count - last_pages)
        free = budgets[row] - begin - (count - end)
        scores = np.empty(end - begin, np.float32)
        for head in range(heads):
            least, equal = np.float32(-np.inf), end - begin  # how many of the least score are read
            if free < end - begin:
                for page in range(begin, end):
                    block = block_table[row, page]
                    total = np.float32(0.0)
                    for place in range(size):
                        total += queries[row, head, place] * landmarks[block, head, place]
                    scores[page - begin] = total
                if free > 0:
                    least = np.partition(scores, len(scores) - free)[len(scores) - free]
                    equal = free - np.sum(scores > least)
            else:
                scores[:] = 0.0
            line, at, left = row * heads + head, 0, free
            for page in range(count):
                if begin <= page < end:
                    score = scores[page - begin]
                    # `left` bounds what is written, also where scores are not numbers.
                    if left <= 0 or score < least or (score == least and equal <= 0):
                        continue
                    equal -= score == least
                    left -= 1
                table[line, at] = block_table[row, page] * heads + head
                at += 1


def warm_up() -> None:
    """Compile, which takes seconds once a machine, or load what was compiled."""
    marks, table = np.zeros((1, 1, 1), np.float32), np.zeros((1, 1), np.int32)
    one = np.ones(1, np.int64)
    add_keys(marks, one - 1, marks, PAGE_TOKENS[0])
    choose_pages(marks, marks, one[:, None] - 1, one, one, 1, 1, table)
