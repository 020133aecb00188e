"""Number of chains that the sender's uplink feeds, learnt from finished broadcasts. Pure.

ECHO-2, section 4.2: N_ch = floor(B0 / Bw), B0 the sender's uplink, Bw the rate of one worker's hop. Rates
that the settings leave out are learnt:

- While the uplink has room, a peer's receiving rate is what its hop can carry. Bw is the mean over the seeds.
- While the seeds receive what they can carry, the uplink has room, and B0 is at least the sum of their rates.
  The next plan then has more chains: the fewest that shorten the longest chain. A count that does not shorten
  it is not tried, since new connections are cold and more seeds have no other benefit.
- When the seeds receive clearly less, the uplink is full. B0 is then the sum of their rates, and the formula
  gives the count. The count stays until the rates rise, or for `RETRY_BROADCASTS`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from echo_planes.weights.chain.plan import RATE_MEMORY, num_chains

# The uplink is full where seeds receive less than this share of what they can carry. The means of undisturbed
# broadcasts differ by a few percent. With fewer than ten chains, one too many costs each a tenth or more.
FULL_SHARE = 0.9
# The floor would lose a chain to a measurement 1 % too low, so a count fits where its seeds get 95 % of Bw. A
# count found full, at less than 90 %, does not fit again on the same figures. The allowance is at most a
# quarter of a chain: where the seeds just fill the uplink, Bw looks like their share, and must not add one.
TOLERANCE = 0.05
MAX_TOLERANCE = 0.25  # chains
ROSE = 1.1  # times the B0 measured when full: the uplink has grown, or other traffic used it then
SURE = 2  # full broadcasts in a row before a proven count is lowered: a single one may be an outlier
RETRY_BROADCASTS = 100  # until more chains are tried again: one trial, at most twice as slow, costs 1 %


class ChainRates:
    """Number of chains for the next plan. A rate that is set is never learnt.

    Args:
        uplink_bytes_per_s: B0, as set; None: learnt.
        worker_bytes_per_s: Bw, as set; None: learnt.
    """

    def __init__(self, uplink_bytes_per_s: float | None, worker_bytes_per_s: float | None) -> None:
        self._worker = worker_bytes_per_s
        self._uplink_is_set = uplink_bytes_per_s is not None
        self._uplink = uplink_bytes_per_s  # None: never found full, or too long ago
        self._reached: dict[str, float] = {}  # by peer, bytes/s: received while the uplink had room
        self._carried = 0.0  # bytes/s, by all seeds together when the uplink last had room
        self._proven = 1  # chains for which the uplink had room
        self._doubts = 0  # broadcasts in a row that found the uplink full
        self._since_full = 0  # broadcasts with room since the uplink was last found full
        self._count = 1
        if uplink_bytes_per_s is not None and worker_bytes_per_s is not None:
            self._count = num_chains(uplink_bytes_per_s, worker_bytes_per_s)

    @property
    def worker_bytes_per_s(self) -> float | None:
        """Bw as set, else the measured rate of the median peer's hop; None: not known."""
        return self._worker or (statistics.median_low(self._reached.values()) if self._reached else None)

    @property
    def count(self) -> int:
        """Chains for the next plan; 1 before anything is known: one chain runs at the full rate of any
        uplink, and only its length costs time."""
        return self._count

    def take(self, seeds: Sequence[str], rates: Mapping[str, float], num_forwarding: int) -> None:
        """Learn from a broadcast in which only the links set the pace.

        Args:
            seeds: the peers that the sender fed, at least one.
            rates: mean receiving rate of each measured peer, bytes/s, all above 0; with every seed's.
            num_forwarding: peers that may be in chains.
        """
        if self._uplink_is_set and self._worker is not None:
            return
        able = sum(max(self._worker or self._reached.get(seed, 0.0), rates[seed]) for seed in seeds)
        carried = sum(rates[seed] for seed in seeds)
        full = carried < FULL_SHARE * able
        if full and len(seeds) == 1 and self._worker is None:
            # A single seed has the uplink to itself: unless this is an outlier, its hop carries no more now.
            self._doubts += 1
            if self._doubts < SURE:
                return
            self._reached, full = {}, False
        if full:
            self._on_full(len(seeds), carried, self._worker or able / len(seeds), num_forwarding)
        else:
            self._on_room(seeds, rates, num_forwarding)

    def _on_full(self, num_seeds: int, carried: float, worker: float, num_forwarding: int) -> None:
        if self._uplink_is_set:
            self._count = self._next(num_seeds, worker, num_forwarding)
            return
        self._doubts += 1
        tried = num_seeds > self._proven
        if not tried and self._doubts < SURE:
            return
        # More connections may carry a little less than fewer did just before.
        self._uplink = max(carried, self._carried) if tried else carried
        self._count = max(1, min(num_seeds - 1, _fitting(self._uplink, worker)))
        self._proven, self._doubts, self._since_full = self._count, 0, 0

    def _on_room(self, seeds: Sequence[str], rates: Mapping[str, float], num_forwarding: int) -> None:
        # A rate rises at once, since it was reached, and falls slowly, since the fall may be a disturbance.
        self._reached = {
            peer_id: max(rate, RATE_MEMORY * self._reached.get(peer_id, 0.0) + (1 - RATE_MEMORY) * rate)
            for peer_id, rate in rates.items()
        }
        self._doubts, self._proven = 0, max(self._proven, len(seeds))
        self._carried = sum(rates[seed] for seed in seeds)
        if self._uplink is not None and not self._uplink_is_set:
            self._since_full += 1
            stale = self._carried > ROSE * self._uplink or self._since_full >= RETRY_BROADCASTS
            self._uplink = None if stale else max(self._uplink, self._carried)
        worker = self._worker or sum(self._reached[seed] for seed in seeds) / len(seeds)
        self._count = self._next(len(seeds), worker, num_forwarding)

    def _next(self, num_seeds: int, worker: float, num_forwarding: int) -> int:
        """Return the count one step nearer to what the uplink holds: more chains may measure rates better."""
        step = next_count(num_seeds, num_forwarding)
        if self._uplink is None:
            return max(self._count, step)
        limit = _fitting(self._uplink, worker)
        if limit > num_seeds:
            return max(self._count, min(step, limit))
        return limit if self._uplink < FULL_SHARE * num_seeds * worker else self._count


def _fitting(uplink_bytes_per_s: float, worker_bytes_per_s: float) -> int:
    """Return N_ch of measured rates, with the tolerance."""
    spare = min(TOLERANCE * uplink_bytes_per_s, MAX_TOLERANCE * worker_bytes_per_s)
    return num_chains(uplink_bytes_per_s + spare, worker_bytes_per_s)


def next_count(count: int, num_peers: int) -> int:
    """Return the fewest chains, more than `count`, that shorten the longest chain over `num_peers`; `count`
    itself if none do."""
    longest = math.ceil(num_peers / count)
    return math.ceil(num_peers / (longest - 1)) if longest > 1 else count
