"""Actors of a run: makes them from plain classes, with Ray's options, and converts Ray's errors to ours."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from echo_planes.cluster.clock import Clock
from echo_planes.cluster.placement import cluster_address, lasting_machines
from echo_planes.cluster.session import NodeWatch, machines
from echo_planes.config.extensions import extension
from echo_planes.config.fleet import WorkerConfig
from echo_planes.config.kv_schedule import Schedule
from echo_planes.config.schema import Config, LearnerConfig
from echo_planes.data.actor import DataService
from echo_planes.data.replay.batch import make_batch
from echo_planes.data.replay.dispatch import policy_named
from echo_planes.data.store.files import REPLAY_FOLDER
from echo_planes.data.tasks.adapter import train_everything
from echo_planes.errors import (
    ClusterError,
    EchoPlanesError,
    EngineStartError,
    LearnerLostError,
    RunError,
    WorkerGoneError,
)
from echo_planes.fleet.actuators.actuator import Actuator, StaticActuator
from echo_planes.fleet.actuators.ray_nodes import RayNodes
from echo_planes.learning.actor import PROGRESS, LearnerProcess
from echo_planes.loop.builders import build_scorer, build_task
from echo_planes.loop.reconcile import instance_types_of
from echo_planes.loop.watch import SILENT
from echo_planes.reporting.metrics import write_atomic
from echo_planes.rollout.actor import FIRST_WEIGHTS, WorkerProcess
from echo_planes.rollout.model_folder import ModelFiles
from echo_planes.rollout.sparsity.acceptance import Audit
from echo_planes.types import (
    Adjustment,
    BroadcastStats,
    BufferCounts,
    Complaint,
    Draw,
    Group,
    InstallReport,
    Lease,
    LeaseTokens,
    Manifest,
    Receipt,
    StepStats,
    TrainBatch,
    Trajectory,
    Uploads,
    WorkerStats,
)
from echo_planes.weights.link import WeightLink, listening_host
from echo_planes.weights.sparse_adapter import Distilled, SparseAdapter
from echo_planes.weights.wire.signing import Signer

CLOSE_S = 10.0
PROGRESS_S = 3.0  # longest wait for a rank's word of where it is
NODE_ID = "ray.io/node-id"  # label that every node of Ray has


# --- calls ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Actor:
    """Actor handle whose calls raise errors of `echo_planes.errors`."""

    handle: Any
    name: str
    gone: type[RunError]
    node: NodeWatch | None = None  # only in the process that started the cluster

    async def call(self, method: str, *arguments: Any) -> Any:
        return await self.answer(method, self.begin(method, *arguments))

    def begin(self, method: str, *arguments: Any) -> Any:
        """Start a call and return the reference of its result."""
        return getattr(self.handle, method).remote(*arguments)

    async def answer(self, method: str, answer: Any) -> Any:
        try:
            return await (answer if self.node is None else self.node.while_up(answer))
        except ConnectionResetError as error:
            raise self.gone(f"{self.name}: {error}") from error
        except RayTaskError as error:
            if isinstance(error.cause, EchoPlanesError):
                raise error.cause from None
            raise RunError(f"{self.name}: {error.cause!r} in {method}") from error
        except RayActorError as error:
            # The last line of an error in a constructor is that of the exception.
            why = (
                str(error).rstrip().rpartition("\n")[2] if error.actor_init_failed else "its process is gone"
            )
            raise self.gone(f"{self.name}: {why}") from error
        except RayError as error:  # pages of advice may follow its first line
            raise RunError(f"{self.name}: {str(error).partition(chr(10))[0]}") from error


class RemoteData:
    """`DataService` in an actor, for the driver and for the workers."""

    def __init__(self, handle: Any, run_dir: Path, node: NodeWatch | None = None) -> None:
        self._actor = _Actor(handle, f"replay buffer (resume with run.resume={run_dir})", RunError, node)
        self._newest: tuple[TrainBatch, Any] | None = None

    def reference(self, batch: TrainBatch) -> Any:
        """Return the reference of a batch in Ray's object store, from which the ranks fetch it."""
        if self._newest is not None and self._newest[0] is batch:
            return self._newest[1]
        return ray.put(batch)

    async def ready(self) -> int:
        return int(await self._actor.call("ready"))

    async def register(self, worker_id: str, epoch: int) -> None:
        await self._actor.call("register", worker_id, epoch)

    async def park(self, worker_id: str, parked: bool) -> None:
        await self._actor.call("park", worker_id, parked)

    async def pull(self, worker_id: str, epoch: int, room: int, wait_s: float) -> list[Lease]:
        return list(await self._actor.call("pull", worker_id, epoch, room, wait_s))

    async def stream(self, worker_id: str, epoch: int, messages: list[LeaseTokens]) -> tuple[str, ...]:
        return tuple(await self._actor.call("stream", worker_id, epoch, messages))

    async def tell(self, epoch: int, stats: WorkerStats) -> None:
        await self._actor.call("tell", epoch, stats)

    async def hand_over(self, worker_id: str, epoch: int, messages: list[LeaseTokens]) -> int:
        return int(await self._actor.call("hand_over", worker_id, epoch, messages))

    async def submit(self, worker_id: str, epoch: int, groups: list[tuple[str, Group]]) -> list[Receipt]:
        receipts: list[Receipt] = await self._actor.call("submit", worker_id, epoch, groups)
        return receipts

    async def publish(self, version: int, digest: str) -> None:
        await self._actor.call("publish", version, digest)

    async def installed(self, worker_id: str, version: int) -> None:
        await self._actor.call("installed", worker_id, version)

    async def lose(self, worker_id: str) -> int:
        return int(await self._actor.call("lose", worker_id))

    async def limit_staleness(self, max_staleness: int) -> None:
        await self._actor.call("limit_staleness", max_staleness)

    async def next_batch(self, step: int, wait_s: float, whole: bool = False) -> Any:
        self._newest = None  # lets Ray free the last batch
        answer = self._actor.begin("next_batch", step, wait_s, whole)
        found = await self._actor.answer("next_batch", answer)
        if isinstance(found, TrainBatch):
            self._newest = found, answer
        return found

    async def counts(self) -> BufferCounts:
        counts: BufferCounts = await self._actor.call("counts")
        return counts

    async def accepted(self) -> dict[tuple[str, int], tuple[int, int]]:
        accepted: dict[tuple[str, int], tuple[int, int]] = await self._actor.call("accepted")
        return accepted

    async def complaints(self) -> list[Complaint]:
        return list(await self._actor.call("complaints"))

    async def save(self, folder: Path) -> None:
        await self._actor.call("save", folder)

    async def close(self) -> BufferCounts:
        counts: BufferCounts = await self._actor.call("close")
        return counts


