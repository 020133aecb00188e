"""State of one peer, of one broadcast, and of the bytes that crossed a hop, as the tracker keeps it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from echo_planes.weights.chain.events import IDLE_REPORT_INTERVAL_S, REPORT_INTERVAL_S, SENDER_ID
from echo_planes.weights.chain.plan import PeerStats
from echo_planes.weights.wire.manifest import PublicationKey

WINDOW_S = 1.5  # the tracker judges a hop by the bytes that crossed it in this time
SLACK_S = 0.5  # half a round trip and two reports: bytes that the parent got later may be in flight
SLOW_SHARE = 0.7  # of the bytes that could have crossed; less is slow
MIN_BUSY_SHARE = 0.5  # of the window at full rate must have been there to send, else there is no verdict
KEPT_S = WINDOW_S + SLACK_S + 4 * REPORT_INTERVAL_S
MIN_MEASURED_S = 0.5  # of receiving, before a mean rate means anything
MIN_STEADY_S = 2.0  # of receiving (eight reports), before a mean rate counts as that of the link
MIN_STEADY_CHUNKS = 32  # likewise: progress moves in whole chunks
SOURCE_AHEAD = 1.25  # times the fastest link: a source slower than this may have set the pace
DAMAGE_WINDOW_S = 2.0
MIN_DAMAGED = 3  # chunks in the window, before the tracker acts
THROTTLE_SHARE = 0.02  # damaged: the tracker throttles the link
DISSOLVE_SHARE = 0.05  # still damaged after DAMAGE_WINDOW_S: the tracker dissolves the hop
THROTTLE_FACTOR = 0.5  # of the known rate
CLEAN_S = 5.0  # since the first damage, and no damage in the window: the throttle is lifted
SILENCE_S = 1.5  # without a report from a busy peer, or a byte from a parent
IDLE_SILENCE_S = 2.5  # without a report from a peer that had nothing to receive
PATIENCE = 4.0  # factor on both where the peer's children still receive from it, or all reports are overdue
STALE_REPORTS = 2.5  # report intervals without a report: it is overdue
SETTLE_S = 0.5  # before a new parent is judged; doubles with every further move in a broadcast


class Progress:
    """Payload bytes of one publication that a peer or the sender had, over the last `KEPT_S` seconds."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()
        self._first = (0.0, 0)  # (when, bytes) at the first growth
        self._last = (0.0, 0)  # at the last growth
        self._before = (0.0, 0)  # at the growth before the last
        self.have = 0  # bytes
        self.chunks = 0
        self.damaged = 0  # chunks
        self.complete = False
        self.made = False  # some were made from the model's files: no rate of a link can be told

    def add(self, now_s: float, num_bytes: int) -> None:
        """Record `num_bytes` in all at `now_s`; a smaller number than before counts as no growth."""
        if num_bytes > self.have:
            if not self.have:
                self._first = (now_s, num_bytes)
            self._before, self._last = self._last, (now_s, num_bytes)
        self.have = max(self.have, num_bytes)
        self._samples.append((now_s, self.have))
        while len(self._samples) > 1 and self._samples[1][0] < now_s - KEPT_S:
            self._samples.popleft()

    def at(self, when_s: float) -> int:
        """Return the bytes known at `when_s`, which lies within the last `KEPT_S` seconds."""
        return next((have for at_s, have in reversed(self._samples) if at_s <= when_s), 0)

    @property
    def first_s(self) -> float:
        """Time of the first growth, seconds; infinity before."""
        return self._first[0] if self.have else math.inf

    def mean_bytes_per_s(self) -> float:
        """Return the rate from the first growth to the last; 0 if that is less than `MIN_MEASURED_S`, or not
        that of a link."""
        seconds = self._last[0] - self._first[0]
        enough = seconds >= MIN_MEASURED_S and not self.made
        return (self.have - self._first[1]) / seconds if enough else 0.0

    def steady_bytes_per_s(self) -> float:
        """Return the rate from the first growth to the last but one; 0 if that is too little to measure.

        The last growth is left out: the transfer ends somewhere between two reports.
        """
        seconds = self._before[0] - self._first[0]
        enough = seconds >= MIN_STEADY_S and self.chunks >= MIN_STEADY_CHUNKS and not self.made
        return (self._before[1] - self._first[1]) / seconds if enough else 0.0


