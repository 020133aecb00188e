"""Starvation of nodes: which lack what the learner has committed, and since when they get too little. Pure.

A parent that wants to keep its child from the newest version need not be silent: it can ping, send old
versions, open publications and cancel them, send byte after byte, or headers without their chunks, and report
that it has everything. None of that counts here. What counts is the child's own word on verified bytes of
publications that the sender's node itself knows and the child has not come to yet, each byte once.

Those bytes buy time: one second for what a link must at least carry in a second, `FED_SHARE` of what links
are known to carry. Who has used up its time, `limit_s` and what a few chunks take on the slowest link,
starves. So a slow and honest parent is left alone down to that rate, which is documented rather than guessed
where nothing is known of the links.

The fault lies at the hop where plenty ends. A parent that goes hungry itself, by its own word, is excused:
its own parent is looked at first. It cannot hide so for long: its child's patience is twice as long then, and
whoever goes on being hungry is moved itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from echo_planes.weights.chain.events import Report
from echo_planes.weights.chain.hops import Peer
from echo_planes.weights.wire.manifest import PublicationKey

FED_SHARE = 0.1  # of the known rate of the links: whoever gets so much of what it lacks does not starve
MAX_NEED_BYTES_PER_S = 10e6 / 8  # links that are shared or busy may be far below what they can carry
MAX_KNOWN = 16  # newest publications that count: nodes keep fewer
EXCUSED_SHARE = 0.5  # of its patience that a parent must have gone hungry to be excused
EXCUSED_FOR = 2.0  # times as long its child waits then


class Hunger:
    """Follows the publications and the peers' own reports.

    Args:
        peers: every known peer by id; owned by the tracker.
        limit_s: without enough of what it lacks for so long, a peer starves.
        streams: connections per link, each of which carries a chunk of its own.
        need_bytes_per_s: of what it lacks: less is too little.
        cancelled: whether a peer was told to give a publication up.
    """

    def __init__(
        self,
        peers: Mapping[str, Peer],
        limit_s: float,
        streams: int,
        need_bytes_per_s: Callable[[], float],
        cancelled: Callable[[str, PublicationKey], bool],
    ) -> None:
        self._peers = peers
        self._limit_s = limit_s
        self._streams = streams
        self._need_bytes_per_s = need_bytes_per_s
        self._cancelled = cancelled
        self._sizes: dict[PublicationKey, int] = {}  # payload bytes at the sender so far, oldest first
        self._newest: PublicationKey | None = None  # committed
        self._chunk_bytes = 0.0  # of the newest, on average

    def grow(self, key: PublicationKey, num_bytes: int) -> None:
        """The sender's node has so much of a publication."""
        self._sizes[key] = max(num_bytes, self._sizes.get(key, 0))
        while len(self._sizes) > MAX_KNOWN:
            del self._sizes[next(iter(self._sizes))]

    def commit(self, key: PublicationKey, payload_bytes: int, num_chunks: int, now_s: float) -> None:
        """The learner has committed it: whoever has everything before begins to lack it now."""
        self.begin_anew((peer_id for peer_id in self._peers if not self.lacks(peer_id)), now_s)
        self.grow(key, payload_bytes)
        before = self._newest
        if before is None or before.lineage != key.lineage or key.version >= before.version:
            self._newest = key
            self._chunk_bytes = payload_bytes / max(1, num_chunks)

    def lacks(self, peer_id: str) -> bool:
        """Whether the peer lacks the newest committed version, and was not told to do without."""
        newest = self._newest
        if newest is None or self._cancelled(peer_id, newest):
            return False
        return self._peers[peer_id].whole_version(newest.lineage) < newest.version

    def hear(self, event: Report, now_s: float) -> None:
        """Enter a peer's report."""
        peer, newest = self._peers[event.peer_id], self._newest
        if newest is None:
            return
        # Without a key the installed version is of the newest lineage that the peer knows.
        if event.key is None or event.key.lineage == newest.lineage:
            complete = event.key.version if event.key is not None and event.complete else -1
            peer.came_to(newest.lineage, max(complete, event.installed_version, event.staged_version))
        size = self._sizes.get(event.key) if event.key is not None else None
        if event.key is not None and size is not None:
            self._count(peer, event.key, min(event.bytes_received, size), now_s)
        if not self.lacks(event.peer_id):
            peer.fed_s = now_s

    def starves(self, peer_id: str, now_s: float) -> bool:
        """Whether the peer is to get another parent."""
        patience_s, peer = self._patience_s(), self._peers[peer_id]
        hungry_s = self._hungry_s(peer_id, now_s)
        parent_hungry_s = self._hungry_s(peer.parent_id, now_s) if peer.parent_id in self._peers else 0.0
        if parent_hungry_s > EXCUSED_SHARE * patience_s:
            patience_s *= EXCUSED_FOR
        return hungry_s > patience_s

    def begin_anew(self, peer_ids: Iterable[str], now_s: float) -> None:
        """Start these peers' starvation clocks anew: what they receive comes another way from now on."""
        for peer_id in peer_ids:
            self._peers[peer_id].fed_s = now_s

    def _count(self, peer: Peer, key: PublicationKey, num_bytes: int, now_s: float) -> None:
        if key.version <= peer.whole_version(key.lineage):
            return
        gained = num_bytes - peer.got.get(key, 0)
        if gained > 0:
            peer.got[key] = num_bytes
            while len(peer.got) > MAX_KNOWN:
                del peer.got[next(iter(peer.got))]
            peer.fed_s = min(now_s, peer.fed_s + gained / self._need_bytes_per_s())

    def _hungry_s(self, peer_id: str, now_s: float) -> float:
        peer = self._peers[peer_id]
        return min(now_s - peer.fed_s, peer.settled(now_s)) if self.lacks(peer_id) else 0.0

    def _patience_s(self) -> float:
        return self._limit_s + self._streams * self._chunk_bytes / self._need_bytes_per_s()


def needed_bytes_per_s(known_bytes_per_s: float | None, least_bytes_per_s: float) -> float:
    """Least rate that must reach a peer that lacks something; `least_bytes_per_s` where nothing is known."""
    if not known_bytes_per_s:
        return least_bytes_per_s
    return min(FED_SHARE * known_bytes_per_s, MAX_NEED_BYTES_PER_S)
