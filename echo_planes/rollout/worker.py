"""A rollout worker: pulls leases as it has room, samples, scores, submits.

A plain asyncio class over two small interfaces, the engine below it and the data plane beside it;
`launch.py` makes it an actor. Work is pulled, so a fast worker does more.

::

    pull leases -> per lease: n episodes (adapter.rollout) -> rewards (other processes, deadlines) -> submit
                      tokens renew the lease ^                install(publication) at any time, between tokens
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from echo_planes.clock import Clock, MonotonicClock
from echo_planes.config import SamplingConfig, WorkerConfig
from echo_planes.errors import ClusterError, RunError, WeightsError
from echo_planes.rollout.generate import Engine
from echo_planes.rollout.group_policy import GroupPolicy
from echo_planes.rollout.scoring import Scorer
from echo_planes.types import (
    Episode,
    Group,
    InstallReport,
    Lease,
    Manifest,
    Prompt,
    Publication,
    Receipt,
    Reward,
    RewardFailure,
    Sample,
    Trajectory,
    WorkerStats,
)

PULL_WAIT_S = 5.0


class WorkSource(Protocol):
    """The data plane, as a worker sees it."""

    async def pull(self, worker_id: str, epoch: int, room: int, wait_s: float) -> list[Lease]: ...

    async def renew(self, worker_id: str, epoch: int, lease_ids: list[str]) -> None: ...

    async def submit(self, worker_id: str, epoch: int, groups: list[tuple[str, Group]]) -> list[Receipt]: ...


class WeightSource(Protocol):
    """Where published weights come from (`echo_planes.weights.node_client`)."""

    async def staged(self, manifest: Manifest, fresh: bool) -> Publication:
        """That version, verified and ready for the engine; `fresh`: every weight, not only what changed.

        Raises:
            WeightsError: it cannot be had, or is not what its manifest says.
        """
        ...

    async def settled(self, version: int, ok: bool) -> str:
        """The engine took that version, or refused it.

        Returns:
            The publications it was caught up with, in words; "" where it came as one.
        """
        ...


class Policy(Protocol):
    """What an adapter's rollout is handed."""

    async def generate(self, token_ids: Sequence[int]) -> Sample: ...


class Task(Protocol):
    """The part of a task adapter that runs in the rollout plane (`echo_planes.data.task.TaskAdapter`)."""

    max_new_tokens: int | None
    reward_limit_s: float

    def eval_prompt(self, index: int) -> Prompt: ...

    async def rollout(self, prompt: Prompt, policy: Policy) -> Episode: ...


@dataclass
class _Work:
    """One lease in progress."""

    lease: Lease
    tokens_since_renewal: int = 0
    sampling: bool = True  # False: its samples are there and being scored


