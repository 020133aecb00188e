"""Dispatch over the replay buffer: prompts for each waiting worker, and recalls of leases that are to move.

A request of a policy is a group here, all samples of one prompt, as it is for leases and permits. A worker's
slots are the groups it samples at once. Leases whose answers are being scored take no slot. Of the others, as
many execute as the worker has slots; the rest are pending.

A move is a recall: the source hands the prompt over with its tokens when it streams next, and the prompt is
kept for its target for `KEEP_TICKS`. Meanwhile it counts as the target's, so that no second move covers the
same imbalance. A lease that resulted from a move does not move again: each move costs a prefill, and without
this rule a worker's newest prompts would move back and forth as workers fill up and run empty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from echo_planes.data.replay.dispatch import DispatchPolicy, Workers, free_slots_first
from echo_planes.data.replay.leases import LeaseTable
from echo_planes.data.replay.prompts import PromptCursor
from echo_planes.data.replay.worker_registry import WorkerRegistry
from echo_planes.types import Lease, WorkerStats

KEEP_TICKS = 2  # ticks for which a moved prompt is kept for its target; then any worker may get it
LAPSE_TICKS = 10  # ticks after which an idle worker loses its share to the others


@dataclass(frozen=True, slots=True)
class Ground:
    """The parts of the replay buffer that a dispatcher uses."""

    workers: WorkerRegistry
    leases: LeaseTable
    cursor: PromptCursor
    # (v, n): number of groups that may be leased under version v once n more leases have ended.
    permits: Callable[[int, int], int]
    admits: Callable[[int], bool]  # whether tokens sampled under a version now can still be trained
    # (worker, number of leases, leases to spare): recalls leases of the worker; returns their ids.
    recall: Callable[[str, int, Collection[str]], list[str]]


class EvenShares:
    """Policy `pull`: each waiting worker gets at most an even share of the permits.

    Workers pull again as they finish. Without the limit, a slow worker could take all prompts at once. The
    replay buffer reports events to this class, and calls `grant` for each waiting worker.
    """

    plans = False  # whether `ask` decides for all waiting workers at once

    def __init__(self, ground: Ground) -> None:
        self._workers = ground.workers
        self._leases = ground.leases
        self._cursor = ground.cursor
        self._ground = ground

    def published(self, version: int) -> None:
        """Note that a version was published."""

    def registered(self, worker_id: str, epoch: int) -> None:
        """Note a new incarnation of a worker."""

    def lost(self, worker_id: str) -> None:
        """Note that a worker is gone."""

    def serves(self, worker_id: str, version: int) -> None:
        """Note that a worker serves a version, before the registry is updated."""

    def parked(self, worker_id: str) -> None:
        """Note that a worker was parked or unparked."""

    def tell(self, stats: WorkerStats) -> None:
        """Take a worker's counters."""

    def ask(self, rooms: Mapping[str, int], now_s: float) -> None:
        """Decide how many prompts each waiting worker gets; `grant` hands them out.

        Args:
            rooms: room of each waiting worker, the longest waiting first.
            now_s: present time, seconds.
        """

    def grant(self, worker_id: str, room: int) -> list[int]:
        """Take the prompts for one waiting worker: at most `room`."""
        if not self._workers.may_lease(worker_id):
            return []
        share = -(-self._ground.permits(self._workers.version(worker_id), 0) // self._workers.num_leasing)
        return [self._cursor.take() for _ in range(min(room, share))]

    def leased(self, lease: Lease) -> None:
        """Note that a lease was issued for a granted prompt."""

    def tick(self, now_s: float) -> list[str]:
        """Recall the leases that are to move. Return the workers that must give some up."""
        return []

    def handed_over(self, leases: Mapping[str, int], now_s: float) -> None:
        """Note the leases that a worker gave up, with the prompt index of each."""

    def batch_formed(self) -> None:
        """Note that a batch was formed, which frees permits."""


@dataclass(slots=True)
class _Share:
    """Part of a split that a worker may still take."""

    count: int
    version: int  # version that the worker must serve before it takes any
    idle_since_s: float


class Dispatcher(EvenShares):
    """Dispatch by a policy: workers still pull, and the policy decides how many prompts each of them gets.

    Args:
        ground: parts of the replay buffer.
        policy: the dispatch policy.
        tick_s: shortest time between two rounds of moves, seconds.
    """

    plans = True

    def __init__(self, ground: Ground, policy: DispatchPolicy, tick_s: float) -> None:
        super().__init__(ground)
        self.policy = policy
        self._tick_s = tick_s
        self._next_tick_s = 0.0
        self._publications: dict[int, int] = {}  # version -> its number in order of publication, from 0
        self._epochs: dict[str, int] = {}
        self._stats: dict[str, WorkerStats] = {}
        self._speeds: dict[str, float] = {}  # tokens/s
        self._settled: dict[str, tuple[int, float]] = {}  # tokens and busy seconds at the last measurement
        self._rooms: dict[str, int] = {}  # rooms of waiting workers
        self._granted: dict[str, int] = {}  # groups granted to waiting workers
        self._shares: dict[str, _Share] = {}  # of the batch
        self._split_due = True
        self._going: dict[str, str] = {}  # recalled lease -> worker that continues it
        self._kept: dict[int, tuple[str, float]] = {}  # prompt -> worker it is kept for, and until when
        self._arriving: set[int] = set()  # prompts granted to the worker they were kept for, not leased yet
        self._moved: set[str] = set()  # leases that resulted from a move

    @property
    def kept(self) -> dict[int, str]:
        """Prompts kept for a worker, with that worker."""
        return {index: target for index, (target, _) in self._kept.items()}

    # --- versions and workers --------------------------------------------------------------------

    def published(self, version: int) -> None:
        self._publications.setdefault(version, len(self._publications))

    def registered(self, worker_id: str, epoch: int) -> None:
        self.lost(worker_id)
        self._epochs[worker_id] = epoch

    def lost(self, worker_id: str) -> None:
        for known in (self._epochs, self._stats, self._settled, self._rooms, self._granted, self._shares):
            known.pop(worker_id, None)
        self._expect_nothing_of(worker_id)

    def serves(self, worker_id: str, version: int) -> None:
        if self._workers.version(worker_id) < 0 <= version:
            self._split_due = True  # the worker serves its first version and takes part from now on

    def parked(self, worker_id: str) -> None:
        self._shares.pop(worker_id, None)
        self._expect_nothing_of(worker_id)

    def tell(self, stats: WorkerStats) -> None:
        self._stats[stats.worker_id] = stats
        self._settled.setdefault(stats.worker_id, (stats.tokens, stats.busy_s))

    def _expect_nothing_of(self, worker_id: str) -> None:
        """Release the prompts and moves meant for a worker, and have the next `ask` split anew."""
        self._split_due = True
        self._going = {name: target for name, target in self._going.items() if target != worker_id}
        self._release([index for index, (target, _) in self._kept.items() if target == worker_id])

    # --- shares of workers -----------------------------------------------------------------------

    def ask(self, rooms: Mapping[str, int], now_s: float) -> None:
        self._release([index for index, (_, until_s) in self._kept.items() if until_s <= now_s])
        self._rooms = {worker: room for worker, room in rooms.items() if self._workers.may_lease(worker)}
        if self.policy.splits:
            self._granted = self._of_split(now_s)
            return
        workers = self._state(self._rooms)
        most = [self._most(worker) for worker in workers.ids]
        workers.room[:] = [min(room, limit) for room, limit in zip(workers.room, most, strict=True)]
        counts = free_slots_first(self.policy, self._free(), workers)
        self._granted = dict(zip(workers.ids, counts.tolist(), strict=True))

    def grant(self, worker_id: str, room: int) -> list[int]:
        """Take the prompts of a worker: first those moved to it, then those that `ask` granted it."""
        most = min(room, self._most(worker_id))
        mine = [index for index, (target, _) in self._kept.items() if target == worker_id][:most]
        for index in mine:
            del self._kept[index]
            self._arriving.add(self._cursor.take_aside(index))
        count = min(self._granted.pop(worker_id, 0), most - len(mine))
        share = self._shares.get(worker_id)
        if share is not None:
            share.count -= min(count, share.count)
        if mine or count:
            self._rooms.pop(worker_id, None)
        return mine + [self._cursor.take() for _ in range(count)]

    def leased(self, lease: Lease) -> None:
        if lease.prompt.index in self._arriving:
            self._arriving.remove(lease.prompt.index)
            self._moved.add(lease.lease_id)

    def batch_formed(self) -> None:
        self._split_due = True

    def _of_split(self, now_s: float) -> dict[str, int]:
        """Return what each waiting worker may take of its share.

        Workers without a share get even parts of the permits that belong to no share.
        """
        if self._split_due and self._free():  # at S = 0 there are no permits until a worker serves version t
            self._split(now_s)
        for worker in list(self._shares):
            if self._leases.of_worker(worker):
                self._shares[worker].idle_since_s = now_s
            elif now_s - self._shares[worker].idle_since_s > LAPSE_TICKS * self._tick_s:
                del self._shares[worker]
        granted: dict[str, int] = {}
        others = []
        for worker, room in self._rooms.items():
            share = self._shares.get(worker)
            if share is None or not share.count:
                others.append((worker, room))
            elif self._workers.version(worker) >= share.version:
                granted[worker] = min(share.count, room)
        free = self._free() - sum(share.count for share in self._shares.values())
        even = -(-free // max(len(others), 1))
        for worker, room in others:
            granted[worker] = max(0, min(room, even, free))
            free -= granted[worker]
        return granted

    def _split(self, now_s: float) -> None:
        self._split_due = False
        for worker, stats in self._stats.items():
            tokens, busy_s = self._settled[worker]
            if stats.tokens > tokens:  # otherwise it had no share, or has finished nothing of it
                self._settled[worker] = (stats.tokens, stats.busy_s)
                one = Workers.named(worker)
                one.tokens_per_s[0] = self._speeds.get(worker, 0.0)
                self.policy.settle(one, 0, stats.tokens - tokens, stats.busy_s - busy_s)
                self._speeds[worker] = float(one.tokens_per_s[0])
        free, newest = self._free(), max(self._publications)
        workers = self._state()
        workers.room[:] = free
        assigned = self.policy.assign(free, workers)
        self._speeds |= dict(zip(workers.ids, workers.tokens_per_s.tolist(), strict=True))
        shares = zip(workers.ids, assigned.counts.tolist(), assigned.commit.tolist(), strict=True)
        self._shares = {
            worker: _Share(count, newest if commit else 0, now_s) for worker, count, commit in shares
        }

    def _free(self) -> int:
        """Return how many groups may be leased under the newest version served, without kept prompts."""
        newest = max(self._workers.versions, default=-1)
        return max(0, self._ground.permits(newest, 0) - len(self._kept)) if newest >= 0 else 0

    def _most(self, worker_id: str) -> int:
        """Return how many groups may be leased to a worker, without prompts kept for others."""
        if not self._workers.may_lease(worker_id):
            return 0
        others = sum(target != worker_id for target, _ in self._kept.values())
        return max(0, self._ground.permits(self._workers.version(worker_id), 0) - others)

    # --- moves -----------------------------------------------------------------------------------

    def tick(self, now_s: float) -> list[str]:
        if now_s < self._next_tick_s:
            return []
        self._next_tick_s = now_s + self._tick_s
        live = {lease.lease_id for lease in self._leases.live}
        self._going = {name: target for name, target in self._going.items() if name in live}
        self._moved &= live
        sources = []
        for move in self.policy.rebalance(self._state()):
            recalled = self._recall(move.source, move.count)
            self._going |= dict.fromkeys(recalled, move.target)
            sources += [move.source] * bool(recalled)
        return sources

    def handed_over(self, leases: Mapping[str, int], now_s: float) -> None:
        for lease_id, index in leases.items():
            target = self._going.pop(lease_id, None)
            if target is not None:
                self._cursor.set_aside(index)
                self._kept[index] = (target, now_s + KEEP_TICKS * self._tick_s)

    def _recall(self, source: str, count: int) -> list[str]:
        """Recall up to `count` leases, none that moved already or whose tokens would be discarded."""
        mine = self._leases.of_worker(source)
        stuck = {one.lease_id for one in mine if self._ground.permits(one.version, 1) < 1}
        spare = stuck | (self._moved & {one.lease_id for one in mine})
        return self._ground.recall(source, count, spare)

    def _release(self, indices: Sequence[int]) -> None:
        """Return kept prompts to the cursor, so that any worker may get them."""
        for index in indices:
            del self._kept[index]
            self._cursor.give_back(self._cursor.take_aside(index))

    # --- input of the policy ---------------------------------------------------------------------

    def _state(self, among: Collection[str] | None = None) -> Workers:
        """Return the state of all workers that may be given prompts, or of those `among`."""
        leasing = [
            (worker, version)
            for worker, version in self._workers.leasing()
            if among is None or worker in among
        ]
        coming = Counter(self._going.values()) + Counter(target for target, _ in self._kept.values())
        state = Workers.named(*(worker for worker, _ in leasing))
        state.newest = len(self._publications) - 1
        for row, (worker, version) in enumerate(leasing):
            stats = self._stats.get(worker)
            slots, scoring = (stats.slots, stats.scoring) if stats else (1, 0)
            leases = len(self._leases.of_worker(worker))
            leases -= len(self._leases.recalled_from(worker, self._epochs[worker]))
            has = max(0, leases - scoring) + coming[worker]
            asked = self._rooms.get(worker, 0) if self._ground.admits(version) else 0
            state.version[row] = self._publications.get(version, -1)
            state.pending[row] = max(0, has - slots)
            state.running[row] = min(has, slots)
            state.slots[row] = slots
            state.room[row] = max(0, asked - coming[worker])
            state.plateau[row] = stats.plateau if stats else 0
            state.tokens_per_s[row] = self._speeds.get(worker, 0.0)
        return state
