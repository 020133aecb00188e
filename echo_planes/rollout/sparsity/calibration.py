"""Calibration of a schedule: the smallest budget of each bin that keeps the target (Sparrow 3.2)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from echo_planes.rollout.sparsity.acceptance import Histogram, share_bounds

LEAST_ANSWERS = 32  # audited in a bin, without which it has no figure
DEVIATIONS = 1.96  # standard errors on either side: 95 %


@dataclass(frozen=True, slots=True)
class Cell:
    """Acceptance of the tokens of one bin under one budget."""

    answers: int
    tail: float  # 5th percentile
    mean: float
    share: tuple[float, float]  # bounds (95 %) of the share of tokens below the target
    is_kept: bool  # whether the target is kept beyond doubt: no bound of that share is above what may be


@dataclass(slots=True)
class Surface:
    """Acceptance by budget and bin.

    Args:
        bin_tokens: sequence lengths in a bin.
        target: least acceptance of a token, but for a share of `tail_share`.
        tail_share: largest share of a bin's tokens below it.
    """

    bin_tokens: int
    target: float
    tail_share: float
    _histograms: dict[int, Histogram] = field(default_factory=lambda: defaultdict(Histogram))
    # By budget and bin: tokens of each answer, and those of them below the target.
    _answers: dict[tuple[int, int], list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))

    def add(self, pages: int, context_tokens: int, alphas: Sequence[float]) -> None:
        """Count an answer, decoded with this budget, as an `Audit` has it."""
        alpha = np.asarray(alphas)
        bins = (context_tokens + np.arange(len(alpha))) // self.bin_tokens
        self._histograms[pages].add(bins.tolist(), alphas)
        for place in np.unique(bins).tolist():
            here = alpha[bins == place]
            self._answers[pages, place].append((len(here), int((here < self.target).sum())))

    @property
    def budgets(self) -> list[int]:
        return sorted(self._histograms)

    @property
    def num_bins(self) -> int:
        return 1 + max((place for _, place in self._answers), default=-1)

    def cell(self, pages: int, place: int) -> Cell | None:
        """Return the figures of a budget in a bin; None: fewer than two answers."""
        answers = self._answers.get((pages, place), [])
        if len(answers) < 2:
            return None
        histogram, share = self._histograms[pages], share_bounds(answers, DEVIATIONS)
        is_kept = len(answers) >= LEAST_ANSWERS and share[1] <= self.tail_share
        return Cell(len(answers), histogram.tail(place), histogram.mean(place), share, is_kept)

    def schedule(self, longest_tokens: int) -> list[int]:
        """Return the budget of each bin in pages, never falling; 0, all pages, where none keeps the target.

        Longer sequences need larger budgets, so a bin with too few answers takes that of the next longer one
        that has enough. Behind the last of these, everything is dense.
        """
        last = self.num_bins * self.bin_tokens < longest_tokens
        found = [self._least(place) for place in range(self.num_bins)] + [0] * last
        for place in reversed(range(len(found) - 1)):
            if found[place] is None:
                found[place] = found[place + 1]
        chosen: list[int] = []
        for pages in found:
            before = chosen[-1] if chosen else 1
            chosen.append(max(before, pages) if pages and before else 0)
        return chosen

    def _least(self, place: int) -> int | None:
        """Return the smallest budget that keeps the target in a bin; 0: none does; None: too few answers."""
        cells = {pages: cell for pages in self.budgets if (cell := self.cell(pages, place))}
        if all(cell.answers < LEAST_ANSWERS for cell in cells.values()):
            return None
        return min((pages for pages, cell in cells.items() if cell.is_kept), default=0)
