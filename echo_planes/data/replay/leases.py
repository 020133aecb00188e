"""Leases: time-bounded claims on prompts, fenced by the worker's incarnation (SparrowRL section 5.4)."""

from __future__ import annotations

import heapq
import statistics
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Mapping

from echo_planes.errors import LeaseError
from echo_planes.types import Lease

TIMES_MEDIAN = 2.5  # lease duration over median completion time; the paper takes 2 to 3
RECENT_COMPLETIONS = 64  # completions that the median is taken over
ENOUGH_COMPLETIONS = 16  # fewest completions for which the median is used
_MOST_DOUBLINGS = 30  # after so many doublings every lease has reached its longest duration


class LeaseTable:
    """Table of live leases. Pure state: every call that depends on time takes `now_s`.

    A lease lasts 2.5 times the median completion time of recent leases, and is renewed whenever tokens arrive
    for it. So a silent worker's prompts come back soon, and long answers keep their leases. After each expiry
    the next lease of the same prompt begins with twice the duration: otherwise a prompt whose first tokens
    take longer than a lease would expire forever.

    Args:
        longest_s: longest duration of a lease, seconds; used until enough leases are completed.
        shortest_s: shortest duration, seconds; a shorter lease would end between a healthy worker's messages.
    """

    def __init__(self, longest_s: float, shortest_s: float) -> None:
        self._longest_s = longest_s
        self._shortest_s = min(shortest_s, longest_s)
        self._live: dict[str, Lease] = {}
        self._issued_s: dict[str, float] = {}
        self._by_worker: dict[str, set[str]] = {}
        self._expires_s: dict[str, float] = {}  # as last renewed
        self._ends: list[tuple[float, str]] = []  # a heap; `expire` corrects entries of renewed leases
        self._versions: Counter[int] = Counter()
        self._recalled: set[str] = set()
        self._took_s: deque[float] = deque()  # recent completions, the oldest first, ...
        self._sorted_s: list[float] = []  # ... and the shortest first
        self._lease_s = longest_s
        self._expiries: Counter[int] = Counter()  # of each prompt, since a lease of it ended with a result
        self._epochs: dict[str, int] = {}  # newest incarnation of each worker
        self._gone: set[str] = set()

    @property
    def live(self) -> tuple[Lease, ...]:
        return tuple(self._live.values())

    @property
    def versions(self) -> Mapping[int, int]:
        """Number of live leases by version."""
        return self._versions

    @property
    def lease_s(self) -> float:
        """Present duration of a lease, counted from its last tokens, seconds."""
        return self._lease_s

    def __len__(self) -> int:
        return len(self._live)

    def of_worker(self, worker_id: str) -> list[Lease]:
        """Return a worker's live leases, oldest first."""
        return sorted(
            (self._live[lease_id] for lease_id in self._by_worker.get(worker_id, ())),
            key=lambda lease: (self._issued_s[lease.lease_id], lease.lease_id),
        )

    def register(self, worker_id: str, epoch: int) -> None:
        """Register a new incarnation of a worker; results of older ones are refused from now on.

        Raises:
            LeaseError: a newer incarnation has registered already.
        """
        if epoch < self._epochs.get(worker_id, -1):
            raise LeaseError(f"worker {worker_id} registered epoch {epoch} after {self._epochs[worker_id]}")
        self._epochs[worker_id] = epoch
        self._gone.discard(worker_id)

    def is_current(self, worker_id: str, epoch: int) -> bool:
        return worker_id not in self._gone and self._epochs.get(worker_id) == epoch

    def forget(self, worker_id: str) -> list[Lease]:
        """Fence a worker that is gone; end and return its leases."""
        self._gone.add(worker_id)
        return [self._remove(lease.lease_id) for lease in self.of_worker(worker_id)]

    def lasts_s(self, prompt_index: int) -> float:
        """Return the seconds that a lease of a prompt lasts if issued now and never renewed."""
        patience: int = 2 ** min(self._expiries.get(prompt_index, 0), _MOST_DOUBLINGS)
        return min(self._lease_s * patience, self._longest_s)

    def issue(self, lease: Lease, now_s: float) -> Lease:
        """Enter a lease that begins now, and return it.

        Raises:
            LeaseError: a live lease has this id.
        """
        if lease.lease_id in self._live:
            raise LeaseError(f"lease {lease.lease_id} was issued twice")
        self._live[lease.lease_id] = lease
        self._issued_s[lease.lease_id] = now_s
        self._expires_s[lease.lease_id] = lease.expires_s
        self._by_worker.setdefault(lease.worker_id, set()).add(lease.lease_id)
        self._versions[lease.version] += 1
        heapq.heappush(self._ends, (lease.expires_s, lease.lease_id))
        return lease

    def holds(self, lease_id: str, worker_id: str, epoch: int, now_s: float) -> bool:
        """Return whether this incarnation still holds the lease."""
        lease = self._live.get(lease_id)
        return (
            lease is not None
            and lease.worker_id == worker_id
            and lease.epoch == epoch
            and self._expires_s[lease_id] > now_s
            and self.is_current(worker_id, epoch)
        )

    def renew(self, worker_id: str, epoch: int, lease_ids: Iterable[str], now_s: float) -> None:
        """Renew the leases whose tokens arrived; ignore those that this incarnation does not hold."""
        for lease_id in lease_ids:
            if self.holds(lease_id, worker_id, epoch, now_s):
                self._expires_s[lease_id] = max(self._expires_s[lease_id], now_s + self._lease_s)

    def close(self, lease_id: str, worker_id: str, epoch: int, now_s: float) -> Lease:
        """End a lease with a result, and return it.

        Raises:
            LeaseError: the lease is not valid; the message is "unknown", "fenced" or "expired".
        """
        lease = self._live.get(lease_id)
        if lease is None:
            raise LeaseError("unknown")
        if lease.worker_id != worker_id or lease.epoch != epoch or not self.is_current(worker_id, epoch):
            raise LeaseError("fenced")
        if self._expires_s[lease_id] <= now_s:
            raise LeaseError("expired")
        self._observe(now_s - self._issued_s[lease_id])
        self._expiries.pop(lease.prompt.index, None)
        return self._remove(lease_id)

    def _observe(self, took_s: float) -> None:
        """Adapt the duration of leases to another completion time."""
        if len(self._took_s) == RECENT_COMPLETIONS:
            del self._sorted_s[bisect_left(self._sorted_s, self._took_s.popleft())]
        self._took_s.append(took_s)
        insort(self._sorted_s, took_s)
        if len(self._took_s) >= ENOUGH_COMPLETIONS:
            wanted_s = TIMES_MEDIAN * statistics.median(self._sorted_s)
            self._lease_s = min(max(wanted_s, self._shortest_s), self._longest_s)

    def recalled_from(self, worker_id: str, epoch: int) -> list[str]:
        """Return the recalled live leases of this incarnation."""
        if not self._recalled or not self.is_current(worker_id, epoch):
            return []
        return sorted(self._recalled & self._by_worker.get(worker_id, set()))

    def recall(
        self,
        worker_id: str,
        num_leases: int,
        prefill_tokens: Callable[[Lease], int],
        is_far: Callable[[Lease], bool],
        spare: Container[str] = (),
    ) -> list[str]:
        """Mark up to `num_leases` leases of a worker to be given up. Return their ids.

        An episode of several turns is one lease, so it stays with its worker and that worker's cached context
        until the worker goes or the lease is recalled here. Another worker must compute the context of a
        recalled lease again. So the leases with the fewest prefill tokens go first, among equals the newest.
        Leases that are far stay, unless all of the worker's leases are far.

        Args:
            worker_id: the worker.
            num_leases: most leases to recall.
            prefill_tokens: tokens that another worker would compute before it continues a lease.
            is_far: whether a lease has come so far that moving it costs more than it saves.
            spare: leases that are never recalled.
        """
        mine = [lease for lease in self.of_worker(worker_id)[::-1] if lease.lease_id not in spare]
        movable = [lease for lease in mine if not is_far(lease)] or mine
        open_ = [lease for lease in movable if lease.lease_id not in self._recalled]
        chosen = [lease.lease_id for lease in sorted(open_, key=prefill_tokens)[:num_leases]]
        self._recalled.update(chosen)
        return chosen

    def give_up(self, lease_id: str) -> Lease:
        """End a lease without a result."""
        return self._remove(lease_id)

    def expire(self, now_s: float) -> list[Lease]:
        """End and return the leases whose time is up."""
        ended = []
        while self._ends and self._ends[0][0] <= now_s:
            _, lease_id = heapq.heappop(self._ends)
            expires_s = self._expires_s.get(lease_id)
            if expires_s is None:
                continue
            if expires_s > now_s:
                heapq.heappush(self._ends, (expires_s, lease_id))
            else:
                ended.append(self._remove(lease_id))
                self._expiries[ended[-1].prompt.index] += 1
        return ended

    def _remove(self, lease_id: str) -> Lease:
        lease = self._live.pop(lease_id)
        del self._issued_s[lease_id], self._expires_s[lease_id]
        self._recalled.discard(lease_id)
        self._by_worker[lease.worker_id].discard(lease_id)
        self._versions[lease.version] -= 1
        if not self._versions[lease.version]:
            del self._versions[lease.version]
        return lease
