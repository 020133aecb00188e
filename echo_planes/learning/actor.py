"""Process of a learner rank: the learner and, on rank 0, the publisher of its weights with its node.

The constructor imports the learner, and with it torch. A process that only refers to the class saves seconds.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from echo_planes.cluster.clock import MonotonicClock
from echo_planes.cluster.process import LOOPBACK, enter_actor, io_mib, release_freed, settle
from echo_planes.cluster.session import take_gpus
from echo_planes.config.kv_schedule import Schedule
from echo_planes.config.schema import Config
from echo_planes.errors import RunError
from echo_planes.types import (
    Adjustment,
    BroadcastStats,
    FloatArray,
    Manifest,
    StepStats,
    TrainBatch,
    Uploads,
)
from echo_planes.weights.codec.choice import CodecChoice
from echo_planes.weights.codec.table import take_codec
from echo_planes.weights.codec.warm_up import warm_up
from echo_planes.weights.digest import BitTensor
from echo_planes.weights.link import WeightLink
from echo_planes.weights.node.client import SenderNode
from echo_planes.weights.publisher import Publisher
from echo_planes.weights.sparse_adapter import Distilled
from echo_planes.weights.wire.signing import Signer

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from echo_planes.learning.learner import Learner


PROGRESS = "progress"  # concurrency group, of one thread of its own


class LearnerProcess:
    """One rank. Callers call all ranks alike, because gathering and saving are collective.

    Args:
        config: the run's settings.
        rank, world_size: place among the ranks.
        failure_dir: folder for a batch that made the loss non-finite.
    """

    def __init__(self, config: Config, rank: int, world_size: int, failure_dir: Path) -> None:
        enter_actor()
        self._gpus = take_gpus()
        from echo_planes.learning.learner import Learner

        self._config = config
        self._make_learner = partial(Learner, config, rank, world_size, failure_dir=failure_dir)
        self._learner_or_none: Learner | None = None
        self._store: Store | None = None  # at which the ranks meet
        self._node: SenderNode | None = None
        self._publisher: Publisher | None = None
        self._choice: CodecChoice | None = None

    def listen(self, link: WeightLink, signing_key: bytes) -> str:
        """Start the node that sends weights, and return its address. Rank 0 only."""
        self._node = SenderNode.spawn(link.sender_settings(ray.util.get_node_ip_address(), signing_key))
        if link.config.mode != "full":
            self._choice = CodecChoice(take_codec(link.config.codec), MonotonicClock())
        self._publisher = Publisher(
            link.lineage,
            Signer.from_private_bytes(signing_key),
            self._node,
            choice=self._choice,
            digest=link.config.digest,
            chunk_bytes=link.config.chunk_kib * 1024,
        )
        return self._node.address

    def place(self) -> str:
        """Return the id of the cluster node that this rank runs on."""
        return str(ray.get_runtime_context().get_node_id())

    def meeting_place(self, together: bool) -> tuple[str, int]:
        """Return the address and port at which the ranks are to meet. Rank 0 only.

        The address is MASTER_ADDR if that is set, else loopback for ranks that are `together` on one machine,
        else this machine's. The port is `learner.master_port`, else one that is free. Raises as `open_store`.
        """
        from echo_planes.learning.meeting import alone, open_store

        ranks = self._config.learner.num_ranks
        if ranks == 1:
            self._store = alone()
            return LOOPBACK, 0
        host = os.environ.get("MASTER_ADDR", LOOPBACK if together else str(ray.util.get_node_ip_address()))
        self._store, port = open_store(host, self._config.learner.master_port, ranks)
        return host, port

    def start(self, checkpoint: Path | None, host: str, port: int) -> str:
        """Load the model, meet the other ranks, and load the state in the folder `checkpoint`, if any.

        `host` and `port` are of `meeting_place`. Returns `Learner.about`.
        """
        if self._gpus:
            from echo_planes.learning.deepspeed_engine import check_gpu

            check_gpu(self._config.learner.rank_resources["GPU"])
        from echo_planes.learning.deepspeed_engine import saved_dtype

        os.environ["MASTER_ADDR"] = host
        if self._store is None:
            from echo_planes.learning.meeting import join_store

            self._store = join_store(host, port, self._config.learner.num_ranks)
        self._learner_or_none = self._make_learner(store=self._store)
        self._learner.start(saved_dtype(checkpoint) if checkpoint else None)
        if self._publisher is not None:
            warm_up()
        if checkpoint:
            self._learner.load(checkpoint)
        settle()
        return self._learner.about

    @ray.method(concurrency_group=PROGRESS)  # type: ignore[untyped-decorator]
    def progress(self) -> str:
        """Return where the rank is, as a text that changes as it moves. Answers during other calls."""
        learner = self._learner_or_none
        doing = f"{learner.doing}, {learner.layers.passes} layer passes" if learner else "not started"
        return f"{doing}, {io_mib(self._node.pid if self._node else None)} MiB read and written"

    def train_step(self, batch: TrainBatch) -> StepStats:
        return self._learner.train_step(batch)

    def train_part(self, batch: TrainBatch) -> None:
        self._learner.train_part(batch)

    def adjust(self, adjustment: Adjustment) -> None:
        self._learner.adjust(adjustment)

    def logprobs(self, batch: TrainBatch) -> FloatArray:
        """Return the trained tokens' logprobs under the current weights; shape (T,), 0 elsewhere."""
        return self._learner.logprobs(batch)

    def publish(self, version: int) -> Manifest | None:
        """Send the current weights out as `version`; None on all ranks but the first."""
        bits = self._learner.state_bits()
        if self._publisher is None:
            return None
        tensors = {name: BitTensor(array, "bfloat16", shape) for name, (array, shape) in bits.items()}
        manifest = self._publisher.publish(version, self._learner.num_updates, tensors)
        del bits, tensors
        release_freed()
        return manifest

    def distil(self, schedule: Schedule, version: int) -> Distilled | None:
        return self._learner.distil(schedule, version)

    def commit(self) -> None:
        """Let workers install the last publication. Rank 0 only."""
        if self._publisher is None:
            raise RunError("only rank 0 publishes")
        self._publisher.commit()

    def broadcasts(self) -> list[BroadcastStats]:
        """Return the broadcast figures of the newest publications. Rank 0 only."""
        if self._node is None:
            raise RunError("only rank 0 publishes")
        stats = self._node.stats()
        rates = [rate for one in stats[-1:] for rate in one.hop_bytes_per_s if rate > 0]
        if self._choice is not None and rates:
            self._choice.rate_bytes_per_s = min(rates)
        return stats

    def uploads(self) -> Uploads:
        """Return the state of the uploads to the store. Rank 0 only."""
        if self._node is None:
            raise RunError("only rank 0 publishes")
        return self._node.uploads()

    def sees(self, path: Path) -> bool:
        """Return whether this machine has a file."""
        return path.exists()

    def save(self, folder: Path) -> None:
        self._learner.save(folder)

    @property
    def _learner(self) -> Learner:
        if self._learner_or_none is None:
            raise RunError("the learner has not started")
        return self._learner_or_none

    def close(self) -> None:
        if self._learner_or_none is not None:
            self._learner_or_none.close()
        if self._node is not None:
            self._node.close()
