"""A replay buffer whose leases a router hands out and moves (`rollout.routing`; RLBoost 4.2, SparrowRL 5.3).

Workers still pull; how many of the waiting prompts each of them gets is the router's decision. The unit is a
group, all samples of a prompt, as it is of leases and permits: a worker's slots are the groups it samples at
once. Of a worker's leases those being scored take no slot; of the rest as many execute as it has slots, and
the others are pending.

A move is a recall: its source hands the prompt over with its tokens when it streams next, and the prompt is
set aside for its target for a moment. Until then it counts at its target, so that no second move makes up
for what one is doing already. Whoever a prompt was moved to keeps it: each move costs a prefill, and what is
newest at its worker would be the first to move on, to and fro between workers that fill up and run dry.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from echo_planes.data.replay.buffer import ReplayBuffer
from echo_planes.data.replay.buffer_state import Accepted, NotReady
from echo_planes.data.replay.staleness import is_admissible
from echo_planes.types import Lease, LeaseTokens, Prompt, WorkerStats

KEEP_TICKS = 2  # a moved prompt is kept so long for its target; then anybody may have it
LAPSE_TICKS = 10  # a share that an idle worker does not take goes to others then


@dataclass(frozen=True, slots=True)
class Seat:
    """What is known of a worker that serves, in groups."""

    worker_id: str
    publication: int  # number of the one that it serves
    pending: int
    running: int
    slots: int
    room: int  # more that it can be sent
    plateau: int  # 0: not known


class Router(Protocol):
    """Decides from the seats alone, but for the speeds that it remembers."""

    @property
    def splits(self) -> bool:
        """Whether permits are split among all workers once a batch, not among those that wait."""
        ...

    def assign(self, num_groups: int, newest: int, seats: Sequence[Seat]) -> Sequence[tuple[int, bool]]:
        """Of each seat, the groups it gets, and whether it must serve publication `newest` before."""
        ...

    def rebalance(self, newest: int, seats: Sequence[Seat]) -> Sequence[tuple[str, str, int]]:
        """What moves: from whom, to whom, how many groups."""
        ...

    def settle(self, worker_id: str, tokens: int, elapsed_s: float) -> None:
        """What a worker made in a time in which it had work."""
        ...


@dataclass(slots=True)
class _Share:
    """What a worker may still take of a split."""

    count: int
    version: int  # it must serve this one before it begins
    idle_since_s: float


class RoutedBuffer(ReplayBuffer):
    """See `ReplayBuffer`.

    Args:
        router: decides who gets what.
        tick_s: it may move something this often, seconds.
    """

    def __init__(self, *arguments: Any, router: Router, tick_s: float, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._router = router
        self._tick_s = tick_s
        self._next_tick_s = 0.0
        self._publications: dict[int, int] = {}  # number of each version, in order
        self._epochs: dict[str, int] = {}
        self._stats: dict[str, WorkerStats] = {}
        self._settled: dict[str, tuple[int, float]] = {}  # tokens and busy seconds by then
        self._rooms: dict[str, int] = {}  # of those that wait
        self._granted: dict[str, int] = {}  # groups, to those that wait
        self._shares: dict[str, _Share] = {}  # of the batch
        self._split_due = True
        self._going: dict[str, str] = {}  # recalled lease -> who goes on with it
        self._kept: dict[int, tuple[str, float]] = {}  # prompt -> for whom, and until when
        self._arriving: set[int] = set()  # prompts that are leased next to whom they were kept for
        self._moved: set[str] = set()  # leases that came of a move

    # --- versions and workers --------------------------------------------------------------------

    def publish(self, version: int, digest: str) -> None:
        super().publish(version, digest)
        self._publications.setdefault(version, len(self._publications))

    def register(self, worker_id: str, epoch: int) -> None:
        super().register(worker_id, epoch)
        self._forget(worker_id)
        self._epochs[worker_id] = epoch

    def lose(self, worker_id: str) -> int:
        self._forget(worker_id)
        return super().lose(worker_id)

    def installed(self, worker_id: str, version: int) -> None:
        if worker_id in self._workers and self._workers.version(worker_id) < 0 <= version:
            self._split_due = True  # it takes part from now on
        super().installed(worker_id, version)

    def park(self, worker_id: str, parked: bool) -> None:
        super().park(worker_id, parked)
        self._shares.pop(worker_id, None)
        self._expect_nothing_of(worker_id)

    def tell(self, epoch: int, stats: WorkerStats) -> None:
        """How a worker is. What an older incarnation says, or nobody can believe, is passed over."""
        if self.believes(epoch, stats):
            self._stats[stats.worker_id] = stats
            self._settled.setdefault(stats.worker_id, (stats.tokens, stats.busy_s))

    def _forget(self, worker_id: str) -> None:
        for known in (self._epochs, self._stats, self._settled, self._rooms, self._granted, self._shares):
            known.pop(worker_id, None)
        self._expect_nothing_of(worker_id)

    def _expect_nothing_of(self, worker_id: str) -> None:
        """What was to go to a worker goes to others, and the next split is made anew."""
        self._split_due = True
        self._going = {name: target for name, target in self._going.items() if target != worker_id}
        self._release([index for index, (target, _) in self._kept.items() if target == worker_id])

    # --- who gets how many -----------------------------------------------------------------------

    def ask(self, rooms: Mapping[str, int], now_s: float) -> None:
        """Decide what those get who wait; `pull` hands it out.

        Args:
            rooms: of all who wait, by worker, the longest first.
        """
        self.expire(now_s)
        self._release([index for index, (_, until_s) in self._kept.items() if until_s <= now_s])
        self._rooms = {worker: room for worker, room in rooms.items() if self._workers.may_lease(worker)}
        if self._router.splits:
            self._granted = self._of_split(now_s)
            return
        seats = [
            replace(seat, room=min(seat.room, self._most(seat.worker_id)))
            for seat in self._seats()
            if seat.worker_id in self._rooms
        ]
        counts = self._router.assign(self._free(), self._newest, seats)
        self._granted = {seat.worker_id: count for seat, (count, _) in zip(seats, counts, strict=True)}

    def pull(self, worker_id: str, epoch: int, room: int, now_s: float) -> list[int]:
        """What was decided for a worker, after what was moved to it."""
        super().pull(worker_id, epoch, 0, now_s)
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

    def lease(self, worker_id: str, epoch: int, prompt: Prompt, now_s: float) -> Lease:
        lease = super().lease(worker_id, epoch, prompt, now_s)
        if prompt.index in self._arriving:
            self._arriving.remove(prompt.index)
            self._moved.add(lease.lease_id)
        return lease

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
                self._router.settle(worker, stats.tokens - tokens, stats.busy_s - busy_s)
        free, newest = self._free(), max(self._publications)
        seats = self._seats(room=free)
        shares = self._router.assign(free, self._newest, seats)
        self._shares = {
            seat.worker_id: _Share(count, newest if commit else 0, now_s)
            for seat, (count, commit) in zip(seats, shares, strict=True)
        }

    def _free(self) -> int:
        """Groups that may be leased to whoever serves the newest version, and are kept for nobody."""
        newest = max(self._workers.versions, default=-1)
        return max(0, self._permits(newest) - len(self._kept)) if newest >= 0 else 0

    def _most(self, worker_id: str) -> int:
        """Groups that may be leased to a worker, but for those kept for others."""
        if not self._workers.may_lease(worker_id):
            return 0
        others = sum(target != worker_id for target, _ in self._kept.values())
        return max(0, self._permits(self._workers.version(worker_id)) - others)

    # --- what moves ------------------------------------------------------------------------------

    def tick(self, now_s: float) -> list[str]:
        """Recall what the router moves. Returns the workers that are to give something up."""
        if now_s < self._next_tick_s:
            return []
        self._next_tick_s = now_s + self._tick_s
        live = {lease.lease_id for lease in self._leases.live}
        self._going = {name: target for name, target in self._going.items() if name in live}
        self._moved &= live
        sources = []
        for source, target, count in self._router.rebalance(self._newest, self._seats()):
            recalled = self._recall(source, count)
            self._going |= dict.fromkeys(recalled, target)
            sources += [source] * bool(recalled)
        return sources

    def stream(
        self, worker_id: str, epoch: int, messages: Sequence[LeaseTokens], now_s: float
    ) -> tuple[str, ...]:
        self.tick(now_s)
        return super().stream(worker_id, epoch, messages, now_s)

    def hand_over(self, worker_id: str, epoch: int, messages: Sequence[LeaseTokens], now_s: float) -> int:
        before = {lease.lease_id: lease.prompt.index for lease in self._leases.of_worker(worker_id)}
        given = super().hand_over(worker_id, epoch, messages, now_s)
        for lease in self._leases.of_worker(worker_id):
            del before[lease.lease_id]
        for lease_id, index in before.items():
            target = self._going.pop(lease_id, None)
            if target is not None:
                self._cursor.set_aside(index)
                self._kept[index] = (target, now_s + KEEP_TICKS * self._tick_s)
        return given

    def next_batch(self, step: int, now_s: float) -> list[Accepted] | NotReady:
        chosen = super().next_batch(step, now_s)
        if isinstance(chosen, list):
            self._split_due = True
        return chosen

    def _recall(self, source: str, count: int) -> list[str]:
        """Recall so many leases, but none that moved already or whose tokens nobody could go on from."""
        mine = self._leases.of_worker(source)
        spare = {one.lease_id for one in mine if one.lease_id in self._moved or not self._can_go_on(one)}
        return self.recall(source, count, spare)

    def _can_go_on(self, lease: Lease) -> bool:
        """Whether a group of that age may be leased once this lease has ended."""
        return self._permits(lease.version, ended=1) > 0

    def _release(self, indices: Sequence[int]) -> None:
        """Prompts that are kept for nobody any more."""
        for index in indices:
            del self._kept[index]
            self._cursor.give_back(self._cursor.take_aside(index))

    # --- inside ----------------------------------------------------------------------------------

    @property
    def _newest(self) -> int:
        """Number of the newest publication; -1: none."""
        return len(self._publications) - 1

    def _seats(self, room: int | None = None) -> list[Seat]:
        """Of all workers that may be given prompts. `room`: of each; default: what it asks for."""
        coming = Counter(self._going.values()) + Counter(target for target, _ in self._kept.values())
        return [
            self._seat(worker, version, coming[worker], room) for worker, version in self._workers.leasing()
        ]

    def _seat(self, worker: str, version: int, num_coming: int, room: int | None) -> Seat:
        stats = self._stats.get(worker)
        slots, scoring, plateau = (stats.slots, stats.scoring, stats.plateau) if stats else (1, 0, 0)
        leases = len(self._leases.of_worker(worker))
        leases -= len(self._leases.recalled_from(worker, self._epochs[worker]))
        has = max(0, leases - scoring) + num_coming
        asked = self._rooms.get(worker, 0)
        if not is_admissible(version, self._step, self._staleness.max_staleness):
            asked = 0
        return Seat(
            worker_id=worker,
            publication=self._publications.get(version, -1),
            pending=max(0, has - slots),
            running=min(has, slots),
            slots=slots,
            room=max(0, asked - num_coming) if room is None else room,
            plateau=plateau,
        )
