"""Schedule of KV budgets: pages that a sampled token reads, by the length of its sequence (Sparrow, 3.2).

The cache of a sequence lies in pages of 16 or 32 tokens. A token of a sparse layer reads the first pages, the
last pages and, of those between, the ones with the highest scores (`pages`), as many as its budget allows.
Tokens are binned by the length of their sequence: under a fixed budget the tail worsens as it grows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from echo_planes.errors import ConfigError

IntArray = npt.NDArray[np.int64]
# Sparrow 3.3: of 16, 32, 64 and 128, 16 has the best tail at a given cost, 32 nearly so in long answers.
PAGE_TOKENS = (16, 32)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Budgets by bin of sequence length.

    Raises:
        ConfigError: a value is out of range.
    """

    pages: tuple[int, ...]  # budget of each bin; the last one holds for all longer sequences; 0: dense
    number: int = 0  # of the schedule, to tell one from another
    page_tokens: int = 16
    bin_tokens: int = 2000
    first_pages: int = 1  # always read
    last_pages: int = 2  # always read; the newest token lies in the last one
    dense_layers: int = 2  # first layers, which read everything

    def __post_init__(self) -> None:
        for name, least in (
            ("number", 0),
            ("bin_tokens", 1),
            ("first_pages", 0),
            ("last_pages", 1),
            ("dense_layers", 0),
        ):
            if (value := getattr(self, name)) < least:
                raise ConfigError(f"sparse.{name}={value}: set at least {least}")
        if self.page_tokens not in PAGE_TOKENS:
            raise ConfigError(
                f"sparse.page_tokens={self.page_tokens}: there are {PAGE_TOKENS[0]} and {PAGE_TOKENS[1]}"
            )
        if not self.pages:
            raise ConfigError("sparse.schedule: it has no bins; give at least one budget")
        kept = self.first_pages + self.last_pages
        for place, pages in enumerate(self.pages):
            if pages and pages < kept:
                raise ConfigError(
                    f"sparse.schedule: bin {place} reads {pages} pages, but the first {self.first_pages} "
                    f"and the last {self.last_pages} are always read; give at least {kept}, or 0 for dense"
                )

    def bins(self, lengths: IntArray) -> IntArray:
        """Return the bin of each sequence length (n,), in tokens with the newest."""
        found: IntArray = np.minimum((lengths - 1) // self.bin_tokens, len(self.pages) - 1)
        return found

    def pages_of(self, lengths: IntArray) -> IntArray:
        """Return the pages that sequences of these lengths (n,) have."""
        there: IntArray = -(-lengths // self.page_tokens)
        return there

    def budgets(self, lengths: IntArray) -> IntArray:
        """Return the pages that the newest token of each length (n,) reads: its budget or all there are."""
        there = self.pages_of(lengths)
        budget = np.array(self.pages, np.int64)[self.bins(lengths)]
        read: IntArray = np.where(budget > 0, np.minimum(budget, there), there)
        return read

    def read_tokens(self, lengths: IntArray) -> IntArray:
        """Return the tokens in the pages that the newest token of each length (n,) reads."""
        left_out = self.pages_of(lengths) - self.budgets(lengths)  # each of them full
        read: IntArray = lengths - left_out * self.page_tokens
        return read
