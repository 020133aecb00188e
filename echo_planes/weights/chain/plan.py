"""Plan of the chains: peer scores, the number of chains, their first plan, and their repair. Pure.

ECHO-2, section 4.2 and appendix C.3. A chain is an ordered list of peers: the first, its seed, pulls from the
sender, every other one from the peer before it. Peers that shall not forward hang on the tails, as leaves. So
no peer has two parents, there is no cycle, and only a tail has more than one child, whatever is cut or moved.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from echo_planes.weights.chain.events import SENDER_ID

MAX_CONSECUTIVE_FAILURES = 3  # more of them: no stability, and no forwarding any more
FULL_STABILITY = 10  # successes for full marks
DECAY_WINDOW_S = 600.0
MAX_DECAY = 0.3
RATE_MEMORY = 0.7  # weight of the old mean when a new rate is measured


@dataclass(frozen=True, slots=True)
class PeerStats:
    """Record of a peer's broadcasts."""

    peer_id: str
    region: str
    rate_bytes_per_s: float = 0.0  # running mean over broadcasts; 0: never measured
    num_successes: int = 0
    num_failures: int = 0
    consecutive_failures: int = 0
    measured_s: float = 0.0  # when one of these last changed

    def after_success(self, rate_bytes_per_s: float, now_s: float) -> PeerStats:
        """A broadcast went through; 0 as rate: it was too small to measure."""
        old, new = self.rate_bytes_per_s, rate_bytes_per_s
        mean = RATE_MEMORY * old + (1 - RATE_MEMORY) * new if old and new else new or old
        return replace(
            self,
            rate_bytes_per_s=mean,
            num_successes=self.num_successes + 1,
            consecutive_failures=0,
            measured_s=now_s,
        )

    def after_failure(self, now_s: float) -> PeerStats:
        """It died, fell silent, slowed or damaged bytes in the middle of a broadcast."""
        return replace(
            self,
            num_failures=self.num_failures + 1,
            consecutive_failures=self.consecutive_failures + 1,
            measured_s=now_s,
        )


def peer_score(peer: PeerStats, now_s: float) -> float:
    """Decay (0.5 Speed + 0.35 Success + 0.15 Stability), 0 to 100 (ECHO-2, appendix C.3).

    Speed is logarithmic from 1 kbit/s (0) to 100 Mbit/s (100). A peer without history counts as successful,
    of unknown speed.
    """
    bits_per_s = 8 * peer.rate_bytes_per_s
    speed = min(max(100 * (math.log10(bits_per_s) - 3) / 5, 0.0), 100.0) if bits_per_s > 0 else 0.0
    attempts = peer.num_successes + peer.num_failures
    success = 100 * peer.num_successes / attempts if attempts else 100.0
    unstable = peer.consecutive_failures > MAX_CONSECUTIVE_FAILURES
    stability = 0.0 if unstable else 100 * min(peer.num_successes / FULL_STABILITY, 1.0)
    decay = 1 - min(max(now_s - peer.measured_s, 0.0) / DECAY_WINDOW_S, MAX_DECAY)
    return decay * (0.5 * speed + 0.35 * success + 0.15 * stability)


def num_chains(uplink_bytes_per_s: float, worker_bytes_per_s: float) -> int:
    """N_ch = floor(B0 / Bw), at least 1 (ECHO-2, section 4.2). Both above 0."""
    # An uplink of 300 Mbit/s holds three workers of 100, whatever the units' rounding did to the quotient.
    return max(1, math.floor(uplink_bytes_per_s / worker_bytes_per_s + 1e-9))


def ideal_broadcast_s(
    payload_bytes: float, num_hops: int, chunk_bytes: float, rate_bytes_per_s: float, rtt_s: float
) -> float:
    """M/B + H (C/B + RTT/2): seconds until the last of `num_hops` peers of a chain has it all."""
    return payload_bytes / rate_bytes_per_s + num_hops * (chunk_bytes / rate_bytes_per_s + rtt_s / 2)


def plan_chains(peers: Iterable[PeerStats], count: int, now_s: float) -> list[list[str]]:
    """At most `count` chains over all `peers`, best first.

    The best `count` are seeds, the rest go round-robin in rank order; then each chain is grouped by region,
    its seed's region first, so that it enters every region once.
    """
    ranked = sorted(peers, key=lambda peer: (-peer_score(peer, now_s), peer.peer_id))
    chains = [ranked[start::count] for start in range(min(count, len(ranked)))]
    return [[peer.peer_id for peer in _by_region(chain)] for chain in chains]


