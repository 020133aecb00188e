"""State that the tracker keeps of one peer, of one broadcast, and of the bytes that crossed a hop."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from echo_planes.weights.chain.events import IDLE_REPORT_INTERVAL_S, REPORT_INTERVAL_S, SENDER_ID
from echo_planes.weights.chain.plan import PeerStats
from echo_planes.weights.wire.manifest import PublicationKey

WINDOW_S = 1.5  # a hop is judged by what crossed it in so long
SLACK_S = 0.5  # what a parent has had for less may be on its way: half a round trip and two reports
SLOW_SHARE = 0.7  # of what could have crossed: less is slow
MIN_BUSY_SHARE = 0.5  # of the window at full rate must have been there to send, else nothing is concluded
KEPT_S = WINDOW_S + SLACK_S + 4 * REPORT_INTERVAL_S
MIN_MEASURED_S = 0.5  # of receiving, before a mean rate means anything
MIN_STEADY_S = 2.0  # of receiving, before a mean rate says what a link carries: eight reports
MIN_STEADY_CHUNKS = 32  # the same: only whole chunks are counted
SOURCE_AHEAD = 1.25  # times faster than its links a publication must be made, or the maker sets the pace
DAMAGE_WINDOW_S = 2.0
MIN_DAMAGED = 3  # chunks in the window, before anything is done
THROTTLE_SHARE = 0.02  # damaged: the link is throttled
DISSOLVE_SHARE = 0.05  # still damaged so long afterwards: the hop is dissolved
THROTTLE_FACTOR = 0.5
CLEAN_S = 5.0  # without damage: the throttle is lifted
SILENCE_S = 1.5  # without a report from a busy peer, or a byte from a parent
IDLE_SILENCE_S = 2.5  # without a report from a peer that had nothing to receive
PATIENCE = 4.0  # times longer, where its children still receive from it or nobody at all is heard
STALE_REPORTS = 2.5  # report intervals
SETTLE_S = 0.5  # a new parent is not judged before; doubles with every further move in a broadcast


class Progress:
    """Payload bytes of one publication that a peer or the sender had, over the last seconds."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()
        self._first = (0.0, 0)  # when its first bytes were seen, and how many they were
        self._last = (0.0, 0)  # the same when it grew last
        self._before = (0.0, 0)  # and the time before that
        self.have = 0  # bytes
        self.chunks = 0
        self.damaged = 0  # chunks
        self.complete = False

    def add(self, now_s: float, num_bytes: int) -> None:
        """`num_bytes` in all by now."""
        if num_bytes > self.have:
            if not self.have:
                self._first = (now_s, num_bytes)
            self._before, self._last = self._last, (now_s, num_bytes)
        self.have = max(self.have, num_bytes)
        self._samples.append((now_s, self.have))
        while len(self._samples) > 1 and self._samples[1][0] < now_s - KEPT_S:
            self._samples.popleft()

    def at(self, when_s: float) -> int:
        """Bytes it was known to have at `when_s`, which lies in the last seconds."""
        return next((have for at_s, have in reversed(self._samples) if at_s <= when_s), 0)

    @property
    def first_s(self) -> float:
        """Time at which its first bytes were seen, seconds; infinity before."""
        return self._first[0] if self.have else math.inf

    def mean_bytes_per_s(self) -> float:
        """From its first bytes to its newest; 0 while that is too short to tell."""
        seconds = self._last[0] - self._first[0]
        return (self.have - self._first[1]) / seconds if seconds >= MIN_MEASURED_S else 0.0

    def steady_bytes_per_s(self) -> float:
        """From its first bytes to its newest but one; 0 while that is too little to say what a link carries.

        The newest come when everything is there, somewhere between two reports.
        """
        seconds = self._before[0] - self._first[0]
        enough = seconds >= MIN_STEADY_S and self.chunks >= MIN_STEADY_CHUNKS
        return (self._before[1] - self._first[1]) / seconds if enough else 0.0


