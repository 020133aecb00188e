"""Tracker of the chains while publications travel: the sans-I/O core in the sender's node.

It takes events and returns actions (`events`); `plan.Topology` holds the chains. The tracker repairs a chain
in these cases (ECHO-2, section 4.2 and appendix D):

- A peer without a report for `patience_s` is lost. The tracker cuts it out, and places it at a tail again
  when it reports again.
- A hop that is silent or closed although both ends report, that is slow, or that keeps damaging bytes, is
  dissolved: the parent becomes a leaf, and the child moves to the peer before it. If the child's next hop is
  no better, the child was at fault: it becomes a leaf, and its former parent's record is restored.
- The sender is never cut out. A slow seed is replaced once per broadcast; after that the source itself is
  slow.
- When a peer starves (`starvation`), its parent becomes a leaf, whatever the parent reports, and the peer
  moves to the one before. If it starves again, the sender feeds it until it lacks nothing. If it starves even
  there, it is at fault itself, and the records of its former parents are restored.

A child that accuses its parent of altering bytes cannot prove it: chunks carry the learner's signature, not
the parent's, and the child could have altered them. So one accusation only dissolves the hop. Accusations by
`EXPELLING_CHILDREN` different children, which the tracker chose, exclude the parent for `EXPELLED_S`. The
tracker demotes a child that accuses a second parent.

The tracker reorders the chains between publications only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from echo_planes.types import BroadcastStats
from echo_planes.weights.chain.broadcasts import Broadcasts
from echo_planes.weights.chain.events import (
    SENDER_ID,
    TICK_INTERVAL_S,
    Accusation,
    Action,
    Assign,
    Demote,
    Drop,
    Event,
    PeerJoined,
    PublicationCommitted,
    PublicationOpened,
    Readmit,
    Report,
    SegmentAdded,
    Throttle,
    Tick,
)
from echo_planes.weights.chain.hops import (
    SILENCE_S,
    THROTTLE_FACTOR,
    WINDOW_S,
    Broadcast,
    Peer,
    due_bytes_per_s,
    is_slow,
    known_bytes_per_s,
    patience_s,
    steady_rates,
)
from echo_planes.weights.chain.plan import (
    MAX_CONSECUTIVE_FAILURES,
    PeerStats,
    Topology,
    is_misplaced,
    peer_score,
    plan_chains,
)
from echo_planes.weights.chain.rates import ChainRates
from echo_planes.weights.chain.starvation import Hunger, needed_bytes_per_s
from echo_planes.weights.wire.manifest import PublicationKey

CLOSED_S = 1.0  # since the last byte of a parent without a connection, until the hop is repaired
SLOW_REPORTS = 2  # in a row, until a slow hop is dissolved
STALLED_S = 2 * TICK_INTERVAL_S  # a longer gap between two events means that this process did not run
RERANK_MARGIN = 10.0  # points by which a peer must beat one nearer to the sender for a new order
FORGOTTEN_S = 600.0  # without a report, until a lost peer's record is removed
STARVED_S = 4.0  # without enough bytes, beyond the time of a few chunks
LEAST_BYTES_PER_S = 1e6 / 8
EXPELLING_CHILDREN = 3  # one or two colluding workers must not be able to exclude others
EXPELLED_S = 600.0


@dataclass(frozen=True, slots=True)
class TrackerSettings:
    """Settings of a tracker. Rates in bytes/s; None: learnt from finished broadcasts (`rates`)."""

    uplink_bytes_per_s: float | None = None  # B0, of the sender
    worker_bytes_per_s: float | None = None  # Bw, of one worker
    direct: bool = False  # every peer pulls from the sender
    gamma: float = 1.1  # T_bcast ends when the fraction 1/gamma of the peers has everything
    starved_s: float = STARVED_S
    least_bytes_per_s: float = LEAST_BYTES_PER_S  # a peer that receives less starves, while no rate is known
    streams_per_link: int = 2


class Tracker:
    """Owner of the topology and of the peers' records. Not thread-safe.

    Args:
        settings: known rates of the links, and limits.
    """

    def __init__(self, settings: TrackerSettings) -> None:
        self._settings = settings
        self._peers: dict[str, Peer] = {}
        self._regions: dict[str, str] = {}
        self._dropped: dict[str, float] = {}  # excluded peers: until when
        self._accused: dict[str, set[str]] = {}  # accused peers: by which children
        self._topology = Topology(self._regions)
        self._broadcasts = Broadcasts(self._peers, self._topology, settings.gamma)
        self._rates = ChainRates(settings.uplink_bytes_per_s, settings.worker_bytes_per_s)
        self._hunger = Hunger(
            self._peers,
            settings.starved_s,
            settings.streams_per_link,
            lambda: needed_bytes_per_s(self._rates.worker_bytes_per_s, settings.least_bytes_per_s),
            lambda peer_id, key: key in self._broadcasts.cancelled(peer_id),
        )
        self._actions: list[Action] = []
        self._now_s: float | None = None
        self._reorder = False

    # --- asked by the sender's node ---------------------------------------------------------------

    def assignment(self, peer_id: str) -> Assign | None:
        """Return the peer's present parent; None: the peer was dropped, or must join: it is unknown, or was
        lost and its parent is gone."""
        peer = self._peers.get(peer_id)
        known = peer and (peer.parent_id == SENDER_ID or peer.parent_id in self._peers)
        return self._assign(peer_id, peer.parent_id) if peer and known else None

    def cancelled(self, peer_id: str) -> list[PublicationKey]:
        """Return the newest publications that the peer must no longer request, closed ones included."""
        return self._broadcasts.cancelled(peer_id)

    def is_dropped(self, peer_id: str) -> bool:
        """Return whether the peer is excluded at present: its messages have no effect."""
        return peer_id in self._dropped

    def parents(self) -> dict[str, str]:
        """Return the parent of every live peer."""
        return self._topology.parents()

    def chains(self) -> list[list[str]]:
        """Return the chains, each from seed to tail, without the leaves."""
        return self._topology.chains

    def stats(self, key: PublicationKey) -> BroadcastStats | None:
        """Return the figures of a publication's broadcast; None if never opened, or no longer kept."""
        return self._broadcasts.stats(key)

    def all_stats(self) -> list[BroadcastStats]:
        """Return the figures of all publications still known: closed ones first, then open ones."""
        return self._broadcasts.all_stats()

    # --- events -----------------------------------------------------------------------------------

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Process one event; return the actions to take, in order."""
        self._forgive_standstill(now_s)
        self._actions = []
        match event:
            case PeerJoined():
                self._join(event, now_s)
            case PublicationOpened():
                if not self._broadcasts:
                    self._replan(now_s)
                self._actions += self._broadcasts.open(event, now_s)
            case SegmentAdded(key, _, num_bytes):
                self._broadcasts.grow(key, num_bytes, now_s)
                self._hunger.grow(key, num_bytes)
            case PublicationCommitted(key, payload_bytes, num_chunks):
                self._actions += self._broadcasts.commit(key, payload_bytes, now_s)
                self._hunger.commit(key, payload_bytes, num_chunks, now_s)
            case Report():
                self._report(event, now_s)
            case Accusation():
                self._accuse(event, now_s)
            case Tick():
                self._tick(now_s)
        self._broadcasts.finish(now_s, lambda broadcast: self._book(broadcast, now_s))
        self._reassign(now_s)
        return self._actions

    def _forgive_standstill(self, now_s: float) -> None:
        """Shift all peers' clocks by a gap in which this process did not run, so that none seems silent."""
        gap = now_s - self._now_s if self._now_s is not None else 0.0
        self._now_s = now_s
        if gap > STALLED_S:
            for peer in self._peers.values():
                peer.forgive(gap)

    def _join(self, event: PeerJoined, now_s: float) -> None:
        if event.peer_id in self._dropped or event.peer_id == SENDER_ID:
            return
        known = self._peers.get(event.peer_id)
        stats = known.stats if known else PeerStats(event.peer_id, event.region, measured_s=now_s)
        self._remove(event.peer_id)
        self._regions[event.peer_id] = event.region
        stats = replace(stats, region=event.region)
        peer = self._peers[event.peer_id] = Peer(stats, event.address, now_s, fed_s=now_s)
        if known:  # joining again must not erase faults
            peer.rollout_only, peer.struck = known.rollout_only, known.struck
        self._place(event.peer_id)

    def _place(self, peer_id: str) -> None:
        """Give a peer without a place one: as the sender's leaf, as another leaf, or behind a tail."""
        if self._peers[peer_id].refuge:
            self._topology.take_in(peer_id)
        elif self._peers[peer_id].rollout_only:
            self._topology.hang(peer_id)
        else:
            self._topology.append(peer_id, self._count())
        self._reorder = True

    def _count(self) -> int:
        return max(1, len(self._peers)) if self._settings.direct else self._rates.count

    def _remove(self, peer_id: str) -> None:
        if self._peers.pop(peer_id, None):
            self._topology.remove(peer_id)
            self._regions.pop(peer_id, None)
            self._broadcasts.forget(peer_id)
            self._reorder = True

    def _accuse(self, event: Accusation, now_s: float) -> None:
        child = self._peers.get(event.by)
        if child is None or child.lost or event.peer_id not in self._peers:
            return
        if child.parent_id != event.peer_id:
            return  # a child knows the bytes of its present parent alone
        accusers = self._accused.setdefault(event.peer_id, set())
        if any(event.by in others for accused, others in self._accused.items() if accused != event.peer_id):
            # A child that finds altered bytes at every parent alters them itself, or has faulty memory.
            for others in self._accused.values():
                others.discard(event.by)
            self._demote(event.by, "accuses one parent after another of forgery")
            return
        accusers.add(event.by)
        if len(accusers) < EXPELLING_CHILDREN:
            self._dissolve(event.by, "serves altered bytes", now_s)
            return
        self._dropped[event.peer_id] = now_s + EXPELLED_S
        self._remove(event.peer_id)
        shown = ", ".join(sorted(accusers))
        self._actions.append(Drop(event.peer_id, f"altered signed bytes, say its children {shown}"))

    def _readmit(self, now_s: float) -> None:
        for peer_id in [peer_id for peer_id, until_s in self._dropped.items() if now_s >= until_s]:
            del self._dropped[peer_id]
            self._accused.pop(peer_id, None)
            self._actions.append(Readmit(peer_id))

    def _tick(self, now_s: float) -> None:
        self._readmit(now_s)
        for peer_id, peer in list(self._peers.items()):
            if peer.lost and now_s - peer.seen_s >= FORGOTTEN_S:
                self._remove(peer_id)
            elif not peer.lost and now_s - peer.seen_s >= patience_s(peer_id, self._peers, now_s):
                self._lose(peer_id, now_s)
        if not self._broadcasts:
            self._replan(now_s)

    # --- reports ----------------------------------------------------------------------------------

    def _report(self, event: Report, now_s: float) -> None:
        peer = self._peers.get(event.peer_id)
        if peer is None:
            return
        peer.seen_s, peer.installed, peer.idle = now_s, event.installed_version, event.key is None
        damaged, sound = self._broadcasts.take(event, now_s)
        self._hunger.hear(event, now_s)
        if not self._hunger.lacks(event.peer_id):
            self._reorder |= peer.refuge
            peer.refuge, peer.starved_by = False, []
        if peer.lost:
            peer.lost, peer.fed_s = False, now_s
            self._place(event.peer_id)
            return
        peer.reported_parent = event.parent_id
        peer.silent_s, peer.closed = event.parent_silent_s, event.parent_closed
        if event.parent_id == peer.parent_id and peer.settled(now_s) >= 0:
            peer.best_bytes_per_s = max(peer.best_bytes_per_s, event.rate_bytes_per_s)
            if not self._check_damage(event.peer_id, peer, damaged, sound, now_s):
                self._check_hop(event.peer_id, peer, now_s)
        if not self._settings.direct and self._hunger.starves(event.peer_id, now_s):
            self._feed_elsewhere(event.peer_id, peer, now_s)

    def _check_hop(self, child_id: str, child: Peer, now_s: float) -> None:
        if child.silent_s >= (CLOSED_S if child.closed else SILENCE_S):
            parent = self._peers.get(child.parent_id)
            if parent is not None and parent.is_stale(now_s):
                self._lose(child.parent_id, now_s)
            else:
                self._dissolve(child_id, "is silent", now_s)
        elif self._is_slow_hop(child_id, child, now_s):
            child.slow_reports += 1
            if child.slow_reports >= SLOW_REPORTS:
                self._dissolve(child_id, "is slow", now_s)
        else:
            child.slow_reports = 0

    def _is_slow_hop(self, child_id: str, child: Peer, now_s: float) -> bool:
        # A leaf delays no other peer, and it shares its parent's uplink with other children.
        exempt = self._settings.direct or self._topology.is_leaf(child_id) or child.throttled
        if exempt or child.settled(now_s) < WINDOW_S:
            return False
        wanted = [broadcast for broadcast in self._broadcasts if child_id not in broadcast.cancelled]
        pairs = [(broadcast.of(child.parent_id), broadcast.of(child_id)) for broadcast in wanted]
        most = self._settings.worker_bytes_per_s or math.inf
        seeds = [chain[0] for chain in self._topology.chains]
        due = due_bytes_per_s(wanted, child_id, child.parent_id, seeds, most)
        return is_slow(child.received, pairs, due, now_s)

    def _check_damage(self, child_id: str, child: Peer, damaged: int, sound: int, now_s: float) -> bool:
        """Throttle, release or dissolve a hop by its damaged chunks; return whether it was dissolved."""
        hop = child.on_chunks(now_s, damaged, sound)
        if hop == "hopeless":
            damaging = sum(peer.damaging_s is not None for peer in self._peers.values())
            if 2 * damaging <= len(self._peers):  # otherwise the network as a whole damages chunks
                self._dissolve(child_id, "damages bytes", now_s)
                return True
        if hop == "clean" and child.throttled:
            self._throttle(child_id, child, 0.0)
        elif hop != "clean" and not child.throttled:
            known = known_bytes_per_s(child_id, child, self._broadcasts) or self._settings.worker_bytes_per_s
            if known:  # a throttle of 0 would limit nothing
                self._throttle(child_id, child, THROTTLE_FACTOR * known)
        return False

    def _throttle(self, child_id: str, child: Peer, bytes_per_s: float) -> None:
        child.throttled = bytes_per_s > 0
        for broadcast in self._broadcasts:
            broadcast.throttled = True
        self._actions.append(Throttle(child_id, child.parent_id, bytes_per_s))

    # --- repair -----------------------------------------------------------------------------------

    def _lose(self, peer_id: str, now_s: float) -> None:
        """Cut out a peer that neither the tracker nor its children hear."""
        self._peers[peer_id].lost = True
        self._strike(peer_id, "falls silent in mid-broadcast", now_s)
        self._topology.remove(peer_id)
        self._reorder = True

    def _dissolve(self, child_id: str, fault: str, now_s: float) -> None:
        """Dissolve the hop to `child_id`: one of its ends becomes a leaf."""
        if self._settings.direct:
            return
        child = self._peers[child_id]
        parent = self._peers.get(child.parent_id)
        child.slow_reports = 0
        if self._topology.is_leaf(child_id):
            self._topology.remove(child_id)
            self._topology.hang(child_id, avoid=child.parent_id)
            child.moves += 1
            child.assigned_s = now_s
        elif parent is None:
            if fault == "is slow" and not self._broadcasts.may_blame_seed():
                return
            self._to_tail(child_id, fault, now_s)
        elif child.suspect is not None:
            self._absolve(*child.suspect)
            self._to_tail(child_id, fault, now_s)
        else:
            child.suspect = (child.parent_id, parent.stats)
            self._to_tail(child.parent_id, fault, now_s)

    def _feed_elsewhere(self, child_id: str, child: Peer, now_s: float) -> None:
        """Move a starving peer: to the peer before its parent, the second time to the sender."""
        parent_id = child.parent_id
        parent = self._peers.get(parent_id)
        child.fed_s = now_s
        if parent is None:
            for innocent, record in child.starved_by:
                self._absolve(innocent, record)
            child.starved_by = []
            if not self._topology.is_leaf(child_id):
                self._to_tail(child_id, "does not take what the sender sends", now_s)
            return
        first = not child.starved_by
        child.starved_by.append((parent_id, parent.stats))
        self._punish(parent_id, "leaves its child without bytes", now_s)
        self._topology.remove(parent_id)
        self._topology.hang(parent_id)
        self._reorder = True
        if not first:
            child.refuge = True
            self._topology.take_in(child_id)

    def _to_tail(self, peer_id: str, fault: str, now_s: float) -> None:
        self._strike(peer_id, fault, now_s)
        self._topology.remove(peer_id)
        self._topology.hang(peer_id)
        self._reorder = True

    def _strike(self, peer_id: str, why: str, now_s: float) -> None:
        if self._broadcasts:  # otherwise the fault disturbed no broadcast
            self._punish(peer_id, why, now_s)

    def _punish(self, peer_id: str, why: str, now_s: float) -> None:
        peer = self._peers[peer_id]
        peer.stats, peer.struck = peer.stats.after_failure(now_s), True
        for broadcast in self._broadcasts:
            broadcast.at_fault[peer_id] = why
        if peer.stats.consecutive_failures > MAX_CONSECUTIVE_FAILURES:
            self._demote(peer_id, f"{why}, again and again")

    def _absolve(self, peer_id: str, record: PeerStats) -> None:
        """Give a peer whose child was at fault the record that it had before."""
        if peer_id in self._peers:
            self._peers[peer_id].stats, self._peers[peer_id].struck = record, False
        for broadcast in self._broadcasts:
            broadcast.at_fault.pop(peer_id, None)

    def _demote(self, peer_id: str, why: str) -> None:
        peer = self._peers.get(peer_id)
        if peer is None or peer.rollout_only or self._settings.direct:
            return
        demoted = sum(other.rollout_only for other in self._peers.values()) + 1
        if 2 * demoted > len(self._peers):  # at least half of the peers must forward
            return
        peer.rollout_only = True
        if not peer.lost:
            self._topology.remove(peer_id)
            self._topology.hang(peer_id)
        self._actions.append(Demote(peer_id, why))

    # --- order ------------------------------------------------------------------------------------

    def _book(self, broadcast: Broadcast, now_s: float) -> None:
        """Record a success of each peer without a fault: at the rate of its child, or its own if it has none
        that kept its parent."""
        fed = {parent: child for child, parent in self.parents().items()}
        for peer_id in self._broadcasts.taking_part(broadcast):
            peer, child = self._peers[peer_id], fed.get(peer_id, peer_id)
            if not peer.struck:
                measured = peer_id if self._peers[child].moves else child
                rate = broadcast.of(measured).mean_bytes_per_s()
                peer.stats = peer.stats.after_success(rate, now_s)
        for peer in self._peers.values():
            peer.struck, peer.moves, peer.suspect = False, 0, None
        self._learn(broadcast)

    def _learn(self, broadcast: Broadcast) -> None:
        """Learn the number of chains of the next plan, unless the fleet changed meanwhile."""
        if self._settings.direct or self._reorder or any(peer.throttled for peer in self._peers.values()):
            return
        seeds = [peer_id for peer_id, parent_id in self.parents().items() if parent_id == SENDER_ID]
        if rates := steady_rates(broadcast, self._broadcasts.taking_part(broadcast), seeds):
            before = self._count()
            forwarding = sum(not peer.rollout_only for peer in self._peers.values())
            self._rates.take(seeds, rates, forwarding)
            self._reorder = self._count() != before

    def _replan(self, now_s: float) -> None:
        """Reorder the chains if the fleet changed or a peer is misplaced; not called in mid-broadcast."""
        live = {peer_id: peer for peer_id, peer in self._peers.items() if not peer.lost}
        refuges = [peer_id for peer_id, peer in live.items() if peer.refuge]
        forwarding = [peer.stats for peer in live.values() if not (peer.rollout_only or peer.refuge)]
        # Scores as of their measurement: ageing records alone must not move a peer.
        scores = {stats.peer_id: peer_score(stats, stats.measured_s) for stats in forwarding}
        if not self._reorder and not is_misplaced(self._topology.chains, scores, RERANK_MARGIN):
            return
        leaves = [peer_id for peer_id, peer in live.items() if peer.rollout_only and not peer.refuge]
        self._topology.set_plan(plan_chains(forwarding, self._count(), now_s), leaves, refuges)
        self._reorder = False
        self._reassign(now_s)

    def _reassign(self, now_s: float) -> None:
        """Assign every peer to its parent in the topology, where that has changed."""
        parents = self.parents()
        moved = {one for one, parent_id in parents.items() if self._peers[one].parent_id != parent_id}
        if moved:  # the peers below a moved one receive over another path, too
            below = (peer_id for peer_id in parents if moved & _line(peer_id, parents))
            self._hunger.begin_anew(below, now_s)
        for peer_id, parent_id in parents.items():
            peer = self._peers[peer_id]
            if peer.parent_id == parent_id:
                continue
            if peer.parent_id and self._broadcasts:
                peer.moves += 1
                for broadcast in self._broadcasts:
                    broadcast.repairs += 1
            peer.parent_id, peer.assigned_s = parent_id, now_s
            peer.judge_anew()
            self._actions.append(self._assign(peer_id, parent_id))

    def _assign(self, peer_id: str, parent_id: str) -> Assign:
        address = "" if parent_id == SENDER_ID else self._peers[parent_id].address
        return Assign(peer_id, parent_id, address, shown="")


def _line(peer_id: str, parents: Mapping[str, str]) -> set[str]:
    """Return a peer and its parents, up to but without the sender."""
    line: set[str] = set()
    while peer_id in parents and peer_id not in line:
        line.add(peer_id)
        peer_id = parents[peer_id]
    return line
