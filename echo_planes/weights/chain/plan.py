"""Plan of the chains: peer scores, the number of chains, their first plan, and their repair. Pure.

ECHO-2, section 4.2 and appendix C.3. A chain is an ordered list of peers: the first, its seed, pulls from the
sender, every other one from the peer before it. A peer that must not forward is a leaf: it pulls from a tail.
So no peer has two parents, and there is no cycle, after any cut or move.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from echo_planes.weights.chain.events import SENDER_ID

MAX_CONSECUTIVE_FAILURES = 3  # with more, the stability score is 0 and the peer forwards no longer
FULL_STABILITY = 10  # successes for the full stability score
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
    measured_s: float = 0.0  # time of the last change of this record

    def after_success(self, rate_bytes_per_s: float, now_s: float) -> PeerStats:
        """Return the record after a successful broadcast; rate 0: not measured, the mean stays."""
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
        """Return the record after a fault: silence, a slow hop, damaged bytes, or a starving child."""
        return replace(
            self,
            num_failures=self.num_failures + 1,
            consecutive_failures=self.consecutive_failures + 1,
            measured_s=now_s,
        )


def peer_score(peer: PeerStats, now_s: float) -> float:
    """Return Decay (0.5 Speed + 0.35 Success + 0.15 Stability), 0 to 100 (ECHO-2, appendix C.3).

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
    """Return N_ch = floor(B0 / Bw), at least 1 (ECHO-2, section 4.2). Both rates are above 0."""
    # The summand covers rounding: an uplink of 300 Mbit/s feeds three workers of 100.
    return max(1, math.floor(uplink_bytes_per_s / worker_bytes_per_s + 1e-9))


def ideal_broadcast_s(
    payload_bytes: float, num_hops: int, chunk_bytes: float, rate_bytes_per_s: float, rtt_s: float
) -> float:
    """Return M/B + H (C/B + RTT/2): seconds until the last of `num_hops` peers of a chain is complete."""
    return payload_bytes / rate_bytes_per_s + num_hops * (chunk_bytes / rate_bytes_per_s + rtt_s / 2)


def plan_chains(peers: Iterable[PeerStats], count: int, now_s: float) -> list[list[str]]:
    """Return at most `count` chains over all `peers`.

    The best `count` peers are seeds, and the rest follow round-robin by score. Each chain is then grouped by
    region, its seed's region first, so that it enters every region once.
    """
    ranked = sorted(peers, key=lambda peer: (-peer_score(peer, now_s), peer.peer_id))
    chains = [ranked[start::count] for start in range(min(count, len(ranked)))]
    return [[peer.peer_id for peer in _by_region(chain)] for chain in chains]


def is_misplaced(chains: list[list[str]], scores: Mapping[str, float], margin: float) -> bool:
    """Return whether a peer's score exceeds that of a peer nearer to the sender by more than `margin`.

    Moving a peer costs a cold connection, so a rise that all scores share must not move any. Peers without a
    score, which do not forward, do not count.
    """
    worst = math.inf  # score of the peers nearer to the sender
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
    """Return whether a peer should give an older publication up for a newer one on the same link.

    It should if the newer one would be whole first. Then the time until the peer's next version only shrinks
    at any pace of the learner, and no tail starves. A peer never gives up the base of a newer patch.
    """
    return not newer_needs_older and newer_bytes < older_remaining_bytes


class Topology:
    """The present chains and leaves.

    Args:
        regions: region of each peer; the owner keeps it up to date.
    """

    def __init__(self, regions: Mapping[str, str]) -> None:
        self._regions = regions
        self._chains: list[list[str]] = []
        self._leaves: dict[str, str] = {}  # leaf: its parent

    @property
    def chains(self) -> list[list[str]]:
        """Copy of the chains; each begins with its seed."""
        return [list(chain) for chain in self._chains]

    def __contains__(self, peer_id: str) -> bool:
        return peer_id in self._leaves or any(peer_id in chain for chain in self._chains)

    def parents(self) -> dict[str, str]:
        """Return the parent of every peer: first those in chains, from seed to tail, then the leaves."""
        found = {peer: before for chain in self._chains for before, peer in _links(chain)}
        return found | self._leaves

    def is_leaf(self, peer_id: str) -> bool:
        """Return whether the peer is a leaf, which forwards to no peer."""
        return peer_id in self._leaves

    def set_plan(self, chains: list[list[str]], leaves: Iterable[str], refuges: Iterable[str] = ()) -> None:
        """Replace chains and leaves. `refuges` become leaves of the sender itself."""
        self._chains = [list(chain) for chain in chains if chain]
        self._leaves = dict.fromkeys(refuges, SENDER_ID)
        for leaf in leaves:
            self.hang(leaf)

    def take_in(self, peer_id: str) -> None:
        """Remove a peer from its place and make it a leaf of the sender itself."""
        self.remove(peer_id)
        self._leaves[peer_id] = SENDER_ID

    def append(self, peer_id: str, count: int) -> None:
        """Add a peer that has no place as a tail: of a new chain if there are fewer than `count`, else of a
        chain at most one peer longer than the shortest. The best such chain ends in the peer's region, the
        next best never enters it."""
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
        """Make a peer that has no place a leaf: of a tail other than `avoid`; if there is none, of the peer
        before `avoid`; without any chain, of the sender."""
        region = self._regions.get(peer_id, "")
        tails = [chain[-1] for chain in self._chains if chain[-1] != avoid]
        tails = tails or [before for chain in self._chains for before, peer in _links(chain) if peer == avoid]
        self._leaves[peer_id] = min(
            tails,
            key=lambda tail: (self._num_leaves(tail), self._regions.get(tail, "") != region),
            default=SENDER_ID,
        )

    def remove(self, peer_id: str) -> None:
        """Cut a peer out: its successor in the chain follows its predecessor, its leaves move to tails."""
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