def is_slow(
    received: Progress, pairs: Iterable[tuple[Progress, Progress]], rate_bytes_per_s: float, now_s: float
) -> bool:
    """Whether much less crossed a hop than its child could have had.

    Whoever has nothing to wait for but its source is not slow: what counts is what the parent already had and
    the child lacked, at most what `rate_bytes_per_s` carries.

    Args:
        received: what the child received of all publications.
        pairs: (parent's, child's) progress for each publication on its way.
        rate_bytes_per_s: what the hop should carry.
        now_s: when the child reported last.
    """
    got = ready = received.have - received.at(now_s - WINDOW_S)
    since_s = math.inf
    for parent, child in pairs:
        if not child.complete:
            since_s = min(since_s, parent.first_s)
        before = child.at(now_s - WINDOW_S)
        ready += max(0, parent.at(now_s - SLACK_S) - before) - (child.have - before)
    if since_s > now_s - WINDOW_S - SLACK_S:  # there was not always something to send
        return False
    full = rate_bytes_per_s * WINDOW_S
    could = min(ready, full)
    return could >= MIN_BUSY_SHARE * full > 0 and got < SLOW_SHARE * could


@dataclass(slots=True)
class Peer:
    """One worker's node, as the tracker knows it."""

    stats: PeerStats
    address: str
    seen_s: float  # when it was last heard of
    parent_id: str = ""  # that it was told to pull from
    assigned_s: float = 0.0
    moves: int = 0  # times it was given another parent in mid-broadcast, lately
    reported_parent: str = ""
    received: Progress = field(default_factory=Progress)  # bytes of all publications together
    silent_s: float = 0.0
    closed: bool = False
    idle: bool = True
    installed: int = -1  # version
    lost: bool = False
    rollout_only: bool = False
    struck: bool = False  # in the present broadcast
    slow_reports: int = 0
    suspect: tuple[str, PeerStats] | None = None  # the former parent blamed for this hop, and its old record
    damage: deque[tuple[float, int, int]] = field(default_factory=deque)  # (when, damaged, sound) chunks
    damaging_s: float | None = None  # since when its hop has damaged too many; None: it does not
    throttled: bool = False  # for it
    best_bytes_per_s: float = 0.0  # that it received in a second from this parent, as it reports
    whole: tuple[str, int] = ("", -1)  # (lineage, version): the newest that it has whole, or installed
    got: dict[PublicationKey, int] = field(default_factory=dict)  # verified bytes of what it lacked
    fed_s: float = 0.0  # until then it had enough of what it lacks (`starvation`)
    starved_by: list[tuple[str, PeerStats]] = field(default_factory=list)  # parents, their records before
    refuge: bool = False  # it starved twice: the sender itself feeds it until it has everything

    def on_chunks(self, now_s: float, damaged: int, sound: int) -> Literal["clean", "damages", "hopeless"]:
        """Chunks since the last report. Says what its hop is like: `damages` is to be throttled, `hopeless`
        damages many though it was given time to become better."""
        self.damage.append((now_s, damaged, sound))
        while self.damage[0][0] < now_s - DAMAGE_WINDOW_S:
            self.damage.popleft()
        bad = sum(entry[1] for entry in self.damage)
        share = bad / max(1, bad + sum(entry[2] for entry in self.damage))
        if self.damaging_s is None:
            if bad >= MIN_DAMAGED and share >= THROTTLE_SHARE:
                self.damaging_s = now_s
                self.damage.clear()
        elif bad >= MIN_DAMAGED and share >= DISSOLVE_SHARE and now_s - self.damaging_s >= DAMAGE_WINDOW_S:
            return "hopeless"
        elif bad == 0 and now_s - self.damaging_s >= CLEAN_S:
            self.damaging_s = None
        return "clean" if self.damaging_s is None else "damages"

    def whole_version(self, lineage: str) -> int:
        """The newest version of a lineage that it has whole; -1: none."""
        return self.whole[1] if self.whole[0] == lineage else -1

    def came_to(self, lineage: str, version: int) -> None:
        """It has this version of the present lineage whole; -1: none."""
        if version > self.whole_version(lineage):
            self.whole = lineage, version

    def is_stale(self, now_s: float) -> bool:
        """Whether reports are overdue: should its children hear nothing of it either, it is lost."""
        interval_s = IDLE_REPORT_INTERVAL_S if self.idle else REPORT_INTERVAL_S
        return now_s - self.seen_s >= STALE_REPORTS * interval_s

    def settled(self, now_s: float) -> float:
        """Seconds since it had time enough to get used to its parent, negative before; the more often it was
        moved, the more time it gets."""
        return now_s - self.assigned_s - SETTLE_S * float(2 ** min(max(self.moves - 1, 0), 4))

    def forgive(self, gap_s: float) -> None:
        """Nobody listened for so long."""
        self.seen_s += gap_s
        self.assigned_s += gap_s
        self.fed_s += gap_s
        self.slow_reports = 0

    def judge_anew(self) -> None:
        """Forget what was held against its hop: it has another parent now, or another broadcast began."""
        self.slow_reports, self.closed, self.silent_s = 0, False, 0.0
        self.damaging_s, self.throttled, self.best_bytes_per_s = None, False, 0.0
        self.damage.clear()


