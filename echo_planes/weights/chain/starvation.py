"""Starvation of nodes: which lack a committed version, and since when they receive too little of it. Pure.

A parent that withholds the newest version need not be silent. It can ping, send old versions, open and cancel
publications, send single bytes, or headers without their chunks, and report that it has everything. None of
that counts here. Only verified bytes count that the child itself reports, each once, of publications that the
sender's node knows and that are newer than the child's newest whole version.

A peer that lacks the newest version needs a least rate (`needed_bytes_per_s`). Each such byte advances the
peer's clock by the time the byte takes at this rate. The peer starves when its clock is behind by more than
`limit_s` plus the time of a few chunks at this rate. So an honest parent may be slow down to this rate.

The tracker blames the hop at which the shortage begins. A parent that reports a shortage itself is excused
first, so that its own parent is judged before it. That excuse is limited: its child then waits
`EXCUSED_FOR` times as long, and a parent that remains starved is moved itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from echo_planes.weights.chain.events import Report
from echo_planes.weights.chain.hops import Peer
from echo_planes.weights.wire.manifest import PublicationKey

FED_SHARE = 0.1  # of the known rate of the links: a peer that receives this share does not starve
MAX_NEED_BYTES_PER_S = 10e6 / 8  # a shared or busy link may carry far less than it can
MAX_KNOWN = 16  # newest publications that count; nodes keep fewer
EXCUSED_SHARE = 0.5  # of the patience: a parent that lacked bytes for longer is excused
EXCUSED_FOR = 2.0  # factor on the child's patience while its parent is excused


class Hunger:
    """Starvation clocks of the peers, from the publications and the peers' own reports.

    Args:
        peers: every known peer by id; owned by the tracker.
        limit_s: seconds with too few bytes until a peer starves.
        streams: connections per link, each of which carries a chunk of its own.
        need_bytes_per_s: least rate that a peer needs of the versions it lacks.
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
        self._newest: PublicationKey | None = None  # newest committed publication
        self._chunk_bytes = 0.0  # mean chunk size of the newest

    def grow(self, key: PublicationKey, num_bytes: int) -> None:
        """Record that the sender's node has `num_bytes` of a publication."""
        self._sizes[key] = max(num_bytes, self._sizes.get(key, 0))
        while len(self._sizes) > MAX_KNOWN:
            del self._sizes[next(iter(self._sizes))]

    def commit(self, key: PublicationKey, payload_bytes: int, num_chunks: int, now_s: float) -> None:
        """Record a commit; the clock of each peer that lacked nothing before starts now."""
        self.begin_anew((peer_id for peer_id in self._peers if not self.lacks(peer_id)), now_s)
        self.grow(key, payload_bytes)
        before = self._newest
        if before is None or before.lineage != key.lineage or key.version >= before.version:
            self._newest = key
            self._chunk_bytes = payload_bytes / max(1, num_chunks)

    def lacks(self, peer_id: str) -> bool:
        """Return whether the peer lacks the newest committed version, and was not told to give it up."""
        newest = self._newest
        if newest is None or self._cancelled(peer_id, newest):
            return False
        return self._peers[peer_id].whole_version(newest.lineage) < newest.version

    def hear(self, event: Report, now_s: float) -> None:
        """Record a peer's report."""
        peer, newest = self._peers[event.peer_id], self._newest
        if newest is None:
            return
        # Without a key, the installed version belongs to the newest lineage that the peer knows.
        if event.key is None or event.key.lineage == newest.lineage:
            complete = event.key.version if event.key is not None and event.complete else -1
            peer.came_to(newest.lineage, max(complete, event.installed_version, event.staged_version))
        size = self._sizes.get(event.key) if event.key is not None else None
        if event.key is not None and size is not None:
            self._count(peer, event.key, min(event.bytes_received, size), now_s)
        if not self.lacks(event.peer_id):
            peer.fed_s = now_s

    def starves(self, peer_id: str, now_s: float) -> bool:
        """Return whether the peer starves, so that it needs another parent."""
        patience_s, peer = self._patience_s(), self._peers[peer_id]
        hungry_s = self._hungry_s(peer_id, now_s)
        parent_hungry_s = self._hungry_s(peer.parent_id, now_s) if peer.parent_id in self._peers else 0.0
        if parent_hungry_s > EXCUSED_SHARE * patience_s:
            patience_s *= EXCUSED_FOR
        return hungry_s > patience_s

    def begin_anew(self, peer_ids: Iterable[str], now_s: float) -> None:
        """Restart these peers' starvation clocks: they receive over another path from now on."""
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
    """Return the least rate at which a peer must receive what it lacks; `least_bytes_per_s` if no link's rate
    is known."""
    if not known_bytes_per_s:
        return least_bytes_per_s
    return min(FED_SHARE * known_bytes_per_s, MAX_NEED_BYTES_PER_S)
