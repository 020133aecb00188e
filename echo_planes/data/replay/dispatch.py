"""Dispatch policies: they decide which worker gets the next prompts, and which leases move. Pure.

`sampling.router` names the policy; `pull` needs none (`dispatcher.EvenShares`).

- `jsq`: join the shortest queue with delayed dispatch and continuous rebalancing (RLBoost, Algorithm 2).
- `proportional`: a batch is split by measured speed (SparrowRL, Algorithm 1).

A policy decides over `Workers`, one array per quantity, so a batch of any size over any number of workers is
one call; ties go to the worker that comes first.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from echo_planes.config.extensions import extension
from echo_planes.errors import ConfigError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
PolicyName = Literal["pull", "jsq", "proportional"]

MAX_REQUESTS = 2**31  # in one batch; up to it a split in floating point is exact to a request
MAX_THETA = 2**16  # a longer queue limit has no effect in practice
LEAST_WEIGHT = 1e-12  # share of the greatest weight; smaller ones get no request, and could overflow


@dataclass(slots=True)
class Workers:
    """State of all workers: one entry each, all arrays in the order of `ids`. The caller writes in place.

    A worker whose `version` is -1 serves nothing: it gets no requests, and its speed estimate stays as it is.
    A worker without `room` gets no requests either, but its own may move away.
    """

    ids: tuple[str, ...]
    newest: int  # v, the newest publication
    version: Ints  # (n,) version it serves; -1: none yet
    pending: Ints  # (n,) requests sent to it that wait for a slot
    running: Ints  # (n,) requests it executes
    slots: Ints  # (n,) requests it can execute at once, at least 1
    room: Ints  # (n,) further requests it may be sent
    plateau: Ints  # (n,) B, the batch at which its throughput levels off (`rollout.plateau`); 0: not known
    tokens_per_s: Floats  # (n,) tau, its speed as `settle` estimates it; 0: not known, as without `splits`

    @classmethod
    def named(cls, *ids: str) -> Workers:
        """Make the state of workers that serve no version yet and have no measurements."""
        n = len(ids)
        return cls(
            ids=ids,
            newest=0,
            version=np.full(n, -1, np.int64),
            pending=np.zeros(n, np.int64),
            running=np.zeros(n, np.int64),
            slots=np.ones(n, np.int64),
            room=np.zeros(n, np.int64),
            plateau=np.zeros(n, np.int64),
            tokens_per_s=np.zeros(n),
        )

    @property
    def able(self) -> Bools:
        """Mask of the workers that may be sent something, shape (n,)."""
        return (self.version >= 0) & (self.room > 0)


@dataclass(frozen=True, slots=True)
class Assignment:
    """Requests for each worker. The caller keeps those that are not in `counts`."""

    counts: Ints  # (n,)
    commit: Bools  # (n,) whether the worker must serve the newest publication before it starts on them


@dataclass(frozen=True, slots=True)
class Move:
    """Requests that go from one worker to another, all queued ("pending") or all executing ("running")."""

    source: str
    target: str
    count: int
    kind: Literal["pending", "running"]


class DispatchPolicy(Protocol):
    """Policy that decides from the workers' state alone."""

    @property
    def splits(self) -> bool:
        """Whether permits are split once per batch among all workers, instead of among waiting ones."""
        ...

    def assign(self, num_requests: int, workers: Workers) -> Assignment:
        """Hand out up to `num_requests`; no worker gets more than its room.

        Raises:
            ConfigError: more requests than a batch may have.
        """
        ...

    def rebalance(self, workers: Workers) -> tuple[Move, ...]:
        """Return the moves to make now."""
        ...

    def settle(self, workers: Workers, row: int, tokens: int, elapsed_s: float) -> None:
        """Record that the worker of `row` made `tokens` in `elapsed_s` seconds in which it had work.

        Writes the estimate to `workers.tokens_per_s`. Called once per batch, and only if the policy `splits`.
        """
        ...


