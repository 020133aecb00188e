"""Simulation of broadcasts over links, in virtual time: the real `Tracker`, and the rules that nodes follow.

The rules are those of the transport. A child pulls from its assigned parent. It receives every chunk that it
lacks as soon as the parent has verified it, in that order. Nodes keep and forward only sound chunks, and
request damaged ones again. A new parent sends only missing chunks.

The model has, per node, an upload and a download rate (full duplex). Connections with pending chunks share
the uplink fairly, chunk by chunk. A hop takes half a round trip, a new connection one and a half, and
back-pressure applies. TCP's slow start and losses, and the time for hashing, are not modelled.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from echo_planes.errors import RunError
from echo_planes.weights.chain.events import (
    IDLE_REPORT_INTERVAL_S,
    REPORT_INTERVAL_S,
    SENDER_ID,
    TICK_INTERVAL_S,
    Accusation,
    Action,
    CancelBroadcast,
    Drop,
    Event,
    PeerJoined,
    PublicationCommitted,
    PublicationOpened,
    Report,
    SegmentAdded,
    Throttle,
    Tick,
)
from echo_planes.weights.chain.tracker import Tracker, TrackerSettings
from echo_planes.weights.wire.manifest import PublicationKey

MBIT = 1e6 / 8  # bytes/s
RATE_WINDOW_S = 1.0


@dataclass(frozen=True, slots=True)
class SimSettings:
    """Settings of the simulated network. Rates in bytes/s."""

    uplink_bytes_per_s: float  # B0, of the sender
    worker_bytes_per_s: float  # Bw, of every worker, up and down
    rtt_s: float = 0.08
    chunk_bytes: int = 256 * 1024
    direct: bool = False
    reports: bool = True  # False: no heartbeats, for faultless runs of hours
    seed: int = 0


@dataclass(slots=True, eq=False)
class Published:
    """One publication: chunks [start, stop) of the numbering over all publications."""

    key: PublicationKey
    number: int
    start: int
    stop: int
    opened_s: float
    complete_s: dict[str, float] = field(default_factory=dict)  # when each worker had it whole


@dataclass(slots=True, eq=False)
class Link:
    """One connection, with the chunks that the parent still has to send on it."""

    parent: SimNode
    child: SimNode
    pending: deque[int] = field(default_factory=deque)
    in_flight: int = 0
    spacing_s: float = 0.0  # between chunks, when throttled
    ready_s: float = 0.0  # earliest start of the next chunk
    closed: bool = False


@dataclass(slots=True, eq=False)
class SimNode:
    """The sender or one worker."""

    name: str
    region: str
    up_bytes_per_s: float
    down_bytes_per_s: float
    have: set[int] = field(default_factory=set)  # chunks, numbered over all publications
    counts: dict[int, int] = field(default_factory=dict)  # number of these chunks, by publication
    links: list[Link] = field(default_factory=list)  # to its children
    parent: Link | None = None
    parent_id: str = ""
    sending: bool = False
    next_link: int = 0
    down_free_s: float = 0.0
    heard_s: float = 0.0  # last byte from the parent
    dead: bool = False
    cut_off: bool = False
    damage_share: float = 0.0  # of the chunks it sends
    damaged: dict[int, int] = field(default_factory=dict)  # by publication
    arrivals: deque[float] = field(default_factory=deque)
    cancelled: set[int] = field(default_factory=set)  # publications

    @property
    def reachable(self) -> bool:
        """Whether bytes reach and leave the node."""
        return not self.dead and not self.cut_off

    def has(self, one: Published) -> bool:
        """Return whether the node has the publication whole."""
        return self.counts.get(one.number, 0) == one.stop - one.start

    def is_done_with(self, one: Published) -> bool:
        """Return whether the node has the publication whole, or has given it up."""
        return one.number in self.cancelled or self.has(one)


class BroadcastSim:
    """Simulation of one sender, workers, publications and faults.

    Args:
        settings: the network.
    """

    def __init__(self, settings: SimSettings) -> None:
        self.settings = settings
        self.tracker = Tracker(
            TrackerSettings(settings.uplink_bytes_per_s, settings.worker_bytes_per_s, settings.direct)
        )
        self.now_s = 0.0
        self.nodes = {
            SENDER_ID: SimNode(SENDER_ID, "", settings.uplink_bytes_per_s, settings.uplink_bytes_per_s)
        }
        self.published: list[Published] = []
        self.actions: list[tuple[float, Action]] = []
        self.num_sent = 0  # chunks, damaged and lost ones included
        self.num_damaged = 0
        self.num_duplicates = 0
        self._rng = random.Random(settings.seed)
        self._order = itertools.count()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._window = 2 + math.ceil(settings.worker_bytes_per_s * settings.rtt_s / settings.chunk_bytes)
        if settings.reports:
            self.at(0.0, self._tick)

    # --- the schedule -----------------------------------------------------------------------------

    def at(self, when_s: float, action: Callable[[], None]) -> None:
        """Call `action` at a moment of virtual time."""
        heapq.heappush(self._queue, (when_s, next(self._order), action))

    def join(self, name: str, region: str = "") -> None:
        """Start a worker now."""
        rate = self.settings.worker_bytes_per_s
        self.nodes[name] = SimNode(name, region, rate, rate, heard_s=self.now_s)
        self._tell(PeerJoined(name, f"http://{name}", region))
        if self.settings.reports:
            self.at(self.now_s + self._rng.uniform(0, REPORT_INTERVAL_S), partial(self._report, name))

    def publish(self, key: PublicationKey, num_chunks: int, source_bytes_per_s: float = math.inf) -> None:
        """Start a publication now; its chunks become ready at the source's rate."""
        start = self.published[-1].stop if self.published else 0
        new = Published(key, len(self.published), start, start + num_chunks, self.now_s)
        self.published.append(new)
        size = self.settings.chunk_bytes
        self._tell(PublicationOpened(key, num_chunks * size))
        if not self.settings.reports:  # without reports no node hears its assignment, so take the plan
            self._attach_all()
        step = 1 if source_bytes_per_s < math.inf else num_chunks
        for done in range(step, num_chunks + 1, step):
            self.at(self.now_s + done * size / source_bytes_per_s, partial(self._add, new, done, step))

    def kill(self, name: str) -> None:
        """End a worker's process; its connections break at once."""
        node = self.nodes[name]
        node.dead = True
        self._detach(node)
        for link in node.links:
            link.closed = True

    def cut_off(self, name: str) -> None:
        """Cut a worker off: no byte reaches or leaves it, but its connections stay open."""
        self.nodes[name].cut_off = True

    def heal(self, name: str) -> None:
        """Make a worker reachable again; its stalled connections are replaced."""
        self.nodes[name].cut_off = False
        for node in self.nodes.values():
            if node.parent_id and name in (node.name, node.parent_id):
                self._attach(node, node.parent_id)

    def slow(self, name: str, factor: float) -> None:
        """Multiply the rate of a worker's uplink by `factor`."""
        self.nodes[name].up_bytes_per_s *= factor

    def run(self, limit_s: float) -> None:
        """Run until every live worker has every publication that it has not given up.

        Raises:
            RunError: that is not the case by `limit_s` of virtual time.
        """
        while not self.is_over():
            if not self._queue or self._queue[0][0] > limit_s:
                raise RunError(f"the broadcast is not over after {limit_s:.1f} s: {self._missing()}")
            self.step()

    def step(self) -> None:
        """Run the next event."""
        self.now_s, _, action = heapq.heappop(self._queue)
        action()

    def is_over(self) -> bool:
        """Return whether every live worker has every publication that it has not given up."""
        return all(node.is_done_with(one) for one in self.published for node in self.workers())

    def workers(self) -> list[SimNode]:
        """Return the workers that are alive and not cut off."""
        return [node for node in self.nodes.values() if node.name != SENDER_ID and node.reachable]

    def seconds(self, number: int = 0, share: float = 1.0) -> float:
        """Return the seconds from the opening of a publication until `share` of the live workers had it."""
        one = self.published[number]
        times = sorted(one.complete_s[node.name] for node in self.workers())
        return times[math.ceil(len(times) * share) - 1] - one.opened_s

    # --- the links --------------------------------------------------------------------------------

    def _add(self, one: Published, done: int, step: int) -> None:
        size = self.settings.chunk_bytes
        self._tell(SegmentAdded(one.key, done, done * size))
        if done == one.stop - one.start:
            self._tell(PublicationCommitted(one.key, done * size, done))
        for chunk in range(one.start + done - step, one.start + done):
            self._accept(self.nodes[SENDER_ID], chunk)

    def _accept(self, node: SimNode, chunk: int) -> None:
        one = self._publication(chunk)
        node.have.add(chunk)
        node.counts[one.number] = node.counts.get(one.number, 0) + 1
        if node.has(one):
            one.complete_s[node.name] = self.now_s
        for link in node.links:
            if chunk not in link.child.have and one.number not in link.child.cancelled:
                link.pending.append(chunk)
        self._send(node)

    def _send(self, node: SimNode) -> None:
        """Start the next chunk, if the uplink is free and a child lacks one."""
        if node.sending or not node.reachable:
            return
        for turn in range(len(node.links)):
            link = node.links[(node.next_link + turn) % len(node.links)]
            if not link.pending or link.in_flight >= self._window:
                continue
            if link.ready_s > self.now_s:
                self.at(link.ready_s, partial(self._send, node))
                continue
            node.next_link = (node.next_link + turn + 1) % len(node.links)
            self._start(node, link, link.pending.popleft())
            return

    def _start(self, node: SimNode, link: Link, chunk: int) -> None:
        size, child = self.settings.chunk_bytes, link.child
        on_wire_s = size / min(node.up_bytes_per_s, child.down_bytes_per_s)
        arrives_s = max(
            self.now_s + on_wire_s + self.settings.rtt_s / 2,
            child.down_free_s + size / child.down_bytes_per_s,
        )
        child.down_free_s = arrives_s
        node.sending = True
        link.in_flight += 1
        link.ready_s = self.now_s + link.spacing_s
        self.num_sent += 1
        self.at(self.now_s + size / node.up_bytes_per_s, partial(self._uplink_free, node))
        self.at(arrives_s, partial(self._arrive, link, chunk))

    def _uplink_free(self, node: SimNode) -> None:
        node.sending = False
        self._send(node)

    def _arrive(self, link: Link, chunk: int) -> None:
        parent, child = link.parent, link.child
        if link.closed or not child.reachable or not parent.reachable:
            return  # without acknowledgements, an open connection stalls once its window is full
        link.in_flight -= 1
        child.heard_s = self.now_s
        if chunk in child.have:
            self.num_duplicates += 1
        elif parent.damage_share and self._rng.random() < parent.damage_share:
            number = self._publication(chunk).number
            child.damaged[number] = child.damaged.get(number, 0) + 1
            self.num_damaged += 1
            self.at(self.now_s + self.settings.rtt_s / 2, partial(self._again, link, chunk))
        else:
            child.arrivals.append(self.now_s)
            self._accept(child, chunk)
        self._send(parent)

    def _again(self, link: Link, chunk: int) -> None:
        if not link.closed:
            link.pending.appendleft(chunk)
            self._send(link.parent)

    def _attach(self, child: SimNode, parent_id: str) -> None:
        """Move a child to another parent, which begins to send when the child has connected."""
        self._detach(child)
        child.parent_id, child.heard_s = parent_id, self.now_s
        self.at(self.now_s + 1.5 * self.settings.rtt_s, partial(self._connected, child, parent_id))

    def _detach(self, child: SimNode) -> None:
        if child.parent is not None:
            child.parent.closed = True
            child.parent.parent.links.remove(child.parent)
            child.parent = None

    def _connected(self, child: SimNode, parent_id: str) -> None:
        parent = self.nodes[parent_id]
        if child.parent_id != parent_id or child.parent is not None or not parent.reachable:
            return
        child.parent = Link(parent, child)
        parent.links.append(child.parent)
        self._fill(child.parent)

    def _fill(self, link: Link) -> None:
        """Queue every chunk that the child lacks and the parent has, older publications first."""
        link.pending = deque(
            chunk
            for chunk in sorted(link.parent.have - link.child.have)
            if self._publication(chunk).number not in link.child.cancelled
        )
        self._send(link.parent)

    def _attach_all(self) -> None:
        for name, parent_id in self.tracker.parents().items():
            if self.nodes[name].parent_id != parent_id:
                self._attach(self.nodes[name], parent_id)

    # --- the tracker ------------------------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        for action in self.tracker.handle(event, self.now_s):
            self.actions.append((self.now_s, action))
            match action:
                case Throttle(child_id, _, bytes_per_s):
                    link = self.nodes[child_id].parent
                    if link is not None:
                        link.spacing_s = self.settings.chunk_bytes / bytes_per_s if bytes_per_s else 0.0
                case CancelBroadcast(key, peer_ids):
                    number = next(one.number for one in self.published if one.key == key)
                    for peer_id in peer_ids:
                        self._give_up(self.nodes[peer_id], number)
                case Drop(peer_id, _):
                    self.kill(peer_id)

    def _give_up(self, node: SimNode, number: int) -> None:
        node.cancelled.add(number)
        if node.parent is not None:
            kept = (c for c in node.parent.pending if self._publication(c).number != number)
            node.parent.pending = deque(kept)

    def _tick(self) -> None:
        self._tell(Tick())
        self.at(self.now_s + TICK_INTERVAL_S, self._tick)

    def accuse(self, name: str, by: str) -> None:
        """Report that `by` has received altered bytes from its parent `name` repeatedly."""
        self._tell(Accusation(name, by))

    def _report(self, name: str) -> None:
        node = self.nodes[name]
        if node.dead:
            return
        todo = [one for one in self.published if one.number not in node.cancelled]
        missing = [one for one in todo if not node.has(one)]
        fresh = [one for one in todo if self.now_s - one.complete_s.get(name, math.inf) <= REPORT_INTERVAL_S]
        found: list[Published | None] = [*fresh, *missing]
        for one in found or [None]:
            report = self._report_of(node, one)
            if node.reachable:
                self.at(self.now_s + self.settings.rtt_s / 2, partial(self._hear, report))
        interval_s = REPORT_INTERVAL_S if missing or fresh else IDLE_REPORT_INTERVAL_S
        self.at(self.now_s + interval_s, partial(self._report, name))

    def _report_of(self, node: SimNode, one: Published | None) -> Report:
        healthy = node.parent is not None and node.parent.parent.reachable and node.reachable
        if healthy:
            node.heard_s = self.now_s  # the parent's pings
        while node.arrivals and node.arrivals[0] < self.now_s - RATE_WINDOW_S:
            node.arrivals.popleft()
        have = node.counts.get(one.number, 0) if one else 0
        parent = self.nodes.get(node.parent_id)
        return Report(
            peer_id=node.name,
            parent_id=node.parent_id,
            key=one.key if one else None,
            chunks_have=have,
            bytes_received=have * self.settings.chunk_bytes,
            rate_bytes_per_s=len(node.arrivals) * self.settings.chunk_bytes / RATE_WINDOW_S,
            damaged_chunks=node.damaged.get(one.number, 0) if one else 0,
            parent_silent_s=self.now_s - node.heard_s,
            parent_closed=parent is not None and parent.dead,
            complete=one is not None and node.has(one),
            installed_version=max((p.key.version for p in self.published if node.has(p)), default=-1),
            staged_version=-1,
            made=False,
        )

    def _hear(self, report: Report) -> None:
        """Process a report at the sender's node, which answers with the assignment."""
        self._tell(report)
        assigned = self.tracker.assignment(report.peer_id)
        if assigned is not None:
            answer = assigned.parent_id
            self.at(self.now_s + self.settings.rtt_s / 2, partial(self._answered, report.peer_id, answer))

    def _answered(self, name: str, parent_id: str) -> None:
        node = self.nodes[name]
        if node.reachable and node.parent_id != parent_id:
            self._attach(node, parent_id)

    # --- helpers ----------------------------------------------------------------------------------

    def _publication(self, chunk: int) -> Published:
        return next(one for one in reversed(self.published) if one.start <= chunk)

    def _missing(self) -> dict[str, int]:
        last = self.published[-1].stop if self.published else 0
        return {node.name: last - len(node.have) for node in self.workers() if len(node.have) < last}
