"""Data plane in virtual time: the real replay buffer over an index in memory, and queues of requests.

`data.service` keeps waiting tasks; this module keeps lists. It serves workers in the order in which they
asked for work. It answers a request for a batch when a batch exists or when the time is up. It does not store
rows, because the simulator never reads them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from echo_planes.data.replay.buffer import ReplayBuffer
from echo_planes.data.replay.buffer_state import Accepted, NotReady
from echo_planes.data.replay.dispatch import policy_named
from echo_planes.data.replay.refill import Refill
from echo_planes.data.service import SHORTEST_LEASE_STREAMS
from echo_planes.data.store.index import Fate, GroupIndex
from echo_planes.data.store.segment import GROUP_ENTRY
from echo_planes.sim.kernel import Kernel, Timer
from echo_planes.sim.scenario import SamplingModel, Scenario
from echo_planes.types import (
    BufferCounts,
    Group,
    IntArray,
    Lease,
    LeaseTokens,
    Prompt,
    Receipt,
    WorkerStats,
)

EXPIRE_EVERY_S = 5.0  # longest delay until an expired lease is noticed
HOLD_SHARE = 1e-3  # share of T_train: longest delay until the end of a hold is noticed

Answer = list[Accepted] | NotReady


@dataclass(slots=True)
class _Ask:
    """Request of a worker that waits for work."""

    epoch: int
    room: int  # groups that it can take
    number: int  # position in the order of arrival
    version: int


@dataclass(slots=True)
class _Question:
    """Request of the learner for a batch."""

    step: int
    whole: bool  # no part but the one that makes the batch whole
    answer: Callable[[Answer], None]
    deadline: Timer
    missing: int = 0  # groups that must be accepted before another attempt can succeed
    held: int = -1  # during a hold, groups of leases from this version on do not end it; -1: no hold
    look: Timer | None = None  # next attempt during a hold


class SimDataPlane:
    """Data plane of one simulation.

    Args:
        scenario: staleness and sampling.
        kernel: the clock.
        lineage: of the run.
        on_leases: called with the leases issued to a waiting worker.
        on_dropped: called with groups that were dropped as too old.
        on_uninformative: called with groups set aside as uninformative.
    """

    buffer_type: type[ReplayBuffer] = ReplayBuffer  # a subclass may set a checked buffer

    def __init__(
        self,
        scenario: Scenario,
        kernel: Kernel,
        lineage: str,
        *,
        on_leases: Callable[[str, Sequence[Lease]], None],
        on_dropped: Callable[[Sequence[Accepted]], None],
        on_uninformative: Callable[[Sequence[Accepted]], None],
    ) -> None:
        self._scenario = scenario
        self._kernel = kernel
        self._on_leases = on_leases
        self._on_dropped = on_dropped
        self._on_uninformative = on_uninformative
        self._index = GroupIndex()
        self._new: dict[str, tuple[float, ...]] = {}  # entries of accepted groups, not indexed yet
        sampling = scenario.sampling
        self._buffer = self.buffer_type(
            scenario.staleness,
            groups_per_step=sampling.prompts_per_step,
            samples_per_prompt=sampling.samples_per_prompt,
            lease_s=sampling.lease_s,
            shortest_lease_s=SHORTEST_LEASE_STREAMS * sampling.stream_s,
            lineage=lineage,
            seed=scenario.seed % 2**32,
            index=self._index,
            refill=_refill(sampling),
            dispatch=policy_named(sampling.router, sampling.theta),
            tick_s=sampling.stream_s,
            part_groups=scenario.learner.micro_batch_groups,
        )
        self._taken = 0  # groups of the present step, in its parts so far
        self._versions: dict[str, int] = {}  # version that each worker serves; -1: none yet
        self._parked: set[str] = set()
        self._asks: dict[str, _Ask] = {}
        self._queues: dict[int, list[tuple[int, str]]] = {}  # version -> heap of (arrival, worker)
        self._num_asks = 0
        self._serving_asks = False
        self._question: _Question | None = None
        kernel.after(EXPIRE_EVERY_S, self._expire)

    @property
    def counts(self) -> BufferCounts:
        return self._buffer.counts

    @property
    def step(self) -> int:
        """t: batches formed so far."""
        return self._buffer.step

    @property
    def lease_s(self) -> float:
        """Seconds that a lease lasts now after its last tokens."""
        return self._buffer.lease_s

    # --- workers ---------------------------------------------------------------------------------

    def register(self, worker_id: str, epoch: int) -> None:
        """Register a new incarnation of a worker."""
        self._asks.pop(worker_id, None)
        self._versions[worker_id] = -1
        self._buffer.register(worker_id, epoch)

    def park(self, worker_id: str, parked: bool) -> None:
        """Stop leasing to a worker, or let it ask again."""
        self._buffer.park(worker_id, parked)
        (self._parked.add if parked else self._parked.discard)(worker_id)
        self._changed()

    def publish(self, version: int, digest: str) -> None:
        """Record a published version."""
        self._buffer.publish(version, digest)

    def installed(self, worker_id: str, version: int) -> None:
        """Record the version that a worker serves."""
        if worker_id not in self._versions:
            return
        self._versions[worker_id] = version
        self._buffer.installed(worker_id, version)
        ask = self._asks.get(worker_id)
        if ask is not None:
            ask.version = version
            heapq.heappush(self._queues.setdefault(version, []), (ask.number, worker_id))
        self._changed()

    def lose(self, worker_id: str) -> None:
        """Remove a worker and return its prompts for other workers."""
        self._asks.pop(worker_id, None)
        if self._versions.pop(worker_id, None) is not None:
            self._parked.discard(worker_id)
        self._buffer.lose(worker_id)
        self._changed()

    def ask(self, worker_id: str, epoch: int, room: int) -> None:
        """Queue a worker that has room for `room` groups. A worker that asks again keeps its place."""
        if worker_id in self._parked:
            return  # `_serve` would take the refusal of a parked worker for one of all workers of its version
        version = self._versions.get(worker_id, -1)
        known = self._asks.get(worker_id)
        if known is not None:
            known.room = room
            return
        self._asks[worker_id] = _Ask(epoch, room, self._num_asks, version)
        heapq.heappush(self._queues.setdefault(version, []), (self._num_asks, worker_id))
        self._num_asks += 1
        self._serve()

    def withdraw(self, worker_id: str) -> None:
        """Remove a worker's request for work."""
        self._asks.pop(worker_id, None)

    def stream(self, worker_id: str, epoch: int, messages: list[LeaseTokens]) -> tuple[str, ...]:
        """Take in streamed tokens and return the leases that the worker must give up."""
        return self._buffer.stream(worker_id, epoch, messages, self._kernel.now_s)

    def tick(self, told: Sequence[tuple[int, WorkerStats]]) -> list[str]:
        """Take in workers' stats with their epochs; return the workers from which leases are recalled."""
        for epoch, stats in told:
            self._buffer.tell(epoch, stats)
        sources = self._buffer.tick(self._kernel.now_s)
        self._serve()  # prompts that were reserved for a worker may be free now
        return sources

    def hand_over(self, worker_id: str, epoch: int, messages: list[LeaseTokens]) -> int:
        """Take back leases that a worker gives up; return how many of them it still held."""
        given = self._buffer.hand_over(worker_id, epoch, messages, self._kernel.now_s)
        self._changed()
        return given

    def submit(self, worker_id: str, epoch: int, lease: Lease, group: Group) -> Receipt:
        """Accept or refuse a finished group."""
        receipt = self._buffer.submit(worker_id, epoch, lease.lease_id, group, self._kernel.now_s)
        question = self._question
        if receipt.accepted:
            self._enter(group, group.version)
            self._settle_dropped()
            replaced = self._settle_uninformative()
            if question is not None and not replaced:
                question.missing -= 1
        self._serve()
        if question is not None and (question.held < 0 or lease.version < question.held):
            self._look()
        return receipt

    # --- the learner -----------------------------------------------------------------------------

    @property
    def accepted_s(self) -> float:
        """Time at which the youngest buffered group was accepted."""
        return self._buffer.accepted_s

    def ask_batch(self, step: int, wait_s: float, whole: bool, answer: Callable[[Answer], None]) -> None:
        """Call `answer` with the batch of update `step`, or its next part, or after `wait_s` with the reason
        for none. `whole`: with no part but the one that makes the batch whole.
        """
        self._question = _Question(step, whole, answer, self._kernel.after(wait_s, self._give_up))
        self._look()

    def _give_up(self) -> None:
        question = self._question
        if question is not None:
            self._answer(question, self._form(question))

    def _look(self) -> None:
        """Try to answer the learner's request now, or plan another attempt during a hold."""
        question = self._question
        if question is None or question.missing > 0 or question.look is not None:
            return
        if question.held >= 0:
            delay_s = HOLD_SHARE * self._scenario.learner.t_train_s
            question.look = self._kernel.after(delay_s, self._look_again)
            return
        found = self._form(question)
        if isinstance(found, list):
            self._answer(question, found)
        elif found.reason == "filling" and self._scenario.staleness.reuse == 1:
            groups = self._scenario.sampling.prompts_per_step - self._taken
            if self._scenario.learner.micro_batch_groups is not None and not question.whole:
                groups = min(groups, self._scenario.learner.micro_batch_groups)
            buffered = self._buffer.counts.buffered // self._scenario.sampling.samples_per_prompt
            question.missing = max(groups - buffered, 1)
        else:
            question.held = max(self._versions.values(), default=-1)

    def _look_again(self) -> None:
        if self._question is not None:
            self._question.look, self._question.held = None, -1
            self._look()

    def _form(self, question: _Question) -> Answer:
        self._index_new()
        step = question.step
        found = self._buffer.next_batch(step, self._kernel.now_s, whole=question.whole)
        self._settle_dropped()
        if isinstance(found, list):
            sequences = self._sequences(found)
            new = self._index.groups["fate"][sequences] == Fate.BUFFERED
            self._index.settle(sequences[new], Fate.TRAINED, step)
            self._taken = 0 if self._buffer.step > step else self._taken + len(found)
        return found

    def _answer(self, question: _Question, found: Answer) -> None:
        question.deadline.cancel()
        if question.look is not None:
            question.look.cancel()
        self._question = None
        question.answer(found)
        self._serve()

    # --- inside ----------------------------------------------------------------------------------

    def _changed(self) -> None:
        self._serve()
        self._look()

    def _expire(self) -> None:
        if self._buffer.expire(self._kernel.now_s):
            self._changed()
        self._kernel.after(EXPIRE_EVERY_S, self._expire)

    def _serve(self) -> None:
        """Issue leases to the waiting workers.

        A worker on a newer version has at least as many permits as one on an older version. So a refusal also
        holds for all workers on the same or an older version.
        """
        if self._serving_asks:
            return  # called by a worker that was just served and asks for more from the end of the queue
        self._serving_asks = True
        if self._buffer.dispatcher.plans:
            while self._serve_planned():
                pass
            self._serving_asks = False
            return
        refused = -1
        while (worker_id := self._longest_waiting(refused)) is not None:
            ask = self._asks[worker_id]
            now_s = self._kernel.now_s
            indices = self._buffer.pull(worker_id, ask.epoch, ask.room, now_s)
            if not indices:
                refused = ask.version
                continue
            self._issue(worker_id, indices)
        self._serving_asks = False

    def _serve_planned(self) -> bool:
        """Serve one round as the dispatch policy plans it; return whether any worker got a lease."""
        waiting = sorted(self._asks, key=lambda worker_id: self._asks[worker_id].number)
        rooms = {worker_id: self._asks[worker_id].room for worker_id in waiting}
        self._buffer.ask(rooms, self._kernel.now_s)
        served = False
        for worker_id in waiting:
            ask = self._asks[worker_id]
            indices = self._buffer.pull(worker_id, ask.epoch, ask.room, self._kernel.now_s)
            if indices:
                self._issue(worker_id, indices)
                served = True
        return served

    def _issue(self, worker_id: str, indices: Sequence[int]) -> None:
        epoch, now_s = self._asks.pop(worker_id).epoch, self._kernel.now_s
        prompts = [Prompt(index, (index,)) for index in indices]
        self._on_leases(
            worker_id, [self._buffer.lease(worker_id, epoch, prompt, now_s) for prompt in prompts]
        )

    def _longest_waiting(self, refused: int) -> str | None:
        """Return the worker that has waited longest among those on a version newer than `refused`."""
        if not self._asks:
            return None
        best: tuple[int, str] | None = None
        for version in list(self._queues):
            queue = self._queues[version]
            while queue and not self._is_waiting(version, *queue[0]):
                heapq.heappop(queue)
            if not queue:
                del self._queues[version]
            elif version > refused and (best is None or queue[0] < best):
                best = queue[0]
        return best[1] if best else None

    def _is_waiting(self, version: int, number: int, worker_id: str) -> bool:
        ask = self._asks.get(worker_id)
        return ask is not None and ask.number == number and ask.version == version

    def _enter(self, group: Group, version: int) -> None:
        size = len(group.trajectories)
        reward = sum([t.reward.value for t in group.trajectories]) / size
        entry = (version, reward, 0.0, size, 0, len(group.group_id), 0)
        self._new[group.group_id] = entry

    def _index_new(self) -> None:
        """Index the groups accepted since the last call, as one message."""
        if self._new:
            message = (0, 0, self._index.num_groups, len(self._new))
            entries = np.array(list(self._new.values()), GROUP_ENTRY)
            self._index.add_new(0, [message], entries, list(self._new))
            self._new.clear()

    def _sequences(self, groups: Sequence[Accepted]) -> IntArray:
        return np.array([self._index.ids.sequence(group.group_id) for group in groups], np.int64)

    def _settle_dropped(self) -> None:
        dropped = self._buffer.take_dropped()
        if dropped:
            self._index_new()
            self._index.settle(self._sequences(dropped), Fate.DROPPED, -1)
            self._on_dropped(dropped)

    def _settle_uninformative(self) -> bool:
        """Settle the groups set aside as uninformative; return whether there were any."""
        groups = self._buffer.take_uninformative()
        if groups:
            self._index_new()
            self._index.settle(self._sequences(groups), Fate.UNINFORMATIVE, self._buffer.step)
            self._on_uninformative(groups)
        return bool(groups)


def _refill(sampling: SamplingModel) -> Refill | None:
    if sampling.refill == "off":
        return None
    return Refill(sampling.refill, int(sampling.refill_limit * sampling.prompts_per_step))