def is_slow(
    received: Progress, pairs: Iterable[tuple[Progress, Progress]], rate_bytes_per_s: float, now_s: float
) -> bool:
    """Return whether far fewer bytes crossed a hop than could have.

    A slow source does not make a hop slow. The hop could have carried the bytes that the parent had and the
    child lacked, at most `rate_bytes_per_s` over the window.

    Args:
        received: the child's bytes of all publications.
        pairs: (parent's, child's) progress for each publication on its way.
        rate_bytes_per_s: rate that the hop should carry; 0: not known, never slow.
        now_s: time of the child's last report.
    """
    got = ready = received.have - received.at(now_s - WINDOW_S)
    since_s = math.inf
    for parent, child in pairs:
        if not child.complete:
            since_s = min(since_s, parent.first_s)
        before = child.at(now_s - WINDOW_S)
        ready += max(0, parent.at(now_s - SLACK_S) - before) - (child.have - before)
    if since_s > now_s - WINDOW_S - SLACK_S:  # the parent did not have bytes to send all the time
        return False
    full = rate_bytes_per_s * WINDOW_S
    could = min(ready, full)
    return could >= MIN_BUSY_SHARE * full > 0 and got < SLOW_SHARE * could


@dataclass(slots=True)
class Peer:
    """Tracker's record of one worker's node."""

    stats: PeerStats
    address: str
    seen_s: float  # time of its last report
    parent_id: str = ""  # the parent assigned to it
    assigned_s: float = 0.0
    moves: int = 0  # changes of its parent in mid-broadcast, since a broadcast was finished last
    reported_parent: str = ""  # the parent that it says it pulls from
    received: Progress = field(default_factory=Progress)  # bytes of all publications together
    silent_s: float = 0.0
    closed: bool = False
    idle: bool = True
    installed: int = -1  # version
    lost: bool = False
    rollout_only: bool = False
    struck: bool = False  # a fault was recorded against it in the present broadcast
    slow_reports: int = 0
    suspect: tuple[str, PeerStats] | None = None  # former parent blamed for its hop, with its record before
    damage: deque[tuple[float, int, int]] = field(default_factory=deque)  # (when, damaged, sound) chunks
    damaging_s: float | None = None  # since when its hop damages too many chunks; None: it does not
    throttled: bool = False  # its hop is throttled, because it damages chunks
    best_bytes_per_s: float = 0.0  # largest rate that it reported with this parent
    whole: tuple[str, int] = ("", -1)  # (lineage, version): newest that is whole, staged or installed
    got: dict[PublicationKey, int] = field(default_factory=dict)  # verified bytes of versions it lacked
    fed_s: float = 0.0  # time up to which it received enough (`starvation`)
    starved_by: list[tuple[str, PeerStats]] = field(default_factory=list)  # parents, their records before
    refuge: bool = False  # it starved twice: the sender itself feeds it until it lacks nothing

    def on_chunks(self, now_s: float, damaged: int, sound: int) -> Literal["clean", "damages", "hopeless"]:
        """Record the chunks since the last report and judge the hop: `damages` asks for a throttle,
        `hopeless` means much damage still `DAMAGE_WINDOW_S` later."""
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
        """Return the newest version of a lineage that the peer has whole; -1: none."""
        return self.whole[1] if self.whole[0] == lineage else -1

    def came_to(self, lineage: str, version: int) -> None:
        """Record that the peer has this version of a lineage whole; -1: none."""
        if version > self.whole_version(lineage):
            self.whole = lineage, version

    def is_stale(self, now_s: float) -> bool:
        """Return whether its reports are overdue: if its child hears nothing from it either, it is lost."""
        interval_s = IDLE_REPORT_INTERVAL_S if self.idle else REPORT_INTERVAL_S
        return now_s - self.seen_s >= STALE_REPORTS * interval_s

    def settled(self, now_s: float) -> float:
        """Return the seconds since the time to settle with its parent ended, negative before: `SETTLE_S`,
        doubled with every further move, at most 16-fold."""
        return now_s - self.assigned_s - SETTLE_S * float(2 ** min(max(self.moves - 1, 0), 4))

    def forgive(self, gap_s: float) -> None:
        """Shift the peer's clocks by `gap_s` seconds in which the tracker did not run."""
        self.seen_s += gap_s
        self.assigned_s += gap_s
        self.fed_s += gap_s
        self.slow_reports = 0

    def judge_anew(self) -> None:
        """Clear the faults of the peer's former hop: it has another parent now."""
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
    seed_blamed: bool = False  # a slow seed was replaced: if the next is slow too, the source is slow
    repairs: int = 0  # changes of a parent meanwhile
    at_fault: dict[str, str] = field(default_factory=dict)  # peer -> why it was moved out of the way
    alone: bool = True  # no other publication has been open at the same time
    throttled: bool = False  # the throttle of a link changed meanwhile
    seconds: float | None = None  # until the fraction 1/gamma of the peers was complete

    def of(self, peer_id: str) -> Progress:
        """Return the progress of a peer, or of the sender; a peer begins with nothing."""
        if peer_id == SENDER_ID:
            return self.source
        return self.peers.setdefault(peer_id, Progress())

    @property
    def payload_bytes(self) -> int:
        """Payload size: as committed; before, the larger of the estimate and the bytes at the sender."""
        return self.source.have if self.committed else max(self.est_bytes, self.source.have)


