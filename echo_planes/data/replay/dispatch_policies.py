"""The named policies of `router.py` over what the data plane knows of its workers (`data.routing`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from echo_planes.data.replay.dispatch import Ints, Policy, Proportional, Workers


class Seat(Protocol):
    """One worker that serves, in groups (`echo_planes.data.replay.dispatch_buffer.Seat`)."""

    @property
    def worker_id(self) -> str: ...
    @property
    def publication(self) -> int: ...
    @property
    def pending(self) -> int: ...
    @property
    def running(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def room(self) -> int: ...
    @property
    def plateau(self) -> int: ...


class Routing:
    """A policy, and the speeds that it remembers. What `router.Workers` calls a request is a group here.

    Args:
        policy: `jsq` or `proportional`.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._speeds: dict[str, float] = {}  # tokens/s

    @property
    def splits(self) -> bool:
        """Whether permits are split among all workers once a batch, not among those that wait."""
        return isinstance(self._policy, Proportional)

    def assign(self, num_groups: int, newest: int, seats: Sequence[Seat]) -> list[tuple[int, bool]]:
        """Of each seat, the groups it gets, and whether it must serve publication `newest` before."""
        workers = self._workers(newest, seats)
        if self.splits:
            assigned = self._policy.assign(num_groups, workers)
            self._speeds |= dict(zip(workers.ids, workers.tokens_per_s.tolist(), strict=True))
            return list(zip(assigned.counts.tolist(), assigned.commit.tolist(), strict=True))
        return [(count, False) for count in self._filled(num_groups, workers).tolist()]

    def rebalance(self, newest: int, seats: Sequence[Seat]) -> list[tuple[str, str, int]]:
        """What moves: from whom, to whom, how many groups."""
        moves = self._policy.rebalance(self._workers(newest, seats))
        return [(move.source, move.target, move.count) for move in moves]

    def settle(self, worker_id: str, tokens: int, elapsed_s: float) -> None:
        """What a worker made in a time in which it had work."""
        if isinstance(self._policy, Proportional):
            one = Workers.named(worker_id)
            one.tokens_per_s[0] = self._speeds.get(worker_id, 0.0)
            self._policy.settle(one, 0, tokens, elapsed_s)
            self._speeds[worker_id] = float(one.tokens_per_s[0])

    def _filled(self, num_groups: int, workers: Workers) -> Ints:
        """Free slots first, then queues.

        A group that meets a free slot is pending for no time, so the queue's limit says nothing about it;
        and no queue shall grow while another worker has a slot for what would wait there.
        """
        room = workers.room
        counts: Ints = np.zeros(len(room), np.int64)
        for slots_only in (True, False):
            while num_groups > 0:
                free = workers.slots - workers.running
                workers.room = np.minimum(room, free) if slots_only else room
                more = self._policy.assign(num_groups, workers).counts
                if not more.any():
                    break
                num_groups -= int(more.sum())
                counts, room = counts + more, room - more
                begun = np.minimum(more, free)
                workers.running = workers.running + begun
                workers.pending = workers.pending + more - begun
        return counts

    def _workers(self, newest: int, seats: Sequence[Seat]) -> Workers:
        workers = Workers.named(*(seat.worker_id for seat in seats))
        workers.newest = newest
        workers.version[:] = [seat.publication for seat in seats]
        workers.pending[:] = [seat.pending for seat in seats]
        workers.running[:] = [seat.running for seat in seats]
        workers.slots[:] = [seat.slots for seat in seats]
        workers.room[:] = [seat.room for seat in seats]
        workers.plateau[:] = [seat.plateau for seat in seats]
        workers.tokens_per_s[:] = [self._speeds.get(seat.worker_id, 0.0) for seat in seats]
        return workers