@dataclass(slots=True)
class Broadcast:
    """One publication on its way."""

    key: PublicationKey
    opened_s: float
    est_bytes: int
    source: Progress = field(default_factory=Progress)
    peers: dict[str, Progress] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    committed: bool = False
    seed_blamed: bool = False  # a slow seed was replaced: if the next is slow too, it is the source
    repairs: int = 0
    alone: bool = True  # on its way, from its first to its last byte
    throttled: bool = False  # a link was, at some time
    seconds: float | None = None

    def of(self, peer_id: str) -> Progress:
        """The progress of a peer, which begins with nothing, or of the sender."""
        if peer_id == SENDER_ID:
            return self.source
        return self.peers.setdefault(peer_id, Progress())

    @property
    def payload_bytes(self) -> int:
        """As committed; before, the better guess."""
        return self.source.have if self.committed else max(self.est_bytes, self.source.have)


def due_bytes_per_s(
    wanted: list[Broadcast], child_id: str, parent_id: str, seeds: list[str], most: float
) -> float:
    """Rate that a hop should carry, bytes/s, at most `most`; 0: not known.

    A relay passes on what it gets itself. A seed is measured by what it got so far, and by the median seed.
    """

    def mean(peer_id: str) -> float:
        return max((broadcast.of(peer_id).mean_bytes_per_s() for broadcast in wanted), default=0.0)

    if parent_id != SENDER_ID:
        return min(most, mean(parent_id))
    means = sorted(map(mean, seeds))
    return min(most, max(mean(child_id), means[(len(means) - 1) // 2] if means else 0.0))


def known_bytes_per_s(child_id: str, child: Peer, broadcasts: Iterable[Broadcast]) -> float:
    """The best that is known of how fast a peer receives: now, on average of a broadcast on its way, or,
    where nothing has come yet, in former ones; 0: nothing is known."""
    means = (broadcast.of(child_id).mean_bytes_per_s() for broadcast in broadcasts)
    return max(child.best_bytes_per_s, *means, 0.0) or child.stats.rate_bytes_per_s


def steady_rates(broadcast: Broadcast, peer_ids: Iterable[str], seeds: Iterable[str]) -> dict[str, float]:
    """Rates that the peers' links carried, bytes/s; {} where a broadcast does not tell: it was too small, was
    disturbed, or went no faster than it was made. Peers with too little to measure are left out."""
    if not broadcast.alone or broadcast.repairs or broadcast.throttled:
        return {}
    means = ((peer_id, broadcast.of(peer_id).steady_bytes_per_s()) for peer_id in peer_ids)
    rates = {peer_id: mean for peer_id, mean in means if mean > 0}
    fastest = max((rates.get(seed, 0.0) for seed in seeds), default=0.0)
    made = broadcast.source.mean_bytes_per_s()  # 0: all at once
    measured = all(seed in rates for seed in seeds) and not 0 < made < SOURCE_AHEAD * fastest
    return rates if measured else {}


def patience_s(peer_id: str, peers: Mapping[str, Peer], now_s: float) -> float:
    """Without a report for so long, the peer is lost."""
    peer = peers[peer_id]
    others = [other for other in peers.values() if other is not peer and not other.lost]
    heard = [other for other in others if not other.is_stale(now_s)]
    feeds_someone = any(
        other.reported_parent == peer_id and other.silent_s < SILENCE_S / 2 and not other.closed
        for other in heard
    )
    limit_s = IDLE_SILENCE_S if peer.idle else SILENCE_S
    return limit_s * PATIENCE if feeds_someone or (others and not heard) else limit_s