class RemoteLearner:
    """All learner ranks. Rank 0 alone has the node that sends weights."""

    def __init__(
        self,
        config: Config,
        link: WeightLink,
        signing_key: bytes,
        run_dir: Path,
        start_step: int,
        node: NodeWatch | None,
        reference: Callable[[TrainBatch], Any],
    ) -> None:
        self._reference = reference
        settings = config.learner
        self._group, options = _ranks_together(settings, lasting_machines(config, machines()))
        remote = ray.remote(concurrency_groups={PROGRESS: 1})(LearnerProcess)
        checkpoints = run_dir / "checkpoints"
        self._run_dir = run_dir
        self._start_step = start_step
        self.has_published = False
        self._places: list[str] = []
        self._seen = ["not started"] * settings.num_ranks  # where each rank was when it last answered
        self._ranks = [
            _Actor(
                remote.options(**options, **self._bundle(rank)).remote(
                    config, rank, settings.num_ranks, run_dir / "failures"
                ),
                f"learner rank {rank} (resume with run.resume={run_dir}, checkpoints in {checkpoints})",
                LearnerLostError,
                node,
            )
            for rank in range(settings.num_ranks)
        ]
        listening = self._ranks[0].call("listen", link, signing_key)
        self._sender = asyncio.ensure_future(listening)

    def _bundle(self, rank: int) -> dict[str, Any]:
        """Return the place of a rank: successive ones, which may share sequences, in successive bundles."""
        if self._group is None:
            return {}
        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, rank)}

    async def _all(self, method: str, *arguments: Any) -> list[Any]:
        return await asyncio.gather(*(rank.call(method, *arguments) for rank in self._ranks))

    async def start(self, resume_dir: Path | None) -> tuple[int, str]:
        # Rank 0 begins with its node. If that cannot listen, the run ends now, by the node's own message.
        await self.sender()
        together = len(set(await self.places())) == 1
        if not together:
            await self._check_shared_disk()
        meeting_place = await self._ranks[0].call("meeting_place", together)
        abouts = await self._all("start", resume_dir / "learner" if resume_dir else None, *meeting_place)
        return self._start_step, abouts[0]

    async def _check_shared_disk(self) -> None:
        """Check that all ranks see the run folder, into which each writes its part of a checkpoint.

        Raises:
            ClusterError: one does not.
        """
        mark = self._run_dir / f".seen-by-all-ranks-{secrets.token_hex(8)}"
        mark.touch()
        try:
            found = await self._all("sees", mark)
        finally:
            mark.unlink()
        if not all(found):
            raise ClusterError(
                f"run.dir={self._run_dir}: learner rank {found.index(False)} is on a machine without that "
                "folder, where its part of a checkpoint would stay; give a folder on a disk that all of the "
                "learner's machines share, or set learner.num_ranks so that one machine holds them"
            )

    async def train_part(self, batch: TrainBatch) -> None:
        await self._all("train_part", self._reference(batch))

    async def train_step(self, batch: TrainBatch) -> StepStats:
        stats: StepStats = (await self._all("train_step", self._reference(batch)))[0]
        return stats

    async def adjust(self, adjustment: Adjustment) -> None:
        await self._all("adjust", adjustment)

    async def places(self) -> list[str]:
        """Return the id of the cluster node of each rank. Ranks answer between two steps."""
        if not self._places:
            self._places = [str(place) for place in await self._all("place")]
        return self._places

    async def sender(self) -> str:
        """Return the address of the node that sends weights."""
        return str(await asyncio.shield(self._sender))

    async def publish(self, version: int) -> Manifest:
        manifest: Manifest = (await self._all("publish", version))[0]
        self.has_published = True
        return manifest

    async def commit(self, version: int) -> None:
        await self._ranks[0].call("commit")

    async def distil(self, schedule: Schedule, version: int) -> Distilled | None:
        distilled: Distilled | None = (await self._all("distil", schedule, version))[0]
        return distilled

    async def broadcasts(self) -> list[BroadcastStats]:
        stats: list[BroadcastStats] = await self._ranks[0].call("broadcasts")
        return stats

    async def uploads(self) -> Uploads:
        uploads: Uploads = await self._ranks[0].call("uploads")
        return uploads

    async def progress(self) -> dict[str, str]:
        """Return where all ranks are, as one text: of a rank that does not answer, where it was last."""
        answers = await asyncio.gather(*(self._progress_of(rank) for rank in self._ranks))
        silent = [f"rank {number}" for number, answer in enumerate(answers) if not answer]
        self._seen = [answer or seen for answer, seen in zip(answers, self._seen, strict=True)]
        text = "; ".join(f"rank {number} {seen}" for number, seen in enumerate(self._seen))
        return {"": text, **({SILENT: ", ".join(silent)} if silent else {})}

    async def _progress_of(self, rank: _Actor) -> str:
        with suppress(RunError, TimeoutError):  # the call that is waited for reports a rank that is gone
            async with asyncio.timeout(PROGRESS_S):
                return str(await rank.call("progress"))
        return ""

    async def mismatch(self, trajectories: Sequence[Trajectory]) -> float:
        """Return the mean |learner logprob - sampler logprob| on sampled tokens, nats."""
        batch = make_batch(0, [Group("probe", tuple(trajectories))], train_everything)
        logprobs: np.ndarray = (await self._all("logprobs", self._reference(batch)))[0]
        return float(np.abs(logprobs - batch.sampler_logprobs)[batch.loss_mask].mean())

    async def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        await self._all("save", folder)

    async def close(self) -> None:
        self._sender.cancel()
        with suppress(RunError, TimeoutError):  # the process may be gone already, which is no error here
            async with asyncio.timeout(CLOSE_S):
                await self._ranks[0].call("close")
        for rank in self._ranks:
            ray.kill(rank.handle)
        if self._group is not None:
            remove_placement_group(self._group)


