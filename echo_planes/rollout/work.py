"""Leases in progress, and the load of their worker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from echo_planes.config.fleet import WorkerConfig
from echo_planes.config.schema import SamplingConfig
from echo_planes.rollout.plateau import BatchProfile
from echo_planes.types import Lease, LeaseTokens, PartialRollout, Sample, joined

CPU_GROUPS = 16  # prompts in flight at once by default, of an engine on CPUs


@dataclass(eq=False)
class Work:
    """Lease in progress."""

    lease: Lease
    sampling: bool = True  # False: all samples are complete and in scoring
    serving: asyncio.Task[None] | None = None  # None: the lease waits for a slot
    asks: int = 0  # requests that the engine has not answered in full
    # By call, since the last message: context (empty for a call sent before) and pieces of the sample.
    pieces: dict[int, tuple[tuple[int, ...], list[Sample]]] = field(default_factory=dict)
    sent: dict[int, int] = field(default_factory=dict)  # tokens of each call that the data plane has

    def __post_init__(self) -> None:
        self.sent = {number: len(d.sample.token_ids) for number, d in enumerate(self.lease.partials)}

    def add(self, number: int, context: tuple[int, ...], piece: Sample) -> None:
        """Record tokens that arrived for a call."""
        self.pieces.setdefault(number, (context, []))[1].append(piece)

    def take_tokens(self) -> LeaseTokens:
        """Take the tokens that arrived since the last message."""
        pieces, self.pieces = self.pieces, {}
        partials = []
        for number, (context, parts) in sorted(pieces.items()):
            piece = PartialRollout(context, joined(parts), self.sent.get(number, 0))
            self.sent[number] = piece.first + len(piece.sample.token_ids)
            partials.append((number, piece))
        return LeaseTokens(self.lease.lease_id, tuple(partials))


def places(kind: WorkerConfig, sampling: SamplingConfig) -> tuple[int, int]:
    """Return how many groups a worker samples at once, and how many more may wait for a slot.

    The policy `jsq` keeps queues at the workers and must know which groups execute. Under it a group begins
    only when the engine has room for all its requests. Under other policies requests may wait in the engine.
    """
    at_once = max(1, kind.engine.max_num_seqs // sampling.samples_per_prompt)
    most = kind.max_groups
    if most is None:
        most = max(CPU_GROUPS, at_once) if kind.resources.get("GPU") else CPU_GROUPS
    if sampling.router != "jsq":
        return most, 0
    return min(most, at_once), sampling.theta


class Plateau:
    """Estimator of the number of groups at which a worker's throughput levels off.

    Args:
        slots: groups that the worker samples at once.
    """

    def __init__(self, slots: int) -> None:
        self._profile = BatchProfile(slots)
        self._before = (0.0, 0.0, 0)

    def groups(self, now_s: float, load: Load, works: Iterable[Work]) -> int:
        """Take in the interval since the last call and return the number of groups; 0 while unknown."""
        now = (now_s, load.group_s, load.tokens)
        seconds, group_s, tokens = (new - old for new, old in zip(now, self._before, strict=True))
        self._before = now
        sampling = [work for work in works if work.sampling and work.serving is not None]
        if sampling and seconds > 0:
            contexts = [
                len(work.lease.prompt.token_ids) + sum(work.sent.values()) / work.lease.num_samples
                for work in sampling
            ]
            self._profile.observe(group_s / seconds, int(tokens), seconds, sum(contexts) / len(contexts))
        return self._profile.plateau() or 0


class Load:
    """Counters of a worker's load: tokens, and the time in which it was busy or full.

    Only the time in which a worker is full shows its speed. At other times it may wait for permits.
    """

    def __init__(self) -> None:
        self.busy_s = 0.0  # seconds with at least one lease, or an evaluation
        self.full_s = 0.0  # seconds without room for another pull
        self.full_tokens = 0  # tokens sampled in `full_s`
        self.tokens = 0  # tokens sampled
        self.group_s = 0.0  # seconds of sampling, summed over groups
        self._since_s: float | None = None
        self._busy = self._full = False
        self._num_sampling = 0

    def now(self, now_s: float, *, busy: bool, full: bool, num_sampling: int) -> None:
        """Set the state from `now_s` on."""
        if self._since_s is not None:
            self.busy_s += self._busy * (now_s - self._since_s)
            self.full_s += self._full * (now_s - self._since_s)
            self.group_s += self._num_sampling * (now_s - self._since_s)
        self._since_s, self._busy, self._full, self._num_sampling = now_s, busy, full, num_sampling

    def sampled(self, num_tokens: int) -> None:
        """Count tokens that arrived."""
        self.tokens += num_tokens
        self.full_tokens += self._full * num_tokens
