"""Process of a rollout worker: builds the engine, the task and the weight node, and forwards calls."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import aiohttp
import ray

from echo_planes.cluster.process import enter_actor, io_mib
from echo_planes.cluster.session import take_gpus
from echo_planes.config.fleet import WorkerConfig
from echo_planes.config.kv_schedule import Schedule
from echo_planes.config.schema import Config
from echo_planes.errors import RunError, WeightsError
from echo_planes.rollout.model_folder import ModelFiles, has_weights
from echo_planes.rollout.notices import Cloud, MetadataService, watch
from echo_planes.rollout.scoring import ProcessScorer
from echo_planes.rollout.sources import Task, WorkSource
from echo_planes.rollout.sparsity.acceptance import Audit
from echo_planes.rollout.vllm.engine import VllmEngine
from echo_planes.rollout.vllm.sparse_engine import SparseEngine
from echo_planes.rollout.worker import RolloutWorker
from echo_planes.types import Draw, InstallReport, Manifest, Trajectory, WorkerStats
from echo_planes.weights.link import NodeSource, WeightLink
from echo_planes.weights.node.client import WorkerNode
from echo_planes.weights.sparse_adapter import SparseAdapter

NOTICE_EVERY_S = 2.0  # the shortest notice any cloud gives is 30 s
NOTICE_LIMIT_S = 2.0
NODE_ANSWER_S = 2.0  # longest wait for the weight node's word of its progress
FIRST_WEIGHTS = "first weights"  # in `progress`: the engine waits for them
NOTICE_FAILURES = 10  # in a row; after more the worker ends, because it would miss a notice


class WorkerProcess:
    """One incarnation of a worker.

    Args:
        config: the run's settings.
        worker_id, epoch: name and incarnation of the worker.
        link: settings of the weight network.
        kind: the worker's hardware and engine options.
        source: the data plane.
        model_files: settings and tokenizer of the model, for a machine without its folder.
        build_task: builds the task adapter in this process, given the settings as they are here.
        build_scorer: builds the scorer, given them and the deadline of one reward in seconds.
    """

    def __init__(
        self,
        config: Config,
        worker_id: str,
        epoch: int,
        link: WeightLink,
        kind: WorkerConfig,
        source: WorkSource,
        model_files: ModelFiles,
        build_task: Callable[[Config], Task],
        build_scorer: Callable[[Config, float], ProcessScorer],
    ) -> None:
        enter_actor()
        take_gpus()
        self._model_files = model_files
        self._config = config = model_files.local(config)
        self._id = worker_id
        self._epoch = epoch
        self._link = link
        self._kind = kind
        self._source = source
        self._task = build_task(config)
        self._scorer = build_scorer(config, self._task.reward_limit_s)
        # Shorter than the limit of the whole install: exceeding that one would end this worker.
        self._weights = NodeSource(link.lineage, 0.9 * config.run.wait_limit_s)
        self._node: WorkerNode | None = None
        self._joined = asyncio.Event()
        self._started: RolloutWorker | None = None
        self._is_starting = False
        self._waits_for_weights = False  # of the chain, without which the engine cannot start
        self._received_bytes = 0  # of weights, when the node last answered
        self._ends_unix_s: float | None = None  # when the cloud will take the machine

    async def join(self, sender: str) -> None:
        """Start the weight node, which receives at once. `sender`: address of the learner's weight node."""
        link = replace(self._link, sender=sender)
        machine = ray.util.get_node_ip_address()
        folder = self._config.model.folder
        model = folder if has_weights(folder) else None
        settings = link.worker_settings(self._id, self._epoch, machine, self._kind.region, model)
        self._node = self._weights.node = await WorkerNode.spawn(settings)
        self._joined.set()

    async def start(self) -> str:
        """Build the engine and start the scorer. Return how the engine computes.

        Runs beside `join`: without weights in the model folder the engine waits for those of the chain.
        """
        config, kind, link = self._config, self._kind, self._link
        # Two workers with one seed would sample the same noise.
        seed = zlib.crc32(f"{config.run.seed}/{self._id}/{self._epoch}".encode())
        settings = (
            kind.engine,
            config.sampling,
            config.model.folder,
            config.model.max_model_len,
            seed % 2**31,
        )
        sparse, engine = config.sparse, VllmEngine(*settings)
        if sparse.schedule:
            engine = SparseEngine(*settings, page_tokens=sparse.page_tokens, audit_share=sparse.audit_share)
        self._started = RolloutWorker(
            self._id,
            self._epoch,
            link.lineage,
            engine=engine,
            task=self._task,
            scorer=self._scorer,
            source=self._source,
            weights=self._weights,
            kind=kind,
            sampling=config.sampling,
        )
        self._is_starting = True
        with await self._weights_in(config.model.folder):
            about, _ = await asyncio.gather(self._started.start(), self._scorer.start())
        self._is_starting = False
        return about

    async def _weights_in(self, folder: Path) -> AbstractContextManager[None]:
        if has_weights(folder):
            return nullcontext()
        self._waits_for_weights = True
        await self._joined.wait()
        try:
            weights = await self._weights.snapshot()
        except WeightsError as why:
            raise RunError(f"the engine has no weights to start with: {why}") from why
        self._waits_for_weights = False
        return self._model_files.weights_in(folder, weights)

    @property
    def _worker(self) -> RolloutWorker:
        if self._started is None:
            raise RunError(f"worker {self._id} was called before it was started")
        return self._started

    async def run(self) -> None:
        if self._kind.cloud is None:
            await self._worker.run()
            return
        watching = asyncio.create_task(self._watch_for_notice(self._kind.cloud))
        tasks = {asyncio.create_task(self._worker.run()), watching}
        try:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in ended:
                task.result()
        finally:
            for task in tasks:
                task.cancel()

    async def _watch_for_notice(self, cloud: Cloud) -> None:
        async with aiohttp.ClientSession(trust_env=False) as session:
            service = MetadataService(session, cloud, NOTICE_LIMIT_S, time.time, self._kind.metadata_url)
            notice = await watch(service, NOTICE_EVERY_S, NOTICE_FAILURES)
        self._ends_unix_s = notice.deadline_unix_s

    async def install(self, manifest: Manifest, fresh: bool) -> InstallReport:
        return await self._worker.install(manifest, fresh)

    async def set_schedule(self, schedule: Schedule) -> None:
        await self._worker.set_schedule(schedule)

    async def set_adapter(self, adapter: SparseAdapter) -> None:
        await self._worker.set_adapter(adapter)

    async def audits(self) -> list[Audit]:
        return await self._worker.audits()

    async def live_digest(self) -> str:
        return await self._worker.live_digest()

    async def evaluate(
        self, indices: Sequence[int], samples_per_prompt: int, draw: Draw | None
    ) -> list[Trajectory]:
        return await self._worker.evaluate(indices, samples_per_prompt, draw)

    async def progress(self) -> dict[str, str]:
        """Return how far the worker is with what may be waited for; see `loop.watch`.

        Also `FIRST_WEIGHTS` where its engine cannot start without weights that it has not received.
        """
        found = await self._started.progress() if self._started else {}
        if self._is_starting:
            found["engine start"] = f"{io_mib(self._node.pid if self._node else None)} MiB read and written"
        try:
            async with asyncio.timeout(NODE_ANSWER_S):
                self._received_bytes = await self._weights.received_bytes()
        except (TimeoutError, RunError):
            found["silent"] = "its weight node"
        received = f"{self._received_bytes} bytes of weights received"
        if self._waits_for_weights:
            found |= {"engine start": received, FIRST_WEIGHTS: ""}
        return {"weight install": received, **found}

    async def stats(self) -> WorkerStats:
        stats = await self._worker.stats()
        if self._ends_unix_s is None:
            return stats
        return replace(stats, leaves_in_s=self._ends_unix_s - time.time())

    async def pause(self) -> int:
        return await self._worker.pause()

    async def resume(self) -> None:
        await self._worker.resume()

    async def leave(self, limit_s: float) -> int:
        return await self._worker.leave(limit_s)

    async def stop(self) -> None:
        await self._worker.stop()
        if self._node is not None:
            await self._node.close()