class RemoteWorker:
    """One incarnation of a rollout worker in an actor.

    Args:
        output: file for what its engine's processes wrote, if the engine does not start.
    """

    def __init__(
        self, handle: Any, name: str, learner: RemoteLearner, output: Path, node: NodeWatch | None = None
    ) -> None:
        self.handle = handle
        self._output = output
        self._actor = _Actor(handle, name, WorkerGoneError, node)
        self._learner = learner
        self._has_started = False

    async def start(self) -> str:
        try:
            about, _ = await asyncio.gather(self._actor.call("start"), self._join())
        except EngineStartError as why:
            self._output.parent.mkdir(exist_ok=True)
            write_atomic(self._output, why.output)
            told = f"{str(why).rstrip('.')}; all that its processes wrote: {self._output}"
            raise EngineStartError(told, is_final=why.is_final) from None
        self._has_started = True
        return str(about)

    async def _join(self) -> None:
        await self._actor.call("join", await self._learner.sender())

    async def run(self) -> None:
        await self._actor.call("run")

    async def install(self, manifest: Manifest, fresh: bool) -> InstallReport:
        report: InstallReport = await self._actor.call("install", manifest, fresh)
        return report

    async def evaluate(
        self, indices: Sequence[int], samples_per_prompt: int, draw: Draw | None
    ) -> list[Trajectory]:
        answers: list[Trajectory] = await self._actor.call("evaluate", indices, samples_per_prompt, draw)
        return answers

    async def set_schedule(self, schedule: Schedule) -> None:
        await self._actor.call("set_schedule", schedule)

    async def set_adapter(self, adapter: SparseAdapter) -> None:
        await self._actor.call("set_adapter", adapter)

    async def audits(self) -> list[Audit]:
        audits: list[Audit] = await self._actor.call("audits")
        return audits

    async def progress(self) -> dict[str, str]:
        found = dict(await self._actor.call("progress"))
        if FIRST_WEIGHTS in found and not self._learner.has_published:
            found["engine start"] = (await self._learner.progress())[""]  # without which nothing can come
        return found

    async def stats(self) -> WorkerStats:
        stats: WorkerStats = await self._actor.call("stats")
        return stats

    async def pause(self) -> int:
        return int(await self._actor.call("pause"))

    async def resume(self) -> None:
        await self._actor.call("resume")

    async def leave(self, limit_s: float) -> int:
        return int(await self._actor.call("leave", limit_s))

    async def stop(self) -> None:
        try:
            # One that is still starting has nothing to end but processes that go with it.
            if self._has_started:
                with suppress(RunError):  # the process may be gone already, which is no error here
                    await self._actor.call("stop")
        finally:  # also if the caller waits no longer
            if ray.is_initialized():  # a task that outlives the run would have Ray connect again, without end
                ray.kill(self.handle)


