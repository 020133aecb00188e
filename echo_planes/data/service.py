"""The data plane as workers and the controller call it: the buffer's core with clock, waiting and store.

A plain asyncio class; `actor.py` makes it an actor. `buffer.py` takes the decisions. The service acknowledges
a group once it is durable, and hands out a batch once the store has recorded it as trained.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from echo_planes.cluster.clock import Clock, MonotonicClock
from echo_planes.cluster.process import settle
from echo_planes.config.schema import Config, ReplayConfig
from echo_planes.data.claims import Rules, rules_of
from echo_planes.data.open import LEVELS_NAME, open_store
from echo_planes.data.replay.batch import make_batch, omegas_of, with_accepted
from echo_planes.data.replay.buffer import ReplayBuffer
from echo_planes.data.replay.buffer_state import Accepted, NotReady
from echo_planes.data.replay.checkpoint_state import write_checkpoint_state
from echo_planes.data.replay.dispatch import DispatchPolicy
from echo_planes.data.replay.overlong import overlong_of
from echo_planes.data.replay.prompts import Curriculum
from echo_planes.data.replay.refill import refill_of
from echo_planes.data.store.files import on_disk
from echo_planes.data.store.index import Fate
from echo_planes.data.store.retention import Retention
from echo_planes.data.tasks.adapter import TaskAdapter
from echo_planes.data.tasks.registry import build_adapter, load_tokenizer
from echo_planes.errors import DataError, EchoPlanesError, LeaseError, TaskError
from echo_planes.types import (
    BufferCounts,
    Complaint,
    Group,
    IntArray,
    Lease,
    LeaseTokens,
    Omega,
    Receipt,
    TrainBatch,
    Trajectory,
    WorkerStats,
    sampled_tokens,
)

SHORTEST_LEASE_STREAMS = 10  # shortest lease, in streaming intervals


@dataclass(eq=False, slots=True)
class _Pull:
    """Pending request of a worker for leases."""

    worker_id: str
    epoch: int
    room: int
    leases: asyncio.Future[list[Lease]]


class DataService:
    """Service of the data plane; one per run.

    Args:
        config: the run's settings.
        lineage: name of the run's present line of versions.
        store_dir: folder of the replay store.
        restore_dir: a checkpoint's data folder to continue from, or None.
        adapter: the task, if already built (in-process use); otherwise built from `config`.
        clock: seconds; the machine's by default.
        wall_s: seconds since 1970, for the rows.
        dispatch: decides which worker gets which prompts; None: even shares of the permits.
        rules: bounds on workers' messages; default: those of the model.
    """

    def __init__(
        self,
        config: Config,
        lineage: str,
        store_dir: Path,
        restore_dir: Path | None = None,
        *,
        adapter: TaskAdapter | None = None,
        clock: Clock | None = None,
        wall_s: Callable[[], float] = time.time,
        dispatch: DispatchPolicy | None = None,
        rules: Rules | None = None,
    ) -> None:
        self._clock = clock or MonotonicClock()
        self._adapter = adapter or build_adapter(
            config.task, load_tokenizer(config.model.folder, config.run.date), config.run.seed
        )
        self._wall_s = wall_s
        self._max_new_tokens = config.sampling.max_new_tokens
        self._overlong = overlong_of(config, self._adapter.max_new_tokens)
        self._replay = config.replay
        self._batch_size = config.sampling.trajectories_per_step
        self._broken: EchoPlanesError | None = None
        self._is_built = False
        try:
            rules = rules or rules_of(config)
            self._store, state, self._forgotten = open_store(store_dir, lineage, restore_dir, config)
            try:
                self._curriculum = Curriculum(self._adapter, store_dir / LEVELS_NAME)
            except BaseException:  # after any failure the store's lock must be released
                self._store.close()
                raise
        except EchoPlanesError as error:
            # `ready` raises it: an error in an actor's constructor does not keep its type on the way out.
            self._broken = error
            return
        stream_s = config.sampling.stream_s
        self._buffer = ReplayBuffer(
            config.staleness,
            groups_per_step=config.sampling.prompts_per_step,
            samples_per_prompt=config.sampling.samples_per_prompt,
            lease_s=config.sampling.lease_s,
            shortest_lease_s=SHORTEST_LEASE_STREAMS * stream_s,
            lineage=lineage,
            seed=config.run.seed,
            index=self._store.index,
            state=state,
            refill=refill_of(config, self._overlong, self._omegas),
            rules=rules,
            dispatch=dispatch,
            tick_s=stream_s,
            part_groups=config.learner.micro_batch_groups,
        )
        self._step_trajectories = self._batch_size if config.learner.micro_batch_groups else 0
        self._tags: set[str] = set()  # advantage groups in the parts of the present step
        # Set aside since the last batch. A resumed run's first step lacks those before its checkpoint.
        self._set_aside: list[Group] = []
        self._accepted: dict[tuple[str, int], tuple[int, int]] = {}
        self._pulls: list[_Pull] = []  # in order of arrival
        self._changed = asyncio.Event()
        self._closed = False
        self._is_built = True

    async def ready(self) -> int:
        """Return t once the service is built.

        Raises:
            ClusterError: another run has the store open, or the disk is full or cannot be written.
            DataError: the store or the checkpoint is not readable, or of a newer version.
        """
        settle()
        self._check()
        return self._buffer.step

    # --- workers ---------------------------------------------------------------------------------

    async def register(self, worker_id: str, epoch: int) -> None:
        """Register a new incarnation of a worker."""
        self._check()
        self._buffer.register(worker_id, epoch)

    async def park(self, worker_id: str, parked: bool) -> None:
        """Park a worker, so that it is leased nothing, or unpark it. It need not be registered yet."""
        self._check()
        self._buffer.park(worker_id, parked)
        self._notify()

    async def pull(self, worker_id: str, epoch: int, room: int, wait_s: float) -> list[Lease]:
        """Return up to `room` leases; wait up to `wait_s` for the first. Return [] when none came in time.

        The longest waiting request is served first, so a worker that asks often cannot crowd out the others.
        """
        self._check()
        if type(room) is not int:  # calls of other workers read it too, and must not fail on it
            raise LeaseError(f"worker {worker_id} asked for {type(room).__name__} of leases")
        request = _Pull(worker_id, epoch, room, asyncio.get_running_loop().create_future())
        self._pulls.append(request)
        try:
            self._serve_pulls()
            # Not wait_for: until Python 3.12 it swallows a cancellation that comes with the leases.
            async with asyncio.timeout(wait_s):
                return await request.leases
        except TimeoutError:  # the leases may have come at the same moment
            return [] if request.leases.cancelled() else request.leases.result()
        finally:
            if request in self._pulls:
                self._pulls.remove(request)

    async def stream(self, worker_id: str, epoch: int, messages: list[LeaseTokens]) -> tuple[str, ...]:
        """Take tokens that a worker sampled, by lease. Return the leases that the worker must give up."""
        self._check()
        return self._buffer.stream(worker_id, epoch, messages, self._clock.now_s())

    async def tell(self, epoch: int, stats: WorkerStats) -> None:
        """Pass a worker's counters on to dispatch."""
        self._check()
        self._buffer.tell(epoch, stats)

    async def hand_over(self, worker_id: str, epoch: int, messages: list[LeaseTokens]) -> int:
        """End leases that a worker gives up, with their last tokens. Return how many it still had."""
        self._check()
        given = self._buffer.hand_over(worker_id, epoch, messages, self._clock.now_s())
        self._notify()
        return given

    async def recall(self, worker_id: str, num_leases: int) -> int:
        """Ask a worker to give up `num_leases` leases when it streams next. Return how many it will."""
        self._check()
        return len(self._buffer.recall(worker_id, num_leases))

    async def submit(self, worker_id: str, epoch: int, groups: list[tuple[str, Group]]) -> list[Receipt]:
        """Take finished groups with their lease ids; return one receipt each, in order.

        An accepted group is durable when this returns. Nothing of a refused group is written; see `claims`.

        Raises:
            LeaseError: `groups` does not hold pairs of a lease id and a group.
            ClusterError: the disk is full or cannot be written. Buffer and store may then disagree, so the
                service accepts and hands out nothing more; the run ends, and a resume continues it.
        """
        self._check()
        if not all(isinstance(one, tuple) and len(one) == 2 and type(one[0]) is str for one in groups):
            raise LeaseError("results come as pairs of a lease's name and a group")
        if self._closed:
            over = "the run is over"
            return [Receipt(lease, accepted=False, reason="unknown", detail=over) for lease, _ in groups]
        now_s = self._clock.now_s()
        receipts = [self._buffer.submit(worker_id, epoch, lease, group, now_s) for lease, group in groups]
        accepted = [group for (_, group), receipt in zip(groups, receipts, strict=True) if receipt.accepted]
        if accepted:
            tokens, trajectories = self._accepted.get((worker_id, epoch), (0, 0))
            tokens += sum(sampled_tokens(group) for group in accepted)
            trajectories += sum(len(group.trajectories) for group in accepted)
            self._accepted[worker_id, epoch] = (tokens, trajectories)
        try:
            with self._whole(f"groups {', '.join(group.group_id for group in accepted)} cannot be kept"):
                self._keep(accepted)
        finally:
            self._notify()
        return receipts

    # --- controller ------------------------------------------------------------------------------

    async def publish(self, version: int, digest: str) -> None:
        """Record a published version. The controller calls this before any worker can install it."""
        self._check()
        self._buffer.publish(version, digest)

    async def installed(self, worker_id: str, version: int) -> None:
        """Record that a worker serves a version."""
        self._check()
        self._buffer.installed(worker_id, version)
        self._notify()

    async def lose(self, worker_id: str) -> int:
        """End the leases of a worker that is gone, and return how many. Their prompts go to others."""
        self._check()
        lost = self._buffer.lose(worker_id)
        self._notify()
        return lost

    async def limit_staleness(self, max_staleness: int) -> None:
        """Apply another S from the next batch and lease on; see `ReplayBuffer.limit_staleness`."""
        self._check()
        self._buffer.limit_staleness(max_staleness)
        self._notify()

    async def next_batch(self, step: int, wait_s: float, whole: bool = False) -> TrainBatch | NotReady:
        """Return the batch of update `step`, or the next part of it; wait up to `wait_s` for it.

        `whole`: return no part but the one that makes the batch whole.

        Raises:
            TaskError: more than a batch of trajectories failed, and no group was accepted; or an advantage
                group of the task goes over two parts of a step.
            ClusterError: the disk is full or cannot be written.
            DataError: the rows of a group are damaged on disk.
        """
        deadline_s = self._clock.now_s() + wait_s
        while True:
            self._check()
            if self._closed:
                return NotReady("filling", "the run is over")
            chosen = self._buffer.next_batch(step, self._clock.now_s(), whole=whole)
            with self._whole("what is too old cannot be dropped"):
                self._settle_dropped()
            if not isinstance(chosen, NotReady):
                with self._whole(f"the batch of step {step + 1} cannot be made"):
                    batch = self._take(chosen, step)
                self._notify()
                return batch
            counts = self._buffer.counts
            if counts.accepted == 0 and counts.failed > self._batch_size:
                raise TaskError(f"every group fails; the last one because: {self._buffer.last_failure}")
            self._serve_pulls()  # leases may have expired
            if not await self._wait_for_change(deadline_s):
                return chosen

    async def counts(self) -> BufferCounts:
        """Return the ledger."""
        self._check_built()
        damage = len(self._store.recovery.damage) + self._store.num_damaged + self._forgotten
        return replace(self._buffer.counts, damaged=damage)

    async def accepted(self) -> dict[tuple[str, int], tuple[int, int]]:
        """Return sampled tokens and trajectories accepted from each incarnation (worker, epoch)."""
        self._check_built()
        return dict(self._accepted)

    async def complaints(self) -> list[Complaint]:
        """Return the complaints since the last call: one per incarnation that sent malformed messages."""
        self._check_built()
        return self._buffer.take_complaints()

    async def save(self, folder: Path) -> None:
        """Write the consistent state of `ReplayBuffer.state` to a checkpoint's data folder.

        Raises:
            ClusterError: the disk is full or cannot be written.
            EchoPlanesError: an earlier failure left buffer and store inconsistent; it is raised again.
        """
        self._check()
        with on_disk(folder):
            folder.mkdir(parents=True)
            state, num_groups = self._buffer.state(), self._store.counts().accepted
            # In a thread: partial rollouts may be millions of tokens, and leases must not expire meanwhile.
            await asyncio.to_thread(write_checkpoint_state, folder, state, num_groups=num_groups)

    async def close(self) -> BufferCounts:
        """Stop issuing leases and close the store. Return the final ledger.

        From then on groups are refused and no batch is formed: nothing could be made durable.
        """
        self._check_built()
        self._closed = True
        self._notify()
        counts = await self.counts()
        self._store.close()
        return counts

    # --- inside ----------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._broken:
            raise self._broken

    def _check_built(self) -> None:
        """Raise the error of a service that could not be built: it has no ledger and no store."""
        if not self._is_built:
            self._check()

    @contextmanager
    def _whole(self, trouble: str) -> Iterator[None]:
        """Refuse further work after any failure within: it may have left buffer and store in disagreement."""
        try:
            yield
        except EchoPlanesError as error:
            self._broken = error
            raise
        except Exception as error:  # a task failed, or a text cannot be encoded: raised as a DataError
            self._broken = DataError(f"{trouble}: {type(error).__name__}: {error}")
            raise self._broken from error

    def _omegas(self, trajectories: Sequence[Trajectory]) -> list[Omega]:
        """Return the task's training metadata of a group that arrives; the run ends where that fails."""
        with self._whole(f"what group {trajectories[0].group_id} trains cannot be told"):
            return omegas_of(trajectories, self._adapter.materialize)

    def _keep(self, accepted: Sequence[Group]) -> None:
        """Make the groups durable that the buffer has accepted."""
        if accepted:
            appended = self._store.append_groups(accepted, created_s=self._wall_s())
            if appended.duplicates:
                raise DataError(
                    f"groups {', '.join(appended.duplicates)} are in the replay store already, from another "
                    "run of this lineage; choose another folder"
                )
        self._settle_dropped()
        if uninformative := self._buffer.take_uninformative():
            self._store.settle(self._sequences(uninformative), Fate.UNINFORMATIVE, step=self._buffer.step)
            aside = {group.group_id for group in uninformative}
            self._set_aside += [group for group in accepted if group.group_id in aside]
        for group in accepted:
            self._curriculum.observe(group)

    def _take(self, chosen: Sequence[Accepted], step: int) -> TrainBatch:
        """Record chosen groups as trained in the store, and return their rows as a batch."""
        sequences = self._sequences(chosen)
        groups = self._store.gather_groups(sequences)
        new = self._store.index.groups["fate"][sequences] == Fate.BUFFERED
        self._store.settle(sequences[new], Fate.TRAINED, step=step)
        last = self._buffer.step > step
        if last and step % self._replay.trim_every == 0:
            self._trim(step)
        tags: set[str] = set()

        def materialize(trajectories: Sequence[Trajectory]) -> list[Omega]:
            omegas = self._adapter.materialize(trajectories)
            tags.update(omega.advantage_group for omega in omegas)
            return omegas

        longest = self._adapter.longest_answer(self._max_new_tokens)
        batch = make_batch(step, groups, materialize, self._overlong, longest)
        batch = with_accepted(batch, [*groups, *self._set_aside], self._curriculum.level)
        self._set_aside = []
        if both := self._tags & tags:
            raise TaskError(
                f"advantage group '{min(both)}' of the task is in two parts of step {step + 1}, and would be "
                "normalised in each: leave out learner.micro_batch_groups"
            )
        self._tags = set() if last else self._tags | tags
        waited_s = self._clock.now_s() - self._buffer.accepted_s
        return replace(batch, step_trajectories=self._step_trajectories, last=last, waited_s=waited_s)

    def _sequences(self, groups: Sequence[Accepted]) -> IntArray:
        return np.array([self._store.index.ids.sequence(group.group_id) for group in groups], np.int64)

    def _settle_dropped(self) -> None:
        if dropped := self._buffer.take_dropped():
            self._store.settle(self._sequences(dropped), Fate.DROPPED)

    def _trim(self, step: int) -> None:
        """Remove the rows that the retention settings do not keep, and free their disk space."""
        if self._store.retain(_retention(self._replay, step), now_s=self._wall_s()):
            self._buffer.forget_removed()
            self._store.compact()
            self._buffer.forget_removed()  # compaction may have found damaged rows

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self._serve_pulls()

    def _serve_pulls(self) -> None:
        """Issue the leases that may be issued now to the waiting workers."""
        now_s = self._clock.now_s()
        waiting = [request for request in self._pulls if not request.leases.done()]
        self._buffer.ask({one.worker_id: one.room for one in waiting}, now_s)
        for request in [] if self._closed else waiting:
            worker_id, epoch = request.worker_id, request.epoch
            try:
                indices = self._buffer.pull(worker_id, epoch, request.room, now_s)
            except LeaseError as why:
                indices = []
                request.leases.set_exception(why)
            if indices:
                try:
                    with self._whole(f"a prompt of {indices} cannot be made"):
                        prompts = [self._curriculum.prompt(i) for i in indices]
                except EchoPlanesError as why:
                    request.leases.set_exception(why)
                    self._pulls.remove(request)
                    return
                request.leases.set_result(
                    [self._buffer.lease(worker_id, epoch, prompt, now_s) for prompt in prompts]
                )
            if request.leases.done():
                self._pulls.remove(request)

    async def _wait_for_change(self, deadline_s: float) -> bool:
        """Wait for a change, one second at most. Return whether the caller should look again.

        The limit of a second is there because leases expire without an event. False: the deadline passed.
        """
        left_s = deadline_s - self._clock.now_s()
        if left_s <= 0:
            return False
        try:
            async with asyncio.timeout(min(left_s, 1.0)):
                await self._changed.wait()
        except TimeoutError:
            return self._clock.now_s() < deadline_s
        return True


def _retention(settings: ReplayConfig, step: int) -> Retention:
    return Retention(
        max_age_s=math.inf if settings.max_age_h is None else settings.max_age_h * 3600.0,
        min_version=-1 if settings.max_versions is None else step + 1 - settings.max_versions,
        max_bytes=settings.max_gib * 2**30,
    )
