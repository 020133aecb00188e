"""Leases: time-bounded claims on prompts, fenced by the worker's incarnation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from echo_planes.errors import LeaseError
from echo_planes.types import Lease


class LeaseBook:
    """Which leases are live. Pure state: every call that depends on time takes `now_s`."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._live: dict[str, Lease] = {}
        self._epochs: dict[str, int] = {}  # newest incarnation of each worker
        self._gone: set[str] = set()

    @property
    def live(self) -> tuple[Lease, ...]:
        return tuple(self._live.values())

    def __len__(self) -> int:
        return len(self._live)

    def register(self, worker_id: str, epoch: int) -> None:
        """A new incarnation of a worker; results of older ones are refused from now on."""
        if epoch < self._epochs.get(worker_id, -1):
            raise LeaseError(f"worker {worker_id} registered epoch {epoch} after {self._epochs[worker_id]}")
        self._epochs[worker_id] = epoch
        self._gone.discard(worker_id)

    def is_current(self, worker_id: str, epoch: int) -> bool:
        return worker_id not in self._gone and self._epochs.get(worker_id) == epoch

    def forget(self, worker_id: str) -> list[Lease]:
        """A worker is gone: fence it and end its leases, which are returned."""
        self._gone.add(worker_id)
        ended = [lease for lease in self._live.values() if lease.worker_id == worker_id]
        for lease in ended:
            del self._live[lease.lease_id]
        return ended

    def issue(self, lease: Lease, now_s: float) -> Lease:
        """Enter a lease, with its expiry set."""
        if lease.lease_id in self._live:
            raise LeaseError(f"lease {lease.lease_id} was issued twice")
        lease = replace(lease, expires_s=now_s + self._lease_s)
        self._live[lease.lease_id] = lease
        return lease

    def renew(self, worker_id: str, epoch: int, lease_ids: Iterable[str], now_s: float) -> None:
        """Streamed tokens renew a lease; unknown or fenced ones are left alone."""
        for lease_id in lease_ids:
            lease = self._live.get(lease_id)
            if lease and lease.worker_id == worker_id and lease.epoch == epoch and lease.expires_s > now_s:
                self._live[lease_id] = replace(lease, expires_s=now_s + self._lease_s)

    def close(self, lease_id: str, worker_id: str, epoch: int, now_s: float) -> Lease:
        """End a lease with a result.

        Raises:
            LeaseError: "unknown", "fenced" or "expired"; the message is that one word.
        """
        lease = self._live.get(lease_id)
        if lease is None:
            raise LeaseError("unknown")
        if lease.worker_id != worker_id or lease.epoch != epoch or not self.is_current(worker_id, epoch):
            raise LeaseError("fenced")
        if lease.expires_s <= now_s:
            raise LeaseError("expired")
        return self._live.pop(lease_id)

    def expire(self, now_s: float) -> list[Lease]:
        """End and return the leases whose time is up."""
        ended = [lease for lease in self._live.values() if lease.expires_s <= now_s]
        for lease in ended:
            del self._live[lease.lease_id]
        return ended
