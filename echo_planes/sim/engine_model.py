"""Model of an inference engine: throughput grows with the batch and levels off.

All running samples decode side by side at the same rate. So one number, the *mark*, gives the progress of
every sample: the tokens of an imagined sample that has run since the start. The kernel needs an event only
where a group ends; `advance` handles the ends of single samples between two events.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

_SAME_TOKENS = 1e-6  # tolerance for rounding: samples end at whole tokens


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Throughput of one worker: peak * b / (b + half) tokens/s with b samples running."""

    peak_tokens_per_s: float
    half_batch: float  # samples at which half of the peak is reached; 0: a single sample reaches the peak
    prefill_tokens_per_s: float | None = None  # prompts and partial rollouts taken in; None: at once

    def tokens_per_s(self, batch: float) -> float:
        """Return the tokens/s of `batch` running samples together."""
        return self.peak_tokens_per_s * batch / (batch + self.half_batch) if batch else 0.0


@dataclass(slots=True)
class _Running:
    """Running group: the marks at which it began and at which each of its samples ends."""

    begun: float
    ends: list[float]
    have: tuple[int, ...]  # tokens of each sample that other workers made


class Engine:
    """Engine with its running groups.

    Args:
        spec: its throughput.
        max_groups: places.
        now_s: time of its start.
    """

    def __init__(self, spec: EngineSpec, max_groups: int, now_s: float) -> None:
        self._spec = spec
        self._max_groups = max_groups
        self._now_s = now_s
        self._peak = spec.peak_tokens_per_s  # at its present speed; each of b samples gets peak / (b + half)
        self._paused = False
        self.clock_rate = 1.0  # seconds that its machine's clock counts in a second
        self._prefill_s = 0.0  # seconds of prefill before the next token
        self._mark = 0.0  # tokens of an imagined sample that has run since the start
        self._ends: list[float] = []  # end marks of all running samples, ascending
        self._groups: dict[str, _Running] = {}
        self._group_ends: list[tuple[float, str]] = []  # (end mark, group), ascending
        self.tokens = 0.0  # decoded so far
        self.busy_s = 0.0  # seconds with at least one sample running
        self.saturated_s = 0.0  # seconds without a free place, by its machine's clock
        self.saturated_tokens = 0.0

    @property
    def room(self) -> int:
        """Number of groups that the engine can take."""
        return self._max_groups - len(self._groups)

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    @property
    def mark(self) -> float:
        """Mark now, tokens: a difference of two marks is the tokens of each sample that ran in between."""
        return self._mark

    def add(self, key: str, lengths: Sequence[int], have: Sequence[int] = (), prompt_tokens: int = 0) -> None:
        """Begin a group now (see `advance`). Its prefill delays all samples.

        Args:
            key: its name.
            lengths: tokens at which its samples end.
            have: tokens of each sample that other workers made; empty: none.
            prompt_tokens: of its prompt, whose prefill all samples share.
        """
        if self._spec.prefill_tokens_per_s is not None:
            self._prefill_s += (prompt_tokens + sum(have)) / self._spec.prefill_tokens_per_s
        had, mark = tuple(have), self._mark
        if any(had):
            left = [length - done for length, done in zip(lengths, had, strict=True)]
            ends = [mark + more if more > 0 else mark for more in left]
            self._ends += [end for end in ends if end > mark]
        else:  # the usual case
            ends = [mark + length for length in lengths]
            self._ends += ends
            had = (0,) * len(ends)
        self._ends.sort()
        self._groups[key] = _Running(mark, ends, had)
        insort(self._group_ends, (max(ends), key))

    def remove(self, key: str) -> tuple[int, ...]:
        """Remove a group that has not ended; return each sample's tokens, those it came with included."""
        group = self._groups.pop(key)
        self._group_ends.remove((max(group.ends), key))
        for end in group.ends:
            if end > self._mark + _SAME_TOKENS:
                self._ends.remove(end)
        return self._tokens_of(group)

    def progress(self, key: str) -> tuple[int, ...]:
        """Return the tokens that each sample of a running group has by now."""
        return self._tokens_of(self._groups[key])

    def advance(self, now_s: float) -> None:
        """Decode up to a time. Callers advance the engine to the present before they change it.

        A time in the past changes nothing.
        """
        left_s = now_s - self._now_s
        if left_s <= 0:
            return
        self._now_s = now_s
        if self._paused:
            return
        full, before = len(self._groups) == self._max_groups, self.tokens
        if full:
            self.saturated_s += left_s * self.clock_rate
        if self._prefill_s:
            prefill_s = min(self._prefill_s, left_s)
            self._prefill_s -= prefill_s
            self.busy_s += prefill_s
            left_s -= prefill_s
        ends, mark, tokens, busy_s = self._ends, self._mark, self.tokens, self.busy_s
        peak, half = self._peak, self._spec.half_batch
        num_ended, batch = 0, len(ends)
        while batch and left_s > 0:
            rate = peak / (batch + half)
            part_s = min((ends[num_ended] - mark) / rate, left_s)
            mark += part_s * rate
            tokens += part_s * rate * batch
            busy_s += part_s
            left_s -= part_s
            while batch and ends[num_ended] <= mark + _SAME_TOKENS:
                num_ended, batch = num_ended + 1, batch - 1
        del ends[:num_ended]
        self._mark, self.tokens, self.busy_s = mark, tokens, busy_s
        if full:
            self.saturated_tokens += self.tokens - before

    def take_ended(self) -> list[str]:
        """Remove and return the groups whose samples have all ended, in the order of their ends."""
        ended = []
        while self._group_ends and self._group_ends[0][0] <= self._mark + _SAME_TOKENS:
            ended.append(self._group_ends.pop(0)[1])
            del self._groups[ended[-1]]
        return ended

    def next_end_s(self) -> float:
        """Return the time at which the next group ends if nothing else happens; infinite if none does."""
        if self._paused or not self._group_ends:
            return math.inf
        target, mark, batch = self._group_ends[0][0], self._mark, len(self._ends)
        when_s = self._now_s + self._prefill_s
        peak, half = self._peak, self._spec.half_batch
        for end in self._ends:
            if end > target:
                break
            when_s += (end - mark) / (peak / (batch + half))
            mark, batch = end, batch - 1
        return when_s

    def set_speed(self, factor: float) -> None:
        """Set the engine's rate to a multiple of its usual rate from now on."""
        self._peak = factor * self._spec.peak_tokens_per_s

    def pause(self, paused: bool) -> None:
        """Stop decoding from now on, or resume."""
        self._paused = paused

    def _tokens_of(self, group: _Running) -> tuple[int, ...]:
        return tuple(
            had + math.floor(min(self._mark, end) - group.begun + _SAME_TOKENS)
            for had, end in zip(group.have, group.ends, strict=True)
        )
