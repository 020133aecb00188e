"""The parts of a simulated network: the sender, the workers, their connections, and what is published."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from echo_planes.weights.wire.manifest import PublicationKey


@dataclass(frozen=True, slots=True)
class SimSettings:
    """The network. Rates in bytes/s."""

    uplink_bytes_per_s: float  # B0, of the sender
    worker_bytes_per_s: float  # Bw, of every worker, up and down
    rtt_s: float = 0.08
    chunk_bytes: int = 256 * 1024
    direct: bool = False
    reports: bool = True  # False: no heartbeats, for faultless runs of hours
    seed: int = 0


@dataclass(slots=True, eq=False)
class Published:
    """One publication: chunks [start, stop) of the common numbering."""

    key: PublicationKey
    number: int
    start: int
    stop: int
    opened_s: float
    complete_s: dict[str, float] = field(default_factory=dict)  # when each worker had it whole


@dataclass(slots=True, eq=False)
class Link:
    """One connection: what the parent still has to send on it."""

    parent: SimNode
    child: SimNode
    pending: deque[int] = field(default_factory=deque)
    in_flight: int = 0
    spacing_s: float = 0.0  # between chunks, when throttled
    ready_s: float = 0.0  # the next chunk may not start before
    closed: bool = False


@dataclass(slots=True, eq=False)
class SimNode:
    """The sender or one worker."""

    name: str
    region: str
    up_bytes_per_s: float
    down_bytes_per_s: float
    have: set[int] = field(default_factory=set)  # chunks, numbered through all publications
    counts: dict[int, int] = field(default_factory=dict)  # of them, by publication
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
        """Whether bytes reach and leave it."""
        return not self.dead and not self.cut_off

    def has(self, one: Published) -> bool:
        """Whether it has the publication whole."""
        return self.counts.get(one.number, 0) == one.stop - one.start

    def is_done_with(self, one: Published) -> bool:
        """Whether it has it, or has given it up."""
        return one.number in self.cancelled or self.has(one)