class RolloutWorker:
    """One engine and its share of the prompts.

    Args:
        worker_id: stable name.
        epoch: incarnation; results of older ones are refused by the data plane.
        lineage: the run's line of versions.
        engine: the inference engine.
        task: the task adapter.
        scorer: the task's rewards.
        source: the data plane.
        weights: where published weights come from.
        kind: how many groups at once, and how slow.
        sampling: answer length and lease length.
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
        self._lineage = lineage
        self._engine = engine
        self._task = task
        self._scorer = scorer
        self._source = source
        self._weights = weights
        self._kind = kind
        self._sampling = sampling
        self._clock = clock or MonotonicClock()
        self._max_new_tokens = task.max_new_tokens or sampling.max_new_tokens
        self._work: dict[str, _Work] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._finished: list[tuple[str, Group]] = []  # lease ids and their groups, not yet submitted
        self._has_finished = asyncio.Event()
        self._stirred = asyncio.Event()  # there may be room, or a task to look after
        self._install_lock = asyncio.Lock()
        self._stopping = False
        self._trajectories = 0
        self._tokens = 0
        self._busy_s = 0.0
        self._busy_since_s: float | None = None

    # --- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Build the engine."""
        await self._engine.start()

    async def run(self) -> None:
        """Pull and work until `stop`. An error in any lease ends the worker: nothing is swallowed."""
        helpers = {asyncio.create_task(self._renew_leases()), asyncio.create_task(self._submit_finished())}
        for helper in helpers:
            helper.add_done_callback(lambda _: self._stirred.set())
        # Places are filled a few at a time: a call for every single one costs more than it brings.
        enough = max(1, self._kind.max_groups // 16)
        try:
            while not self._stopping:
                self._stirred.clear()
                for done in [task for task in helpers | self._tasks if task.done()]:
                    self._tasks.discard(done)
                    done.result()
                room = self._room()
                if room >= enough:
                    for lease in await self._source.pull(self._id, self._epoch, room, PULL_WAIT_S):
                        self._begin(lease)
                else:
                    await self._stirred.wait()
        finally:
            for task in helpers | self._tasks:
                task.cancel()

    async def stop(self) -> None:
        """No new leases; end the engine."""
        self._stopping = True
        await self._scorer.close()
        await self._engine.close()

    # --- weights and measurements ----------------------------------------------------------------

    async def install(self, manifest: Manifest, fresh: bool) -> InstallReport:
        """Make a version serve. A refusal is a report with `ok=False`; the old version serves on.

        Args:
            manifest: of the publication, which comes by way of the `WeightSource`.
            fresh: rewrite every weight, not only those that changed.
        """
        begun_s = self._clock.now_s()
        error = caught_up = ""
        async with self._install_lock:
            known = self._engine.digest_mismatches
            try:
                # Asked again for what serves already, by a learner that had not heard of it.
                if fresh or self._engine.version < manifest.version:
                    caught_up = await self._install(manifest, fresh)
            except (WeightsError, ClusterError) as why:  # ClusterError: no room for it on this machine
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
        try:
            await self._engine.install(publication)
        finally:
            caught_up = await self._weights.settled(staged.version, self._engine.version == staged.version)
        return caught_up

    async def live_digest(self) -> str:
        """Digest of the engine's live tensors, now."""
        return await self._engine.live_digest()

    async def evaluate(self, indices: Sequence[int], samples_per_prompt: int) -> list[Trajectory]:
        """Answer held-out prompts with the weights that serve now."""
        groups = await asyncio.gather(
            *(
                self._play(
                    f"eval-{i}", self._task.eval_prompt(i), samples_per_prompt, lambda _: None, lambda: None
                )
                for i in indices
            )
        )
        return [trajectory for group in groups for trajectory in group.trajectories]

    async def stats(self) -> WorkerStats:
        """Counters of this incarnation."""
        self._account_busy()
        return WorkerStats(
            worker_id=self._id,
            version=self._engine.version,
            digest=self._engine.digest,
            groups_in_flight=len(self._work),
            trajectories=self._trajectories,
            tokens=self._tokens,
            busy_s=self._busy_s,
        )

    # --- inside ----------------------------------------------------------------------------------

    def _room(self) -> int:
        """Groups that may be begun now: those being scored leave the engine free, up to as many again."""
        sampling = sum(work.sampling for work in self._work.values())
        return min(self._kind.max_groups - sampling, 2 * self._kind.max_groups - len(self._work))

    def _begin(self, lease: Lease) -> None:
        self._account_busy()
        self._work[lease.lease_id] = _Work(lease)
        self._account_busy()
        serving = asyncio.create_task(self._serve(lease))
        serving.add_done_callback(lambda _: self._stirred.set())
        self._tasks.add(serving)

    async def _serve(self, lease: Lease) -> None:
        work = self._work[lease.lease_id]

        def on_tokens(count: int) -> None:
            work.tokens_since_renewal += count

        def on_sampled() -> None:
            work.sampling = False
            self._stirred.set()

        try:
            if self._kind.slowdown_s:
                await asyncio.sleep(self._kind.slowdown_s)
            group = await self._play(lease.group_id, lease.prompt, lease.num_samples, on_tokens, on_sampled)
            self._finished.append((lease.lease_id, group))
            self._has_finished.set()
        finally:
            self._account_busy()
            del self._work[lease.lease_id]
            self._account_busy()

    async def _play(
        self,
        group_id: str,
        prompt: Prompt,
        num_samples: int,
        on_tokens: Callable[[int], None],
        on_sampled: Callable[[], None],
    ) -> Group:
        """All samples of one prompt, scored. A failed rollout is a status on every sample of the group, a
        failed reward on its own."""
        policy = GroupPolicy(self._engine, self._max_new_tokens, on_tokens)
        error = ""
        scored: list[tuple[Episode, Reward | RewardFailure]] = []
        plays = [asyncio.ensure_future(self._task.rollout(prompt, policy)) for _ in range(num_samples)]
        try:
            episodes = await asyncio.gather(*plays)
            on_sampled()
            scored = list(zip(episodes, await self._scorer.score(prompt, episodes), strict=True))
        except RunError:
            raise  # the engine hangs or died: this worker must be replaced
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            error = f"prompt {prompt.index}: the task cancelled its own rollout"  # nobody cancelled us
        except Exception as why:  # noqa: BLE001  a user's adapter may raise anything; it becomes a counted status
            error = f"{type(why).__name__} in prompt {prompt.index}: {why}"
        finally:
            for play in plays:
                play.cancel()
            policy.close()
        if error:
            nothing = Episode((), (), (), (), "abort")
            scored = [(nothing, RewardFailure("failed", error))] * num_samples
        members = [
            self._trajectory(f"{group_id}/{i}", group_id, prompt, episode, outcome)
            for i, (episode, outcome) in enumerate(scored)
        ]
        return Group(group_id, tuple(members))

    def _trajectory(
        self,
        trajectory_id: str,
        group_id: str,
        prompt: Prompt,
        episode: Episode,
        outcome: Reward | RewardFailure,
    ) -> Trajectory:
        failure = outcome if isinstance(outcome, RewardFailure) else None
        error = failure.error if failure else ""
        if failure and failure.status != "failed":
            error = f"the reward of prompt {prompt.index}: {error}"
        reward = Reward(0.0, False) if isinstance(outcome, RewardFailure) else outcome
        return Trajectory(
            trajectory_id=trajectory_id,
            group_id=group_id,
            prompt=prompt,
            episode=replace(episode, notes=reward.notes or episode.notes),
            reward=replace(reward, notes=""),
            worker_id=self._id,
            lineage=self._lineage,
            status=failure.status if failure else "ok",
            error=error,
        )

    async def _submit_finished(self) -> None:
        """Hand in what is finished; whatever finishes meanwhile goes with the next call."""
        while True:
            await self._has_finished.wait()
            self._has_finished.clear()
            groups, self._finished = self._finished, []
            receipts = await self._source.submit(self._id, self._epoch, groups)
            for receipt, (_, group) in zip(receipts, groups, strict=True):
                if receipt.accepted:
                    self._trajectories += len(group.trajectories)
                    self._tokens += sum(sum(t.episode.response_mask) for t in group.trajectories)

    async def _renew_leases(self) -> None:
        """Tell the data plane, a few times per lease, which leases received tokens, or are being scored.

        Scoring has deadlines of its own.
        """
        while True:
            await asyncio.sleep(self._sampling.lease_s / 4)
            active = [w for w in self._work.values() if w.tokens_since_renewal or not w.sampling]
            for work in active:
                work.tokens_since_renewal = 0
            if active:
                await self._source.renew(self._id, self._epoch, [w.lease.lease_id for w in active])

    def _account_busy(self) -> None:
        now_s = self._clock.now_s()
        if self._busy_since_s is not None:
            self._busy_s += now_s - self._busy_since_s
        self._busy_since_s = now_s if self._work else None