def due_bytes_per_s(
    wanted: list[Broadcast], child_id: str, parent_id: str, seeds: list[str], most: float
) -> float:
    """Return the rate that a hop should carry, bytes/s, at most `most`; 0: not known.

    A parent should forward at the mean rate at which it receives. Of a child that makes chunks itself nothing
    is due. A seed should receive at its own mean rate,
    or at that of the median seed if that is higher.
    """

    def mean(peer_id: str) -> float:
        return max((broadcast.of(peer_id).mean_bytes_per_s() for broadcast in wanted), default=0.0)

    if any(broadcast.of(child_id).made for broadcast in wanted):
        return 0.0
    if parent_id != SENDER_ID:
        return min(most, mean(parent_id))
    means = sorted(map(mean, seeds))
    return min(most, max(mean(child_id), means[(len(means) - 1) // 2] if means else 0.0))


def known_bytes_per_s(child_id: str, child: Peer, broadcasts: Iterable[Broadcast]) -> float:
    """Return the best known receiving rate of a peer: from its parent, or as mean of an open broadcast; if
    neither is known, from earlier broadcasts; 0: not known."""
    means = (broadcast.of(child_id).mean_bytes_per_s() for broadcast in broadcasts)
    return max(child.best_bytes_per_s, *means, 0.0) or child.stats.rate_bytes_per_s


def steady_rates(broadcast: Broadcast, peer_ids: Iterable[str], seeds: Iterable[str]) -> dict[str, float]:
    """Return the rates that the peers' links carried, bytes/s, without peers that received too little; {} for
    a broadcast that was too small or disturbed, or for which the source set the pace."""
    if not broadcast.alone or broadcast.repairs or broadcast.throttled:
        return {}
    means = ((peer_id, broadcast.of(peer_id).steady_bytes_per_s()) for peer_id in peer_ids)
    rates = {peer_id: mean for peer_id, mean in means if mean > 0}
    fastest = max((rates.get(seed, 0.0) for seed in seeds), default=0.0)
    made = broadcast.source.mean_bytes_per_s()  # 0: too quick to measure
    measured = all(seed in rates for seed in seeds) and not 0 < made < SOURCE_AHEAD * fastest
    return rates if measured else {}


def patience_s(peer_id: str, peers: Mapping[str, Peer], now_s: float) -> float:
    """Return the seconds without a report after which a peer is lost."""
    peer = peers[peer_id]
    others = [other for other in peers.values() if other is not peer and not other.lost]
    heard = [other for other in others if not other.is_stale(now_s)]
    feeds_someone = any(
        other.reported_parent == peer_id and other.silent_s < SILENCE_S / 2 and not other.closed
        for other in heard
    )
    limit_s = IDLE_SILENCE_S if peer.idle else SILENCE_S
    return limit_s * PATIENCE if feeds_someone or (others and not heard) else limit_s
