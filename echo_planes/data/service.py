"""The data plane as workers and the controller call it: the buffer's core with a clock and waiting around it.

A plain asyncio class; `launch.py` makes it an actor. It decides nothing: `buffer.py` does.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from echo_planes.clock import Clock, MonotonicClock
from echo_planes.config import Config
from echo_planes.data.batch import make_batch
from echo_planes.data.buffer import BufferState, NotReady, ReplayBuffer
from echo_planes.data.registry import build_adapter, load_tokenizer
from echo_planes.data.schema import TrajectoryLog, read_groups, write_groups
from echo_planes.data.task import TaskAdapter
from echo_planes.errors import LeaseError, TaskError
from echo_planes.process import settle
from echo_planes.types import BufferCounts, Group, Lease, Receipt, TrainBatch


@dataclass(eq=False, slots=True)
class _Pull:
    """A worker that waits for work."""

    worker_id: str
    epoch: int
    room: int
    leases: asyncio.Future[list[Lease]]


class DataService:
    """One per run.

    Args:
        config: the run's settings.
        lineage: this incarnation of the run.
        trajectory_dir: where Arrow files go.
        restore_dir: a checkpoint's data folder to continue from, or None.
        adapter: the task, if already built (in-process use); otherwise built from `config`.
        clock: seconds; the machine's by default.
    """

    def __init__(
        self,
        config: Config,
        lineage: str,
        trajectory_dir: Path,
        restore_dir: Path | None = None,
        *,
        adapter: TaskAdapter | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or MonotonicClock()
        self._adapter = adapter or build_adapter(
            config.task, load_tokenizer(config.model.folder), config.run.seed
        )
        self._log = TrajectoryLog(trajectory_dir, lineage)
        self._batch_size = config.sampling.trajectories_per_step
        self._buffer = ReplayBuffer(
            config.staleness,
            groups_per_step=config.sampling.prompts_per_step,
            samples_per_prompt=config.sampling.samples_per_prompt,
            lease_s=config.sampling.lease_s,
            lineage=lineage,
            seed=config.run.seed,
            state=_read_state(restore_dir) if restore_dir else None,
        )
        self._pulls: list[_Pull] = []  # in order of arrival
        self._changed = asyncio.Event()
        self._closed = False

    async def ready(self) -> int:
        """Answers once the service is built: t."""
        settle()
        return self._buffer.step

    # --- workers ---------------------------------------------------------------------------------

    async def register(self, worker_id: str, epoch: int) -> None:
        """A new incarnation of a worker."""
        self._buffer.register(worker_id, epoch)

    async def pull(self, worker_id: str, epoch: int, room: int, wait_s: float) -> list[Lease]:
        """Up to `room` leases; waits up to `wait_s` for the first. Empty when none came, or none will.

        Whoever waits longest is served first, so that a worker that asks often cannot crowd others out.
        """
        request = _Pull(worker_id, epoch, room, asyncio.get_running_loop().create_future())
        self._pulls.append(request)
        self._serve_pulls()
        try:
            # Not wait_for: until Python 3.12 it swallows a cancellation that comes with the leases.
            async with asyncio.timeout(wait_s):
                return await request.leases
        except TimeoutError:  # in the very moment they came, perhaps
            return [] if request.leases.cancelled() else request.leases.result()
        finally:
            if request in self._pulls:
                self._pulls.remove(request)

    async def renew(self, worker_id: str, epoch: int, lease_ids: list[str]) -> None:
        """Tokens arrived for these leases."""
        self._buffer.renew(worker_id, epoch, lease_ids, self._clock.now_s())

    async def submit(self, worker_id: str, epoch: int, groups: list[tuple[str, Group]]) -> list[Receipt]:
        """Finished groups with their lease ids; one receipt each, in order."""
        now_s = self._clock.now_s()
        receipts = [self._buffer.submit(worker_id, epoch, lease, group, now_s) for lease, group in groups]
        self._notify()
        return receipts

    # --- controller ------------------------------------------------------------------------------

    async def publish(self, version: int, digest: str) -> None:
        """A version exists; called before any worker can install it."""
        self._buffer.publish(version, digest)

    async def installed(self, worker_id: str, version: int) -> None:
        """A worker serves a version."""
        self._buffer.installed(worker_id, version)
        self._notify()

    async def lose(self, worker_id: str) -> int:
        """A worker is gone; its prompts go to others."""
        lost = self._buffer.lose(worker_id)
        self._notify()
        return lost

    async def next_batch(self, step: int, wait_s: float) -> TrainBatch | NotReady:
        """The batch of update `step`; waits up to `wait_s` for it.

        Raises:
            TaskError: a whole batch of groups failed and not one was accepted.
        """
        deadline_s = self._clock.now_s() + wait_s
        while True:
            chosen = self._buffer.next_batch(step, self._clock.now_s())
            self._log.add(self._buffer.take_dropped(), step=-1, fate="dropped")
            if not isinstance(chosen, NotReady):
                self._notify()
                self._log.add(chosen, step=step, fate="trained")
                return make_batch(step, chosen, self._adapter.materialize)
            counts = self._buffer.counts
            if counts.accepted == 0 and counts.failed > self._batch_size:
                raise TaskError(f"every group fails; the last one because: {self._buffer.last_failure}")
            self._serve_pulls()  # leases may have expired
            if not await self._wait_for_change(deadline_s):
                return chosen

    async def counts(self) -> BufferCounts:
        """The ledger."""
        return self._buffer.counts

    async def save(self, folder: Path) -> None:
        """Write the consistent cut of `ReplayBuffer.state` to a checkpoint's data folder."""
        folder.mkdir(parents=True)
        self._log.flush()
        state = self._buffer.state()
        write_groups(folder / "buffered.arrow", state.groups, fate="buffered")
        record = asdict(state)
        del record["groups"]
        (folder / "state.json").write_text(json.dumps(record))

    async def close(self) -> BufferCounts:
        """No more leases; write out what the log holds. Returns the final ledger."""
        self._closed = True
        self._notify()
        self._log.flush()
        return self._buffer.counts

    # --- inside ----------------------------------------------------------------------------------

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self._serve_pulls()

    def _serve_pulls(self) -> None:
        """Issue the leases that may be issued now to those who wait."""
        now_s = self._clock.now_s()
        waiting = [request for request in self._pulls if not request.leases.done()]
        for request in [] if self._closed else waiting:
            worker_id, epoch = request.worker_id, request.epoch
            try:
                indices = self._buffer.pull(worker_id, epoch, request.room, now_s)
            except LeaseError as why:
                indices = []
                request.leases.set_exception(why)
            if indices:
                prompts = [self._adapter.prompt(i) for i in indices]
                request.leases.set_result(
                    [self._buffer.lease(worker_id, epoch, prompt, now_s) for prompt in prompts]
                )
            if request.leases.done():
                self._pulls.remove(request)

    async def _wait_for_change(self, deadline_s: float) -> bool:
        """Wait until something changed (True) or the deadline passed (False).

        Looks again at least every second, because leases expire without an event.
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


def _read_state(folder: Path) -> BufferState:
    record = json.loads((folder / "state.json").read_text())
    return BufferState(
        step=record["step"],
        next_index=record["next_index"],
        returned=tuple(record["returned"]),
        issued=record["issued"],
        groups=tuple(read_groups(folder / "buffered.arrow")),
        counts=BufferCounts(**record["counts"]),
        published=tuple((line, version, digest) for line, version, digest in record["published"]),
    )
