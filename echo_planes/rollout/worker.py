"""A rollout worker: pulls leases while it has room, samples, scores, submits.

A plain asyncio class over two small interfaces, the engine and the data plane; `actor.py` runs it in its own
process. Workers pull their work, so a faster worker does more.

::

    pull leases -> per lease: n episodes (adapter.rollout) -> rewards (other processes, deadlines) -> submit
                      tokens stream to the data plane ^       install(publication) at any time, between tokens

Tokens reach the data plane every `sampling.stream_s` seconds and renew the lease. If the worker ends, or
loses a lease, another worker continues from those tokens.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from echo_planes.cluster.clock import Clock, MonotonicClock
from echo_planes.config.fleet import WorkerConfig
from echo_planes.config.kv_schedule import Schedule
from echo_planes.config.schema import SamplingConfig
from echo_planes.errors import ClusterError, WeightsError
from echo_planes.rollout.engine import Engine
from echo_planes.rollout.episodes import Player
from echo_planes.rollout.scoring import Scorer
from echo_planes.rollout.sources import Task, WeightSource, WorkSource
from echo_planes.rollout.sparsity.acceptance import Audit
from echo_planes.rollout.work import Load, Plateau, Work, places
from echo_planes.types import (
    Draw,
    Group,
    InstallReport,
    Lease,
    Manifest,
    Sample,
    Trajectory,
    WorkerStats,
    sampled_tokens,
)
from echo_planes.weights.sparse_adapter import SparseAdapter

PULL_WAIT_S = 5.0
EVAL_RETRIES_S = (1.0, 10.0)  # before each further try of a held-out prompt whose rollout failed


class RolloutWorker:
    """One engine and its share of the prompts.

    Args:
        worker_id: stable name.
        epoch: incarnation; the data plane refuses results of older ones.
        lineage: the run's line of versions.
        engine: the inference engine.
        task: the task adapter.
        scorer: the task's rewards.
        source: the data plane.
        weights: source of published weights.
        kind: groups at once, engine options and artificial slowdown.
        sampling: answer length, lease length and dispatch policy.
        clock: seconds; the machine's by default.
    """

    def __init__(
        self,
        worker_id: str,
        epoch: int,
        lineage: str,
        *,
        engine: Engine,
        task: Task,
        scorer: Scorer,
        source: WorkSource,
        weights: WeightSource,
        kind: WorkerConfig,
        sampling: SamplingConfig,
        clock: Clock | None = None,
    ) -> None:
        self._id = worker_id
        self._epoch = epoch
        self._engine = engine
        self._task = task
        self._scorer = scorer
        self._source = source
        self._weights = weights
        self._kind = kind
        self._sampling = sampling
        self._clock = clock or MonotonicClock()
        max_new_tokens = task.max_new_tokens or sampling.max_new_tokens
        self._player = Player(worker_id, lineage, engine, task, scorer, max_new_tokens)
        self._work: dict[str, Work] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._finished: list[tuple[str, Group]] = []  # lease ids and their groups, not yet submitted
        self._has_finished = asyncio.Event()
        self._submitting = False
        self._emptied = asyncio.Event()  # a lease ended, or finished groups were submitted
        self._stirred = asyncio.Event()  # there may be room, or a task that ended
        self._install_lock = asyncio.Lock()
        self._sending = asyncio.Lock()  # one message at a time, so that their order is kept
        self._stopping = False
        self._evaluating = False
        self._evaluated_tokens = 0
        self._installing = -1  # version that the engine is taking in; -1: none
        self._leaving = False  # takes no new leases any more
        self._paused = False  # takes none until `resume`
        self._trajectories = 0
        self._tokens = 0
        self._load = Load()
        self._slots, self._queue_groups = places(kind, sampling)
        # The worker pulls several leases at a time: one call per lease costs more than it gains.
        self._enough_room = max(1, self._slots // 16)
        self._queue: deque[Work] = deque()  # leases that wait for a slot
        self._plateau = Plateau(self._slots)

    # --- life ------------------------------------------------------------------------------------

    async def start(self) -> str:
        """Build the engine, and return how it computes."""
        await self._engine.start()
        return self._engine.about

    async def run(self) -> None:
        """Pull and work until `stop`. An error in any lease ends the worker and is raised here."""
        await self._tell()
        helpers = {asyncio.create_task(self._stream_tokens()), asyncio.create_task(self._submit_finished())}
        for helper in helpers:
            helper.add_done_callback(lambda _: self._stirred.set())
        try:
            while not self._stopping:
                self._stirred.clear()
                for done in [task for task in helpers | self._tasks if task.done()]:
                    self._tasks.discard(done)
                    if not done.cancelled():  # a cancelled task's lease was given up
                        done.result()
                room = self._room()
                if room >= self._enough_room and not (self._leaving or self._paused):
                    leases = await self._source.pull(self._id, self._epoch, room, PULL_WAIT_S)
                    begun = [self._begin(lease) for lease in leases]
                    if self._leaving or self._paused:  # `leave` or `pause` was called during the pull
                        await self._give_up(begun)
                else:
                    await self._stirred.wait()
        finally:
            self._queue.clear()  # so that no cancelled task begins a queued lease
            for task in helpers | self._tasks:
                task.cancel()

    async def stop(self) -> None:
        """Stop pulling leases; end the scorer and the engine."""
        self._stopping = True
        self._stirred.set()  # so that `run` ends
        await self._scorer.close()
        await self._engine.close()

    async def pause(self) -> int:
        """Hand over all leases that still sample, and take no new ones until `resume`.

        The caller parks the worker in the data plane first: a pull that is on its way would bring new ones.

        Returns:
            The number of leases that other workers continue.
        """
        self._paused = True
        return await self._give_up([work for work in self._work.values() if work.sampling])

    async def resume(self) -> None:
        """Take leases again."""
        self._paused = False
        self._stirred.set()

    async def leave(self, limit_s: float) -> int:
        """Take no new leases and hand over those in progress, because the machine is about to go.

        Leases that still sample are handed over at once. Groups in scoring are submitted, if that takes at
        most `limit_s` seconds, and handed over otherwise.

        Returns:
            The number of leases that other workers continue.
        """
        self._leaving = True
        num_handed = await self._give_up([work for work in self._work.values() if work.sampling])
        with suppress(TimeoutError):  # groups not scored by then are handed over and scored elsewhere
            async with asyncio.timeout(limit_s):
                while self._work or self._finished or self._submitting:
                    self._emptied.clear()
                    await self._emptied.wait()
        return num_handed + await self._give_up(list(self._work.values()))

    # --- weights and measurements ----------------------------------------------------------------

    async def install(self, manifest: Manifest, fresh: bool) -> InstallReport:
        """Make a version serve. A refusal gives a report with `ok=False`, and the old version serves on.

        Args:
            manifest: manifest of the publication, which the `WeightSource` supplies.
            fresh: rewrite every weight, not only those that changed.
        """
        begun_s = self._clock.now_s()
        error = caught_up = ""
        async with self._install_lock:
            known = self._engine.digest_mismatches
            try:
                # A request for the version that serves already changes nothing: the loop may repeat one
                # whose report it did not get.
                if fresh or self._engine.version < manifest.version:
                    caught_up = await self._install(manifest, fresh)
            except (WeightsError, ClusterError) as why:  # ClusterError: no room on this machine
                error = str(why)
            mismatches = self._engine.digest_mismatches - known
        return InstallReport(
            worker_id=self._id,
            version=self._engine.version,
            digest=self._engine.digest,
            ok=not error,
            seconds=self._clock.now_s() - begun_s,
            caught_up=caught_up,
            pause_s=0.0 if error else self._engine.last_pause_s,
            digest_mismatches=mismatches,
            error=error,
        )

    async def _install(self, manifest: Manifest, fresh: bool) -> str:
        publication = await self._weights.staged(manifest, fresh)
        staged = publication.manifest
        if staged.version == manifest.version and staged.digest != manifest.digest:
            raise WeightsError(
                f"version {staged.version} came as {staged.digest}, the learner's is {manifest.digest}"
            )
        self._installing = staged.version
        try:
            await self._engine.install(publication)
        finally:
            self._installing = -1
            caught_up = await self._weights.settled(staged.version, self._engine.version == staged.version)
        return caught_up

    async def set_schedule(self, schedule: Schedule) -> None:
        """Decode by a schedule of KV budgets from now on."""
        await self._engine.set_schedule(schedule)

    async def set_adapter(self, adapter: SparseAdapter) -> None:
        """Compute with this adapter where attention is sparse, from now on."""
        await self._engine.set_adapter(adapter)

    async def audits(self) -> list[Audit]:
        """Return the audits of answers since the last call."""
        return self._engine.take_audits()

    async def live_digest(self) -> str:
        """Return the digest of the engine's live tensors, computed now."""
        return await self._engine.live_digest()

    async def evaluate(
        self, indices: Sequence[int], samples_per_prompt: int, draw: Draw | None
    ) -> list[Trajectory]:
        """Answer held-out prompts with the weights that serve now, and dense attention.

        A prompt whose rollout fails is tried again, as its environment may recover; the last try counts.
        `draw`: None means as for training.
        """
        draw = replace(draw or Draw(self._sampling.temperature, self._sampling.top_p), dense=True)
        self._evaluating = True
        self._account()

        def on_piece(number: int, context: tuple[int, ...], piece: Sample) -> None:
            self._evaluated_tokens += len(piece.token_ids)

        async def answered(i: int) -> Group:
            prompt = self._task.eval_prompt(i)
            for delay_s in (*EVAL_RETRIES_S, None):
                group = await self._player.group(
                    f"eval-{i}", prompt, samples_per_prompt, on_piece, lambda: None, draw=draw
                )
                has_failed = any(
                    t.status == "failed" and not t.episode.response_ids for t in group.trajectories
                )
                if delay_s is None or not has_failed:
                    break
                await asyncio.sleep(delay_s)
            return group

        try:
            groups = await asyncio.gather(*map(answered, indices))
        finally:
            self._evaluating = False
            self._account()
        return [trajectory for group in groups for trajectory in group.trajectories]

    async def progress(self) -> dict[str, str]:
        """Return how far "sampling" and "evaluation" are, as texts that change with every token and group.

        Also with what the engine has computed of prompts, which may take longer than a wait for tokens.
        Also "reward", by the answer that has been scored for longest, so that one that hangs shows though
        others go on; and "weight install", once the engine takes it in: bytes of later versions are no
        progress then.
        """
        found = {}
        if longest := self._scorer.longest():
            found["reward"] = longest
        if self._installing >= 0:
            # It waits for the step that the engine is in.
            found["weight install"] = self._with_computed(f"the engine installs version {self._installing}")
        if self._work:
            scoring = sum(not work.sampling for work in self._work.values())
            found["sampling"] = self._with_computed(
                f"{self._load.tokens} tokens sampled, {len(self._work)} groups in flight, {scoring} of them "
                "wait for rewards"
            )
        if self._evaluating:
            found["evaluation"] = self._with_computed(
                f"{self._evaluated_tokens} tokens sampled for evaluations"
            )
        return found

    def _with_computed(self, text: str) -> str:
        computed = self._engine.progress
        return f"{text}; {computed}" if computed else text

    async def stats(self) -> WorkerStats:
        """Return the counters of this incarnation."""
        self._account()
        return WorkerStats(
            worker_id=self._id,
            version=self._engine.version,
            digest=self._engine.digest,
            groups_in_flight=len(self._work),
            trajectories=self._trajectories,
            tokens=self._tokens,
            busy_s=self._load.busy_s,
            full_s=self._load.full_s,
            full_tokens=self._load.full_tokens,
            slots=self._slots,
            scoring=sum(not work.sampling for work in self._work.values()),
        )

    # --- internals -------------------------------------------------------------------------------

    def _room(self) -> int:
        """Return how many more groups the worker can take.

        A group in scoring occupies no slot, but sampling and scoring groups together are at most twice the
        slots.
        """
        sampling = sum(work.sampling for work in self._work.values())
        return self._queue_groups + min(self._slots - sampling, 2 * self._slots - len(self._work))

    def _begin(self, lease: Lease) -> Work:
        work = self._work[lease.lease_id] = Work(lease)
        self._queue.append(work)
        self._begin_queued()
        return work

    def _begin_queued(self) -> None:
        """Begin waiting leases, the oldest first, while there are free slots."""
        while self._queue and self._num_sampling() < self._slots:
            work = self._queue.popleft()
            work.serving = asyncio.create_task(self._serve(work))
            work.serving.add_done_callback(lambda _: self._stirred.set())
            self._tasks.add(work.serving)
        self._account()

    def _num_sampling(self) -> int:
        return sum(work.sampling for work in self._work.values()) - len(self._queue)

    async def _serve(self, work: Work) -> None:
        lease = work.lease

        def on_piece(number: int, context: tuple[int, ...], piece: Sample) -> None:
            work.add(number, context, piece)
            self._load.sampled(len(piece.token_ids))

        def on_asks(change: int) -> None:
            work.asks += change

        def on_sampled() -> None:
            work.sampling = False
            self._begin_queued()
            self._stirred.set()

        try:
            if self._kind.slowdown_s:
                await asyncio.sleep(self._kind.slowdown_s)
            group = await self._player.group(
                lease.group_id,
                lease.prompt,
                lease.num_samples,
                on_piece,
                on_sampled,
                lease.partials,
                on_asks=on_asks,
            )
            self._finished.append((lease.lease_id, group))
            self._has_finished.set()
        finally:
            self._work.pop(lease.lease_id, None)  # already gone if the lease was given up
            self._begin_queued()
            self._emptied.set()

    async def _submit_finished(self) -> None:
        """Submit finished groups; those that finish during a call go with the next one."""
        while True:
            await self._has_finished.wait()
            self._has_finished.clear()
            groups, self._finished = self._finished, []
            self._submitting = True
            receipts = await self._source.submit(self._id, self._epoch, groups)
            self._submitting = False
            self._emptied.set()
            for receipt, (_, group) in zip(receipts, groups, strict=True):
                if receipt.accepted:
                    self._trajectories += len(group.trajectories)
                    self._tokens += sampled_tokens(group)

    async def _stream_tokens(self) -> None:
        """Send the tokens that arrived, at least four times per lease period.

        Empty messages keep leases alive that wait, that ask an engine which computes (the prompts before
        theirs may take longer than a lease), or are in scoring, which has deadlines of its own.
        """
        interval_s = min(self._sampling.stream_s, self._sampling.lease_s / 4)
        computed = self._engine.progress
        while True:
            await asyncio.sleep(interval_s)
            if not self._work:
                continue
            await self._tell()
            before, computed = computed, self._engine.progress
            async with self._sending:
                works = [
                    work
                    for work in self._work.values()
                    if work.pieces
                    or not work.sampling
                    or work.serving is None
                    or (work.asks and computed != before)
                ]
                messages = [work.take_tokens() for work in works]
                # Sent even without messages: the answer may name a lease that has no tokens yet.
                refused = set(await self._source.stream(self._id, self._epoch, messages))
            await self._give_up([self._work[lease_id] for lease_id in refused & self._work.keys()])

    async def _tell(self) -> None:
        """Send load and throughput to the data plane, if the dispatch policy uses them."""
        if self._sampling.router != "pull":
            stats = await self.stats()
            plateau = self._plateau.groups(self._clock.now_s(), self._load, self._work.values())
            await self._source.tell(self._epoch, replace(stats, plateau=plateau))

    async def _give_up(self, works: Sequence[Work]) -> int:
        """End leases that other workers continue, and send their last tokens.

        Returns:
            The number of these leases that this worker still held, by the data plane's count.
        """
        for work in works:
            self._work.pop(work.lease.lease_id, None)
            if work.serving is not None:
                work.serving.cancel()
        self._queue = deque(work for work in self._queue if work not in works)
        self._begin_queued()
        if not works:
            return 0
        async with self._sending:
            messages = [work.take_tokens() for work in works]
            return await self._source.hand_over(self._id, self._epoch, messages)

    def _account(self) -> None:
        full = bool(self._work) and self._room() - self._queue_groups < self._enough_room
        busy = bool(self._work) or self._evaluating
        now_s, num_sampling = self._clock.now_s(), self._num_sampling()
        self._load.now(now_s, busy=busy, full=full, num_sampling=num_sampling)