# --- planes --------------------------------------------------------------------------------------


class RayPlanes:
    """The three planes on a Ray cluster.

    Args:
        config: the run's settings.
        lineage: name of this part of the run.
        run_dir: the run folder, reachable from every node that holds the learner or the buffer.
        resume_dir: checkpoint to continue from.
        start_step: updates that the checkpoint includes.
        worker_configs: settings of the first workers, by id.
    """

    def __init__(
        self,
        config: Config,
        lineage: str,
        run_dir: Path,
        resume_dir: Path | None,
        start_step: int,
        worker_configs: Mapping[str, WorkerConfig],
    ) -> None:
        self._config = config
        self._worker_configs = dict(worker_configs)
        self._failures = run_dir / "failures"
        self._model_files = ray.put(ModelFiles.of(config.model.folder))
        self._seeders = list(config.seeding.workers())
        self._workers: dict[str, RemoteWorker] = {}
        # Ray may place an actor without resources on any node: the loss of a spot node would end the run.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        service = ray.remote(DataService).options(num_cpus=0, scheduling_strategy=here)
        restore = resume_dir / "data" if resume_dir else None
        dispatch = policy_named(config.sampling.router, config.sampling.theta)
        data = service.remote(config, lineage, run_dir / REPLAY_FOLDER, restore, dispatch=dispatch)
        self._node = NodeWatch.of_this_process()
        self.data = RemoteData(data, run_dir, self._node)
        self._data_for_workers = RemoteData(data, run_dir)  # no NodeWatch: a worker ends with its own node
        key = config.weights.key_file
        # The run folder keeps the key, so that the publications of a resumed run continue its store.
        signer = Signer.from_file(key) if key else Signer.kept_in(run_dir / "signing_key.pem")
        self._link = WeightLink(
            lineage=lineage,
            token=secrets.token_hex(32),
            public_key=signer.public_bytes().hex(),
            store=config.weights.store or str(run_dir / "weights"),
            model_bytes=sum(file.stat().st_size for file in config.model.folder.glob("*.safetensors")),
            config=config.weights,
            host=listening_host(config.weights, joined=cluster_address(config) is not None),
        )
        self.learner = RemoteLearner(
            config,
            self._link,
            signer.private_bytes(),
            run_dir,
            start_step,
            self._node,
            self.data.reference,
        )

    def enlist(self, worker_id: str, worker_config: WorkerConfig) -> None:
        """Store the settings of a worker before it is spawned."""
        self._worker_configs[worker_id] = worker_config

    async def spawn_worker(self, worker_id: str, epoch: int) -> RemoteWorker:
        worker_config = self._worker_configs[worker_id]
        options = _actor_options(worker_config.resources, worker_config.labels)
        if worker_id in self._seeders:
            places = await self.learner.places()
            place = places[self._seeders.index(worker_id) % len(places)]
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(place, soft=False)
        handle = (
            ray.remote(WorkerProcess)
            .options(**options)
            .remote(
                self._config,
                worker_id,
                epoch,
                self._link.of_worker(worker_id, epoch),
                worker_config,
                self._data_for_workers,
                self._model_files,
                build_task,
                build_scorer,
            )
        )
        name = f"worker {worker_id} ({worker_config.sku})"
        output = self._failures / f"engine-{worker_id}-{epoch}.txt"
        worker = RemoteWorker(handle, name, self.learner, output, self._node)
        self._workers[worker_id] = worker
        return worker

    async def kill_worker(self, worker_id: str) -> None:
        worker = self._workers.pop(worker_id, None)
        if worker is not None:
            ray.kill(worker.handle)