class ShortestQueue:
    """Policy `jsq`: RLBoost's load balancing (section 4.2.1, Algorithm 2).

    Args:
        theta: Theta, the most requests that may be pending at a worker.

    Raises:
        ConfigError: `theta` is not within 1 and 65,536.
    """

    splits = False

    def __init__(self, theta: int) -> None:
        if not 1 <= theta <= MAX_THETA:
            raise ConfigError(
                f"jsq: theta is {theta}; take 1 to {MAX_THETA}, the requests queued at a worker"
            )
        self._theta = theta

    def assign(self, num_requests: int, workers: Workers) -> Assignment:
        """Give each request to the shortest queue below Theta; the result equals handing them out in turn.

        All queues are filled to the highest common length for which there are enough requests. The rest go,
        one each, to the first workers whose queues have that length.
        """
        _check_requests(num_requests)
        pending = np.minimum(workers.pending, self._theta)
        most = np.minimum(self._theta - pending, workers.room) * workers.able
        # The inner sum below is the number of workers that take one more at queue length q, for q < Theta.
        starts = np.bincount(pending, minlength=self._theta + 1)
        ends = np.bincount(pending + most, minlength=self._theta + 1)
        filled = np.cumsum(np.cumsum(starts - ends))  # requests that bring all queues to q + 1
        num_requests = max(0, min(num_requests, int(filled[-1])))
        level = int(np.searchsorted(filled, num_requests, side="right"))
        counts: Ints = np.minimum(np.maximum(level - pending, 0), most)
        left = num_requests - (int(filled[level - 1]) if level else 0)
        if left:
            counts[np.flatnonzero((pending + counts == level) & (counts < most))[:left]] += 1
        return _nothing_to_commit(counts)

    def rebalance(self, workers: Workers) -> tuple[Move, ...]:
        """Move queued requests; move executing ones only if no request is queued and a worker is idle."""
        if workers.pending.any():
            return self._level_queues(workers)
        return self._relieve(workers)

    def settle(self, workers: Workers, row: int, tokens: int, elapsed_s: float) -> None:
        """Do nothing: the decisions use queue lengths, not speeds."""

    def _level_queues(self, workers: Workers) -> tuple[Move, ...]:
        """Give every worker with an empty queue one request, each from the queue that is then the longest.

        The last request of a queue moves only to a worker that is less full; otherwise two full workers
        would pass it back and forth forever.
        """
        full = workers.running / np.maximum(workers.slots, 1)
        targets = np.flatnonzero(workers.able & (workers.pending == 0))
        sources = np.flatnonzero(workers.pending > 0)
        longest = [(-int(workers.pending[j]), -float(full[j]), int(j)) for j in sources]
        heapq.heapify(longest)
        moves = []
        for target in targets[np.argsort(full[targets], kind="stable")]:
            if not longest:
                break
            queued, fullness, source = longest[0]
            if queued == -1 and full[target] >= -fullness:
                break  # all queues have length 1, and no target left is less full than the fullest source
            moves.append(Move(workers.ids[source], workers.ids[target], 1, "pending"))
            if queued == -1:
                heapq.heappop(longest)
            else:
                heapq.heapreplace(longest, (queued + 1, fullness, source))
        return tuple(moves)

    def _relieve(self, workers: Workers) -> tuple[Move, ...]:
        """Give idle workers the requests that the most loaded ones execute beyond their plateau.

        A single idle worker takes the whole excess, as in the paper. Several share it; otherwise the same
        requests would move on from one idle worker to the next.
        """
        idle = np.flatnonzero(workers.able & (workers.running == 0))
        excess = np.where(workers.plateau > 0, workers.running - workers.plateau, 0)
        loaded = np.flatnonzero(excess > 0)
        loaded = loaded[np.argsort(-excess[loaded], kind="stable")][: len(idle)]
        moves = []
        for rank, source in enumerate(loaded):
            targets = idle[rank :: len(loaded)]
            left = int(excess[source])
            for place, target in enumerate(targets):
                count = min(math.ceil(left / (len(targets) - place)), int(workers.room[target]))
                left -= count
                if count:
                    moves.append(Move(workers.ids[source], workers.ids[target], count, "running"))
        return tuple(moves)


