"""Guard of a schedule of KV budgets: raises a budget once the audits of its bin are below target.

A bin keeps the target where at most a share of its tokens, 5 % in Sparrow (3.2), have an acceptance below it.
The budget rises a notch when that share is larger beyond doubt, and to all pages when it is for `FLOOR` of
the target. Budgets never fall, so a run is at worst as slow as a dense one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np

from echo_planes.config.kv_schedule import Schedule
from echo_planes.rollout.sparsity.acceptance import Audit, share_bounds

WINDOW = 64  # newest audited answers of a bin that count
LEAST = 16  # answers without which nothing is said
DEVIATIONS = 3.5  # standard errors beyond which there is no doubt
NOTCH = 1.5  # times as many pages
FLOOR = 0.87  # of the target: 0.75 of 0.86: the lowest target that Sparrow studies


@dataclass(frozen=True, slots=True)
class Raise:
    """Rise of a bin's budget."""

    place: int  # the bin
    before: int  # pages
    after: int  # pages; 0: all
    share: float  # lower bound of the share of tokens below the target
    allowed: float  # share of them that may be
    answers: int  # audited, in this bin

    def __str__(self) -> str:
        after = f"{self.after} pages" if self.after else "all pages"
        return (
            f"bin {self.place} reads {after}, not {self.before}: of {self.answers} audited answers at least "
            f"{self.share:.1%} of the tokens are below the target, {self.allowed:.1%} may be"
        )


@dataclass(slots=True)
class _Bin:
    since: int = 0  # number of the schedule that gave it its budget
    # Of each answer: tokens, those below the target, those below the floor.
    answers: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=WINDOW))


class Guard:
    """Guard of one run.

    Args:
        schedule: to begin with.
        target: least acceptance of a token, but for a share of `tail_share`.
        tail_share: largest share of a bin's tokens below it.
        longest_tokens: most tokens of a sequence.
    """

    def __init__(self, schedule: Schedule, target: float, tail_share: float, longest_tokens: int) -> None:
        self.schedule = schedule
        self._target = target
        self._tail_share = tail_share
        self._longest_tokens = longest_tokens
        self._bins = [_Bin(schedule.number) for _ in schedule.pages]

    def add(self, audit: Audit) -> None:
        """Count an audited answer, in every bin whose present budget it was decoded by."""
        alphas = np.array(audit.alphas)
        bins = self.schedule.bins(audit.context_tokens + 1 + np.arange(len(alphas)))
        for place, one in enumerate(self._bins):
            here = alphas[bins == place]
            if len(here) and self.schedule.number >= audit.schedule >= one.since:
                below, beyond = (int((here < limit).sum()) for limit in (self._target, FLOOR * self._target))
                one.answers.append((len(here), below, beyond))

    def raises(self) -> list[Raise]:
        """Return the rises that the audits ask for."""
        found = []
        for place, (one, pages) in enumerate(zip(self._bins, self.schedule.pages, strict=True)):
            if not pages or len(one.answers) < LEAST:
                continue
            share, floor = (
                share_bounds([(row[0], row[column]) for row in one.answers], DEVIATIONS)[0]
                for column in (1, 2)
            )
            allowed = self._tail_share
            if share > allowed:
                after = 0 if floor > allowed else self._notch(place, pages)
                found.append(Raise(place, pages, after, share, allowed, len(one.answers)))
        return found

    def _notch(self, place: int, pages: int) -> int:
        schedule, after = self.schedule, max(pages + 1, int(pages * NOTCH))
        is_last = place == len(schedule.pages) - 1
        longest = self._longest_tokens if is_last else (place + 1) * schedule.bin_tokens
        return after if after * schedule.page_tokens < longest else 0

    def apply(self, raises: list[Raise]) -> Schedule:
        """Give these bins their new budgets, forget their audits, and return the new schedule."""
        pages = list(self.schedule.pages)
        for one in raises:
            pages[one.place] = one.after
        self.schedule = replace(self.schedule, pages=tuple(pages), number=self.schedule.number + 1)
        for one in raises:
            self._bins[one.place] = _Bin(self.schedule.number)
        return self.schedule