async def _static_actuator(config: Config, clock: Clock) -> Actuator:
    return StaticActuator(
        {instance_type.name: instance_type.max_count for instance_type in instance_types_of(config)}
    )


async def _ray_actuator(config: Config, clock: Clock) -> Actuator:
    nodes = RayNodes(
        {worker_config.instance_type: worker_config.labels for worker_config in config.fleet.workers}, clock
    )
    await nodes.check()
    return nodes


MakeActuator = Callable[[Config, Clock], Awaitable[Actuator]]
ACTUATORS: dict[str, MakeActuator] = {"static": _static_actuator, "ray": _ray_actuator}


async def make_actuator(config: Config, clock: Clock) -> Actuator:
    """Make the actuator that `fleet.scale` names.

    Raises:
        ConfigError: there is no actuator of that name.
        ClusterError: the cluster has no autoscaler of the kind that the actuator needs.
    """
    return await extension("fleet.scale", config.fleet.scale, ACTUATORS)(config, clock)


def _ranks_together(settings: LearnerConfig, node_ids: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """Return a placement group for the learner's ranks, and Ray's options of a rank in it.

    The group takes as few of the nodes as it can. It cannot be of nothing: ranks without resources have none.
    """
    options = _actor_options(settings.rank_resources, {})
    bundle = {name: amount for name, amount in settings.rank_resources.items() if amount}
    if not bundle:
        return None, options
    group = placement_group(
        [bundle] * settings.num_ranks,
        strategy="PACK",
        bundle_label_selector=[{NODE_ID: f"in({','.join(node_ids)})"} if node_ids else {}]
        * settings.num_ranks,
    )
    return group, options


def _actor_options(resources: Mapping[str, float], labels: Mapping[str, str]) -> dict[str, Any]:
    others = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")}
    options: dict[str, Any] = {
        "num_cpus": resources.get("CPU", 0.0),
        "num_gpus": resources.get("GPU", 0.0),
        "resources": others,
        "max_restarts": 0,  # the controller restarts workers, with a new epoch
    }
    if labels:
        options["label_selector"] = dict(labels)
    return options