def is_misplaced(chains: list[list[str]], scores: Mapping[str, float], margin: float) -> bool:
    """Whether a peer's score beats by more than `margin` that of one nearer to the sender.

    A new place costs a cold connection: that all have become better alike is no reason for one. Peers without
    a score, which do not forward, have no say.
    """
    worst = math.inf  # of those nearer to the sender
    for row in itertools.zip_longest(*chains):
        here = [scores[peer_id] for peer_id in row if peer_id in scores]
        if max(here, default=-math.inf) > worst + margin:
            return True
        worst = min([worst, *here])
    return False


def _by_region(chain: list[PeerStats]) -> list[PeerStats]:
    order = {region: place for place, region in enumerate(dict.fromkeys(peer.region for peer in chain))}
    return sorted(chain, key=lambda peer: order[peer.region])


def cancels(older_remaining_bytes: int, newer_bytes: int, *, newer_needs_older: bool) -> bool:
    """Whether a peer shall give an older publication up for a newer one on the same link.

    Only if the newer would be whole before the older: then whatever the learner's pace, the time until the
    peer's next version only shrinks, and no tail starves. A patch's own base is never given up.
    """
    return not newer_needs_older and newer_bytes < older_remaining_bytes


class Topology:
    """The chains as they are now, and the leaves on their tails.

    Args:
        regions: region of every peer that may ever be asked about; shared with the owner, who keeps it.
    """

    def __init__(self, regions: Mapping[str, str]) -> None:
        self._regions = regions
        self._chains: list[list[str]] = []
        self._leaves: dict[str, str] = {}  # leaf: its parent

    @property
    def chains(self) -> list[list[str]]:
        """A copy, seeds first."""
        return [list(chain) for chain in self._chains]

    def __contains__(self, peer_id: str) -> bool:
        return peer_id in self._leaves or any(peer_id in chain for chain in self._chains)

    def parents(self) -> dict[str, str]:
        """The parent of every peer, along the chains, then the leaves."""
        found = {peer: before for chain in self._chains for before, peer in _links(chain)}
        return found | self._leaves

    def is_leaf(self, peer_id: str) -> bool:
        """Whether the peer hangs on a tail and forwards to nobody."""
        return peer_id in self._leaves

    def set_plan(self, chains: list[list[str]], leaves: Iterable[str], refuges: Iterable[str] = ()) -> None:
        """Replace everything. `refuges` are leaves of the sender itself."""
        self._chains = [list(chain) for chain in chains if chain]
        self._leaves = dict.fromkeys(refuges, SENDER_ID)
        for leaf in leaves:
            self.hang(leaf)

    def take_in(self, peer_id: str) -> None:
        """Make a peer a leaf of the sender itself, wherever it was."""
        self.remove(peer_id)
        self._leaves[peer_id] = SENDER_ID

    def append(self, peer_id: str, count: int) -> None:
        """Add a peer behind a tail: of its own chain if there are fewer than `count`, else of a chain that
        is among the shortest, preferably one that ends in the peer's region, or else was never there."""
        if len(self._chains) < count:
            self._chains.append([peer_id])
            return
        region = self._regions.get(peer_id, "")

        def cost(chain: list[str]) -> tuple[bool, int, int]:
            visited = [self._regions.get(peer, "") for peer in chain]
            foreign = 0 if visited[-1] == region else 1 if region not in visited else 2
            long = len(chain) + self._num_leaves(chain[-1]) > shortest + 1
            return long, foreign, len(chain)

        shortest = min(len(chain) + self._num_leaves(chain[-1]) for chain in self._chains)
        min(self._chains, key=cost).append(peer_id)

    def hang(self, peer_id: str, avoid: str = "") -> None:
        """Make a peer that has no place a leaf: on a tail other than `avoid`, else on the nearest peer
        before it, else on the sender."""
        region = self._regions.get(peer_id, "")
        tails = [chain[-1] for chain in self._chains if chain[-1] != avoid]
        tails = tails or [before for chain in self._chains for before, peer in _links(chain) if peer == avoid]
        self._leaves[peer_id] = min(
            tails,
            key=lambda tail: (self._num_leaves(tail), self._regions.get(tail, "") != region),
            default=SENDER_ID,
        )

    def remove(self, peer_id: str) -> None:
        """Cut a peer out: the next in its chain goes to the one before it, its leaves to other tails."""
        self._leaves.pop(peer_id, None)
        for chain in self._chains:
            if peer_id in chain:
                chain.remove(peer_id)
        self._chains = [chain for chain in self._chains if chain]
        for leaf in [leaf for leaf, parent in self._leaves.items() if parent == peer_id]:
            del self._leaves[leaf]
            self.hang(leaf)

    def _num_leaves(self, peer_id: str) -> int:
        return sum(parent == peer_id for parent in self._leaves.values())


def _links(chain: list[str]) -> Iterator[tuple[str, str]]:
    return zip([SENDER_ID, *chain], chain, strict=False)
