"""Dispatch over the replay buffer: what each worker that waits gets, and which leases are recalled to move.

A request of a policy is a group here, all samples of a prompt, as it is of leases and permits: a worker's
slots are the groups it samples at once. Of a worker's leases those being scored take no slot; of the rest as
many execute as it has slots, the others are pending.

A move is a recall: its source hands the prompt over with its tokens when it streams next, and the prompt is
set aside for its target for a moment. Until then it counts at its target, so that no second move makes up
for what one is doing already. Whoever a prompt was moved to keeps it: each move costs a prefill, and what is
newest at its worker would be the first to move on, to and fro between workers that fill up and run dry.
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

KEEP_TICKS = 2  # a moved prompt is kept so long for its target; then anybody may have it
LAPSE_TICKS = 10  # a share that an idle worker does not take goes to others then


@dataclass(frozen=True, slots=True)
class Ground:
    """The replay buffer, as far as a dispatcher sees it."""

    workers: WorkerRegistry
    leases: LeaseTable
    cursor: PromptCursor
    # (v, n): groups that may be leased under version v once n leases more have ended.
    permits: Callable[[int, int], int]
    admits: Callable[[int], bool]  # whether what is made under a version now can still be trained
    # (worker, how many, but none of these): has it give up leases when it streams next; which.
    recall: Callable[[str, int, Collection[str]], list[str]]


class EvenShares:
    """`pull`. A worker comes back for more as it finishes; taking all at once, a slow one would hoard.

    The replay buffer tells it what happens, and asks it what a worker that waits gets.
    """

    plans = False  # whether it decides for all who wait at once, in `ask`

    def __init__(self, ground: Ground) -> None:
        self._workers = ground.workers
        self._leases = ground.leases
        self._cursor = ground.cursor
        self._ground = ground

    def published(self, version: int) -> None:
        """A version exists from now on."""

    def registered(self, worker_id: str, epoch: int) -> None:
        """A new incarnation of a worker."""

    def lost(self, worker_id: str) -> None:
        """A worker is gone."""

    def serves(self, worker_id: str, version: int) -> None:
        """A worker is about to serve a version."""

    def parked(self, worker_id: str) -> None:
        """A worker was parked, or is no longer."""

    def tell(self, stats: WorkerStats) -> None:
        """Take a worker's counters."""

    def ask(self, rooms: Mapping[str, int], now_s: float) -> None:
        """Decide what those get who wait; `grant` hands it out.

        Args:
            rooms: of all who wait, by worker, the longest first.
        """

    def grant(self, worker_id: str, room: int) -> list[int]:
        """Prompts for one that waits."""
        if not self._workers.may_lease(worker_id):
            return []
        share = -(-self._ground.permits(self._workers.version(worker_id), 0) // self._workers.num_leasing)
        return [self._cursor.take() for _ in range(min(room, share))]

    def leased(self, lease: Lease) -> None:
        """A lease was issued for what was granted."""

    def tick(self, now_s: float) -> list[str]:
        """Recall what shall move. Returns the workers that are to give something up."""
        return []

    def handed_over(self, leases: Mapping[str, int], now_s: float) -> None:
        """A worker gave these leases up; of each its prompt."""

    def batch_formed(self) -> None:
        """Permits are free again."""


@dataclass(slots=True)
class _Share:
    """Part of a split that a worker may still take."""

    count: int
    version: int  # it must serve this one before it begins
    idle_since_s: float


class Dispatcher(EvenShares):
    """Workers still pull; how many of the waiting prompts each of them gets is the policy's decision.

    Args:
        policy: decides who gets what.
        tick_s: it may move something this often, seconds.
    """

    plans = True

    def __init__(self, ground: Ground, policy: DispatchPolicy, tick_s: float) -> None:
        super().__init__(ground)
        self.policy = policy
        self._tick_s = tick_s
        self._next_tick_s = 0.0
        self._publications: dict[int, int] = {}  # number of each version, in order
        self._epochs: dict[str, int] = {}
        self._stats: dict[str, WorkerStats] = {}
        self._speeds: dict[str, float] = {}  # tokens/s
        self._settled: dict[str, tuple[int, float]] = {}  # tokens and busy seconds by then
        self._rooms: dict[str, int] = {}  # of those that wait
        self._granted: dict[str, int] = {}  # groups, to those that wait
        self._shares: dict[str, _Share] = {}  # of the batch
        self._split_due = True
        self._going: dict[str, str] = {}  # recalled lease -> who goes on with it
        self._kept: dict[int, tuple[str, float]] = {}  # prompt -> for whom, and until when
        self._arriving: set[int] = set()  # prompts that are leased next to whom they were kept for
        self._moved: set[str] = set()  # leases that came of a move

    @property
    def kept(self) -> dict[int, str]:
        """Prompts on their way, and for whom."""
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
            self._split_due = True  # it takes part from now on

    def parked(self, worker_id: str) -> None:
        self._shares.pop(worker_id, None)
        self._expect_nothing_of(worker_id)

    def tell(self, stats: WorkerStats) -> None:
        self._stats[stats.worker_id] = stats
        self._settled.setdefault(stats.worker_id, (stats.tokens, stats.busy_s))

    def _expect_nothing_of(self, worker_id: str) -> None:
        """Release prompts and moves meant for a worker to others, and make the next split anew."""
        self._split_due = True
        self._going = {name: target for name, target in self._going.items() if target != worker_id}
        self._release([index for index, (target, _) in self._kept.items() if target == worker_id])

    # --- who gets how many -----------------------------------------------------------------------

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
        """Take the prompts of a worker: those moved to it first, then those that were decided for it."""
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
        """Of those that wait, what is left of their shares. What is nobody's goes to those without one."""
        if self._split_due and self._free():  # at S = 0 there are no permits until somebody serves t
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
            if stats.tokens > tokens:  # else it had no share, or nothing of it is finished
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
        """Groups that may be leased to whoever serves the newest version, and are kept for nobody."""
        newest = max(self._workers.versions, default=-1)
        return max(0, self._ground.permits(newest, 0) - len(self._kept)) if newest >= 0 else 0

    def _most(self, worker_id: str) -> int:
        """Groups that may be leased to a worker, but for those kept for others."""
        if not self._workers.may_lease(worker_id):
            return 0
        others = sum(target != worker_id for target, _ in self._kept.values())
        return max(0, self._ground.permits(self._workers.version(worker_id), 0) - others)

    # --- what moves ------------------------------------------------------------------------------

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
        """Recall so many leases, but none that moved already or whose tokens nobody could go on from."""
        mine = self._leases.of_worker(source)
        stuck = {one.lease_id for one in mine if self._ground.permits(one.version, 1) < 1}
        spare = stuck | (self._moved & {one.lease_id for one in mine})
        return self._ground.recall(source, count, spare)

    def _release(self, indices: Sequence[int]) -> None:
        """Prompts that are kept for nobody any more."""
        for index in indices:
            del self._kept[index]
            self._cursor.give_back(self._cursor.take_aside(index))

    # --- what the policy is told -----------------------------------------------------------------

    def _state(self, among: Collection[str] | None = None) -> Workers:
        """Of all workers that may be given prompts, or of some; each with the room that it asks for."""
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