class Proportional:
    """Policy `proportional`: SparrowRL's split (section 5.3, Algorithm 1). Call `assign` once per batch.

    Args:
        exclusion_decay: alpha, (0, 1]: factor on a worker's estimate when it is too far behind to take part.
        ema: beta, [0, 1): weight of the previous estimate when a new measurement is added.

    Raises:
        ConfigError: a value outside its range.
    """

    splits = True

    def __init__(self, exclusion_decay: float = 0.5, ema: float = 0.7) -> None:
        for name, value, fits in (
            ("exclusion_decay", exclusion_decay, 0 < exclusion_decay <= 1),
            ("ema", ema, 0 <= ema < 1),
        ):
            if not fits:
                raise ConfigError(f"proportional: {name} is {value}; take a share between 0 and 1")
        self._alpha = exclusion_decay
        self._beta = ema

    def assign(self, num_requests: int, workers: Workers) -> Assignment:
        """Assign B_a = floor(B tau_a / T), the rest by largest fraction; excess over a room goes to others.

        Only workers at the newest publication, or the one before it, take part. The estimates of the
        others decay. A worker without an estimate gets the median of the known ones.
        """
        _check_requests(num_requests)
        serving = workers.version >= 0
        behind = serving & (workers.version == workers.newest - 1)
        eligible = behind | (serving & (workers.version == workers.newest))
        workers.tokens_per_s[serving & ~eligible] *= self._alpha
        counts = np.zeros(len(workers.ids), np.int64)
        able = np.flatnonzero(eligible & (workers.room > 0))
        if num_requests > 0 and len(able):
            speeds = workers.tokens_per_s[able]
            known = speeds[speeds > 0]
            speeds = np.where(speeds > 0, speeds, np.median(known) if len(known) else 1.0)
            counts[able] = _split(num_requests, speeds, workers.room[able])
        return Assignment(counts, behind)

    def rebalance(self, workers: Workers) -> tuple[Move, ...]:
        """Return no moves: the next split corrects an imbalance."""
        return ()

    def settle(self, workers: Workers, row: int, tokens: int, elapsed_s: float) -> None:
        """Update a worker's estimate: tau <- beta tau + (1 - beta) tokens / elapsed."""
        if elapsed_s <= 0 or tokens < 0:
            return  # not a measurement of speed
        known = float(workers.tokens_per_s[row])
        rate = tokens / elapsed_s
        workers.tokens_per_s[row] = self._beta * known + (1 - self._beta) * rate if known else rate


def _split(num_requests: int, weights: Floats, room: Ints) -> Ints:
    """Split requests in proportion to `weights` (> 0), none above its `room` (> 0); return the shares, (n,).

    The shares sum to `num_requests`, or to all rooms if those are fewer. Workers with the least room per
    weight fill first. Sorted by that, the others' level (requests per weight) follows from the requests left.
    """
    weights = np.maximum(weights, weights.max() * LEAST_WEIGHT)
    brim = room / weights  # the level at which a worker is full
    order = np.argsort(brim, kind="stable")
    before = np.cumsum(room[order]) - room[order]
    weight_left = np.cumsum(weights[order][::-1])[::-1]
    levels = (num_requests - before) / weight_left
    # If the requests exceed all rooms, no level is within its brim, and all workers are full.
    first = int(np.argmax(np.append(levels <= brim[order], True)))
    level = levels[min(first, len(levels) - 1)]
    quotas = np.minimum(level * weights, room)
    quotas[order[:first]] = room[order[:first]]
    shares: Ints = np.floor(quotas).astype(np.int64)
    open_to_more = np.flatnonzero(shares < room)
    by_fraction = np.argsort((shares - quotas)[open_to_more], kind="stable")
    shares[open_to_more[by_fraction[: num_requests - int(shares.sum())]]] += 1
    return shares


POLICIES: dict[str, Callable[[int], DispatchPolicy]] = {
    "jsq": ShortestQueue,
    "proportional": lambda theta: Proportional(),
}


def policy_named(name: str, theta: int) -> DispatchPolicy | None:
    """Return the policy called `name`; None for `pull`, which needs none.

    Args:
        theta: `sampling.theta`.

    Raises:
        ConfigError: there is no such policy, or `theta` is outside its range.
    """
    if name == "pull":
        return None
    return extension("sampling.router", name, POLICIES)(theta)


def free_slots_first(policy: DispatchPolicy, num_requests: int, workers: Workers) -> Ints:
    """Return the number of requests for each worker, shape (n,), filling free slots before queues.

    A request that gets a free slot is never pending, so Theta does not count it. No queue grows while another
    worker has a free slot. Changes `workers`.
    """
    room = workers.room
    counts: Ints = np.zeros(len(room), np.int64)
    for slots_only in (True, False):
        while num_requests > 0:
            free = workers.slots - workers.running
            workers.room = np.minimum(room, free) if slots_only else room
            more = policy.assign(num_requests, workers).counts
            if not more.any():
                break
            num_requests -= int(more.sum())
            counts, room = counts + more, room - more
            begun = np.minimum(more, free)
            workers.running = workers.running + begun
            workers.pending = workers.pending + more - begun
    return counts


def _nothing_to_commit(counts: Ints) -> Assignment:
    return Assignment(counts, np.zeros(len(counts), np.bool_))


def _check_requests(num_requests: int) -> None:
    if num_requests > MAX_REQUESTS:
        raise ConfigError(f"{num_requests} requests in one batch; hand out at most {MAX_REQUESTS} at a time")
