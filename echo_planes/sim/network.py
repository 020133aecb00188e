"""Broadcast model: arrival times at each worker, along the planner's chains or from the learner as a star.

`weights.chain.plan.plan_chains` makes the chains, from peer records kept as the tracker keeps them. Bytes
flow cut-through: a worker at the H-th hop has all M bytes after M/B + sum over hops of (C/B_hop + RTT/2),
where B is the slowest hop up to it (ECHO-2 section 4.2). `weights.chain.simulated` simulates the same chunk
by chunk; the formula takes microseconds, and a test compares the two.

Not modelled: signing, hashing and staging at both ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from echo_planes.weights.chain.plan import PeerStats, num_chains, plan_chains

Dissemination = Literal["chain", "star", "star_unlimited"]


@dataclass(frozen=True, slots=True)
class Links:
    """Rates and times of the network."""

    mode: Dissemination
    uplink_bytes_per_s: float  # B0, of the learner; `star_unlimited` ignores it
    worker_bytes_per_s: float  # Bw, of every worker, up and down
    rtt_s: float
    chunk_bytes: float
    detection_s: float  # until a dead relay is detected and its successor has another parent


@dataclass(slots=True)
class Transfer:
    """Transfer of the newest broadcast to one worker."""

    version: int
    arrives_s: float
    rate_bytes_per_s: float  # of its own link
    upstream: tuple[str, ...] = ()  # workers that relay its bytes, from the learner on


@dataclass(slots=True)
class _Peer:
    stats: PeerStats
    speed: float = 1.0  # of its link, as a share of Bw
    newest: Transfer | None = None
    measured: int = -1  # newest version whose rate is in its record


@dataclass(slots=True)
class Network:
    """Links between the learner and the workers.

    Args:
        links: their rates.
    """

    links: Links
    _peers: dict[str, _Peer] = field(default_factory=dict)

    def join(self, worker_id: str, region: str) -> None:
        """Add a worker, with the record and link speed of an earlier one of that name."""
        known = self._peers.get(worker_id)
        stats = known.stats if known else PeerStats(worker_id, region)
        self._peers[worker_id] = _Peer(stats, known.speed if known else 1.0)

    def transfer(self, worker_id: str) -> Transfer | None:
        """Return a worker's newest transfer; None if it has had none since it joined."""
        return self._peers[worker_id].newest

    def leave(self, worker_id: str, now_s: float) -> dict[str, float]:
        """End a worker's transfers; return the new arrival times of the workers that it relayed to."""
        gone = self._peers[worker_id]
        if gone.newest and gone.newest.arrives_s > now_s:
            gone.stats = gone.stats.after_failure(now_s)
        gone.newest = None
        return self._delay(worker_id, now_s)

    def forget(self, worker_id: str) -> None:
        """Forget a worker and its record."""
        self._peers.pop(worker_id, None)

    def set_speed(self, worker_id: str, factor: float) -> None:
        """Set the share of Bw that a worker's link carries from the next broadcast on."""
        self._peers[worker_id].speed = factor

    def publish(
        self, version: int, payload_bytes: float, worker_ids: Iterable[str], now_s: float
    ) -> dict[str, float]:
        """Broadcast a publication to these workers.

        Returns:
            Time at which each has all of it. A link first finishes an older publication that it carries.
        """
        names = sorted(worker_ids)
        self._measure(names, now_s)
        for path in self._paths(names, now_s):
            self._flow(version, payload_bytes, path, len(names), now_s)
        return {name: found.arrives_s for name in names if (found := self._peers[name].newest)}

    def fetch(self, worker_id: str, version: int, payload_bytes: float, now_s: float) -> float:
        """Transfer a version from the store to a worker that missed the broadcast, on its own link.

        Returns:
            Time at which the worker has all of it.
        """
        peer = self._peers[worker_id]
        rate = self.links.worker_bytes_per_s * peer.speed
        arrives_s = now_s + self.links.rtt_s + payload_bytes / rate
        peer.newest = Transfer(version, arrives_s, rate)
        peer.measured = version
        return arrives_s

    def _paths(self, names: list[str], now_s: float) -> list[list[str]]:
        if self.links.mode != "chain":
            return [[name] for name in names]
        count = num_chains(self.links.uplink_bytes_per_s, self.links.worker_bytes_per_s)
        return plan_chains([self._peers[name].stats for name in names], count, now_s)

    def _first_hop(self, num_workers: int) -> float:
        """Return the rate that the learner's uplink gives each worker it feeds, bytes/s."""
        links = self.links
        if links.mode == "star_unlimited":
            return math.inf
        chains = num_chains(links.uplink_bytes_per_s, links.worker_bytes_per_s)
        fed = num_workers if links.mode == "star" else min(chains, num_workers)
        return links.uplink_bytes_per_s / fed

    def _flow(
        self, version: int, payload_bytes: float, path: list[str], num_workers: int, now_s: float
    ) -> None:
        """Send a payload along one chain."""
        links = self.links
        slowest, latency_s, above = self._first_hop(num_workers), 0.0, 1.0
        for place, name in enumerate(path):
            peer = self._peers[name]
            hop = min(links.worker_bytes_per_s * min(peer.speed, above), slowest if place == 0 else math.inf)
            slowest, above = min(slowest, hop), peer.speed
            latency_s += links.chunk_bytes / hop + links.rtt_s / 2
            free_s = peer.newest.arrives_s if peer.newest else now_s
            arrives_s = max(now_s + payload_bytes / slowest + latency_s, free_s + payload_bytes / hop)
            own = links.worker_bytes_per_s * peer.speed
            peer.newest = Transfer(version, arrives_s, own, tuple(path[:place]))

    def _measure(self, names: list[str], now_s: float) -> None:
        """Enter the finished broadcasts in the peers' records, as the tracker does.

        The entry is the rate of a worker's own link, so a slow relay does not lower its successors' records.
        """
        for name in names:
            peer = self._peers[name]
            last = peer.newest
            if last and last.arrives_s <= now_s and last.version != peer.measured:
                peer.stats = peer.stats.after_success(last.rate_bytes_per_s, last.arrives_s)
                peer.measured = last.version

    def _delay(self, gone: str, now_s: float) -> dict[str, float]:
        """Delay the workers behind a lost relay by its detection and reconnection; return their new times."""
        late: dict[str, float] = {}
        for name, peer in self._peers.items():
            found = peer.newest
            if found and found.arrives_s > now_s and gone in found.upstream:
                found.arrives_s += self.links.detection_s + 1.5 * self.links.rtt_s
                found.upstream = tuple(other for other in found.upstream if other != gone)
                late[name] = found.arrives_s
        return late


def t_bcast_s(arrivals_s: Mapping[str, float], published_s: float, gamma: float) -> float:
    """Return T_bcast: seconds from a publication until the fraction 1/gamma of the workers had it.

    Args:
        arrivals_s: time at which each worker had it, for at least one worker.
        published_s: time of the publication.
        gamma: redundancy of the fleet, at least 1.
    """
    times = sorted(arrivals_s.values())
    return times[math.ceil(len(times) / gamma - 1e-9) - 1] - published_s
