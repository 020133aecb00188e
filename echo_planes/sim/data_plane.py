"""The data plane in virtual time: the real replay buffer over an index in memory, and who waits for what.

What `data.service` does with waiting tasks is done here with lists: workers that ask for work are served in
the order in which they asked, and a question for a batch is answered when there is one, or when its time is
up. The rows are not kept: nothing reads them here.
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

EXPIRE_EVERY_S = 5.0  # how late a lease's end may be noticed
HOLD_SHARE = 1e-3  # of T_train: how late the end of a hold may be noticed

Answer = list[Accepted] | NotReady


@dataclass(slots=True)
class _Ask:
    """A worker that waits for work."""

    epoch: int
    room: int
    number: int  # in order of arrival
    version: int


@dataclass(slots=True)
class _Question:
    """The learner waits for a batch."""

    step: int
    answer: Callable[[Answer], None]
    deadline: Timer
    missing: int = 0  # groups that must be accepted before it is worth another look
    held: int = -1  # only the end of older leases than of this version ends a hold; -1: none is on
    look: Timer | None = None  # at whether it is over


class SimDataPlane:
    """One per simulation.

    Args:
        scenario: staleness and sampling.
        kernel: the clock.
        lineage: of the run.
        on_leases: called with leases that were issued to a waiting worker.
        on_dropped: called with groups that were dropped as too old.
        on_uninformative: called with groups that others replace.
    """

    buffer_type: type[ReplayBuffer] = ReplayBuffer  # a subclass may watch it

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
        self._new: dict[str, tuple[float, ...]] = {}  # entries of accepted groups that are not indexed yet
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
        )
        self._versions: dict[str, int] = {}  # that workers serve
        self._parked: set[str] = set()
        self._asks: dict[str, _Ask] = {}
        self._queues: dict[int, list[tuple[int, str]]] = {}  # by version: asks in order of arrival
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
        """Seconds that a lease lasts now, from its last tokens on."""
        return self._buffer.lease_s

    # --- workers ---------------------------------------------------------------------------------

    def register(self, worker_id: str, epoch: int) -> None:
        """A new incarnation of a worker."""
        self._asks.pop(worker_id, None)
        self._versions[worker_id] = -1
        self._buffer.register(worker_id, epoch)

    def park(self, worker_id: str, parked: bool) -> None:
        """A worker is leased nothing from now on, or may ask again."""
        self._buffer.park(worker_id, parked)
        (self._parked.add if parked else self._parked.discard)(worker_id)
        self._changed()

    def publish(self, version: int, digest: str) -> None:
        """A version exists."""
        self._buffer.publish(version, digest)

    def installed(self, worker_id: str, version: int) -> None:
        """A worker serves a version."""
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
        """A worker is gone; its prompts go to others."""
        self._asks.pop(worker_id, None)
        if self._versions.pop(worker_id, None) is not None:
            self._parked.discard(worker_id)
        self._buffer.lose(worker_id)
        self._changed()

    def ask(self, worker_id: str, epoch: int, room: int) -> None:
        """A worker has room; leases come when there are some. Asked again, it keeps its place."""
        if worker_id in self._parked:
            return  # others that wait with it for a version would be refused as it is
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
        """A worker wants no more work."""
        self._asks.pop(worker_id, None)

    def stream(self, worker_id: str, epoch: int, messages: list[LeaseTokens]) -> tuple[str, ...]:
        """Tokens that arrived. Returns the leases that the worker must give up."""
        return self._buffer.stream(worker_id, epoch, messages, self._kernel.now_s)

    def tick(self, told: Sequence[tuple[int, WorkerStats]]) -> list[str]:
        """Take in every worker's stats, with its epoch. Returns the workers that are to give something up."""
        for epoch, stats in told:
            self._buffer.tell(epoch, stats)
        sources = self._buffer.tick(self._kernel.now_s)
        self._serve()  # what was kept for a worker may be free by now
        return sources

    def hand_over(self, worker_id: str, epoch: int, messages: list[LeaseTokens]) -> int:
        """Leases that a worker gives up. Returns how many it still had."""
        given = self._buffer.hand_over(worker_id, epoch, messages, self._kernel.now_s)
        self._changed()
        return given

    def submit(self, worker_id: str, epoch: int, lease: Lease, group: Group) -> Receipt:
        """A finished group."""
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

    def ask_batch(self, step: int, answer: Callable[[Answer], None]) -> None:
        """Call `answer` with the batch of update `step`, or with what is missing when the time is up."""
        wait_s = self._scenario.run.batch_wait_s
        self._question = _Question(step, answer, self._kernel.after(wait_s, self._give_up))
        self._look()

    def _give_up(self) -> None:
        question = self._question
        if question is not None:
            self._answer(question, self._form(question.step))

    def _look(self) -> None:
        """Is there a batch?"""
        question = self._question
        if question is None or question.missing > 0 or question.look is not None:
            return
        if question.held >= 0:
            delay_s = HOLD_SHARE * self._scenario.learner.t_train_s
            question.look = self._kernel.after(delay_s, self._look_again)
            return
        found = self._form(question.step)
        if isinstance(found, list):
            self._answer(question, found)
        elif found.reason == "filling" and self._scenario.staleness.reuse == 1:
            groups = self._scenario.sampling.prompts_per_step
            buffered = self._buffer.counts.buffered // self._scenario.sampling.samples_per_prompt
            question.missing = max(groups - buffered, 1)
        else:
            question.held = max(self._versions.values(), default=-1)

    def _look_again(self) -> None:
        if self._question is not None:
            self._question.look, self._question.held = None, -1
            self._look()

    def _form(self, step: int) -> Answer:
        self._index_new()
        found = self._buffer.next_batch(step, self._kernel.now_s)
        self._settle_dropped()
        if isinstance(found, list):
            sequences = self._sequences(found)
            new = self._index.groups["fate"][sequences] == Fate.BUFFERED
            self._index.settle(sequences[new], Fate.TRAINED, step)
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
        """Issue the leases that may be issued now to those who wait.

        Who serves a newer version has no fewer permits: where one has none, no older one has any.
        """
        if self._serving_asks:
            return  # a worker that was just served asks for more: it is at the end of the queue
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
        """One round; whether anybody got anything."""
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
        """Of the workers that serve a newer version than `refused`, the one that waits longest."""
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
        """Enter what was accepted since the last call, as one message."""
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
        """Whether there were any."""
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
