"""The prompt stream: which prompt comes next, and the ones that came back."""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class PromptCursor:
    """Hands out prompt indices 0, 1, 2, ... and takes back those whose work was lost.

    Returned indices go out again first, smallest first, so that no prompt is skipped.
    """

    def __init__(self, next_index: int = 0, returned: Iterable[int] = ()) -> None:
        self._next_index = next_index
        self._returned = list(returned)
        heapq.heapify(self._returned)

    @property
    def next_index(self) -> int:
        """The smallest index never handed out."""
        return self._next_index

    @property
    def returned(self) -> tuple[int, ...]:
        """Indices waiting to go out again, ascending."""
        return tuple(sorted(self._returned))

    def take(self) -> int:
        """The next index to work on."""
        if self._returned:
            return heapq.heappop(self._returned)
        self._next_index += 1
        return self._next_index - 1

    def give_back(self, index: int) -> None:
        """An index whose work ended without an accepted result."""
        heapq.heappush(self._returned, index)
