"""A lease in progress, and how much its worker has to do."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from echo_planes.samples import joined
from echo_planes.types import Draft, Lease, LeaseTokens, Sample


@dataclass(eq=False)
class Work:
    """One lease in progress."""

    lease: Lease
    sampling: bool = True  # False: its samples are there and being scored
    serving: asyncio.Task[None] | None = None
    # Since the last message: by call, its context where it is new, and pieces of its sample.
    pieces: dict[int, tuple[tuple[int, ...], list[Sample]]] = field(default_factory=dict)
    sent: dict[int, int] = field(default_factory=dict)  # tokens of each call that the data plane was told

    def __post_init__(self) -> None:
        self.sent = {number: len(d.sample.token_ids) for number, d in enumerate(self.lease.drafts)}

    def add(self, number: int, context: tuple[int, ...], piece: Sample) -> None:
        """Tokens arrived for a call."""
        self.pieces.setdefault(number, (context, []))[1].append(piece)

    def take_tokens(self) -> LeaseTokens:
        """What arrived since the last message."""
        pieces, self.pieces = self.pieces, {}
        drafts = []
        for number, (context, parts) in sorted(pieces.items()):
            piece = Draft(context, joined(parts), self.sent.get(number, 0))
            self.sent[number] = piece.first + len(piece.sample.token_ids)
            drafts.append((number, piece))
        return LeaseTokens(self.lease.lease_id, tuple(drafts))


class Load:
    """What a worker did, and how long it had no free place.

    Only the time in which it was full says how fast it is: at other times it may be waiting for permits.
    """

    def __init__(self) -> None:
        self.busy_s = 0.0  # with at least one lease in hand
        self.full_s = 0.0  # without a free place
        self.full_tokens = 0  # sampled in that time
        self._since_s: float | None = None
        self._busy = self._full = False

    def now(self, now_s: float, *, busy: bool, full: bool) -> None:
        """How it is from `now_s` on."""
        if self._since_s is not None:
            self.busy_s += self._busy * (now_s - self._since_s)
            self.full_s += self._full * (now_s - self._since_s)
        self._since_s, self._busy, self._full = now_s, busy, full

    def sampled(self, num_tokens: int) -> None:
        """Tokens arrived."""
        self.full_tokens += self._full * num_tokens
