"""Open broadcasts, for the tracker: each peer's progress, the end of a broadcast, and the cancelling of an
older publication in favour of a newer one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from echo_planes.types import BroadcastStats
from echo_planes.weights.chain.events import CancelBroadcast, PublicationOpened, Report
from echo_planes.weights.chain.hops import Broadcast, Peer
from echo_planes.weights.chain.plan import Topology, cancels
from echo_planes.weights.wire.manifest import PublicationKey

MAX_OPEN = 16  # open broadcasts; opening one more closes the oldest
MAX_CLOSED = 256  # closed broadcasts whose figures are kept


class Broadcasts:
    """Open and recently closed broadcasts.

    Args:
        peers: every known peer by id; the tracker owns and changes it.
        topology: the current chains; the tracker owns and changes them.
        gamma: T_bcast ends when the fraction 1/gamma of the peers has everything.
    """

    def __init__(self, peers: Mapping[str, Peer], topology: Topology, gamma: float) -> None:
        self._peers = peers
        self._topology = topology
        self._gamma = gamma
        self._open: dict[PublicationKey, Broadcast] = {}
        self._closed: dict[PublicationKey, BroadcastStats] = {}
        self._given_up: dict[PublicationKey, set[str]] = {}  # newest given up: by these peers

    def __iter__(self) -> Iterator[Broadcast]:
        """Iterate over the open broadcasts, oldest first; closing one meanwhile is safe."""
        return iter(list(self._open.values()))

    def __bool__(self) -> bool:
        return bool(self._open)

    def open(self, event: PublicationOpened, now_s: float) -> list[CancelBroadcast]:
        """Open a broadcast, unless it is open; return the older ones to cancel, with their peers."""
        if event.key in self._open:
            return []
        while len(self._open) >= MAX_OPEN:
            self._close(next(iter(self._open.values())))
        self._closed.pop(event.key, None)
        for other in self._open.values():
            other.alone = False
        self._open[event.key] = Broadcast(event.key, now_s, event.est_bytes, alone=not self._open)
        return self._cancel_older(self._open[event.key])

    def grow(self, key: PublicationKey, num_bytes: int, now_s: float) -> None:
        """Record that the sender can serve `num_bytes` of the publication so far."""
        if broadcast := self._open.get(key):
            broadcast.source.add(now_s, num_bytes)

    def commit(self, key: PublicationKey, payload_bytes: int, now_s: float) -> list[CancelBroadcast]:
        """Record that the sender has the whole publication; return the older ones to cancel."""
        broadcast = self._open.get(key)
        if broadcast is None:
            return []
        broadcast.source.add(now_s, payload_bytes)
        broadcast.committed = True
        return self._cancel_older(broadcast)

    def take(self, event: Report, now_s: float) -> tuple[int, int]:
        """Record a peer's report; return the peer's damaged and sound chunks since its last report."""
        damaged = sound = 0
        received = self._peers[event.peer_id].received
        total = received.have
        for broadcast in self._open.values():
            progress = broadcast.of(event.peer_id)
            total -= progress.have
            if broadcast.key == event.key:
                # A peer cannot have more than the sender has, so a larger claim is cut.
                progress.add(now_s, min(event.bytes_received, broadcast.source.have))
                damaged = max(0, event.damaged_chunks - progress.damaged)
                sound = max(0, event.chunks_have - progress.chunks)
                progress.damaged, progress.chunks = event.damaged_chunks, event.chunks_have
                progress.made |= event.made
            if broadcast.committed:
                whole = event.complete and broadcast.key == event.key
                # The report's installed version belongs to the lineage of its key.
                same_lineage = event.key is None or event.key.lineage == broadcast.key.lineage
                installed = same_lineage and event.installed_version >= broadcast.key.version
                progress.complete |= whole or installed
            if progress.complete:
                progress.add(now_s, broadcast.source.have)
            total += progress.have
        received.add(now_s, total)
        return damaged, sound

    def forget(self, peer_id: str) -> None:
        """Remove the progress of a peer that left or restarted."""
        for broadcast in self._open.values():
            broadcast.peers.pop(peer_id, None)
            broadcast.cancelled.discard(peer_id)

    def finish(self, now_s: float, book: Callable[[Broadcast], None]) -> None:
        """Close the broadcasts that every participating peer has whole; call `book` with each one before."""
        for broadcast in self:
            complete = [broadcast.of(peer).complete for peer in self.taking_part(broadcast)]
            needed = math.ceil(len(complete) / self._gamma)
            if complete and sum(complete) >= needed and broadcast.seconds is None:
                broadcast.seconds = now_s - broadcast.opened_s
            if all(complete) and (complete or broadcast.cancelled):
                book(broadcast)
                self._close(broadcast)

    def may_blame_seed(self) -> bool:
        """Return whether a slow seed may be replaced: once per broadcast, since then the source is slow."""
        first = not any(broadcast.seed_blamed for broadcast in self._open.values())
        for broadcast in self._open.values():
            broadcast.seed_blamed = True
        return first

    def cancelled(self, peer_id: str) -> list[PublicationKey]:
        """Return the publications, among the newest `MAX_OPEN` cancelled, that the peer gave up."""
        return [key for key, peers in self._given_up.items() if peer_id in peers]

    def taking_part(self, broadcast: Broadcast) -> list[str]:
        """Return the live peers that have not given the publication up."""
        live = (peer_id for peer_id, peer in self._peers.items() if not peer.lost)
        return [peer_id for peer_id in live if peer_id not in broadcast.cancelled]

    def stats(self, key: PublicationKey) -> BroadcastStats | None:
        """Return the figures of a broadcast; None if it was never opened, or is no longer kept."""
        if broadcast := self._open.get(key):
            return self._figures(broadcast)
        return self._closed.get(key)

    def all_stats(self) -> list[BroadcastStats]:
        """Return all figures kept: closed broadcasts in the order of closing, then open ones by age."""
        return [*self._closed.values(), *map(self._figures, self._open.values())]

    def _cancel_older(self, newer: Broadcast) -> list[CancelBroadcast]:
        actions = []
        for older in self:
            if older.key.version >= newer.key.version or self._is_needed(older):
                continue
            giving_up: list[str] = []
            # From the tail upwards: a peer that continues needs a parent that continues, too.
            for chain in self._topology.chains:
                while chain and self._gives_up(chain[-1], older, newer):
                    giving_up.append(chain.pop())
            leaves = [peer for peer in self._peers if self._topology.is_leaf(peer)]
            giving_up += [leaf for leaf in leaves if self._gives_up(leaf, older, newer)]
            if fresh := tuple(peer for peer in giving_up if peer not in older.cancelled):
                older.cancelled.update(fresh)
                self._given_up[older.key] = older.cancelled
                while len(self._given_up) > MAX_OPEN:
                    del self._given_up[next(iter(self._given_up))]
                actions.append(CancelBroadcast(older.key, fresh))
        return actions

    def _is_needed(self, older: Broadcast) -> bool:
        """Return whether a newer open patch builds on it, or on a version after it."""
        patches = [key for key in self._open if key.version > older.key.version and key.codec != "full"]
        return any(key.base_version >= older.key.version for key in patches)

    def _gives_up(self, peer_id: str, older: Broadcast, newer: Broadcast) -> bool:
        progress = older.of(peer_id)
        remaining = older.payload_bytes - progress.have
        builds_on = newer.key.codec != "full" and newer.key.base_version != self._peers[peer_id].installed
        return not progress.complete and cancels(remaining, newer.payload_bytes, newer_needs_older=builds_on)

    def _close(self, broadcast: Broadcast) -> None:
        del self._open[broadcast.key]
        self._closed[broadcast.key] = self._figures(broadcast)
        while len(self._closed) > MAX_CLOSED:
            del self._closed[next(iter(self._closed))]

    def _figures(self, broadcast: Broadcast) -> BroadcastStats:
        peers = self.taking_part(broadcast)
        rates = [broadcast.of(peer).mean_bytes_per_s() for peer in peers]
        return BroadcastStats(
            version=broadcast.key.version,
            codec=broadcast.key.codec,
            payload_bytes=broadcast.payload_bytes,
            num_peers=len(peers),
            num_complete=sum(broadcast.of(peer).complete for peer in peers),
            seconds=broadcast.seconds,
            repairs=broadcast.repairs,
            at_fault=tuple(f"{peer} {why}" for peer, why in broadcast.at_fault.items()),
            hop_bytes_per_s=tuple(rate for rate in rates if rate > 0),
        )
